"""The user's face of a limit: so many starts in any window of time, over every process that reaches the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from stampede.colour import BLOCKING, PROMPT, SUSPENDING, Bell, Colour, run_blocking
from stampede.engines.limits import NamedLimits
from stampede.errors import EngineClosed, EngineError, LimitTimeout, OptionError
from stampede.policy import Seconds, seconds
from stampede.ports import Booked, Engine, Limits, Rate, Usage
from stampede.signatures import is_async, with_twins
from stampede.window import SECOND, micros, slack

__all__ = ["Limiter", "checked", "defaults", "limiting"]

SELF = TypeVar("SELF", bound="Limiter")
P = ParamSpec("P")
T = TypeVar("T")

SHORT = 1.0
"""Seconds of sleep before a start, up to which nobody asks whether the limit was penalized meanwhile."""


@with_twins
class Limiter:
    """At most `max` starts in any window of `per` seconds: `with Limiter("github", max=5, per=0.8): ...`.

    It bounds starts, and not how many run at once: the end of a block means nothing to it. Who has to wait books the
    moment of its start and sleeps until then, so that those are served in the order in which they came. `wait`: how
    long they wait at most; a block that would have to wait longer raises LimitTimeout, at once. `when_down="allow"`:
    while the engine can't be asked, this process keeps the same limit by itself; else that is an EngineError.

    >>> with Limiter("github", max=5, per="800ms"):  # of all processes of this machine; on="redis://..." of all
    ...     pass
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
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
        self._penalty = Bell()
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        if engine.limits is None or engine.alimits is None:
            raise OptionError(f"{engine.scheme}:// keeps no limits: name another with on=")
        self._engine = engine
        self._suspending = PROMPT if engine.prompt else SUSPENDING
        self._limits = engine.limits, engine.alimits

    def _bind(self) -> None:
        """Before it is asked: settings may name another engine by now."""

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
        return run_blocking(self._acquire(BLOCKING, wait, cost))

    def try_acquire(self, cost: int = 1) -> bool:
        """May one start now? Then it is counted; and nobody waits."""
        return run_blocking(self._acquire(BLOCKING, 0.0, cost))

    def ready_in(self, cost: int = 1) -> float:
        """Seconds until the next start that nobody has booked yet; 0.0: now. Nothing is counted."""
        return run_blocking(self._ready_in(BLOCKING, cost))

    def penalize(self, seconds: Seconds) -> None:
        """No start for so long, anywhere, as when a third party said `Retry-After`.

        Who has booked and sleeps more than a second asks anew.
        """
        run_blocking(self._penalize(BLOCKING, seconds))

    def used(self) -> Usage:
        """What is used of it now, what is booked for later, and for how long it is penalized."""
        return run_blocking(self._used(BLOCKING))

    def __enter__(self: SELF) -> SELF:
        run_blocking(self._enter(BLOCKING))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A start was made, however it ended."""

    # -- and their twins ------------------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None, cost: int = 1) -> bool:
        return await self._acquire(self._suspending, wait, cost)

    async def atry_acquire(self, cost: int = 1) -> bool:
        return await self._acquire(self._suspending, 0.0, cost)

    async def aready_in(self, cost: int = 1) -> float:
        return await self._ready_in(self._suspending, cost)

    async def apenalize(self, seconds: Seconds) -> None:
        await self._penalize(self._suspending, seconds)

    async def aused(self) -> Usage:
        return await self._used(self._suspending)

    async def __aenter__(self: SELF) -> SELF:
        await self._enter(self._suspending)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The same."""

    # -- how ------------------------------------------------------------------------------------------------------

    async def _acquire(self, colour: Colour, wait: Seconds, cost: int = 1) -> bool:
        patience = self._wait if wait is None else seconds("wait", wait)
        return await self._start(colour, patience, checked(cost, self)) is None

    async def _enter(self, colour: Colour, cost: int = 1) -> None:
        left = await self._start(colour, self._wait, cost)
        if left is not None:
            raise LimitTimeout(
                f"the limit {self.name!r} allows {self.max} per {self.per:g} s, and wait ran out: {self._wait:g} s; "
                f"the next start is in {left:.3g} s",
                left,
            )

    async def _start(self, colour: Colour, patience: float, cost: int) -> float | None:
        """None: now. Else it is as many seconds until the next, which are more than its caller waits."""
        self._bind()
        end, tries = monotonic() + patience, 0
        nearest = inf  # seconds that an answer has taken at least: now, whatever it took before
        while True:
            tries += 1
            limits, penalty = self._limits[colour.suspending], self._penalty
            mine: list[tuple[Limits, Booked]] = []
            try:
                answer, sent = await colour.shielded(self._booked(limits, cost, max(end - monotonic(), 0.0), mine))
                replied = monotonic()
                nearest = min(nearest, replied - sent)
                far = nearest if tries > 2 else 0.0
                if answer.booked and await self._in_time(colour, answer, penalty, sent, replied, far):
                    return None
            except GeneratorExit:  # its loop was closed: nothing can be awaited any more
                raise
            except BaseException:
                if mine and mine[0][1].booked:
                    await colour.shielded(self._given_back(cost, *mine[0]))
                raise
            if answer.booked:
                await colour.shielded(self._given_back(cost, *mine[0]))
            elif monotonic() + answer.delay > end or answer.delay == inf:
                return answer.delay
            else:  # it has no place for one that is so far away
                await _asleep(colour, penalty, min(monotonic() + max(answer.delay / 2, 0.01), end))

    async def _booked(
        self, limits: Limits, cost: int, ahead: float, mine: list[tuple[Limits, Booked]]
    ) -> tuple[Booked, float]:
        """The answer, also for who is interrupted in the moment in which it comes; and when its question was sent."""
        sent = monotonic()
        try:
            answer = await limits.take(self.name, self._rate, cost, ahead)
        except EngineClosed:
            raise
        except EngineError:
            if self._alone is None:
                raise
            limits, sent = self._alone, monotonic()
            answer = await limits.take(self.name, self._rate, cost, ahead)
        mine.append((limits, answer))
        return answer, sent

    async def _in_time(
        self, colour: Colour, mine: Booked, penalty: Bell, sent: float, replied: float, far: float
    ) -> bool:
        """Sleep until a start that was booked. False: it is too late for that by now, or forbidden.

        It was booked between the moments at which its question was sent and its answer came: it is not made before the
        last that this may mean, and late by the first. An engine may be so far away that nobody would ever be in time:
        then the way to it, at its shortest, is no delay.
        """
        due = replied + mine.delay
        if mine.delay > 0:
            if await _asleep(colour, penalty, due):
                return False
            if mine.delay > SHORT and await self._penalized(colour):
                return False
        allowed = slack(micros(self._rate.per)) / SECOND
        return monotonic() - (sent + mine.delay) <= allowed + (far if far > allowed else 0.0)

    async def _penalized(self, colour: Colour) -> bool:
        try:
            return (await self._limits[colour.suspending].used(self.name)).penalized > 0
        except EngineError:
            return False  # it was booked while nobody had said so

    async def _given_back(self, cost: int, limits: Limits, mine: Booked) -> None:
        with suppress(EngineError):
            await limits.give_back(self.name, self._rate, cost, mine.at)

    async def _ready_in(self, colour: Colour, cost: int) -> float:
        self._bind()
        limits = self._limits[colour.suspending]
        return (await limits.take(self.name, self._rate, checked(cost, self), -1.0)).delay

    async def _penalize(self, colour: Colour, forbidden: Seconds) -> None:
        length = seconds("seconds", forbidden)
        if length == inf:
            raise OptionError(f"seconds is {forbidden!r}: give a finite number, as nobody can take a penalty back")
        self._bind()
        await self._limits[colour.suspending].penalize(self.name, self._rate, length)
        told, self._penalty = self._penalty, Bell()
        told.ring()

    async def _used(self, colour: Colour) -> Usage:
        self._bind()
        return await self._limits[colour.suspending].used(self.name)


async def _asleep(colour: Colour, penalty: Bell, until: float) -> bool:
    """Sleep until then. True: it was penalized here meanwhile."""
    while (left := until - monotonic()) > 0:
        if await colour.park(penalty, left):
            return True
    return False


defaults = {name: each.default for name, each in inspect.signature(Limiter).parameters.items()}
"""Of its options."""

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
            await limiter._enter(limiter._suspending, cost)
            return await cast("Callable[P, Awaitable[Any]]", function)(*args, **kwargs)

        return cast("Callable[P, T]", asked)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        run_blocking(limiter._enter(BLOCKING, cost))
        return function(*args, **kwargs)

    return called
