"""Simulate expiries of a hot key: computations per expiry, blocked readers, and how early the refresh comes.

Each process has a local tier in front of one engine, which grants one lease. Callers arrive at random (Poisson), spread
over the processes, and refreshes run in the background. The entries carry the values of `stampede.model.early`. The
baseline is XFetch with beta 1 and no margin, under the same lease.

    python benchmarks/early.py [--quick]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, log
from time import perf_counter
from typing import TypeAlias

from stampede.model import early
from stampede.model.entry import Entry

TTL = 100.0  # in units of the mean cost, as all times here
SIGMA = 0.5

Cost: TypeAlias = Callable[[random.Random], float]
Draw: TypeAlias = Callable[[random.Random], float]
Observe: TypeAlias = Callable[[Entry[None] | None, float], tuple[float, float]]


def constant(dice: random.Random) -> float:
    return 1.0


def log_normal(dice: random.Random) -> float:
    return dice.lognormvariate(-(SIGMA**2) / 2, SIGMA)


@dataclass(frozen=True)
class Way:
    """A rule that says when to refresh."""

    name: str
    draw: Draw
    observe: Observe


OURS = Way("stampede, early=1", lambda dice: early.draw(1.0, dice.random), early.observe)
XFETCH = Way("XFetch, beta=1", lambda dice: -log(1.0 - dice.random()), lambda previous, cost: (cost, 0.0))


@dataclass(slots=True)
class Tally:
    """The counts of a number of expiries."""

    expiries: int = 0
    computations: int = 0
    claims: int = 0
    blocked: int = 0  # expiries at which a caller waited
    earliness: float = 0.0  # summed: from the refresh's start to the end of fresh
    seconds: float = 0.0

    @property
    def blocked_percent(self) -> float:
        return 100 * self.blocked / self.expiries

    @property
    def mean_earliness(self) -> float:
        return self.earliness / self.expiries

    @property
    def interval(self) -> float:
        """Mean time from one value to the next."""
        return self.seconds / self.expiries


def simulate(
    way: Way, cost: Cost, rate: float, processes: int, expiries: int, seed: int = 1, ttl: float = TTL
) -> Tally:
    """Simulate one event per caller that must decide. The hits in between change nothing, and are not simulated."""
    dice = random.Random(seed)
    tally = Tally()
    gap = processes / rate  # mean time between two callers of one process
    # The engine: an entry with the absolute end of its fresh time, and a lease that ends when the value is there.
    entry = Entry(None, b"", *way.observe(None, cost(dice)), ttl=ttl)
    number, end = 0, ttl
    done, took, winner, waited = inf, 0.0, 0, False
    # The processes: which entry each has in its local tier, and when a caller comes who can't just be served from it.
    held, thinks = [0] * processes, [0.0] * processes
    calls: list[tuple[float, int]] = []

    def call(process: int, after: float) -> None:
        """Schedule the first caller of a process after a moment."""
        thinks[process] = after + dice.expovariate(1 / gap)
        heappush(calls, (thinks[process], process))

    def enter(process: int, now: float) -> None:
        """Put the engine's entry into the process, which draws its early moment."""
        held[process] = number
        call(process, max(now, end - early.lead(entry, way.draw(dice))))

    for process in range(processes):
        enter(process, 0.0)
    while tally.expiries < expiries:
        now, process = calls[0]
        if now >= done:  # the fill comes first
            now, done = done, inf
            tally.expiries += 1
            tally.blocked += waited
            tally.seconds = now
            entry.cost, entry.margin = way.observe(entry, took)
            number, end = number + 1, now + ttl
            enter(winner, now)
            continue
        heappop(calls)
        if now != thinks[process]:
            continue  # this caller is just served after all
        tally.claims += 1
        if held[process] != number:  # found: the engine has another entry than the one seen
            enter(process, now)
        elif done == inf:  # granted
            tally.computations += 1
            tally.earliness += end - now
            took, winner, waited = cost(dice), process, now >= end
            done = now + took
            call(process, max(now, end))
        elif now < end:  # busy, and the value is still fresh: served, until it isn't
            call(process, end)
        else:  # busy, and there is nothing to serve
            waited = True
            call(process, done)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="10^3 expiries instead of 10^5")
    expiries = 1_000 if parser.parse_args().quick else 100_000
    began = perf_counter()
    print(f"{expiries:,} expiries each, ttl = {TTL:g} x cost, background refresh\n")
    print("| cost | rate x cost | processes | way | computations/expiry | blocked % | earliness / cost |")
    print("|---|--:|--:|---|--:|--:|--:|")
    for cost in (constant, log_normal):
        for rate in (10, 100, 1000):
            for processes in (1, 8):
                for way in (XFETCH, OURS):
                    tally = simulate(way, cost, rate, processes, expiries)
                    print(
                        f"| {cost.__name__} | {rate} | {processes} | {way.name} "
                        f"| {tally.computations / tally.expiries:.5f} | {tally.blocked_percent:.3f} "
                        f"| {tally.mean_earliness:.2f} |",
                        flush=True,
                    )
    print("\n500 processes, ttl = 6 x cost (no refresh can start before 3, so no value is replaced before 4):\n")
    for way in (XFETCH, OURS):
        fleet = simulate(way, constant, 1000, 500, max(100, expiries // 200), ttl=6.0)
        print(f"- {way.name}: a new value every {fleet.interval:.2f} x cost, blocked {fleet.blocked_percent:.2f} %")
    print(f"{perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
