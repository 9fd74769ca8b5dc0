"""The suspending face of what blocks: its calls are done by a few threads beside the event loops that ask.

The threads are the engine's own, and daemons: a server that hangs keeps no other engine waiting, nor the end of the
program, as it would on asyncio's default executor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from stampede.runtime.colour import Loop, soon
from stampede.runtime.threads import ThreadPool

__all__ = ["Run", "WorkerThreads", "here"]

T = TypeVar("T")

LEAVE = 0.3
"""Seconds that a call which is cancelled waits for the end of what it has begun. An event loop that ends waits for all
its calls, and a server that hangs would keep it for its own time-out."""


class Run(Protocol):
    """How a port runs its blocking steps: `WorkerThreads.run` for event loops, `here` for blocking callers."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


async def here(function: Callable[..., T], /, *args: Any) -> T:
    """In the caller's own thread."""
    return function(*args)


class WorkerThreads:
    """At most so many `threads`, begun when they are needed. A call that is cancelled waits `leave` seconds for the end
    of what it has begun, so that what its caller asks next comes behind it, as a rule."""

    def __init__(self, threads: int = 8, *, leave: float = LEAVE) -> None:
        self._pool = ThreadPool(threads, "stampede-io")
        self._leave = leave

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """What the function gives, or raises. Cancelled before it was begun, it never is; else it goes on to its end.

        What it takes for a caller that has left by then ends by itself, as a lease does.
        """
        errand = _Job(asyncio.get_running_loop(), partial(function, *args))
        try:
            self._pool.do(errand.do)
            return await self._ended(errand)
        finally:
            del errand  # it has its error, which refers to this frame

    async def _ended(self, errand: _Job[T]) -> T:
        try:
            await asyncio.wait([errand.bell])
        except asyncio.CancelledError:
            if not self._pool.take_back(errand.do):
                await self._outwaited(errand)
            raise
        return errand.result()

    async def _outwaited(self, errand: _Job[T]) -> None:
        """A loop that ends cancels once more what is cancelled already: each time, what is left of the wait goes on."""
        end = time.monotonic() + self._leave
        while not errand.bell.done() and (left := end - time.monotonic()) > 0:
            with suppress(asyncio.CancelledError):
                await asyncio.wait([errand.bell], timeout=left)


class _Job(Generic[T]):
    """What a thread does for a caller who may be gone before its end."""

    value: T
    error: BaseException | None = None

    def __init__(self, loop: Loop, function: Callable[[], T]) -> None:
        self.bell: asyncio.Future[None] = loop.create_future()  # nobody else awaits it: it is set once
        self._function = function

    def do(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error
        soon(self.bell.get_loop(), self.bell.set_result, None)

    def result(self) -> T:
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            self.error = None  # or it would refer to itself through this frame
