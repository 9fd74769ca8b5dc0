"""Generations: their names, how engines store them, and how long a process believes one. A generation is named by the
id of all scopes and by a scope's own id. In both, a part behind `~` marks a softer change: stored entries are stale,
not gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from stampede.engines.kit.stamps import NewsStamps
from stampede.model.ports import Ticket

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
"""Seconds for which a generation is believed where the engine does not report the next one."""

BRIEFLY = 0.05
"""Seconds for which a generation is believed where the engine reports the next one, but has no connection for it just
now."""

NOTED = 3.0
"""Seconds for which an ended generation is noted. Another process may still believe it, so changes are made there
too."""

MOST = 32
"""Highest number of ended generations that are noted."""


class Beliefs:
    """The current generations as far as this process knows them, for both colours. Each is believed for `KNOWN`
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}
        self._cleared = -inf

    def at_hand(self, scope: str) -> str | None:
        known = self._known.get(scope)
        return known[0] if known is not None and self._clock() < known[1] else None

    def learn(self, scope: str, generation: str, asked: float) -> None:
        """Note the current generation of a scope, which was asked for at `asked`."""
        if asked + KNOWN >= self._known.get(scope, ("", 0.0))[1] and asked >= self._cleared:  # or another is newer
            self._known[scope] = generation, asked + KNOWN

    def clear(self) -> None:
        """Forget everything: this process has begun a new generation. Answers to older questions will be ignored."""
        self._cleared = self._clock()
        self._known.clear()


class NewsOfServer(Protocol):
    """What generations need of one server's news, such as a `Feed`. `reporter` is the number of the connection on which
    changes are reported, 0 while there is none. `tracks` says whether changes are reported at all."""

    stamps: NewsStamps

    def ticket(self, slot: int, stamp: int) -> Ticket: ...
    @property
    def reporter(self) -> int: ...
    @property
    def tracks(self) -> bool: ...


class PushedGenerations:
    """The current generations as far as this process knows them, where a server reports changes, for both colours. The
    ticket of each belongs to the slot of its scope (`slot_of`), which a bump of that scope voids, and one of all scopes
    voids all."""

    def __init__(self, news: NewsOfServer, slot_of: Callable[[str], int]) -> None:
        self._news = news
        self._slot_of = slot_of
        self.start_again()

    def start_again(self) -> None:
        self._lock = threading.RLock()  # a finalizer, or a signal, may ask in the middle of this
        self._bumps = 0
        self._known: dict[str, tuple[str, Ticket | None, float, float]] = {}

    def generation_at_hand(self, scope: str) -> str | None:
        """Return the current generation of a scope if this process knows it: as long as its ticket is valid, or else
        briefly."""
        now = time.monotonic()
        known = self._known.get(scope)
        if known is None:
            return None
        name, ticket, until, _ = known
        if ticket is None:
            # Where entries have tickets, a generation needs one too: without it, the next bump would go unnoticed.
            return name if now < until and not self._news.reporter else None
        return name if ticket.pulse.holds(now) and ticket.stamps[ticket.slot] == ticket.stamp else None

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        """Return the proof that the scope's generation is still the one that this process knows, or None."""
        known = self._known.get(scope)
        return None if known is None else known[1]

    def sample(self, scope: str) -> tuple[int, int]:
        """Return what to pass to `put`. Call this before asking for the generation."""
        return self._bumps, self._news.stamps[self._slot_of(scope)]

    def put(self, scope: str, name: str, sample: tuple[int, int], reporter: int, now: float) -> None:
        bumps, stamp = sample
        there = reporter and reporter == self._news.reporter
        ticket = self._news.ticket(self._slot_of(scope), stamp) if there else None
        with self._lock:
            known = self._known.get(scope)
            if bumps == self._bumps and (known is None or known[3] <= now):  # else the known one is newer
                self._known[scope] = name, ticket, now + (BRIEFLY if self._news.tracks else KNOWN), now

    def forget(self, scope: str) -> None:
        """Forget the generation of a scope, or of all with "": this process has begun a new one."""
        with self._lock:
            self._bumps += 1
            if scope:
                self._known.pop(scope, None)
            else:
                self._known.clear()


def new_generation() -> str:
    return os.urandom(6).hex()


def hard_part(generation: str) -> str:
    return generation.partition("~")[0]


def names_of(wholes: Sequence[str], owns: Sequence[str]) -> list[str]:
    """Return the names for all pairs of an id of all scopes and an id of a scope, current ones and ended ones."""
    return [_name_of(whole, own) for whole in wholes for own in owns]


def _name_of(whole: str, own: str) -> str:
    (whole, _, softer), (own, _, softest) = whole.partition("~"), own.partition("~")
    return f"{whole}.{own}~{softer}.{softest}" if softer or softest else f"{whole}.{own}"
