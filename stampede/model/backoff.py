"""How often a waiter asks an engine. It never spins, whatever an engine answers."""

from __future__ import annotations

__all__ = ["FARTHEST", "Backoff", "look_again"]

AT_ONCE = 10
"""Questions that a waiter may ask without a pause."""

EVERY = 0.05
"""Seconds for each question beyond those."""

FARTHEST = 30.0
"""Seconds between two looks of a waiter that is far back in a queue."""


class Backoff:
    """The pauses of one waiter between its questions."""

    __slots__ = ("_at", "_level")

    def __init__(self) -> None:
        self._at = self._level = 0.0

    def rest(self, now: float) -> float:
        """Return the seconds to pause before the next question, usually 0. Call this once for each question."""
        self._level = max(self._level - (now - self._at) / EVERY, 0.0) + 1
        self._at = now
        return max(self._level - AT_ONCE, 0.0) * EVERY


def look_again(ahead: int, left: float, turn: float, safety: float) -> float:
    """Return the seconds after which a waiter in a queue looks again, even if no message has woken it. `left` is the
    rest of the holder's lease in seconds, negative if the lease has no end. A waiter with `ahead` others in front
    leaves each of them a `turn`, and looks more rarely. `safety` is the pause of the first waiter."""
    rarely = min(safety * (1 + ahead), max(FARTHEST, safety))
    return rarely if left < 0 else min(rarely, left + turn * ahead)
