"""Locks whose engine may hang: they keep their callers no longer than these wait, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from stampede import stalls
from stampede.colour import Colour
from stampede.errors import EngineClosed, EngineError
from stampede.guarded import Guarded, Questions
from stampede.ports import Busy, Engine, Granted, Locks
from stampede.returns import LockReturns
from stampede.workers import Late, Told, within

__all__ = ["GuardedLocks", "Habit", "PlainLocks", "locks_of"]

T = TypeVar("T")

_clock = time.monotonic

LEAST = 0.5
"""Seconds that an engine has for an answer, beyond what its caller waits for the lock: more than a call gives it, as a
call goes on without it, and who is not told of its lock has an error. On a busy machine tenths are soon gone."""

AGAIN = 0.2
"""The same of one that had no answer for the last question."""

MOST = 1.0
"""The same of one that is known to be slow, or has not answered yet: it may be far away, and has to be connected to.
An answer that has taken longer was a stall, and says nothing of the next one."""

FADES = 60.0
"""Seconds after which half as much is made of how slow it has been."""


class Habit:
    """How long an engine takes for an answer when it is well. Pure."""

    def __init__(self) -> None:
        self.silent = False  # the last question had no answer in time, and none has been answered since
        self._longest: float | None = None
        self._at = 0.0

    def answered(self, seconds: float, now: float) -> None:
        self.silent = False
        if seconds <= MOST:
            self._longest, self._at = max(seconds, self._faded(now)), now
        elif self._longest is None:
            self._longest = 0.0

    def failed(self, seconds: float) -> None:
        """There was no answer. Sooner than one is to be had, that says nothing of the next."""
        if seconds >= AGAIN:
            self.silent = True

    @property
    def known(self) -> bool:
        """It has answered."""
        return self._longest is not None

    def grace(self, now: float) -> float:
        """Seconds within which the next answer comes, if it is well."""
        if not self.known and not self.silent:
            return MOST
        return min(max(2 * self._faded(now), AGAIN if self.silent else LEAST), MOST)

    def _faded(self, now: float) -> float:
        return 0.0 if self._longest is None else self._longest * 0.5 ** ((now - self._at) / FADES)


class _Side(Questions):
    """What all locks of one engine in this process know of it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.lock_engine.silence)
        self.called = engine.lock_engine.called
        self.habit = Habit()
        self.returns = LockReturns(engine)


_sides: WeakKeyDictionary[Engine, _Side] = WeakKeyDictionary()


class PlainLocks:
    """`Locks` of one engine and colour, that hang for no longer than it takes to ask them."""

    hangs = False

    def __init__(self, port: Locks) -> None:
        self.port = port

    async def acquire(
        self, name: str, token: bytes, lease: float, waits: bool, patience: float, since: float, room: float = 1
    ) -> Granted | Busy:
        if room == 1:
            return await self.port.acquire(name, token, lease, waits=waits)
        return await self.port.acquire(name, token, lease, waits=waits, room=room)

    async def wait(self, name: str, busy: Busy, timeout: float, since: float) -> None:
        await self.port.wait(name, busy, timeout)

    async def release(self, name: str, token: bytes) -> bool:
        return await self.port.release(name, token)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self.port.renew(name, token, lease)

    async def withdraw(self, name: str, token: bytes, *, late: bool) -> None:
        """Have nothing, and no place in the queue; best effort, as the lease ends by itself."""
        with suppress(EngineError):
            await self.port.release(name, token)


