"""How often one waiter asks: no answer, of whatever engine, makes it spin."""

from __future__ import annotations

__all__ = ["FARTHEST", "Backoff", "look_again"]

AT_ONCE = 10
"""Questions that a waiter may ask as fast as it is woken."""

EVERY = 0.05
"""Seconds to each that goes beyond."""

FARTHEST = 30.0
"""Seconds between two looks of one who is far back in a queue."""


class Backoff:
    """One waiter's: how long it has to rest before it asks again."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._at = self._level = 0.0

    def rest(self, now: float) -> float:
        """Seconds, none as a rule. To be called once for each question."""
        self._level = max(self._level - (now - self._at) / EVERY, 0.0) + 1
        self._at = now
        return max(self._level - AT_ONCE, 0.0) * EVERY


def look_again(ahead: int, left: float, turn: float, safety: float) -> float:
    """Return the seconds after which one in a queue looks for itself, though nobody has woken it.

    `left` is what the holder's lease has left, less than 0 if that has no end. One with `ahead` others before it
    leaves them a `turn` each, and looks so much more rarely.
    """
    rarely = min(safety * (1 + ahead), max(FARTHEST, safety))
    return rarely if left < 0 else min(rarely, left + turn * ahead)
