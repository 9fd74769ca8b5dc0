"""The user's face of a limit: so many starts in any window of time, over every process that reaches the engine."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from stampede.engines.kit.limits import NamedLimits
from stampede.errors import EngineClosed, EngineError, LimitTimeout, OptionError
from stampede.metrics.table import LIMIT, histogram
from stampede.model.breaker import Breaker
from stampede.model.policy import Seconds, seconds
from stampede.model.ports import Booked, Engine, Limits, Rate, Usage
from stampede.model.window import SECOND, micros, slack
from stampede.runtime import process_lock
from stampede.runtime.colour import BLOCKING, PROMPT, SUSPENDING, Bell, Colour, run_blocking
from stampede.runtime.signatures import is_async, with_twins

__all__ = ["Limiter", "checked", "limiting"]

SELF = TypeVar("SELF", bound="Limiter")
P = ParamSpec("P")
T = TypeVar("T")

SHORT = 1.0
"""Seconds before a start, up to which nobody asks in between whether it has moved."""

HUNG = 0.1
"""Seconds: an engine whose error took longer is then asked by one caller a second. A quick error costs nobody much."""

_breakers: WeakKeyDictionary[Engine, Breaker] = WeakKeyDictionary()  # one for all limits of an engine


class LimitsSide(NamedTuple):
    """How callers of one colour reach the limits of an engine."""

    colour: Colour
    limits: Limits


@with_twins
class Limiter:
    """At most `max` starts in any window of `per` seconds: `with Limiter("github", max=5, per=0.8): ...`.

    It bounds starts, and not how many run at once: the end of a block means nothing to it. A caller that has to wait
    books the moment of its start, sleeps until then, and asks again. `wait`: how long callers wait at most; a block
    that would have to wait longer raises LimitTimeout, at once. `when_down="allow"`: while the engine can't be asked,
    this process keeps the same limit by itself; else that is an EngineError.

    >>> with Limiter("github", max=5, per="800ms"):  # of all processes of this machine; on="redis://..." of all
    ...     pass
    """

    def __init__(
        self,
        name: str,
        engine: Engine | Callable[[], Engine],
        *,
        max: int,
        per: Seconds,
        wait: Seconds = None,
        when_down: str = "raise",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"the name of a limit is {name!r}: give a string that is not empty")
        if isinstance(max, bool) or not isinstance(max, int) or not 0 < max < 2**31:
            raise OptionError(f"max is {max!r}: give a whole number of starts, at least 1")
        if when_down not in ("raise", "allow"):
            raise OptionError(f"when_down is {when_down!r}: give 'raise' or 'allow'")
        self.name = name
        self._rate = Rate(max, seconds("per", per))
        if not 0.001 <= self._rate.per <= YEAR:
            raise OptionError(f"per is {per!r}: give a number of seconds between a thousandth and a year")
        self._wait = seconds("wait", wait)
        self._alone = NamedLimits(monotonic) if when_down == "allow" else None
        self._late = slack(micros(self._rate.per)) / SECOND
        self._moved = Bell()
        self._find = None if isinstance(engine, Engine) else engine  # settings may name another engine later
        self._use(engine if isinstance(engine, Engine) else engine())

    def _use(self, engine: Engine) -> None:
        blocking, suspending = engine.blocking.limits, engine.suspending.limits
        if blocking is None or suspending is None:
            raise OptionError(f"{engine.scheme}:// keeps no limits: name another with on=")
        self._engine = engine
        self._blocking = LimitsSide(BLOCKING, blocking)
        self._suspending = LimitsSide(PROMPT if engine.prompt else SUSPENDING, suspending)
        with process_lock.lock:
            self._breaker = _breakers.setdefault(engine, Breaker())
        self._starts, self._refusals = (histogram(LIMIT, engine.called, each) for each in ("started", "refused"))

    def _way(self, colour: Colour) -> LimitsSide:
        """How callers of this colour reach its limits, on the engine that settings name by now."""
        if self._find is not None and (engine := self._find()) is not self._engine:
            self._use(engine)
        return self._suspending if colour.suspending else self._blocking

    @property
    def max(self) -> int:
        """How many starts are allowed in any window,"""
        return self._rate.most

    @property
    def per(self) -> float:
        """of so many seconds."""
        return self._rate.per

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.max} per {self.per:g} s>"

    # -- plain verbs ----------------------------------------------------------------------------------------------

    def acquire(self, wait: Seconds = None, cost: int = 1) -> bool:
        """Wait until one may start, for at most `wait` seconds (the object's, if it is not given), and count it.

        False, at once: it would be longer. One start may count as several, by its `cost`.

        >>> limiter = Limiter("mails", max=1, per=60)
        >>> limiter.acquire(), limiter.acquire(wait=0.5)
        (True, False)
        """
        return run_blocking(self._acquired(self._way(BLOCKING), wait, cost))

    def try_acquire(self, cost: int = 1) -> bool:
        """May one start now? Then it is counted; and nobody waits."""
        return run_blocking(self._acquired(self._way(BLOCKING), 0.0, cost))

    def ready_in(self, cost: int = 1) -> float:
        """Seconds until the next start that nobody has booked yet; 0.0: now. Nothing is counted."""
        return run_blocking(self._ready_in(self._way(BLOCKING), cost))

    def penalize(self, seconds: Seconds) -> None:
        """No start for so long, anywhere, as when a third party said `Retry-After`.

        Those who wait for their starts already wait for its end, too.
        """
        run_blocking(self._penalize(self._way(BLOCKING), seconds))

    def used(self) -> Usage:
        """What is used of it now, what is booked for later, and for how long it is penalized."""
        return run_blocking(self._used(self._way(BLOCKING)))

    def __enter__(self: SELF) -> SELF:
        run_blocking(self._enter(self._way(BLOCKING)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A start was made, however it ended."""

    # -- and their twins ------------------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None, cost: int = 1) -> bool:
        return await self._acquired(self._way(SUSPENDING), wait, cost)

    async def atry_acquire(self, cost: int = 1) -> bool:
        return await self._acquired(self._way(SUSPENDING), 0.0, cost)

    async def aready_in(self, cost: int = 1) -> float:
        return await self._ready_in(self._way(SUSPENDING), cost)

    async def apenalize(self, seconds: Seconds) -> None:
        await self._penalize(self._way(SUSPENDING), seconds)

    async def aused(self) -> Usage:
        return await self._used(self._way(SUSPENDING))

    async def __aenter__(self: SELF) -> SELF:
        await self._enter(self._way(SUSPENDING))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The same."""

    # -- how ------------------------------------------------------------------------------------------------------

    async def _acquired(self, way: LimitsSide, wait: Seconds, cost: int = 1) -> bool:
        patience = self._wait if wait is None else seconds("wait", wait)
        return await self._start(way, patience, checked(cost, self)) is None

    async def _enter(self, way: LimitsSide, cost: int = 1) -> None:
        left = await self._start(way, self._wait, cost)
        if left is not None:
            raise LimitTimeout(
                f"the limit {self.name!r} allows {self.max} per {self.per:g} s, and wait ran out: {self._wait:g} s; "
                f"the next start is in {left:.3g} s",
                left,
            )

    async def _start(self, way: LimitsSide, patience: float, cost: int) -> float | None:
        """Wait for the start. Return None when it is made, or the seconds until it if they are more than `patience`."""
        (colour, limits), began = way, monotonic()
        end = began + patience
        mine: dict[Limits, int] = {}  # where the start is booked, and its moment
        try:
            while True:
                sent, moved = monotonic(), self._moved
                ahead = max(end - sent, self._late if mine else 0.0)
                answer = await colour.shielded(self._asked(limits, cost, ahead, mine))
                if answer.booked and not answer.delay:
                    self._starts.observe(monotonic() - began)
                    return None
                if not answer.booked and answer.delay > ahead:
                    self._refusals.observe(monotonic() - began)
                    return answer.delay
                # Sent then, the next question comes when the start is due, however far away the engine is. A long sleep
                # is cut short, as others may have given their places back; and here that rings.
                pause = answer.delay if answer.delay <= SHORT else answer.delay / 2
                if await colour.park(moved, sent + pause - monotonic()):
                    await colour.park(Bell(), sent + answer.delay / 8 - monotonic())
        except GeneratorExit:  # its loop was closed: nothing can be awaited any more
            raise
        except BaseException:
            if mine:
                await colour.shielded(self._given_back(cost, mine))
            raise

    async def _asked(self, limits: Limits, cost: int, ahead: float, mine: dict[Limits, int]) -> Booked:
        """Exchange the booking in `mine`, if there is one, for the answer's, also if the caller is cancelled now."""
        try:
            answer = await self._answer(partial(limits.take, self.name, self._rate, cost, ahead, mine.get(limits, 0)))
        except EngineClosed:
            raise
        except EngineError:
            if self._alone is None:
                raise
            limits = self._alone
            answer = await limits.take(self.name, self._rate, cost, ahead, mine.get(limits, 0))
        mine.clear()
        if answer.booked:
            mine[limits] = answer.at
        return answer

    async def _answer(self, question: Callable[[], Awaitable[T]]) -> T:
        """Ask the engine. If it hangs, that costs one caller a second its time-out. Others have an error at once."""
        breaker, sent = self._breaker, monotonic()
        if not breaker.allow(sent):
            raise EngineError(f"{self._engine.url or self._engine.scheme}: it gave no answer a moment ago")
        try:
            answer = await question()
        except EngineError as error:
            if monotonic() - sent > HUNG and not error.partial:
                breaker.failed(monotonic())
            raise
        breaker.succeeded(monotonic())
        return answer

    async def _given_back(self, cost: int, mine: dict[Limits, int]) -> None:
        with suppress(EngineError):
            for limits, at in mine.items():
                if limits is self._alone or not self._breaker.open:  # else it counts as a start
                    await limits.give_back(self.name, self._rate, cost, at)
        self._ring()

    def _ring(self) -> None:
        """Wake those who sleep here until their starts: these may have moved."""
        told, self._moved = self._moved, Bell()
        told.ring()

    async def _ready_in(self, way: LimitsSide, cost: int) -> float:
        return (await self._answer(partial(way.limits.take, self.name, self._rate, checked(cost, self), -1.0))).delay

    async def _penalize(self, way: LimitsSide, forbidden: Seconds) -> None:
        length = seconds("seconds", forbidden)
        if length == inf:
            raise OptionError(f"seconds is {forbidden!r}: give a finite number, as nobody can take a penalty back")
        await self._answer(partial(way.limits.penalize, self.name, self._rate, length))
        self._ring()

    async def _used(self, way: LimitsSide) -> Usage:
        return await self._answer(partial(way.limits.used, self.name))


YEAR = 366 * 24 * 3600.0


def checked(cost: object, limiter: Limiter) -> int:
    """It, or the OptionError of one that can't be."""
    if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
        raise OptionError(f"cost is {cost!r}: give a whole number, at least 1")
    if cost > limiter.max:
        raise OptionError(f"cost is {cost!r}: it can never start, as max is {limiter.max}")
    return cost


def limiting(limiter: Limiter, function: Callable[P, T], cost: int) -> Callable[P, T]:
    """The function, each call of which is a start."""
    if is_async(function, "@limited"):

        @functools.wraps(function)
        async def asked(*args: P.args, **kwargs: P.kwargs) -> Any:
            await limiter._enter(limiter._way(SUSPENDING), cost)
            return await cast("Callable[P, Awaitable[Any]]", function)(*args, **kwargs)

        return cast("Callable[P, T]", asked)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        run_blocking(limiter._enter(limiter._way(BLOCKING), cost))
        return function(*args, **kwargs)

    return called
