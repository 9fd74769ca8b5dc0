"""Capacity: the bytes that an entry takes on each engine besides its value, and the connections of a process.

Bytes are the engine's own figures with 10,000 entries of one size, less those with none, per entry. Values are random,
so that they can't be compressed. The server counts the connections after 8 threads and an event loop with 100 tasks of
one process have used the cache, including its local tier.

    python benchmarks/capacity.py [--entries 10000] [--engines redis,disk]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _measure import machine, table

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from stampede import Cache

SIZES = 100, 1_000, 10_000
ENGINES = "memory", "disk", "redis", "memcached", "postgres"


def filled(cache: Cache, entries: int, size: int) -> None:
    for begin in range(0, entries, 500):
        cache.set_many({f"key:{number}": os.urandom(size) for number in range(begin, min(begin + 500, entries))})


def of_memory(entries: int) -> tuple[list[float], str]:
    found = []
    for size in SIZES:
        tracemalloc.start()
        with Cache("memory://", ttl=600) as cache:
            before = tracemalloc.get_traced_memory()[0]
            filled(cache, entries, size)
            found.append((tracemalloc.get_traced_memory()[0] - before) / entries - size)
        tracemalloc.stop()
    return found, "none"


def of_disk(entries: int) -> tuple[list[float], str]:
    found = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as home, Cache(f"disk://{home}/c", ttl=600) as cache:
            cache.set("first", 1)
            before = _used(Path(home))
            filled(cache, entries, size)
            found.append((_used(Path(home)) - before) / entries - size)
    return found, "none (files: 4 and one for each thread)"


def _used(home: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in home.rglob("*") if path.is_file())


def of_redis(entries: int) -> tuple[list[float], str]:
    from servers import RedisServer

    server = RedisServer()

    def bytes_used() -> int:
        return int(server.cli("INFO", "memory").partition("used_memory:")[2].split()[0])

    def clients() -> int:
        return len([line for line in server.cli("CLIENT", "LIST").splitlines() if "cmd=client" not in line])

    return _of_server(server.url, entries, bytes_used, clients, lambda: server.cli("FLUSHALL"), server.close)


def of_memcached(entries: int) -> tuple[list[float], str]:
    from memcached_server import MemcachedServer

    server = MemcachedServer()
    host, _, port = server.address.rpartition(":")

    def stats() -> dict[str, str]:
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"stats\r\n")
            said = b""
            while not said.endswith(b"END\r\n"):
                said += line.recv(65536)
        return dict(each.split(" ")[1:3] for each in said.decode().splitlines() if each.startswith("STAT "))

    def empty() -> None:
        server.empty()
        server.say(b"lru_crawler crawl all\r\n")  # `flush_all` leaves the old items in place until they are looked at
        deadline = time.monotonic() + 10
        while int(stats()["bytes"]) > 10_000 and time.monotonic() < deadline:
            time.sleep(0.1)

    return _of_server(
        server.url, entries, lambda: int(stats()["bytes"]), lambda: int(stats()["curr_connections"]) - 1,
        empty, server.close,
    )  # fmt: skip


def of_postgres(entries: int) -> tuple[list[float], str]:
    from postgres_server import PostgresServer

    server = PostgresServer()
    server.prepare()

    def bytes_used() -> int:
        return int(server.ask("SELECT pg_total_relation_size('stampede.entries')")[0][0])

    def clients() -> int:
        return int(server.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stampede'")[0][0])

    return _of_server(
        server.postgres_url, entries, bytes_used, clients, lambda: server.say("TRUNCATE stampede.entries"), server.close
    )


def _of_server(
    url: str,
    entries: int,
    bytes_used: Callable[[], int],
    clients: Callable[[], int],
    empty: Callable[[], Any],
    close: Callable[[], object],
) -> tuple[list[float], str]:
    found = []
    try:
        idle = clients()
        with Cache(url, ttl=600, local=True) as cache:
            threads = _by_threads(cache, clients) - idle
            both = _by_tasks(cache, clients) - idle
        for size in SIZES:
            empty()
            with Cache(url, ttl=600) as cache:
                cache.set("first", 1)
                before = bytes_used()
                filled(cache, entries, size)
                found.append((bytes_used() - before) / entries - size)
    finally:
        close()
    return found, f"{threads} with 8 threads, {both} with an event loop besides"


def _by_threads(cache: Cache, clients: Callable[[], int]) -> int:
    def ask(number: int) -> None:
        for turn in range(20):
            cache.get_or_compute(f"t{number}-{turn}", lambda: 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
        return clients()


def _by_tasks(cache: Cache, clients: Callable[[], int]) -> int:
    async def all_of_them() -> int:
        await asyncio.gather(*(cache.aget_or_compute(f"a{number}", lambda: 1) for number in range(100)))
        return await asyncio.to_thread(clients)

    return asyncio.run(all_of_them())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--engines", default=",".join(ENGINES))
    options = parser.parse_args()
    print(f"# Capacity: {machine()}, {options.entries:,} entries\n")
    rows = []
    for name in options.engines.split(","):
        beside, connections = globals()[f"of_{name}"](options.entries)
        rows.append([f"{name}://", *(f"{each:,.0f}" for each in beside), connections])
    head = [f"{size:,} bytes" for size in SIZES]
    table(["bytes beside a value of", *head, "connections of a process"], rows)


if __name__ == "__main__":
    main()
