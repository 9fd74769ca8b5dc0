"""The bulkhead that users see: at most so many at once, across all processes that use the same engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, TypeVar, cast

from stampede.errors import OptionError
from stampede.locks.crowd import Crowd, crowd_of
from stampede.locks.holding import Holding, LocksSide
from stampede.locks.lock import Lock
from stampede.model.ports import Busy, Engine, Granted
from stampede.runtime.chance import randrange
from stampede.runtime.event_loops import Loop
from stampede.runtime.signatures import is_async
from stampede.settings.options import Seconds

__all__ = ["Bulkhead"]

F = TypeVar("F", bound=Callable[..., Any])

POLL = 0.25
"""Seconds between two looks of a caller that waits for any of n locks: only one of them can wake it."""


class Bulkhead(Lock):
    """A limit of `concurrency` callers at once: `with Bulkhead("reports", concurrency=8): ...`, or as a decorator.

    Each place has a lease, which is renewed while its holder is inside, and ends if the holder dies. Any number of
    threads and tasks can share one object. Each `with` and each `acquire()` returns a holding of its own, with a
    `release()`. `release()` of the bulkhead releases the place that `acquire()` took first.

    It works on every engine that has locks. If processes give different numbers, the smallest number of the holders
    inside counts. On engines whose locks have one holder only (`file://`, which is the default, memcached, `sql://`,
    DynamoDB) a bulkhead is several locks, `name/0` and so on. There each process enters by its own number, and the
    order of arrival is not kept.

    >>> reports = Bulkhead("reports", concurrency=2)
    >>> with reports:
    ...     second, third = reports.acquire(wait=0), reports.acquire(wait=0)
    ...     bool(second), bool(third)
    (True, False)
    >>> second.release()
    >>> @reports
    ... def report() -> str:
    ...     return "done"
    >>> report()
    'done'
    """

    def __init__(
        self,
        name: str,
        engine: Engine | Callable[[], Engine],
        *,
        concurrency: int = 8,
        lease: float | str | timedelta = 30.0,
        wait: Seconds = None,
        max_hold: Seconds = None,
    ) -> None:
        if not isinstance(concurrency, int) or isinstance(concurrency, bool) or not 0 < concurrency < 2**31:
            raise OptionError(f"concurrency is {concurrency!r}: give a whole number, from 1 to {2**31 - 1}")
        self.concurrency = concurrency
        self._room = concurrency
        super().__init__(name, engine, lease=lease, wait=wait, max_hold=max_hold)

    def __call__(self, function: F) -> F:
        """Return a function that takes a place for each call of `function`."""
        if is_async(function, f"a place of {self.name!r}"):

            @functools.wraps(function)
            async def asked(*args: Any, **kwargs: Any) -> Any:
                async with self:
                    return await function(*args, **kwargs)

            return cast(F, asked)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                value = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    if inspect.iscoroutine(value):
                        value.close()  # so that it does not warn that it was never awaited
                    raise OptionError(
                        f"the {type(value).__name__} that {function!r} returns would run after its place is released: "
                        "make the function an async def, or use `async with` inside"
                    )
                return value

        return cast(F, called)

    _detachable = False

    async def _is_locked(self, side: LocksSide) -> bool:
        names = [f"{self.name}/{number}" for number in range(self.concurrency)] if self._split else [self.name]
        return sum([await side.inside(name) for name in names]) >= self.concurrency

    def _refuse(self, refusal: Busy) -> None:
        raise self._timeout(refusal, f"{self.concurrency} holders are inside {self.name!r}")

    # -- waiting with the other callers of this process -----------------------------------------------------------

    def _use(self, engine: Engine) -> None:
        super()._use(engine)
        self._threads = self._crowd_of(None)
        if self.concurrency > 1:  # with one place it is a lock, and each holder needs a fence of its own
            self._access.hand_on = lambda side, place: self._crowd(side).hand_on(place)

    def _crowd(self, side: LocksSide) -> Crowd:
        """Return the crowd that the calling thread or task belongs to."""
        loop = side.loop()
        return self._threads if loop is None else self._crowd_of(loop)

    def _crowd_of(self, loop: Loop | None) -> Crowd:
        return crowd_of(self._engine.lock_engine, self.name, self._room, lease=self._lease, loop=loop)

    async def _ask_until_granted(
        self, side: LocksSide, wait: float, on_ask: Callable[[], object] | None = None
    ) -> Holding:
        """Wait in the crowd of this process, until this caller may ask the engine, or is given a place."""
        if wait <= 0 or not self._engine.lock_engine.shared:  # memory:// has a queue in this process already
            return await super()._ask_until_granted(side, wait)
        end, crowd = monotonic() + wait, self._crowd(side)
        with crowd.joined() as me:
            if not await crowd.turn(me, wait):
                holding = Holding(side.access, self.name, None)
                holding.over, holding.refusal = True, Busy(b"", 0.0)
                return holding
            place, me.place = me.place, None
            if place is not None and monotonic() > place.since + self._lease / 2:  # our loop was blocked meanwhile
                place.let_go()  # otherwise it would stay taken while this caller waits for another
                place = None
            if place is None:
                return await super()._ask_until_granted(
                    side, max(end - monotonic(), 0.0), on_ask or partial(crowd.heard, me)
                )
            place.grant(None, self._lease, self._max_hold, place.since)
            return place

    # -- engines whose locks have one holder only -----------------------------------------------------------------

    @property
    def _split(self) -> bool:
        return not self._engine.lock_engine.rooms

    def _check_room(self, lock_engine: Engine) -> None:
        return

    async def _ask_once(self, side: LocksSide, holding: Holding, *, waits: bool) -> Granted | Busy:
        if not self._split:
            return await super()._ask_once(side, holding, waits=waits)
        first, busiest = randrange(self.concurrency), None
        for number in range(self.concurrency):
            holding.key = f"{self.name}/{(first + number) % self.concurrency}"
            reply = await side.locks.acquire(holding.key, holding.token, self._lease, waits=False)
            if isinstance(reply, Granted):
                return reply
            if busiest is None or reply.lease < busiest[1].lease:
                busiest = holding.key, reply
        assert busiest is not None
        holding.key, refused = busiest
        return refused

    async def _wait_for_change(self, side: LocksSide, holding: Holding, busy: Busy, timeout: float) -> None:
        await super()._wait_for_change(side, holding, busy, min(timeout, POLL if self._split else self._threads.look))
