"""The user's face of a bulkhead: at most so many at once, over every process that reaches the engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from math import inf
from random import randrange
from typing import Any, NoReturn, TypeVar, cast

from stampede.block import Block
from stampede.colour import Colour
from stampede.errors import OptionError
from stampede.grip import Grip
from stampede.guarded_locks import PlainLocks
from stampede.hands import inside
from stampede.lock import Lock, caller
from stampede.policy import Seconds
from stampede.ports import Busy, Engine, Granted
from stampede.signatures import is_async

__all__ = ["Bulkhead"]

F = TypeVar("F", bound=Callable[..., Any])

LOOK = 0.25
"""Seconds between two looks of one who waits for any of n locks: it is told of one of them only."""


class Bulkhead(Lock):
    """At most `concurrency` at once: `with Bulkhead("reports", concurrency=8): ...`, or as a decorator.

    Each place is a lease, renewed while its holder is inside, and free again when its holder dies. One object serves
    any number of threads and tasks, each with a place of its own; one that enters twice has two. Where several
    processes say different numbers, the least of those inside holds. It counts on every engine that has locks; where
    those have room for one only, it is so many locks, `name/0` and so on, and nobody's turn is kept.

    >>> reports = Bulkhead("reports", concurrency=2)
    >>> with reports:
    ...     reports.acquire(wait=0), reports.acquire(wait=0)
    (True, False)
    >>> reports.release()
    >>> @reports
    ... def report() -> str:
    ...     return "done"
    >>> report()
    'done'
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
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
                if inspect.iscoroutine(value):
                    value.close()  # it will never be awaited, and needn't warn of that
                    raise OptionError(
                        f"the coroutine that {function!r} returns begins when its place is given back: "
                        "make it an async def, or take the place inside, by `async with`"
                    )
                return value

        return cast(F, called)

    @property
    def held(self) -> bool:
        """Has this caller a place?"""
        me = caller()
        return any(who is me and grip.held for who, grip in self._by_caller())

    def detach(self, seconds: Seconds = None) -> NoReturn:
        """A place can't be handed over: `extend` it."""
        raise OptionError("a place in a bulkhead can't be handed over: it is whose process entered")

    async def adetach(self, seconds: Seconds = None) -> NoReturn:
        self.detach(seconds)

    async def _is_locked(self, colour: Colour) -> bool:
        """Is it full?"""
        self._bind()
        names = [f"{self.name}/{number}" for number in range(self.concurrency)] if self._split else [self.name]
        taken = [await inside(self._engine, colour, name) for name in names]
        return sum(taken) >= self.concurrency

    # -- each time that it is entered is one of its own -----------------------------------------------------------

    def _slot(self, me: object, grip: Grip) -> object:
        return me, grip.number

    def _by_caller(self) -> list[tuple[object, Grip]]:
        return [(cast(tuple[object, int], slot)[0], grip) for slot, grip in list(self._grips.items())]

    def _own(self, me: object) -> Grip | None:
        return None  # who has a place may have another

    def _mine(self) -> Grip | None:
        """The last that this caller has taken; or the only one there is, taken by another and handed on."""
        me, standing = caller(), [(who, grip) for who, grip in self._by_caller() if grip.stands]
        own = [grip for who, grip in standing if who is me]
        if own:
            return own[-1]
        return standing[0][1] if len(standing) == 1 else None

    def _unclaimed(self) -> Grip | None:
        me = caller()
        own = [grip for who, grip in self._by_caller() if who is me and grip.stands and not grip.owned]
        return own[-1] if own else None

    def _not_had(self, block: Block | None, refusal: Busy) -> None:
        raise self._timeout(refusal, f"{self.concurrency} are inside {self.name!r}")

    # -- on engines whose locks have room for one only ------------------------------------------------------------

    @property
    def _split(self) -> bool:
        return not self._engine.lock_engine.rooms

    def _check_room(self, engine: Engine) -> None:
        return

    async def _question(
        self, locks: PlainLocks, grip: Grip, waits: bool, patience: float, since: float
    ) -> Granted | Busy:
        if not self._split:
            return await super()._question(locks, grip, waits, patience, since)
        first, busiest = randrange(self.concurrency), None
        for number in range(self.concurrency):
            grip.name = f"{self.name}/{(first + number) % self.concurrency}"
            reply = await locks.acquire(grip.name, grip.token, self._lease, False, patience, since)
            if isinstance(reply, Granted):
                return reply
            if busiest is None or reply.lease < busiest[1].lease:
                busiest = grip.name, reply
        assert busiest is not None
        grip.name, refused = busiest
        return refused

    async def _wait_for(self, locks: PlainLocks, grip: Grip, busy: Busy, timeout: float, since: float) -> None:
        await super()._wait_for(locks, grip, busy, min(timeout, LOOK if self._split else inf), since)


defaults = {name: each.default for name, each in inspect.signature(Bulkhead).parameters.items()}
"""Of its options."""
