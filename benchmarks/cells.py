"""Engines made of cells, on SQL databases and DynamoDB: cost and requests of a call, and how long a herd waits.

Calls: one process; `raw` is the same read by SQLAlchemy or boto3 alone, of a value of the same size. Herds: 8 processes
of 8 threads ask at the same moment for an unknown key that takes 0.2, 1 and 4 s to compute: how often it is computed,
how long after it is stored the last caller has it, and how often a waiting process has polled. The servers are those of
the tests (`mariadbd`; moto, which answers one request at a time, and is not DynamoDB). The `dev` extra has what they
need.

    python benchmarks/cells.py [--quick] [--runs 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any

from _measure import interleaved, machine, table

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from dynamodb_server import MotoServer
from mariadb_server import MariadbServer

from stampede import Cache
from stampede.engines import dynamodb, sql

COSTS = 0.2, 1.0, 4.0
PROCESSES, THREADS = 8, 8
VALUE = b"x" * 200
_numbers = count()


def opened(url: str) -> tuple[Any, list[str], Callable[[], object]]:
    """Give a cell, the requests that are made through it, and a raw read for comparison."""
    asked: list[str] = []
    if url.startswith("dynamodb"):
        items = dynamodb.from_url(url)
        call, key = items._call, {"name": {"S": "raw"}}

        def counted(verb: str, **terms: Any) -> Any:
            asked.append(verb)
            return call(verb, **terms)

        items._call = counted  # type: ignore[method-assign]
        items.swap("raw", None, VALUE, 600.0)
        client = items._client()
        return items, asked, lambda: client.get_item(TableName="cache", Key=key, ConsistentRead=True)
    import sqlalchemy

    rows = sql.from_url(url)
    rows.swap("raw", None, VALUE, 600.0)
    sqlalchemy.event.listen(rows._engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    query = sqlalchemy.select(rows._table.c.data).where(rows._table.c.name == "raw")

    def raw() -> object:
        with rows._engine.connect() as line:
            return line.execute(query).scalar_one()

    return rows, asked, raw


def calls(url: str, rounds: int, batch: int) -> list[Any]:
    """Return the µs of a raw read, a hit and a miss, and the requests of the last two."""
    cell, asked, raw = opened(url)
    cache = Cache(cell, ttl=600, early=0)
    for _ in range(100):
        cache.get_or_compute("hot", lambda: VALUE)

    def miss() -> object:
        return cache.get_or_compute(f"k{next(_numbers)}", lambda: VALUE)

    ways: dict[str, Callable[[], object]] = {
        "raw": raw, "hit": lambda: cache.get_or_compute("hot", lambda: VALUE), "miss": miss,
    }  # fmt: skip
    took = interleaved({name: lambda way=way: _timed(way, batch) for name, way in ways.items()}, rounds)
    sizes = []
    for name in ("hit", "miss"):
        asked.clear()
        ways[name]()
        sizes.append(len(asked))
    cache.close()
    return [*(f"{took[name]:,.0f}" for name in ways), f"{took['hit'] / took['raw']:.2f}", *sizes]


def _timed(way: Callable[[], object], batch: int) -> float:
    start = time.perf_counter()
    for _ in range(batch):
        way()
    return (time.perf_counter() - start) / batch * 1e6


def _member(url: str, key: str, cost: float, pipe: Any) -> None:
    cell, asked, _ = opened(url)
    cache = Cache(cell, ttl=600, early=0)
    cache.get("warm")
    asked.clear()
    returned: list[float] = []

    def compute() -> bytes:
        time.sleep(cost)
        return VALUE

    def ask() -> None:
        cache.get_or_compute(key, compute)
        returned.append(time.monotonic())

    pipe.send("ready")
    pipe.recv()
    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((cache.stats().computations, min(returned), max(returned), len(asked)))


def herd(url: str, cost: float) -> tuple[int, float, float]:
    """Return the computations, the ms from the first caller that had the value to the last one, and the requests of a
    process. The first caller is the one that computed it, or came soon after."""
    context, key, members = multiprocessing.get_context("spawn"), f"herd{next(_numbers)}", []
    for _ in range(PROCESSES):
        mine, theirs = context.Pipe()
        process = context.Process(target=_member, args=(url, key, cost, theirs))
        process.start()
        members.append((process, mine))
    for _, pipe in members:
        pipe.recv()
    for _, pipe in members:
        pipe.send("go")
    ends = [pipe.recv() for _, pipe in members]
    for process, _ in members:
        process.join()
    computed, first, last, asked = zip(*ends, strict=True)
    return sum(computed), (max(last) - min(first)) * 1000, sum(asked) / PROCESSES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    print(machine(), end="\n\n")
    servers = MariadbServer(), MotoServer()
    with tempfile.TemporaryDirectory() as directory:
        places = {
            "MariaDB, PyMySQL": servers[0].url,
            "SQLite": f"sql+sqlite:///{directory}/cache.db",
            "moto": servers[1].url,
        }
        rounds, batch = (3, 30) if given.quick else (11, 100)
        head = ("µs per call", "raw read", "hit", "miss", "hit / raw", "asked by a hit", "by a miss")
        table(head, [[name, *calls(url, rounds, batch)] for name, url in places.items()])
        rows = []
        for (name, url), cost in product(places.items(), COSTS):
            seen = [herd(url, cost) for _ in range(2 if given.quick else given.runs)]
            computed, late, asked = zip(*seen, strict=True)
            rows.append([
                f"{name}, {cost:g} s", max(computed), f"{median(late):.0f}", f"{max(late):.0f}", f"{median(asked):.0f}",
            ])  # fmt: skip
        table(("herds of 8 x 8", "computations", "last after the first, ms", "worst", "asked by a process"), rows)
    for server in servers:
        server.close()


if __name__ == "__main__":
    main()
