"""The user's face of a bulkhead: at most so many at once, over every process that reaches the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import randrange
from time import monotonic
from typing import Any, TypeVar, cast

from stampede.errors import OptionError
from stampede.locks.crowd import Crowd, crowd_of
from stampede.locks.holding import Holding, LocksSide
from stampede.locks.lock import Lock
from stampede.model.policy import Seconds
from stampede.model.ports import Busy, Engine, Granted
from stampede.runtime.event_loops import Loop
from stampede.runtime.signatures import is_async

__all__ = ["Bulkhead"]

F = TypeVar("F", bound=Callable[..., Any])

POLL = 0.25
"""Seconds between two looks of one who waits for any of n locks: it is told of one of them only."""


class Bulkhead(Lock):
    """At most `concurrency` at once: `with Bulkhead("reports", concurrency=8): ...`, or as a decorator.

    Each place is a lease, renewed while its holder is inside, and free again when its holder dies. One object serves
    any number of threads and tasks. Each time that it is entered, or acquired, is a holding of its own, with a
    `release()`; `release()` of the bulkhead gives back the place that `acquire()` took first. It counts on
    every engine that has locks. Where several processes say different numbers, the least of those inside holds, unless
    the engine's locks have room for one only (`file://`, which is the default, memcached, `sql://`, DynamoDB): there it
    is so many locks, `name/0` and so on, each process enters by its own number, and nobody's turn is kept.

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
        """The same function, which takes a place for each of its calls."""
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
                        value.close()  # it will never be awaited, and needn't warn of that
                    raise OptionError(
                        f"the {type(value).__name__} that {function!r} returns goes on when its place is given back: "
                        "make it an async def, or take the place inside, by `async with`"
                    )
                return value

        return cast(F, called)

    _detachable = False

    async def _is_locked(self, way: LocksSide) -> bool:
        names = [f"{self.name}/{number}" for number in range(self.concurrency)] if self._split else [self.name]
        return sum([await way.inside(name) for name in names]) >= self.concurrency

    def _refuse(self, refusal: Busy) -> None:
        raise self._timeout(refusal, f"{self.concurrency} are inside {self.name!r}")

    # -- with the other callers of this process -------------------------------------------------------------------

    def _use(self, engine: Engine) -> None:
        super()._use(engine)
        self._threads = self._crowd_of(None)
        if self.concurrency > 1:  # else it is a lock, and each of its holders has a fence of its own
            self._access.hand_on = lambda way, place: self._crowd(way).hand_on(place)

    def _crowd(self, way: LocksSide) -> Crowd:
        """Return the callers that wait beside one who comes this way."""
        loop = way.loop()
        return self._threads if loop is None else self._crowd_of(loop)

    def _crowd_of(self, loop: Loop | None) -> Crowd:
        return crowd_of(self._engine.lock_engine, self.name, self._room, lease=self._lease, loop=loop)

    async def _taken(self, way: LocksSide, wait: float, heard: Callable[[], object] | None = None) -> Holding:
        """Wait among the callers of this process, for a turn to ask the engine or for a place that one of them left."""
        if wait <= 0 or not self._engine.lock_engine.shared:  # memory:// has such a queue of its own
            return await super()._taken(way, wait)
        end, crowd = monotonic() + wait, self._crowd(way)
        with crowd.joined() as me:
            if not await crowd.turn(me, wait):
                holding = Holding(way.access, self.name, None)
                holding.over, holding.refusal = True, Busy(b"", 0.0)
                return holding
            place, me.place = me.place, None
            if place is not None and monotonic() > place.since + self._lease / 2:  # our loop was blocked meanwhile
                place.let_go()  # or it would be taken while its caller waits for another
                place = None
            if place is None:
                return await super()._taken(way, max(end - monotonic(), 0.0), heard or partial(crowd.heard, me))
            place.grant(None, self._lease, self._max_hold, place.since)
            return place

    # -- on engines whose locks have room for one only ------------------------------------------------------------

    @property
    def _split(self) -> bool:
        return not self._engine.lock_engine.rooms

    def _check_room(self, its: Engine) -> None:
        return

    async def _asked(self, way: LocksSide, holding: Holding, *, waits: bool) -> Granted | Busy:
        if not self._split:
            return await super()._asked(way, holding, waits=waits)
        first, busiest = randrange(self.concurrency), None
        for number in range(self.concurrency):
            holding.key = f"{self.name}/{(first + number) % self.concurrency}"
            reply = await way.locks.acquire(holding.key, holding.token, self._lease, waits=False)
            if isinstance(reply, Granted):
                return reply
            if busiest is None or reply.lease < busiest[1].lease:
                busiest = holding.key, reply
        assert busiest is not None
        holding.key, refused = busiest
        return refused

    async def _woken(self, way: LocksSide, holding: Holding, busy: Busy, timeout: float) -> None:
        await super()._woken(way, holding, busy, min(timeout, POLL if self._split else self._threads.look))
