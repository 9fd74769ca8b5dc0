"""Memcached: the cost of a call, and how long a herd waits, compared with pymemcache, and dogpile.cache on top of it.

Calls: one process and the server, pinned to one core. `engine` is a look at bytes, or a claim and a fill of them;
`cache` is the whole path of a user's call: flight, codec, early refresh.

Herds: 8 processes of 8 threads ask at the same moment for a key that takes 200 ms to compute: how often it is computed,
how long after the end of the computation the last caller has its value (storing it included), and how many commands per
process the server receives. Cold: the key never had a value. Known: the key had a value before.

    python benchmarks/memcached.py [--quick] [--runs 5]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from statistics import median
from typing import Any

from _measure import interleaved, machine, pin, table

from stampede import Cache
from stampede.engines.memcached import MemcachedEngine
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask
from stampede.runtime.colour import run_blocking

COST = 0.2
PROCESSES, THREADS = 8, 8
VALUE = b"x" * 200
_numbers = count()


class Server:
    """A memcached on a free port of the loopback."""

    def __init__(self) -> None:
        program = shutil.which("memcached")
        if program is None:
            sys.exit("memcached is not installed")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        user = ["-u", "nobody"] if os.getuid() == 0 else []
        self._process = subprocess.Popen([program, *user, "-l", "127.0.0.1", "-p", str(self.port), "-t", "4"])
        self.address = f"127.0.0.1:{self.port}"
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.01)

    def commands(self) -> int:
        from pymemcache.client.base import Client

        stats = Client(("127.0.0.1", self.port)).stats()
        names = (b"cmd_get", b"cmd_set", b"cmd_touch", b"delete_hits", b"delete_misses")
        return sum(int(stats[name]) for name in names)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# -- calls --------------------------------------------------------------------------------------------------------


def calls(server: Server, rounds: int, batch: int) -> None:
    from dogpile.cache import make_region
    from pymemcache.client.base import PooledClient

    client = PooledClient(("127.0.0.1", server.port), no_delay=True)
    client.set("raw", VALUE, noreply=False)
    engine = MemcachedEngine(server.address)
    port, store = engine.blocking.claims, engine.blocking.store
    run_blocking(store.set("hot", _entry()))
    cache = Cache(f"memcached://{server.address}", ttl=600)
    region = make_region().configure(
        "dogpile.cache.pymemcache", expiration_time=600, arguments={"url": [server.address], "distributed_lock": True}
    )
    token = new_id()

    def engine_miss() -> None:
        key = f"e{next(_numbers)}"
        run_blocking(port.claim(key, token, Ask(10.0)))
        run_blocking(port.fill(key, token, _entry()))

    ways: dict[str, Callable[[], Any]] = {
        "pymemcache get": lambda: client.get("raw"),
        "engine, hit": lambda: run_blocking(port.look("hot")),
        "engine, hit by a claim": lambda: run_blocking(port.claim("hot", token, Ask(10.0))),
        "cache, hit": lambda: cache.get_or_compute("hot", _value),
        "dogpile, hit": lambda: region.get_or_create("hot", _value),
        "engine, miss": engine_miss,
        "cache, miss": lambda: cache.get_or_compute(f"c{next(_numbers)}", _value),
        "dogpile, miss": lambda: region.get_or_create(f"d{next(_numbers)}", _value),
    }
    sent = {}
    for name, way in ways.items():
        way()
        before = server.commands()
        for _ in range(100):
            way()
        sent[name] = (server.commands() - before) / 100
    times = interleaved({name: _timed(way, batch) for name, way in ways.items()}, rounds)
    raw = times["pymemcache get"]
    rows = [(name, f"{each * 1e6:.1f}", f"{each / raw:.2f}", f"{sent[name]:.1f}") for name, each in times.items()]
    table(("blocking", "µs", "x get", "commands"), rows)
    engine.close()
    cache.close()


def _timed(way: Callable[[], Any], batch: int) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        for _ in range(batch):
            way()
        return (time.perf_counter() - start) / batch

    return sample


def suspending(server: Server, batch: int) -> None:
    """Measure hits in one event loop: one after another, and with 100 tasks at once."""
    engine = MemcachedEngine(server.address)
    run_blocking(engine.blocking.store.set("hot", _entry()))
    port = engine.suspending.claims

    async def some(number: int) -> None:
        for _ in range(number):
            await port.look("hot")

    async def rate(tasks: int) -> float:
        await some(10)
        start = time.perf_counter()
        await asyncio.gather(*(some(batch) for _ in range(tasks)))
        return tasks * batch / (time.perf_counter() - start)

    rows = [(f"{tasks} tasks", f"{asyncio.run(rate(tasks)) / 1000:.0f}") for tasks in (1, 10, 100)]
    table(("asyncio, one connection", "K hits/s"), rows)
    engine.close()


def _entry() -> Entry[bytes]:
    return Entry(VALUE, new_id(), ttl=600.0, fresh=600.0, keep=600.0)


def _value() -> bytes:
    return VALUE


# -- herds --------------------------------------------------------------------------------------------------------


def stampede(address: str) -> Callable[[str, Callable[[], Any]], Any]:
    return Cache(f"memcached://{address}", ttl=600).get_or_compute


def dogpile(address: str) -> Callable[[str, Callable[[], Any]], Any]:
    from dogpile.cache import make_region

    region = make_region().configure(
        "dogpile.cache.pymemcache", expiration_time=600, arguments={"url": [address], "distributed_lock": True}
    )
    return region.get_or_create


WAYS = {"stampede": stampede, "dogpile.cache": dogpile}


def _member(way: str, address: str, key: str, known: bool, barrier: Any, pipe: Any) -> None:
    """Run the callers of one process of a herd."""
    begun: list[float] = []
    ended: list[float] = []
    returned: list[float] = []

    def compute() -> bytes:
        begun.append(time.monotonic())
        time.sleep(COST)
        ended.append(time.monotonic())
        return VALUE

    ask = WAYS[way](address)
    ask("warm", _value)
    if known:
        ask(key, compute)
        barrier.wait()
        barrier.wait()  # by now it has been deleted
        begun.clear()
        ended.clear()
    gate = threading.Barrier(THREADS + 1)

    def call() -> None:
        gate.wait()
        ask(key, compute)
        returned.append(time.monotonic())

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    pipe.send("ready")
    barrier.wait()
    gate.wait()
    for thread in threads:
        thread.join()
    barrier.wait()  # or the ends of the first ones' interpreters would be in the last one's time
    pipe.send((begun, ended, returned))


def _delete(way: str, address: str, key: str) -> None:
    owner: Any = WAYS[way](address).__self__  # type: ignore[attr-defined]
    (owner.invalidate if isinstance(owner, Cache) else owner.delete)(key)


def herd(way: str, server: Server, known: bool) -> tuple[int, float, float]:
    """Return the computations, the ms from the end of the first one to the last waiter, and commands per process."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES + 1)
    key, members = f"herd{next(_numbers)}", []
    for _ in range(PROCESSES):
        mine, theirs = context.Pipe()
        process = context.Process(target=_member, args=(way, server.address, key, known, barrier, theirs))
        process.start()
        members.append((process, mine))
    if known:
        barrier.wait()
        _delete(way, server.address, key)
        barrier.wait()
    for _, pipe in members:
        pipe.recv()
    before = server.commands()
    barrier.wait()
    barrier.wait()
    begun: list[float] = []
    ended: list[float] = []
    returned: list[float] = []
    for process, pipe in members:
        for all_of_them, some in zip((begun, ended, returned), pipe.recv(), strict=True):
            all_of_them += some
        process.join()
    commands = (server.commands() - before) / PROCESSES
    return len(begun), (max(returned) - min(ended)) * 1000, commands


def herds(server: Server, runs: int) -> None:
    rows = []
    cases = [(way, known) for known in (False, True) for way in WAYS]
    seen: dict[tuple[str, bool], list[tuple[int, float, float]]] = {case: [] for case in cases}
    for _ in range(runs):
        for case in cases:
            seen[case].append(herd(case[0], server, case[1]))
    for (way, known), results in seen.items():
        computed, last, commands = zip(*results, strict=True)
        name = f"{way}, {'known' if known else 'cold'}"
        rows.append((name, max(computed), f"{median(last):.0f}", f"{max(last):.0f}", f"{median(commands):.1f}"))
    table(("herd of 8 x 8, 200 ms", "computed", "last, ms", "worst", "commands/process"), rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    print(f"{machine()}\n")
    pin()  # the server too, which inherits it
    server = Server()
    try:
        calls(server, 3 if given.quick else 15, 100 if given.quick else 500)
        suspending(server, 20 if given.quick else 200)
    finally:
        server.close()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    server = Server()
    try:
        herds(server, 1 if given.quick else given.runs)
    finally:
        server.close()


if __name__ == "__main__":
    main()
