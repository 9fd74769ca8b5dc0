"""How much an origin can bear, found by trial. Pure: callers bring the time."""

from __future__ import annotations

from math import inf, log, sqrt
from typing import NamedTuple

__all__ = ["Adaptive"]

LESS = 0.75
"""What remains of the room after a failure."""

SLOWER = log(1.5)
"""If computations take so many times as long as after the last trial, the next one begins at once."""

STEPS = 10
"""The room grows so often by a sixteenth (at least by one) between two trials."""

CALM = 30
"""With all of its room, an origin is tried again after so many times as many computations as have room."""

ROUND = 0.1
"""Seconds for which a room is kept at least."""

FEWEST = 20
"""Computations that must have ended before their mean says anything."""

NAMES = 1000
"""Names whose usual time is known. Computations of other names say nothing."""


class _Before(NamedTuple):
    """What was measured before a trial, with the whole room."""

    room: float
    mean: float
    variance: float  # of that mean


class Adaptive:
    """The room of an origin, between two bounds.

    A trial takes half of the room away. If computations then take clearly less time, it was too much room, and half of
    it stays; if not, they are slow for another reason, and the room comes back and may grow. A quarter goes whenever
    the origin fails. Times are compared as means of logarithms, so that a few long computations among many short ones
    say little. There is no "usual" time that an origin is held to, which is wrong wherever times differ by nature.

    Each process tells by its own computations, and the fleet has the least of the rooms of those who are inside.
    """

    def __init__(self, most: int, least: int = 1) -> None:
        self._most, self._least = float(most), float(min(least, most))
        self._usual: dict[str, tuple[float, int]] = {}  # by name: a mean, and of how many
        self._normal = inf  # the mean after the last trial
        self._steps = STEPS  # since the last trial: the first comes soon
        self._before: _Before | None = None  # while there is a trial
        self._change(self._most, -inf)

    @property
    def room(self) -> int:
        """How many computations may run at once."""
        return int(self._room)

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        """Note that a computation of this name is over, and how long it has taken."""
        if now - seconds < self._since:
            return  # it began with another room
        if failed:
            if now - self._since >= ROUND:
                room = self._before.room if self._before else self._room
                self._before = None
                self._change(room * LESS, now)
            return
        if name not in self._usual and len(self._usual) >= NAMES:
            return  # it can be compared with nothing
        self._note(name, log(max(seconds, 1e-4)))
        if self._count < max(FEWEST, self.room) or now - self._since < ROUND:
            return
        mean = self._sum / self._count
        variance = max(self._squares / self._count - mean * mean, 0.0) / self._count
        if self._before is None:
            self._go_on(mean, variance, now)
        else:
            self._judge(self._before, mean, variance, now)

    def _go_on(self, mean: float, variance: float, now: float) -> None:
        """Begin a trial if it is time for one; else let the room grow."""
        rounds = self._count / self._room
        slower = mean - 2 * sqrt(variance) > self._normal + SLOWER
        if slower or rounds >= CALM or (self._steps >= STEPS and rounds >= 3):
            low = max(self._room / 2, self._least)
            if int(low) < self.room:
                self._before = _Before(self._room, mean, variance)
                self._change(low, now)
                return
            self._normal, self._steps = mean, 0
        if self._steps < STEPS and self._room < self._most:
            self._steps += 1
            self._change(self._room + max(self._room / 16, 1.0), now)

    def _judge(self, before: _Before, mean: float, variance: float, now: float) -> None:
        """End the trial as soon as it is clear. If times fell by half as much as the room, it was too much."""
        beyond = before.mean - mean - log(before.room / self._room) / 2
        if abs(beyond) < 2 * sqrt(variance + before.variance) and self._count < 10 * self._room:
            return
        self._before = None
        self._steps = STEPS if beyond > 0 else 0
        self._normal = mean if beyond > 0 else before.mean
        self._change(self._room if beyond > 0 else before.room, now)

    def _note(self, name: str, logarithm: float) -> None:
        usual, count = self._usual.get(name, (0.0, 0))
        if count < CALM:  # it makes names comparable with each other, and no more
            count += 1
            usual += (logarithm - usual) / count
            self._usual[name] = usual, count
        self._count += 1
        self._sum += logarithm - usual
        self._squares += (logarithm - usual) ** 2

    def _change(self, room: float, now: float) -> None:
        self._room = min(max(room, self._least), self._most)
        self._since, self._count, self._sum, self._squares = now, 0, 0.0, 0.0
