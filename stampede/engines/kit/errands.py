"""The suspending face of what blocks: its calls are done by a few threads beside the event loops that ask.

    self._errands = Errands(threads=8)
    rows = await self._errands.run(client.read, names)
    self.alocks = self._errands.face(self.locks)

The threads are the engine's own, and daemons: a server that hangs keeps no other engine waiting, nor the end of the
program. (asyncio's default executor does both, and is the user's.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from stampede.colour import Loop, run_blocking, soon
from stampede.errors import EngineError
from stampede.ports import Busy
from stampede.threads import Crew

__all__ = ["Errands", "Run", "here"]

T = TypeVar("T")

_log = logging.getLogger("stampede")

LOOK = 0.02
"""Seconds for which one waits who isn't told: a thread for each waiter is none for work."""

LEAVE = 0.3
"""Seconds that a call which is cancelled waits for the end of what it has begun. An event loop that ends waits for all
its calls, and a server that hangs would keep it for its own time-out."""

_UNDONE_BY = {"claim": "abandon", "acquire": "release"}


class Run(Protocol):
    """How a port has its blocking steps done: `Errands.run` in the suspending colour, `here` in the blocking one."""

    def __call__(
        self, function: Callable[..., T], /, *args: Any, undo: Callable[[], object] | None = None
    ) -> Awaitable[T]: ...


async def here(function: Callable[..., T], /, *args: Any, undo: Callable[[], object] | None = None) -> T:
    """In the caller's own thread, which never leaves earlier: nothing is to be undone."""
    return function(*args)


class Errands:
    """At most so many `threads`, begun when they are needed; who finds none free waits for one.

    `patience`: after so many seconds in the queue it is an EngineError. `leave`: so many seconds a call that is
    cancelled waits for the end of what it has begun, so that what its caller asks next comes behind it, as a rule.
    """

    def __init__(self, threads: int = 8, *, patience: float = inf, leave: float = LEAVE) -> None:
        self._crew = Crew(threads, "stampede-io")
        self._patience, self._leave = patience, leave

    async def run(self, function: Callable[..., T], /, *args: Any, undo: Callable[[], object] | None = None) -> T:
        """What the function gives, or raises. Cancelled before it was begun, it never is.

        A caller that leaves earlier gives back what this takes, perhaps before the thread has taken it. So the thread
        calls `undo` when it has.
        """
        errand = _Errand(asyncio.get_running_loop(), partial(function, *args), undo)
        try:
            self._crew.do(errand.do)
            return await self._ended(errand)
        except BaseException:
            errand.forsaken = True
            raise
        finally:
            del errand  # it has its error, which refers to this frame

    def face(self, port: Any) -> Any:
        """A blocking port (of claims, a store, locks), as event loops ask it. Nobody is woken there: waiters look."""
        return _Face(self, port)

    async def _ended(self, errand: _Errand[T]) -> T:
        cancelled: asyncio.CancelledError | None = None
        until = time.monotonic() + self._patience
        while not errand.bell.done():
            left = until - time.monotonic()
            if left <= 0:
                if cancelled is not None:
                    break
                if self._crew.take_back(errand.do):
                    raise EngineError(f"no thread was free for {self._patience:g} s")
                left = until = inf
            try:
                await asyncio.wait([errand.bell], timeout=left if left < inf else None)
            except asyncio.CancelledError as error:
                if self._crew.take_back(errand.do):
                    raise
                if cancelled is None:
                    until = time.monotonic() + self._leave
                cancelled = error
        if cancelled is None:
            return errand.result()
        try:
            raise cancelled
        finally:
            del cancelled  # it would refer to itself through this frame


class _Errand(Generic[T]):
    """What a thread does for a caller who may be gone before its end."""

    value: T
    error: BaseException | None = None
    forsaken = False

    def __init__(self, loop: Loop, function: Callable[[], T], undo: Callable[[], object] | None) -> None:
        self.bell: asyncio.Future[None] = loop.create_future()  # nobody else awaits it: it is set once
        self._function = function
        self._undo = undo

    def do(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error
        # Asked behind: who leaves from now on finds it done.
        if self._undo is not None and (self.forsaken or self.bell.get_loop().is_closed()):
            try:
                self._undo()
            except EngineError:
                pass  # it ends by itself
            except BaseException:
                _log.exception("what was taken for a cancelled call could not be given back")
        soon(self.bell.get_loop(), self.bell.set_result, None)

    def result(self) -> T:
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            self.error = None  # or it would refer to itself through this frame


class _Face:
    """Has the verbs of its port, one by one, as they are asked for."""

    def __init__(self, errands: Errands, port: Any) -> None:
        self._errands = errands
        self._port = port

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        port, run = self._port, self._errands.run
        act, undone_by = getattr(port, verb), _UNDONE_BY.get(verb)

        async def asked(*args: Any, **terms: Any) -> Any:
            def undo() -> None:
                run_blocking(getattr(port, undone_by or "")(*args[:2]))  # the name, and the token

            return await run(lambda: run_blocking(act(*args, **terms)), undo=undo if undone_by else None)

        setattr(self, verb, asked)
        return asked

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        await asyncio.sleep(max(0.0, min(timeout, busy.lease, LOOK)))
