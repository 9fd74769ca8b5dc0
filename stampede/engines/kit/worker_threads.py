"""The suspending side of blocking clients: a few threads make the calls of event loops. The threads belong to the
engine and are daemons. A server that hangs does not delay other engines or the end of the program, as it would on
asyncio's default executor."""

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
"""Seconds that a cancelled call waits for what it has begun. An event loop that ends waits for all its calls, and a
server that hangs would delay it by a whole time-out."""


class Run(Protocol):
    """How a port runs its blocking steps: `WorkerThreads.run` for event loops, `here` for blocking callers."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


async def here(function: Callable[..., T], /, *args: Any) -> T:
    """Run the function in the caller's own thread."""
    return function(*args)


class WorkerThreads:
    """At most `threads` threads, started on demand. A cancelled call waits `leave` seconds for what it has begun, so
    that usually the caller's next question comes after it."""

    def __init__(self, threads: int = 8, *, leave: float = LEAVE) -> None:
        self._pool = ThreadPool(threads, "stampede-io")
        self._leave = leave

    async def run(self, function: Callable[..., T], /, *args: Any) -> T:
        """Return what the function returns, or raise its error. A call that is cancelled before it begins never runs;
        later it runs to its end. What the function acquires for a caller that has left by then must end by itself, as a
        lease does."""
        job = _Job(asyncio.get_running_loop(), partial(function, *args))
        try:
            self._pool.do(job.do)
            return await self._ended(job)
        finally:
            del job  # its error refers to this frame

    async def _ended(self, job: _Job[T]) -> T:
        try:
            await asyncio.wait([job.bell])
        except asyncio.CancelledError:
            if not self._pool.take_back(job.do):
                await self._outwaited(job)
            raise
        return job.result()

    async def _outwaited(self, job: _Job[T]) -> None:
        """Wait for the job. A loop that ends may cancel the call again and again: each time, the rest of the wait goes
        on."""
        end = time.monotonic() + self._leave
        while not job.bell.done() and (left := end - time.monotonic()) > 0:
            with suppress(asyncio.CancelledError):
                await asyncio.wait([job.bell], timeout=left)


class _Job(Generic[T]):
    """Work for a thread. Its caller may be gone before it ends."""

    value: T
    error: BaseException | None = None

    def __init__(self, loop: Loop, function: Callable[[], T]) -> None:
        self.bell: asyncio.Future[None] = loop.create_future()  # set once: only its caller awaits it
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
            self.error = None  # avoid a reference cycle through this frame
