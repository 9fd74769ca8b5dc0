"""FusionCache's grid on Redis: 100 keys, 10 or 100 callers of each, a computation of 100 ms, in 1 and in 8 processes.

Callers are tasks, and those of a key are spread over the processes. Printed: how often each key is computed (1.000 is
the minimum), and the 99th percentile of the time that a caller waits beyond the computation of its value:

cold         all ask at the same moment
expiry       each asks within 50 ms of the end of the key's life (`early=0`)
invalidated  each asks within 200 ms of an invalidation of each key; callers before it have the old value
killed       all wait for a process that is killed with SIGKILL; the wait counts from the end of its lease at the latest

    python benchmarks/redis_grid.py [--quick] [--runs 3]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from random import Random
from statistics import median
from typing import Any

from _measure import machine, table
from _redis import Crew, Server, percentile
from redis_herd import loop, ours

KEYS = 100
COST = 0.1
LEASE = 1.0
AROUND = 0.05
_numbers = count()


@dataclass
class Told:
    """The observations of one process, or of all. Times are those of the machine's monotonic clock."""

    begun: list[float] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list)  # asked, returned

    def __add__(self, other: Told) -> Told:
        return Told(self.begun + other.begun, self.calls + other.calls)


# -- one process --------------------------------------------------------------------------------------------------


def cache_of(port: int) -> Any:
    return ours(port, lease=LEASE, early=0.0)


def ask(port: int, prefix: str, start: float, spread: float, callers: int, part: int, parts: int) -> Told:
    """Run this process's share of all callers."""
    told = Told()
    loop().run_until_complete(_ask(cache_of(port), prefix, start, spread, callers, part, parts, told))
    return told


async def _ask(
    cache: Any, prefix: str, start: float, spread: float, callers: int, part: int, parts: int, told: Told
) -> None:
    dice = Random(f"{prefix}{part}")

    async def compute() -> str:
        told.begun.append(time.monotonic())
        await asyncio.sleep(COST)
        return prefix

    async def call(key: str, at: float) -> None:
        await asyncio.sleep(at - time.monotonic())
        asked = time.monotonic()
        await cache.aget_or_compute(key, compute)
        told.calls.append((asked, time.monotonic()))

    async with asyncio.TaskGroup() as group:
        for key in range(KEYS):
            for caller in range(callers):
                if (key + caller) % parts == part:
                    group.create_task(call(f"{prefix}-{key}", start + dice.uniform(-spread, spread)))


def warm(port: int, prefix: str, ttl: float) -> float:
    """Store all keys, and return the time."""
    cache = cache_of(port)
    for key in range(KEYS):
        cache.set(f"{prefix}-{key}", prefix, ttl=ttl)
    return time.monotonic()


def invalidate(port: int, prefix: str) -> None:
    """Invalidate all keys in two round trips: one by one would take longer than callers take to ask."""

    async def all_keys() -> None:
        await asyncio.gather(*(cache_of(port).ainvalidate(f"{prefix}-{key}") for key in range(KEYS)))

    loop().run_until_complete(all_keys())


def hold(port: int, prefix: str) -> None:
    """Compute all keys for ever, or until the process is killed."""

    async def all_keys() -> None:
        async with asyncio.TaskGroup() as group:
            for key in range(KEYS):
                group.create_task(cache_of(port).aget_or_compute(f"{prefix}-{key}", lambda: asyncio.sleep(60)))

    loop().run_until_complete(all_keys())


# -- the grid -----------------------------------------------------------------------------------------------------


class Grid:
    """One size of the grid. Each scenario returns the number of loads, and each caller's wait beyond one load."""

    def __init__(self, server: Server, crew: Crew, callers: int) -> None:
        self._port, self._crew, self._callers = server.port, crew, callers

    def cold(self) -> tuple[int, list[float]]:
        self._ask(_prefix(), time.monotonic() + self._patience)
        told = self._told()
        return len(told.begun), [returned - asked - COST for asked, returned in told.calls]

    def expiry(self) -> tuple[int, list[float]]:
        ttl = self._patience + 0.5
        end = warm(self._port, prefix := _prefix(), ttl) + ttl
        self._ask(prefix, end, AROUND)
        told = self._told()
        return len(told.begun), [returned - asked - COST for asked, returned in told.calls]

    def invalidated(self) -> tuple[int, list[float]]:
        warm(self._port, prefix := _prefix(), 600.0)
        start = self._ask(prefix, time.monotonic() + self._patience + 4 * AROUND, 4 * AROUND)
        time.sleep(start - time.monotonic())
        invalidate(self._port, prefix)
        told = self._told()
        return len(told.begun), [returned - asked - COST for asked, returned in told.calls]

    def killed(self) -> tuple[int, list[float]]:
        prefix, holder = _prefix(), Crew(1)
        holder.order(hold, self._port, prefix)
        time.sleep(0.5)
        start = self._ask(prefix, time.monotonic() + self._patience)
        time.sleep(start + 0.1 - time.monotonic())
        death = time.monotonic()
        holder.kill()
        told = self._told()
        return len(told.begun), [returned - max(asked, death + LEASE) - COST for asked, returned in told.calls]

    @property
    def _patience(self) -> float:
        """Return the seconds until all tasks exist and sleep."""
        return 0.2 + KEYS * self._callers / 20_000

    def _ask(self, prefix: str, start: float, spread: float = 0.0) -> float:
        parts = len(self._crew.members)
        for part, (_, pipe) in enumerate(self._crew.members):
            pipe.send((ask, (self._port, prefix, start, spread, self._callers, part, parts)))
        return start

    def _told(self) -> Told:
        return reduce(Told.__add__, self._crew.told())


def _prefix() -> str:
    return f"grid{next(_numbers)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    runs = 1 if options.quick else options.runs
    print(f"# The grid on Redis: {machine()}, {runs} runs each, {KEYS} keys, lease {LEASE:g} s\n")
    rows: list[list[object]] = []
    with Server() as server:
        for processes in (1, 8):
            with Crew(processes) as crew:
                for callers in (10, 100):
                    grid = Grid(server, crew, callers)
                    grid.cold()  # connections, scripts
                    for scenario in (grid.cold, grid.expiry, grid.invalidated, grid.killed):
                        results = [scenario() for _ in range(runs)]
                        loads = [loads / KEYS for loads, _ in results]
                        late = [percentile(waits, 0.99) * 1e3 for _, waits in results]
                        figures = [f"{median(loads):.3f}", f"{max(loads):.3f}", f"{median(late):.1f}"]
                        rows.append([f"{processes} x, {callers} callers", scenario.__name__, *figures])
    table(["", "", "loads per key", "worst", "p99 of the wait beyond the computation, ms"], rows)


if __name__ == "__main__":
    main()
