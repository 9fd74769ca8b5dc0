"""Generations: what they are called, where an engine's author keeps them, and for how long one is believed in.

Each is told by the id of all scopes and by a scope's own. Behind a `~` in these stands what has only made them softer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Protocol

from stampede.engines.kit.stamps import NewsStamps
from stampede.errors import EngineError
from stampede.model.ports import Ticket
from stampede.runtime.colour import Bell, Colour, Loop, running_loop

__all__ = [
    "KNOWN",
    "MOST",
    "NOTED",
    "Beliefs",
    "NewsOfServer",
    "PushedGenerations",
    "hard_part",
    "names_of",
    "new_generation",
]

KNOWN = 1.0
"""Seconds for which a generation is believed where nobody is to tell of the next."""

BRIEFLY = 0.05
"""The same where somebody is to, and doesn't just now: the news are about to come, or to come back."""

NOTED = 3.0
"""Seconds for which an ended generation is noted: somebody may believe in it yet, and changes go there, too."""

MOST = 32
"""As many, at most."""

SAFETY = 1.0
"""Seconds that one waits for another's question, before one's own."""


class Beliefs:
    """What this process takes for today's, for both colours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}
        self._cleared = -inf

    def at_hand(self, scope: str) -> str | None:
        known = self._known.get(scope)
        return known[0] if known is not None and self._clock() < known[1] else None

    def learn(self, scope: str, generation: str, asked: float) -> None:
        """It was so at some moment after `asked`."""
        if asked + KNOWN >= self._known.get(scope, ("", 0.0))[1] and asked >= self._cleared:  # or another is newer
            self._known[scope] = generation, asked + KNOWN

    def clear(self) -> None:
        """Somebody here has begun a new one. What was asked before may be answered late."""
        self._cleared = self._clock()
        self._known.clear()


class NewsOfServer(Protocol):
    """What is to be known of the news of one server: as of a `Feed`.

    `told` is the connection that is told of changes, 0 while there is none; `tracks`: they are to be told at all.
    """

    stamps: NewsStamps

    def ticket(self, slot: int, stamp: int) -> Ticket: ...
    @property
    def told(self) -> int: ...
    @property
    def tracks(self) -> bool: ...


class _Asking:
    """A question for a generation, for all who need it meanwhile: or a herd would ask it a thousand times."""

    __slots__ = ("bell", "error", "name")

    def __init__(self) -> None:
        self.bell = Bell()
        self.name: str | None = None
        self.error: EngineError | None = None


class PushedGenerations:
    """What this process takes for today's where a server tells of the next, for both colours. A ticket of theirs is of
    one `slot`, which every bump voids."""

    def __init__(self, news: NewsOfServer, slot: int) -> None:
        self._news = news
        self._slot = slot
        self.start_again()

    def start_again(self) -> None:
        self._lock = threading.RLock()  # a finalizer, or a signal, may ask in the middle of this
        self._bumps = 0
        self._known: dict[str, tuple[str, Ticket | None, float, float]] = {}
        self._asked: dict[tuple[str, Loop | None], _Asking] = {}

    async def today(self, scope: str, colour: Colour, ask: Callable[[str], Awaitable[str]]) -> str:
        """Today's, asked for by one for all who need it."""
        known = self.generation_at_hand(scope)
        if known is not None:
            return known
        key, mine = (scope, running_loop() if colour.suspending else None), _Asking()
        with self._lock:
            asked = self._asked.setdefault(key, mine)
        if asked is not mine:
            await colour.park(asked.bell, SAFETY)
            if asked.error is not None:
                raise EngineError(str(asked.error)) from asked.error
            return asked.name or await ask(scope)
        try:
            mine.name = await ask(scope)
        except EngineError as error:
            mine.error = error
            raise
        finally:
            with self._lock:
                if self._asked.get(key) is mine:
                    del self._asked[key]
            mine.bell.ring()
        return mine.name

    def generation_at_hand(self, scope: str) -> str | None:
        """Today's, as far as it is known to be so: by its ticket, else for a while."""
        now = time.monotonic()
        known = self._known.get(scope)
        if known is None:
            return None
        name, ticket, until, _ = known
        if ticket is None:
            # Where entries have tickets it needs one too: of the next bump nobody would be told.
            return name if now < until and not self._news.told else None
        return name if ticket.pulse.holds(now) and ticket.stamps[ticket.slot] == ticket.stamp else None

    def sample(self) -> tuple[int, int]:
        """To be taken before one is read."""
        return self._bumps, self._news.stamps[self._slot]

    def put(self, scope: str, name: str, sample: tuple[int, int], told: int, now: float) -> None:
        bumps, stamp = sample
        ticket = self._news.ticket(self._slot, stamp) if told and told == self._news.told else None
        with self._lock:
            known = self._known.get(scope)
            if bumps == self._bumps and (known is None or known[3] <= now):  # or it was asked before that one
                self._known[scope] = name, ticket, now + (BRIEFLY if self._news.tracks else KNOWN), now

    def forget(self) -> None:
        """Somebody here has begun a new one."""
        with self._lock:
            self._bumps += 1
            self._known.clear()
            self._asked.clear()  # what they are told may be old


def new_generation() -> str:
    return os.urandom(6).hex()


def hard_part(generation: str) -> str:
    return generation.partition("~")[0]


def names_of(wholes: Sequence[str], owns: Sequence[str]) -> list[str]:
    """What keys are told apart by, for each that all scopes and for each that a scope has, or had a moment ago."""
    return [_name_of(whole, own) for whole in wholes for own in owns]


def _name_of(whole: str, own: str) -> str:
    (whole, _, softer), (own, _, softest) = whole.partition("~"), own.partition("~")
    return f"{whole}.{own}~{softer}.{softest}" if softer or softest else f"{whole}.{own}"