class GuardedLocks(PlainLocks):
    """The same of locks that may hang, for callers of so much patience each."""

    hangs = True

    def __init__(self, engine: Engine, port: Locks, side: _Side, colour: Colour, *, owes: bool) -> None:
        super().__init__(port)
        self._owes = owes
        self._engine = engine
        self._side = side
        self._colour = colour
        self._guarded = Guarded(colour, side)

    async def acquire(
        self, name: str, token: bytes, lease: float, waits: bool, patience: float, since: float, room: float = 1
    ) -> Granted | Busy:
        """EngineError if it hangs: then what may come of this is given back when it comes. `since`: the lock is waited
        for."""

        def late(reply: Any, error: BaseException | None) -> None:
            if error is not None or waits or isinstance(reply, Granted):
                self.owe(name, token, late=error is not None)
            else:
                self._side.returns.forget(token)

        work = partial(super().acquire, name, token, lease, waits, patience, since, room)
        return await self._ask(name, work, patience, late, since)

    async def wait(self, name: str, busy: Busy, timeout: float, since: float) -> None:
        """The same: it may be the look of one who waits that has no answer."""
        habit, began = self._side.habit, _clock()
        try:
            answer = await self._guarded.wait(
                lambda left: self.port.wait(name, busy, left), timeout, habit.grace(began)
            )
        except EngineError:
            habit.silent = True  # or as good as: who is refused again and again needn't hear it twice
            raise
        if answer is Late.LATE:
            raise self._hangs(name, _clock() - began - timeout, since)

    async def release(self, name: str, token: bytes) -> bool:
        """It has the engine's own time-out, since an error there is one of a block that has done its work; unless the
        engine was silent before."""

        def late(_: object, error: BaseException | None) -> None:
            if error is not None:
                self.owe(name, token)

        try:
            patience = 0.0 if self._side.habit.silent else inf
            return await self._ask(name, lambda: self.port.release(name, token), patience, late)
        except EngineClosed:
            raise
        except EngineError:
            self.owe(name, token)
            raise

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        """As of the release: in the engine's own time."""
        return await self._ask(name, lambda: self.port.renew(name, token, lease), inf, _nobody_is_told)

    async def withdraw(self, name: str, token: bytes, *, late: bool) -> None:
        """The same: now, if the engine is well; if it is slow, beside the caller; and
        soon, in nobody's time, if it hangs. `late`: its question has had no answer, and may come behind this."""

        def told(stood: object, error: BaseException | None) -> None:
            if error is None and (stood or not late):
                self._side.returns.forget(token)

        if self._side.habit.silent:
            self.owe(name, token, late=late)
            return
        try:
            answer = await within(self._colour, self.port.release(name, token), stalls.LATE, told)
        except EngineClosed:
            return
        except EngineError:
            self.owe(name, token, late=late)
        else:
            # Also what goes on beside us: its loop may end, and nobody would hear what came of it.
            if isinstance(answer, Late) or (late and answer is False):
                self.owe(name, token, late=late)

    async def _ask(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        patience: float,
        late: Told,
        since: float | None = None,
    ) -> T:
        habit, began, server = self._side.habit, _clock(), self._engine.server_of(name, lock=True)

        def ended(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._answered(_clock() - began)
            late(result, error)

        try:
            answer = await self._guarded.ask(work, patience, ended, habit.grace(began), server=server)
        except EngineError:
            habit.failed(_clock() - began)
            raise
        if isinstance(answer, Late):
            raise self._hangs(name, _clock() - began, since)
        self._answered(_clock() - began)
        return answer

    def _answered(self, seconds: float) -> None:
        self._side.habit.answered(seconds, _clock())
        self._side.returns.hurry()

    def _hangs(self, name: str, seconds: float, since: float | None) -> EngineError:
        self._side.habit.silent = True
        server = self._engine.server_of(name, lock=True)
        names = ":".join(map(str, server)) if isinstance(server, tuple) else server
        its = "" if names is None else f"{names} of "
        why = self._engine.no_answer(name) or ("" if self._side.habit.known else "is it running?")
        told = f"no answer from {its}{self._side.called} for {max(seconds, 0.0):.2g} s{why and ': '}{why}"
        if since is None:
            return EngineError(f"the lock {name!r} can't be given back now, and ends with its lease: {told}")
        return EngineError(f"the lock {name!r} can't be had, after {_clock() - since:.2g} s in all: {told}")

    def owe(self, name: str, token: bytes, *, late: bool = False) -> None:
        """Have it given back, with others, and in nobody's time. Not where somebody may come by the same token."""
        if not self._owes:
            return
        self._side.returns.add(name, token, late=late)


def _nobody_is_told(result: object, error: BaseException | None) -> None:
    return


def locks_of(engine: Engine, port: Locks, colour: Colour, *, owes: bool = True) -> PlainLocks:
    """How they are asked, by whoever takes one. `owes`: what can't be given back now is given back later."""
    if not engine.lock_engine.silence:
        return PlainLocks(port)
    side = _sides.get(engine)
    if side is None:
        side = _sides.setdefault(engine, _Side(engine))
    return GuardedLocks(engine.lock_engine, port, side, colour, owes=owes)
