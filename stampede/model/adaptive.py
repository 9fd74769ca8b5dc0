"""The load that an origin can bear, found by trials. Pure: the time is an argument."""

from __future__ import annotations

from math import inf, log, sqrt
from typing import NamedTuple

__all__ = ["Adaptive"]

LESS = 0.75
"""The part of the room that remains after a failure."""

SLOWER = log(1.5)
"""How much slower (as a logarithm) computations become, compared with the last trial, before the next trial begins at
once."""

STEPS = 10
"""How often the room grows between two trials, by a sixteenth each time, at least by one."""

CALM = 30
"""Rounds between two trials while the room does not grow. A round is as many computations as there is room for."""

ROUND = 0.1
"""The least number of seconds for which a room stays the same."""

FEWEST = 20
"""The least number of ended computations whose mean counts."""

NAMES = 1000
"""The most names whose usual time is remembered. Computations with other names do not count."""


class _Before(NamedTuple):
    """The measurement before a trial, with the whole room."""

    room: float
    mean: float
    variance: float  # of that mean


class Adaptive:
    """The room of an origin, that is how many computations may run at once, between two bounds.

    A trial takes half of the room away. If computations then take clearly less time, there was too much room, and the
    half stays. If not, they are slow for another reason: the room comes back, and may grow. When the origin fails, a
    quarter of the room goes.

    Times are compared as means of logarithms, so that a few long computations among many short ones have little effect.
    There is no target time for an origin, because times may differ by nature.

    Each process decides by its own computations. The fleet has the smallest room of all holders inside."""

    def __init__(self, most: int, least: int = 1) -> None:
        self._most, self._least = float(most), float(min(least, most))
        self._usual: dict[str, tuple[float, int]] = {}  # by name: the mean of the logarithms, and how many
        self._normal = inf  # the mean after the last trial
        self._steps = STEPS  # since the last trial; all of them, so that the first trial comes soon
        self._before: _Before | None = None  # not None during a trial
        self._change(self._most, -inf)

    @property
    def room(self) -> int:
        """The number of computations that may run at once."""
        return int(self._room)

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        """Take note that a computation of this name has ended, and how many seconds it took."""
        if now - seconds < self._since:
            return  # it began while the room was another
        if failed:
            if now - self._since >= ROUND:
                room = self._before.room if self._before else self._room
                self._before = None
                self._change(room * LESS, now)
            return
        if name not in self._usual and len(self._usual) >= NAMES:
            return  # there is nothing to compare it with
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
        """Begin a trial if it is time for one. Otherwise let the room grow."""
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
        """End the trial as soon as the result is clear. If times fell by half as much as the room, it was too large."""
        beyond = before.mean - mean - log(before.room / self._room) / 2
        if abs(beyond) < 2 * sqrt(variance + before.variance) and self._count < 10 * self._room:
            return
        self._before = None
        self._steps = STEPS if beyond > 0 else 0
        self._normal = mean if beyond > 0 else before.mean
        self._change(self._room if beyond > 0 else before.room, now)

    def _note(self, name: str, logarithm: float) -> None:
        usual, count = self._usual.get(name, (0.0, 0))
        if count < CALM:  # enough, as this only makes the times of different names comparable
            count += 1
            usual += (logarithm - usual) / count
            self._usual[name] = usual, count
        self._count += 1
        self._sum += logarithm - usual
        self._squares += (logarithm - usual) ** 2

    def _change(self, room: float, now: float) -> None:
        self._room = min(max(room, self._least), self._most)
        self._since, self._count, self._sum, self._squares = now, 0, 0.0, 0.0
