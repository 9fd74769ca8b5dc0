"""The user's face of a lock: mutual exclusion by name, over every process that reaches the engine."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from math import inf
from time import monotonic
from types import TracebackType
from typing import TypeVar

from stampede.colour import BLOCKING, SUSPENDING, Bell, Colour, run_blocking, running_loop
from stampede.entry import new_id
from stampede.errors import EngineError, LockLost, LockTimeout, OptionError
from stampede.fill import quietly
from stampede.keeper import Hold, keeper
from stampede.pace import Pace
from stampede.policy import seconds
from stampede.ports import Engine, Granted, Locks

__all__ = ["Lock", "TryLock"]

SELF = TypeVar("SELF", bound="Lock")


class Lock:
    """A named lock with a lease, renewed while it is held: `with Lock("nightly"): ...`.

    One object may be used again after release, and by several threads and tasks, which exclude each other. It is not
    re-entrant. `release_via` gets the release at the end of the block and calls it when it sees fit (a database's
    on-commit hook); renewal ends with the block, and an exception releases at once.
    Who lets go of the object without a release gets a ResourceWarning, and the lock is given back.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        lease: float = 30.0,
        wait: float | None = None,
        max_hold: float | None = None,
        release_via: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"the name of a lock is {name!r}: give a string that is not empty")
        if release_via is not None and not callable(release_via):
            raise OptionError(f"release_via is {release_via!r}: give a function that takes the release")
        self.name = name
        self._lease = seconds("lease", lease)
        if not 0 < self._lease < inf:
            raise OptionError(f"lease is {lease!r}: give a finite number of seconds, more than 0")
        self._wait = seconds("wait", wait)
        self._max_hold = seconds("max_hold", max_hold)
        self._release_via = release_via
        self._use(engine)
        self._grips: dict[object, _Grip] = {}
        self._refused: set[object] = set()  # callers inside a block of a TryLock that they didn't get

    def _use(self, engine: Engine) -> None:
        if engine.locks is None or engine.alocks is None:
            raise OptionError(f"{engine.scheme}:// is no lock engine: name another with on=")
        self._engine = engine  # whoever keeps the lock keeps its engine open
        self._locks, self._alocks = engine.locks, engine.alocks

    def _bind(self) -> None:
        """Before it is taken: settings may name another engine by now."""

    # -- what is held ---------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Does this caller, and not just somebody through the same object, hold it, as far as is known?"""
        grip = self._grips.get(_caller())
        return grip is not None and not grip.hold.lost

    @property
    def lost(self) -> bool:
        """Has it ended before its release, or may it have? Somebody else may be inside.

        True as soon as `lease` has passed, by this process's own clock, since it was last renewed: after `max_hold`,
        or while its engine can't be reached, that is before anybody else can have it.
        """
        grip = self._mine()
        return grip is not None and grip.hold.lost

    @property
    def token(self) -> bytes | None:
        """What tells this holder from all others; None while it isn't held."""
        grip = self._mine()
        return None if grip is None else grip.token

    @property
    def fence(self) -> int | None:
        """A number that grows from holder to holder, for resources that can refuse an older one."""
        grip = self._mine()
        return None if grip is None else grip.fence

    def __bool__(self) -> bool:
        return self.held

    def __del__(self) -> None:
        for grip in list(getattr(self, "_grips", {}).values()):
            if not grip.hold.ended:
                message = f"the lock {self.name!r} was held, and never released"
                warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
                keeper.let_go(grip.hold)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {'lost' if self.lost else 'held' if self.held else 'free'}>"

    # -- plain verbs ----------------------------------------------------------------------------------------------

    def acquire(self, wait: float | None = None) -> bool:
        """Take it, after at most `wait` seconds (the object's, if it is not given). False: somebody else has it."""
        self._bind()
        return run_blocking(self._acquire(BLOCKING, self._locks, wait))

    def release(self) -> None:
        """Give it back. LockLost if it had ended before."""
        run_blocking(self._release(BLOCKING, self._locks))

    def __enter__(self: SELF) -> SELF:
        if not self.acquire():
            raise self._timeout()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._leave(BLOCKING, self._locks, error))

    # -- and their twins ------------------------------------------------------------------------------------------

    async def aacquire(self, wait: float | None = None) -> bool:
        self._bind()
        return await self._acquire(SUSPENDING, self._alocks, wait)

    async def arelease(self) -> None:
        await self._release(SUSPENDING, self._alocks)

    async def __aenter__(self: SELF) -> SELF:
        if not await self.aacquire():
            raise self._timeout()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(SUSPENDING, self._alocks, error)

    # -- how ------------------------------------------------------------------------------------------------------

    async def _acquire(self, colour: Colour, port: Locks, wait: float | None) -> bool:
        me = _caller()
        if me in self._grips and not self._grips[me].hold.lost:
            return False  # waiting for ourselves would never end
        patience = self._wait if wait is None else seconds("wait", wait)
        token, began, pace = new_id(), monotonic(), Pace()
        try:
            while True:
                asked = monotonic()
                left = began + patience - asked
                reply = await port.acquire(self.name, token, self._lease, waits=patience > 0)
                if isinstance(reply, Granted):
                    self._grips[me] = _Grip(self, token, reply.fence, asked)
                    return True
                if left <= 0:
                    break
                await port.wait(self.name, reply, left)
                rest = pace.rest(monotonic())
                if rest > 0:
                    await colour.park(Bell(), min(rest, max(left, 0.0)))
        except GeneratorExit:  # its loop was closed: nothing can be awaited any more
            run_blocking(quietly(self._locks.release, self.name, token))
            raise
        except BaseException:
            if me not in self._grips or self._grips[me].token != token:
                await colour.whole(quietly(port.release, self.name, token))  # the reply may just have been lost
            raise
        if patience > 0:  # or it would be its turn one day, and the lock be kept for it
            await colour.whole(quietly(port.release, self.name, token))
        return False

    async def _release(self, colour: Colour, port: Locks) -> None:
        grip = self._take()
        if grip is None:
            raise LockLost(f"the lock {self.name!r} is not held by this caller")
        await self._give_back(colour, port, grip, None)

    async def _leave(self, colour: Colour, port: Locks, error: BaseException | None) -> None:
        me = _caller()
        if me in self._refused:
            self._refused.discard(me)
            return
        grip = self._take()
        if grip is None:
            return  # released inside the block
        if error is not None or self._release_via is None or grip.hold.lost:
            await self._give_back(colour, port, grip, error)
            return
        grip.hold.end()
        try:
            self._release_via(lambda: run_blocking(self._give_back(BLOCKING, self._locks, grip, None)))
        except BaseException as failure:
            await self._give_back(colour, port, grip, failure)
            raise

    async def _give_back(self, colour: Colour, port: Locks, grip: _Grip, error: BaseException | None) -> None:
        lost = grip.hold.lost
        grip.hold.end()
        if grip.hold.foreign:
            return  # a forked child: the lock is its parent's
        try:
            kept = await colour.whole(port.release(self.name, grip.token)) and not lost
        except EngineError:
            if error is None:
                raise
            return  # the block's own error goes first; the lease ends by itself
        if not kept and error is None:
            raise LockLost(f"the lock {self.name!r} ended before its block did: somebody else may have been inside")

    def _mine(self) -> _Grip | None:
        grip = self._grips.get(_caller())
        if grip is None and len(self._grips) == 1:
            return next(iter(self._grips.values()), None)  # taken by another thread or task, and handed on
        return grip

    def _take(self) -> _Grip | None:
        grip = self._mine()
        for caller, held in list(self._grips.items()):
            if held is grip:
                self._grips.pop(caller, None)
        return grip

    def _timeout(self) -> LockTimeout:
        return LockTimeout(f"somebody else has held the lock {self.name!r} for {self._wait:g} s")


class TryLock(Lock):
    """A lock that is never waited for: `with try_lock("nightly") as lock: if lock: ...`."""

    def acquire(self, wait: float | None = 0) -> bool:
        return super().acquire(wait)

    async def aacquire(self, wait: float | None = 0) -> bool:
        return await super().aacquire(wait)

    def __enter__(self: SELF) -> SELF:
        if not self.acquire():
            self._refused.add(_caller())
        return self

    async def __aenter__(self: SELF) -> SELF:
        if not await self.aacquire():
            self._refused.add(_caller())
        return self


class _Grip:
    """One time of holding it, kept standing by the keeper."""

    __slots__ = ("fence", "hold", "token")

    def __init__(self, lock: Lock, token: bytes, fence: int, asked: float) -> None:
        self.token = token
        self.fence = fence
        engine, port, name = lock._engine, lock._locks, lock.name

        def drop(engine: Engine = engine) -> None:  # which closes itself when nobody has it any more
            run_blocking(quietly(port.release, name, token))

        self.hold = Hold(keeper, port, name, token, lock._lease, lock._max_hold, drop, since=asked)
        keeper.add(self.hold)


def _caller() -> object:
    """Who calls: the task, or the thread outside of tasks."""
    if running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return task
    return threading.get_ident()
