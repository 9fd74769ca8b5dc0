"""Real expiries of a hot key: several processes read it from the disk engine, again and again, while its ttl runs out.

Readers come at random (Poisson) at a known rate. A value lives for a second and takes 20 ms to compute, as from a
remote database. Printed for each way: computations per expiry, reads that took half a computation or longer, the
slowest read, and how long before the end of the old value its refresh began.

    python benchmarks/expiry.py [--quick] [--seconds 7] [--rate 1000] [--processes 4]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any

from _measure import machine, table

from stampede import Cache

TTL, COST = 1.0, 0.02
LONG = COST / 2


@dataclass
class Told:
    """The observations of one process, or of all. Times are those of the machine's monotonic clock."""

    computations: list[tuple[float, float]] = field(default_factory=list)
    reads: int = 0
    long: int = 0
    slowest: float = 0.0
    waits: int = 0  # reads that the library itself counts as having waited

    def add(self, other: Told) -> None:
        self.computations += other.computations
        self.reads += other.reads
        self.long += other.long
        self.slowest = max(self.slowest, other.slowest)
        self.waits += other.waits


def stampede(folder: str, compute: Callable[[], Any], **options: Any) -> tuple[Callable[[], Any], Callable[[], int]]:
    cache = Cache(f"disk://{folder}", local=True, ttl=TTL, **options)
    return cache.cached(key="hot")(compute), lambda: cache.stats().waits


def plain(folder: str, compute: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], int]]:
    cache = Cache(f"disk://{folder}", ttl=TTL)

    def read() -> Any:
        value = cache.get("hot")
        if value is None:
            value = compute()
            cache.set("hot", value)
        return value

    return read, lambda: 0


WAYS: dict[str, Callable[..., tuple[Callable[[], Any], Callable[[], int]]]] = {
    "stampede, background=True": lambda folder, compute: stampede(folder, compute, background=True),
    "stampede": stampede,
    "stampede, early=0": lambda folder, compute: stampede(folder, compute, early=0),
    "get, compute, set": plain,
}


def reader(pipe: Any, folder: str, way: str, rate: float, seconds: float) -> None:
    """Read until the time is up, and send the observations: the main function of a process."""
    told = Told()

    def compute() -> list[int]:
        begun = time.monotonic()
        time.sleep(COST)
        told.computations.append((begun, time.monotonic()))
        return [1, 2, 3]

    read, waits = WAYS[way](folder, compute)
    read()  # whoever comes first computes; that is no expiry
    cold = waits()
    pipe.send("ready")
    now = pipe.recv()
    end = now + seconds
    while now < end:
        now += random.expovariate(rate)
        time.sleep(max(0.0, now - time.monotonic()))
        begun = time.monotonic()
        read()
        took = time.monotonic() - begun
        told.reads += 1
        told.long += took >= LONG
        told.slowest = max(told.slowest, took)
    told.waits = waits() - cold
    pipe.send(told)


def measured(way: str, processes: int, rate: float, seconds: float) -> Told:
    spawn = multiprocessing.get_context("spawn")
    whole, members = Told(), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(processes):
            here, there = spawn.Pipe()
            process = spawn.Process(target=reader, args=(there, folder, way, rate / processes, seconds), daemon=True)
            process.start()
            members.append((process, here))
        for _, pipe in members:
            pipe.recv()
        start = time.monotonic() + 0.1
        for _, pipe in members:
            pipe.send(start)
        for process, pipe in members:
            if not pipe.poll(seconds + 60):
                raise TimeoutError("a reader doesn't answer")
            whole.add(pipe.recv())
            process.join(10)
    return whole


def expiries(computations: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the computations of each value, without the cold start: those begun before all could see the first."""
    values: list[list[tuple[float, float]]] = []
    for begun, ended in sorted(computations):
        if values and begun < values[-1][0][1] + COST:
            values[-1].append((begun, ended))
        else:
            values.append([(begun, ended)])
    return values


def row(way: str, told: Told) -> list[object]:
    values = expiries(told.computations)
    count = max(len(values) - 1, 1)
    computations = sum(len(value) for value in values[1:])
    early = [before[0][1] + TTL - after[0][0] for before, after in pairwise(values)]
    return [
        way,
        f"{told.reads:,}",
        count,
        f"{computations / count:.2f}",
        told.long,
        told.waits if way.startswith("stampede") else "",
        f"{told.slowest * 1e3:.1f}",
        f"{mean(early) * 1e3:.0f}" if early else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each of the four ways")
    parser.add_argument("--rate", type=float, default=1000.0, help="reads per second, of all processes together")
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    seconds = 2.5 if options.quick else options.seconds
    print(f"# Expiry of a hot key on disk: {machine()}\n")
    print(f"{options.processes} processes, {options.rate:,.0f} reads/s, ttl {TTL:g} s, cost {COST * 1e3:g} ms\n")
    rows = [row(way, measured(way, options.processes, options.rate, seconds)) for way in WAYS]
    long = f"reads >= {LONG * 1e3:g} ms"
    head = ["", "reads", "expiries", "computations/expiry", long, "waited", "slowest read, ms", "began early, ms"]
    table(head, rows)


if __name__ == "__main__":
    main()
