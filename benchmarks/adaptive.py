"""Simulate the room of an adaptive origin: one that is healthy, and one that can take only a few computations at once.

Callers always fill the room. A computation takes a random time; if there are more than the origin can take, all of them
take proportionally longer. For comparison: the limits of Netflix' concurrency-limits (Gradient2 and Vegas, with their
defaults), and additive increase with a decrease on failures only.

    python benchmarks/adaptive.py [--quick]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, exp, inf, log10
from typing import Protocol

from stampede.model.adaptive import Adaptive

MOST = 64


class Controller(Protocol):
    @property
    def room(self) -> int: ...

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None: ...


class Gradient2:
    """A controller that compares the last time with a long average."""

    def __init__(self, most: int) -> None:
        self._most, self._limit, self._long, self._count = most, 20.0, 0.0, 0

    @property
    def room(self) -> int:
        return int(self._limit)

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        self._count += 1
        self._long += (seconds - self._long) * (1 / self._count if self._count <= 10 else 2 / 601)
        if self._long > 2 * seconds:
            self._long *= 0.95
        gradient = max(0.5, min(1.0, 1.5 * self._long / seconds))
        self._limit = min(max(0.8 * self._limit + 0.2 * (self._limit * gradient + 4), 1.0), float(self._most))


class Vegas:
    """A controller that compares the last time with the shortest one."""

    def __init__(self, most: int) -> None:
        self._most, self._limit, self._shortest, self._count = most, 20.0, inf, 0

    @property
    def room(self) -> int:
        return int(self._limit)

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        self._count += 1
        if self._count > 30 * self._limit:
            self._count, self._shortest = 0, inf
        self._shortest = min(self._shortest, seconds)
        queue, step = ceil(self._limit * (1 - self._shortest / seconds)), max(1.0, log10(self._limit))
        if failed or queue > 6 * step:
            self._limit -= step
        elif queue <= step:
            self._limit += 6 * step
        elif queue < 3 * step:
            self._limit += step
        self._limit = min(max(self._limit, 1.0), float(self._most))


class Failures:
    """A controller that reacts to failures only, of which these origins have none."""

    def __init__(self, most: int) -> None:
        self.room = most

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        pass


TIMES: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda dice: 0.05,
    "uniform, 10 to 90 ms": lambda dice: dice.uniform(0.01, 0.09),
    "bimodal, 10 or 500 ms": lambda dice: 0.5 if dice.random() < 0.1 else 0.01,
    "log-normal, sigma 1": lambda dice: 0.05 * exp(dice.gauss(-0.5, 1.0)),
    "Pareto, alpha 1.5": lambda dice: min(0.02 * dice.random() ** (-1 / 1.5), 5.0),
}
CONTROLLERS: dict[str, Callable[[int], Controller]] = {
    "ours": Adaptive,
    "Gradient2": Gradient2,
    "Vegas": Vegas,
    "failures only": Failures,
}


@dataclass(frozen=True)
class Course:
    """The result of one simulation."""

    room: float  # its mean
    stretch: float  # how many times longer computations took, in the mean
    rate: float  # computations a second


def simulate(
    make: Callable[[int], Controller],
    time: Callable[[random.Random], float],
    bears: float,
    *,
    seconds: float = 120.0,
    unseen: float = 30.0,
    seed: int = 1,
) -> Course:
    """Return the result of `seconds`, after `unseen` seconds in which the controller may settle."""
    dice, controller, inside = random.Random(seed), make(MOST), list[tuple[float, float, float]]()
    now = 1000.0
    begin, end = now + unseen, now + unseen + seconds
    area = stretched = ended = 0.0
    while now < end:
        while len(inside) < controller.room:
            stretch = max(1.0, (len(inside) + 1) / bears)
            took = time(dice) * stretch
            heappush(inside, (now + took, took, stretch))
        room, before = controller.room, now
        now, took, stretch = heappop(inside)
        if now > begin:
            area, stretched, ended = area + room * (now - max(before, begin)), stretched + stretch, ended + 1
        controller.ended("query", took, now, failed=False)
    return Course(area / (now - begin), stretched / ended, ended / (now - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the time")
    seconds = 30.0 if parser.parse_args().quick else 120.0
    for bears in (inf, 12, 4):
        which = "is well" if bears == inf else f"bears {bears} at once"
        print(f"\nThe origin {which}, and may have {MOST}: mean room, and how many times longer computations take\n")
        print("| times | " + " | ".join(CONTROLLERS) + " |")
        print("| --- |" + " ---: |" * len(CONTROLLERS))
        for name, time in TIMES.items():
            courses = [simulate(make, time, bears, seconds=seconds) for make in CONTROLLERS.values()]
            print(f"| {name} | " + " | ".join(f"{it.room:.1f}, {it.stretch:.1f}x" for it in courses) + " |")


if __name__ == "__main__":
    main()
