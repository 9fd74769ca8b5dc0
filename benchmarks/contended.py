"""Contended locks: how often per second a lock changes hands, compared with the peers, and the cost of a crowd.

    python benchmarks/contended.py [--quick] [--engines etcd,zookeeper,zmq] [--rounds 5] [--seconds 4]

Contended: 4 processes with 2 threads each take and release one lock as fast as they can, and do nothing else. The ways
are measured in turns. etcd3gw's lock can't wait: its callers try again after a pause, the better one of two.

A crowd: many callers, in 4 processes of threads, wait for one of the 8 places of a bulkhead, which each holds for 10
ms. `ideal` is the time of the visits alone, one after another in each place; a factor of 1 means that the crowd costs
nothing. For comparison, one exclusive lock that each caller holds for 10 ms.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from math import ceil
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from _measure import machine, table
from locks import CORES, servers

from stampede import Bulkhead, Lock
from stampede.engines import open_engine

PROCESSES, THREADS = 4, 2
PLACES, VISIT = 8, 0.010
LEASE = 30.0
Enter = Callable[[], AbstractContextManager[Any]]


# -- the ways: of each a factory for a process, whose result is called for each thread -----------------------------


def ours(url: str) -> Callable[[], Enter]:
    engine = open_engine(url)
    return lambda: lambda: Lock("contended", lease=LEASE, on=engine)


def places(url: str) -> Callable[[], Enter]:
    bulkhead = Bulkhead("crowd", concurrency=PLACES, lease=LEASE, on=open_engine(url))
    return lambda: lambda: bulkhead


def etcd3gw(url: str, pause: float) -> Callable[[], Enter]:
    from etcd3gw.client import Etcd3Client

    where = urlsplit(url)

    def of_thread() -> Enter:
        client = Etcd3Client(where.hostname, where.port)  # a session of `requests` is not for two threads

        @contextmanager
        def enter() -> Any:
            lock = client.lock("contended", ttl=int(LEASE))
            while not lock.acquire():
                time.sleep(pause)
            try:
                yield
            finally:
                lock.release()

        return enter

    return of_thread


def kazoo(url: str) -> Callable[[], Enter]:
    from kazoo.client import KazooClient

    logging.getLogger("kazoo").setLevel(logging.CRITICAL)  # its servers end before it does
    client = KazooClient(urlsplit(url).netloc)
    client.start()
    return lambda: lambda: client.Lock("/contended")


WAYS: dict[tuple[str, str], Callable[[str], Callable[[], Enter]]] = {
    ("disk", "stampede"): ours,
    ("file", "stampede"): ours,
    ("etcd", "stampede"): ours,
    ("etcd", "etcd3gw, again after 10 ms"): lambda url: etcd3gw(url, 0.010),
    ("etcd", "etcd3gw, again after 100 ms"): lambda url: etcd3gw(url, 0.100),
    ("zookeeper", "stampede"): ours,
    ("zookeeper", "kazoo's recipe"): kazoo,
    ("zmq", "stampede"): ours,
}


# -- one process ---------------------------------------------------------------------------------------------------


def member(pipe: Any, urls: dict[str, str]) -> None:
    """Run the orders from the pipe, (engine, way, threads, seconds, visits per thread), until it brings None."""
    made: dict[Any, Callable[[], Enter]] = {}
    while (order := pipe.recv()) is not None:
        place, name, threads, seconds, visits = order
        if (place, name) not in made:
            its = places if name == "places" else WAYS.get((place, name), ours)
            made[place, name] = its(urls[place])
            with made[place, name]()():
                pass
        enters = [made[place, name]() for _ in range(threads)]
        pipe.send("ready")
        start = pipe.recv()
        hold = VISIT if visits else 0.0
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(caller, each, start, seconds, visits or sys.maxsize, hold) for each in enters]
            found = [each.result() for each in jobs]
        pipe.send(([count for count, _ in found], max(wait for _, wait in found), time.monotonic()))


def caller(enter: Enter, start: float, seconds: float, most: int, hold: float) -> tuple[int, float]:
    """Return how often one caller was inside, and its longest wait."""
    count, longest = 0, 0.0
    time.sleep(max(start - time.monotonic(), 0.0))
    while (began := time.monotonic()) < start + seconds and count < most:
        with enter():
            longest = max(longest, time.monotonic() - began)
            if hold:
                time.sleep(hold)
        count += 1
    return count, longest


class Crew:
    def __init__(self, urls: dict[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes = []
        for _ in range(PROCESSES):
            here, there = spawn.Pipe()
            spawn.Process(target=member, args=(there, urls), daemon=True).start()
            self._pipes.append(here)

    def measured(
        self, place: str, name: str, callers: int, seconds: float, visits: int = 0
    ) -> tuple[list[int], float, float]:
        """Return how often each caller was inside, the longest wait, and how long it took all of them."""
        share, pipes = ceil(callers / PROCESSES), self._pipes[: min(PROCESSES, callers)]
        for number, pipe in enumerate(pipes):
            pipe.send((place, name, min(share, callers - share * number), seconds, visits))
        for pipe in pipes:
            assert pipe.recv() == "ready"
        start = time.monotonic() + 0.3
        for pipe in pipes:
            pipe.send(start)
        found = [pipe.recv() for pipe in pipes]  # EOFError: one has failed
        counts = [count for each in found for count in each[0]]
        return counts, max(each[1] for each in found), max(each[2] for each in found) - start

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


# -- what is printed -----------------------------------------------------------------------------------------------


def contended(crew: Crew, engines: list[str], rounds: int, seconds: float) -> None:
    ways = [way for way in WAYS if way[0] in engines]
    rates: dict[Any, list[float]] = {way: [] for way in ways}
    least: dict[Any, list[float]] = {way: [] for way in ways}
    longest: dict[Any, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            counts, wait, took = crew.measured(*way, PROCESSES * THREADS, seconds)
            rates[way].append(sum(counts) / took)
            least[way].append(min(counts) / (sum(counts) / len(counts)))
            longest[way].append(1000 * wait)
    print(f"## Contended: {PROCESSES} processes of {THREADS} threads, {rounds} turns of {seconds:g} s\n")
    rows = []
    for place, name in ways:
        mine = median(rates[place, "stampede"])
        rate = median(rates[place, name])
        against = "" if name == "stampede" else f"{rate / mine:.2f}"
        share, wait = median(least[place, name]), median(longest[place, name])
        rows.append([f"{place}: {name}", f"{rate:.0f}", against, f"{share:.2f}", f"{wait:.0f}"])
    table(["", "a second", "x stampede", "least share of a caller", "longest wait, ms"], rows)


def crowds(crew: Crew, engines: list[str], numbers: list[int]) -> None:
    print("## A crowd: seconds until all were inside, and how many times the ideal\n")
    rows = []
    for place in engines:
        for name, visit, room in (("places", VISIT, PLACES), ("exclusive", VISIT, 1)):
            row = [
                f"{place}: " + (f"{PLACES} places, {1000 * visit:g} ms" if room > 1 else f"a lock, {1000 * visit:g} ms")
            ]
            for number in numbers:
                visits = max(1, 80 // number)
                counts, _, took = crew.measured(place, name, number, 120.0, visits)
                assert sum(counts) == number * visits, counts
                ideal = ceil(number * visits / room) * visit
                row.append(f"{took:.2f} ({took / ideal:.1f})")
            rows.append(row)
    table(["", *(f"{number} callers" for number in numbers)], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engines", default="etcd,zookeeper,zmq")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--crowd", default="10,100,1000")
    options = parser.parse_args()
    rounds, seconds, numbers = options.rounds, options.seconds, [int(each) for each in options.crowd.split(",")]
    if options.quick:
        rounds, seconds, numbers = 1, 1.0, [10]
    chosen = options.engines.split(",")
    print(f"{machine()}\n")
    with servers(chosen, CORES) as found:
        its_crew = Crew(found)
        contended(its_crew, chosen, rounds, seconds)
        crowds(its_crew, chosen, numbers)
        its_crew.end()
