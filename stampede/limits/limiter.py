"""The rate limit that users see: so many starts in any window of time, across all processes on one engine."""

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
from stampede.model.limit_window import SECOND, micros, slack
from stampede.model.ports import Booked, Engine, Limits, Rate, Usage
from stampede.runtime import process_lock
from stampede.runtime.colour import BLOCKING, PROMPT, SUSPENDING, Bell, Colour, run_blocking
from stampede.runtime.signatures import is_async, with_twins
from stampede.settings.options import Seconds, seconds

__all__ = ["Limiter", "checked", "limiting"]

SELF = TypeVar("SELF", bound="Limiter")
P = ParamSpec("P")
T = TypeVar("T")

SHORT = 1.0
"""Seconds. A caller that has to wait longer for its start asks in between whether the start has moved."""

HUNG = 0.1
"""Seconds. After an error that took longer, one caller a second asks the engine. Quick errors cost callers little."""

_breakers: WeakKeyDictionary[Engine, Breaker] = WeakKeyDictionary()  # one for all limits of an engine


class LimitsSide(NamedTuple):
    """The way in which callers of one colour use the limits of an engine."""

    colour: Colour
    limits: Limits


@with_twins
class Limiter:
    """A limit of `max` starts in any window of `per` seconds: `with Limiter("github", max=5, per=0.8): ...`.

    It limits starts, and not how many blocks run at once: the end of a block has no effect. A caller that has to wait
    books the moment of its start, sleeps until then, and asks again.

    - `wait`: the most seconds that a caller waits; None is for ever. A block that would wait longer raises LimitTimeout
      at once.
    - `when_down`: "raise" raises EngineError while the engine can't be asked. With "allow", each process keeps the same
      limit by itself meanwhile.

    >>> with Limiter("github", max=5, per="800ms"):  # on this machine; with on="redis://...": in a fleet
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
        self._local = NamedLimits(monotonic) if when_down == "allow" else None
        self._slack = slack(micros(self._rate.per)) / SECOND
        self._moved = Bell()
        self._find = None if isinstance(engine, Engine) else engine  # settings may name another engine later
        self._use(engine if isinstance(engine, Engine) else engine())

    def _use(self, engine: Engine) -> None:
        blocking, suspending = engine.blocking.limits, engine.suspending.limits
        if blocking is None or suspending is None:
            raise OptionError(f"{engine.scheme}:// has no limits: name another engine with on=")
        self._engine = engine
        self._blocking = LimitsSide(BLOCKING, blocking)
        self._suspending = LimitsSide(PROMPT if engine.prompt else SUSPENDING, suspending)
        with process_lock.lock:
            self._breaker = _breakers.setdefault(engine, Breaker())
        self._starts, self._refusals = (histogram(LIMIT, engine.called, each) for each in ("started", "refused"))

    def _side(self, colour: Colour) -> LimitsSide:
        """Return the access to the limits for callers of this colour. Settings may have changed the engine."""
        if self._find is not None and (engine := self._find()) is not self._engine:
            self._use(engine)
        return self._suspending if colour.suspending else self._blocking

    @property
    def max(self) -> int:
        """The number of starts that are allowed in any window of `per` seconds."""
        return self._rate.most

    @property
    def per(self) -> float:
        """The length of a window in seconds."""
        return self._rate.per

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.max} per {self.per:g} s>"

    # -- plain verbs ----------------------------------------------------------------------------------------------

    def acquire(self, wait: Seconds = None, cost: int = 1) -> bool:
        """Wait until the caller may start, count the start, and return True.

        Return False at once if that would take more than `wait` seconds (by default, the object's `wait`). A start
        counts as `cost` starts. Raise EngineError if the engine can't be asked, unless `when_down` is "allow".

        >>> limiter = Limiter("mails", max=1, per=60)
        >>> limiter.acquire(), limiter.acquire(wait=0.5)
        (True, False)
        """
        return run_blocking(self._acquired(self._side(BLOCKING), wait, cost))

    def try_acquire(self, cost: int = 1) -> bool:
        """Count a start and return True if it may be made now. Otherwise return False. This never waits."""
        return run_blocking(self._acquired(self._side(BLOCKING), 0.0, cost))

    def ready_in(self, cost: int = 1) -> float:
        """Return the seconds until the next start that is not booked yet; 0.0 means now. Nothing is counted."""
        return run_blocking(self._ready_in(self._side(BLOCKING), cost))

    def penalize(self, seconds: Seconds) -> None:
        """Allow no start for so many seconds in any process, for example after a response with `Retry-After`. Callers
        that are already waiting wait for the end of the penalty, too."""
        run_blocking(self._penalize(self._side(BLOCKING), seconds))

    def used(self) -> Usage:
        """Return how much of the limit is used now, how much is booked for later, and the seconds of a penalty."""
        return run_blocking(self._used(self._side(BLOCKING)))

    def __enter__(self: SELF) -> SELF:
        run_blocking(self._enter(self._side(BLOCKING)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the start counts, however the block ended."""

    # -- the same verbs, awaited ----------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None, cost: int = 1) -> bool:
        return await self._acquired(self._side(SUSPENDING), wait, cost)

    async def atry_acquire(self, cost: int = 1) -> bool:
        return await self._acquired(self._side(SUSPENDING), 0.0, cost)

    async def aready_in(self, cost: int = 1) -> float:
        return await self._ready_in(self._side(SUSPENDING), cost)

    async def apenalize(self, seconds: Seconds) -> None:
        await self._penalize(self._side(SUSPENDING), seconds)

    async def aused(self) -> Usage:
        return await self._used(self._side(SUSPENDING))

    async def __aenter__(self: SELF) -> SELF:
        await self._enter(self._side(SUSPENDING))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the start counts, however the block ended."""

    # -- implementation -------------------------------------------------------------------------------------------

    async def _acquired(self, side: LimitsSide, wait: Seconds, cost: int = 1) -> bool:
        patience = self._wait if wait is None else seconds("wait", wait)
        return await self._start(side, patience, checked(cost, self)) is None

    async def _enter(self, side: LimitsSide, cost: int = 1) -> None:
        left = await self._start(side, self._wait, cost)
        if left is not None:
            raise LimitTimeout(
                f"the limit {self.name!r} allows {self.max} per {self.per:g} s, and wait ran out: {self._wait:g} s; "
                f"the next start is in {left:.3g} s",
                left,
            )

    async def _start(self, side: LimitsSide, patience: float, cost: int) -> float | None:
        """Wait for the start. Return None when it is made, or the seconds until it if that is more than `patience`."""
        (colour, limits), began = side, monotonic()
        end = began + patience
        bookings: dict[Limits, int] = {}  # the port where the start is booked, and its moment
        try:
            while True:
                sent, moved = monotonic(), self._moved
                ahead = max(end - sent, self._slack if bookings else 0.0)
                answer = await colour.shielded(self._take(limits, cost, ahead, bookings))
                if answer.booked and not answer.delay:
                    self._starts.observe(monotonic() - began)
                    return None
                if not answer.booked and answer.delay > ahead:
                    self._refusals.observe(monotonic() - began)
                    return answer.delay
                # Count the pause from before the question, so that the next one arrives when the start is due, however
                # far away the engine is. A long pause is cut, because other callers may have given back their bookings.
                # Those of this process ring `moved`.
                pause = answer.delay if answer.delay <= SHORT else answer.delay / 2
                if await colour.park(moved, sent + pause - monotonic()):
                    await colour.park(Bell(), sent + answer.delay / 8 - monotonic())
        except GeneratorExit:  # the caller's loop was closed: nothing can be awaited any more
            raise
        except BaseException:
            if bookings:
                await colour.shielded(self._give_back(cost, bookings))
            raise

    async def _take(self, limits: Limits, cost: int, ahead: float, bookings: dict[Limits, int]) -> Booked:
        """Ask, and replace the booking in `bookings` by that of the answer. Callers shield this from cancellation."""
        try:
            answer = await self._ask(partial(limits.take, self.name, self._rate, cost, ahead, bookings.get(limits, 0)))
        except EngineClosed:
            raise
        except EngineError:
            if self._local is None:
                raise
            limits = self._local
            answer = await limits.take(self.name, self._rate, cost, ahead, bookings.get(limits, 0))
        bookings.clear()
        if answer.booked:
            bookings[limits] = answer.at
        return answer

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Ask the engine. While it hangs, one caller a second waits for its time-out. Others get an error at once."""
        breaker, sent = self._breaker, monotonic()
        if not breaker.allow(sent):
            raise EngineError(
                f"{self._engine.url or self._engine.scheme}: not asked, because it did not answer a moment ago"
            )
        try:
            answer = await question()
        except EngineError as error:
            if monotonic() - sent > HUNG and not error.partial:
                breaker.failed(monotonic())
            raise
        breaker.succeeded(monotonic())
        return answer

    async def _give_back(self, cost: int, bookings: dict[Limits, int]) -> None:
        with suppress(EngineError):
            for limits, at in bookings.items():
                if limits is self._local or not self._breaker.open:  # while the engine is down, it counts as a start
                    await limits.give_back(self.name, self._rate, cost, at)
        self._ring()

    def _ring(self) -> None:
        """Wake the callers of this object that sleep until their starts, because these may have moved."""
        bell, self._moved = self._moved, Bell()
        bell.ring()

    async def _ready_in(self, side: LimitsSide, cost: int) -> float:
        return (await self._ask(partial(side.limits.take, self.name, self._rate, checked(cost, self), -1.0))).delay

    async def _penalize(self, side: LimitsSide, forbidden: Seconds) -> None:
        length = seconds("seconds", forbidden)
        if length == inf:
            raise OptionError(f"seconds is {forbidden!r}: give a finite number, because a penalty can't be cancelled")
        await self._ask(partial(side.limits.penalize, self.name, self._rate, length))
        self._ring()

    async def _used(self, side: LimitsSide) -> Usage:
        return await self._ask(partial(side.limits.used, self.name))


YEAR = 366 * 24 * 3600.0


def checked(cost: object, limiter: Limiter) -> int:
    """Return the cost of a start. Raise OptionError if it is no whole number from 1 to the limit's `max`."""
    if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
        raise OptionError(f"cost is {cost!r}: give a whole number, at least 1")
    if cost > limiter.max:
        raise OptionError(f"cost is {cost!r}: it can never start, as max is {limiter.max}")
    return cost


def limiting(limiter: Limiter, function: Callable[P, T], cost: int) -> Callable[P, T]:
    """Return a function that makes a start of the limit before each call of `function`."""
    if is_async(function, "@limited"):

        @functools.wraps(function)
        async def asked(*args: P.args, **kwargs: P.kwargs) -> Any:
            await limiter._enter(limiter._side(SUSPENDING), cost)
            return await cast("Callable[P, Awaitable[Any]]", function)(*args, **kwargs)

        return cast("Callable[P, T]", asked)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        run_blocking(limiter._enter(limiter._side(BLOCKING), cost))
        return function(*args, **kwargs)

    return called
