"""How much an origin can bear, told from what it does with what it is given. Pure: callers bring the time."""

from __future__ import annotations

__all__ = ["Adaptive"]

SLOW = 2.0
"""So many times as long as usual is a sign of too much."""

WELL = 1.5
"""Less than so many times as long is none of too little."""

LESS = 0.75
"""What is left of the room after such a sign."""

ROUND = 0.1
"""Seconds, at least, between two signs that count; or as long as it takes just now: those inside all say the same."""

MOST = 1000
"""Names whose usual time is known; who is met after that has none."""


class Adaptive:
    """The room of an origin, between two bounds: one more for each time that all who are inside have come out well
    (an addition), and a quarter less when it fails, or takes twice as long as is usual for what is computed there (a
    multiplication): AIMD, as networks have it. A gradient would need the time of an origin that nobody else asks, and
    a database has others.

    Each process tells by its own computations, and the fleet has the least of the rooms of those who are inside.
    """

    def __init__(self, most: int, least: int = 1) -> None:
        self._most, self._least = float(most), float(min(least, most))
        self._room = self._most
        self._usual: dict[str, float] = {}  # seconds, by name
        self._slower = 1.0  # than usual, of late
        self._since = 0.0  # the last sign

    @property
    def room(self) -> int:
        return int(self._room)

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        """A computation of this name is over, and has taken so long."""
        usual = self._usual.get(name, seconds)
        if not failed and (name in self._usual or len(self._usual) < MOST):
            # What is slow also when there is the least room is so by nature. Elsewhere, it may be for our sake.
            weight = 0.5 if seconds < usual or self.room <= self._least else 0.0
            self._usual[name] = usual + (seconds - usual) * weight
        if not failed:
            self._slower += (seconds / max(usual, 1e-4) - self._slower) * 0.2
        if failed or self._slower > SLOW:
            if now - self._since >= max(ROUND, seconds):
                self._since = now
                self._room = max(self._room * LESS, self._least)
        elif self._slower < WELL:
            self._room = min(self._room + 1 / max(self._room, 1.0), self._most)
