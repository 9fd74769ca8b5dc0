"""Postgres: the cost of a call, compared with a plain SELECT and Django's cache; and how long a herd waits.

Calls: one process on one core, the server on another. `select` reads the same bytes by psycopg alone: prepared, binary,
by the primary key. Async: one task, and 64 tasks over as many connections as we have. Herds: 8 processes of 8 threads
ask at the same moment for a key that takes 200 ms to compute: how often it is computed, how long after it is stored the
last caller has it, and how long it takes until another process computes when the holder is killed. Sizes: a claim and a
fill among a thousand entries, and among a million. Churn: fills over ten thousand keys, and how large the tables get.
The servers are those of the tests; the `dev` extra has what they need.

    python benchmarks/postgres.py [--quick] [--runs 5] [--only calls,tasks,herds,sizes,churn]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from _measure import interleaved, machine, pin, table

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from postgres_server import PostgresServer

from stampede import Cache
from stampede.engines.postgres import PostgresEngine
from stampede.engines.postgres.suspending import MOST
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask
from stampede.runtime.colour import run_blocking

COST = 0.2
PROCESSES, THREADS, TASKS = 8, 8, 64
VALUE = b"x" * 200
SELECT = "SELECT value FROM stampede.entries WHERE id = %b"
ANY = "SELECT id FROM stampede.entries LIMIT 1"
_numbers = count()


def _value() -> bytes:
    return VALUE


def _entry(fresh: float = 600.0) -> Entry[bytes]:
    return Entry(VALUE, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


def _apart() -> PostgresServer:
    """Give a server that runs on the first core, while we run on the last."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    pin(cores[0])
    server = PostgresServer()
    server.prepare()
    pin(cores[-1])
    return server


def _timed(way: Callable[[], Any], batch: int) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        for _ in range(batch):
            way()
        return (time.perf_counter() - start) / batch

    return sample


# -- calls --------------------------------------------------------------------------------------------------------


def django_cache(server: PostgresServer) -> Any:
    """Return Django's cache in a table of the same database."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    where = {"HOST": "127.0.0.1", "PORT": server.port, "USER": "root", "NAME": "postgres"}
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None, **where}},
        CACHES={
            "default": {
                "BACKEND": "django.core.cache.backends.db.DatabaseCache",
                "LOCATION": "django_cache",
                "OPTIONS": {"MAX_ENTRIES": 10_000_000},
            }
        },
    )
    django.setup()
    call_command("createcachetable", verbosity=0)
    from django.core.cache import cache

    return cache


def calls(rounds: int, batch: int) -> None:
    server = _apart()
    cache = Cache(server.postgres_url, ttl=600)
    theirs = django_cache(server)

    @cache.cached(ttl=600)
    def report(number: int) -> bytes:
        return VALUE

    @cache.cached(ttl=600)
    def rare(number: int) -> bytes:
        return VALUE

    for _ in range(2):
        report(0)
    theirs.set("hot", VALUE, 600)
    line = psycopg.connect(server.postgres_url, autocommit=True)
    row = line.execute(ANY).fetchone()
    assert row is not None
    ways: dict[str, Callable[[], Any]] = {
        "psycopg, prepared SELECT": lambda: line.execute(SELECT, row, prepare=True, binary=True).fetchone(),
        "a cached function, hit": lambda: report(0),
        "cache.get": lambda: cache.get(report.key(0)),
        "Django's DatabaseCache, get": lambda: theirs.get("hot"),
        "a cached function, miss": lambda: rare(next(_numbers)),
        "Django's get_or_set, miss": lambda: theirs.get_or_set(f"k{next(_numbers)}", _value, 600),
        "Django's set": lambda: theirs.set("hot", VALUE, 600),
        "cache.set": lambda: cache.set("other", VALUE),
        "cache.invalidate": lambda: cache.invalidate("other"),
    }
    for way in ways.values():
        way()
    times = interleaved({name: _timed(way, batch) for name, way in ways.items()}, rounds)
    raw = times["psycopg, prepared SELECT"]
    table(("blocking", "µs", "x SELECT"), [(name, f"{t * 1e6:.0f}", f"{t / raw:.2f}") for name, t in times.items()])
    line.close()
    cache.close()
    server.close()


def tasks(rounds: int, batch: int) -> None:
    """Measure one event loop, with psycopg's own connections and with ours."""
    server = _apart()
    cache = Cache(server.postgres_url, ttl=600)

    @cache.cached(ttl=600)
    async def report(number: int) -> bytes:
        return VALUE

    async def measured() -> None:
        for number in range(TASKS):
            await report(number)
        lines = [await psycopg.AsyncConnection.connect(server.postgres_url, autocommit=True) for _ in range(MOST)]
        row = await (await lines[0].execute(ANY)).fetchone()
        assert row is not None

        async def select(number: int) -> None:
            line = lines[number % MOST]
            await (await line.execute(SELECT, row, prepare=True, binary=True)).fetchone()

        async def sample(way: Callable[[int], Any], callers: int) -> float:
            async def some(number: int) -> None:
                for _ in range(batch // callers):
                    await way(number)

            start = time.perf_counter()
            await asyncio.gather(*map(some, range(callers)))
            return (time.perf_counter() - start) / (batch // callers * callers)

        seen: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for callers in (1, TASKS):
                for name, way in (("psycopg, prepared SELECT", select), ("a cached function, hit", report)):
                    seen.setdefault((name, callers), []).append(await sample(way, callers))
        rows = []
        for (name, callers), times in seen.items():
            raw = median(seen["psycopg, prepared SELECT", callers])
            rows.append((f"{name}, {callers} task{'s'[: callers - 1]}", f"{median(times) * 1e6:.0f}",
                         f"{median(times) / raw:.2f}"))  # fmt: skip
        table(("asyncio", "µs", "x SELECT"), rows)
        for line in lines:
            await line.close()

    asyncio.run(measured())
    cache.close()
    server.close()


# -- herds --------------------------------------------------------------------------------------------------------


def _member(url: str, key: str, barrier: Any, pipe: Any) -> None:
    """Run the callers of one process of a herd."""
    begun: list[float] = []
    stored: list[float] = []
    returned: list[float] = []
    cache = Cache(url, ttl=600)

    def compute() -> bytes:
        begun.append(time.monotonic())
        time.sleep(COST)
        stored.append(time.monotonic())
        return VALUE

    def call() -> None:
        gate.wait()
        cache.get_or_compute(key, compute)
        returned.append(time.monotonic())

    cache.get_or_compute("warm", _value)
    gate = threading.Barrier(THREADS + 1)
    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    gate.wait()
    for thread in threads:
        thread.join()
    barrier.wait()  # or the ends of the first ones' interpreters would be in the last one's time
    pipe.send((begun, stored, returned))


def herd(server: PostgresServer) -> tuple[int, float]:
    """Return the computations, and the ms from the end of the first one to the last waiter (storing it included)."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROCESSES)
    key, members = f"herd{next(_numbers)}", []
    for _ in range(PROCESSES):
        mine, theirs = context.Pipe()
        process = context.Process(target=_member, args=(server.postgres_url, key, barrier, theirs))
        process.start()
        members.append((process, mine))
    told = [pipe.recv() for _, pipe in members]
    for process, _ in members:
        process.join()
    begun, stored, returned = ([moment for each in told for moment in each[part]] for part in range(3))
    return len(begun), 1000 * (max(returned) - min(stored))


def _holder(url: str, key: str, pipe: Any) -> None:
    def forever() -> bytes:
        pipe.send("computing")
        time.sleep(60)
        return VALUE

    Cache(url, ttl=600).get_or_compute(key, forever)


def takeover(server: PostgresServer) -> float:
    """Return the ms from the holder's SIGKILL until a waiter begins to compute."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    key = f"killed{next(_numbers)}"
    holder = context.Process(target=_holder, args=(server.postgres_url, key, theirs))
    holder.start()
    mine.recv()
    cache = Cache(server.postgres_url, ttl=600)
    cache.get_or_compute("warm", _value)
    begun: list[float] = []

    def compute() -> bytes:
        begun.append(time.monotonic())
        return VALUE

    waiter = threading.Thread(target=cache.get_or_compute, args=(key, compute))
    waiter.start()
    time.sleep(0.5)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    killed = time.monotonic()
    waiter.join()
    holder.join()
    cache.close()
    return 1000 * (begun[0] - killed)


def herds(runs: int) -> None:
    server = PostgresServer()
    server.prepare()
    computed, last = zip(*(herd(server) for _ in range(runs)), strict=True)
    killed = [takeover(server) for _ in range(runs)]
    rows = [
        ("herd of 8 x 8, 200 ms", max(computed), f"{median(last):.0f}", f"{max(last):.0f}"),
        ("its holder is killed", 1, f"{median(killed):.0f}", f"{max(killed):.0f}"),
    ]
    table(("", "computed", "last, ms", "worst"), rows)
    server.close()


# -- sizes --------------------------------------------------------------------------------------------------------

FILLED = """INSERT INTO stampede.entries SELECT substring(sha256(n::text::bytea) FOR 16), n::text::bytea, '12345678',
    'infinity', 'infinity', 'infinity', 0, 0, 0, 'infinity', false, %s FROM generate_series(%s::int, %s::int) AS n"""


def sizes(rounds: int, batch: int, large: int) -> None:
    """Measure the µs of a claim and a fill of new keys, and of a look at a stored one, among few entries and many."""
    server = _apart()
    engine = PostgresEngine(server.postgres_url)
    port, store = engine.blocking.claims, engine.blocking.store
    assert port is not None and store is not None
    seen: dict[str, list[float]] = {}
    token = new_id()
    there = 0
    for entries in (1000, large):
        with psycopg.connect(server.postgres_url) as line:
            line.execute(FILLED, (VALUE, there + 1, entries))
            there = entries
        server.say("VACUUM ANALYZE stampede.entries")
        run_blocking(store.set("hot", _entry(inf)))

        def claim() -> None:
            run_blocking(port.claim(f"c{next(_numbers)}", token, Ask(10.0)))

        def cycle() -> None:
            key = f"f{next(_numbers)}"
            run_blocking(port.claim(key, token, Ask(10.0)))
            run_blocking(port.fill(key, token, _entry()))

        ways = {
            "look": lambda: run_blocking(port.look("hot", 1.0)),  # type: ignore[attr-defined]
            "claim": claim,
            "claim and fill": cycle,
        }
        for way in ways.values():
            _timed(way, batch)()
        for name, each in interleaved({name: _timed(way, batch) for name, way in ways.items()}, rounds).items():
            seen.setdefault(name, []).append(each)
    rows = [(name, f"{few * 1e6:.0f}", f"{many * 1e6:.0f}", f"{many / few:.2f}") for name, (few, many) in seen.items()]
    table(("µs, among", "1,000", f"{large:,}", "ratio"), rows)
    engine.close()
    server.close()


def churn(fills: int) -> None:
    """Measure the sizes of the tables while the same ten thousand keys are filled again and again."""
    server = PostgresServer("autovacuum_naptime=5s")
    server.prepare()
    engine = PostgresEngine(server.postgres_url)
    port = engine.blocking.claims
    assert port is not None
    token, rows = new_id(), []

    def some(share: int, worker: int) -> None:
        for number in range(share):
            key = f"k{(number * 4 + worker) % 10_000}"
            run_blocking(port.claim(key, token, Ask(10.0, force=True)))
            run_blocking(port.fill(key, token, _entry()))

    sized = "SELECT pg_table_size(c), pg_indexes_size(c) FROM (VALUES ('stampede.{}'::regclass)) AS t (c)"
    start = time.perf_counter()
    for part in range(1, 6):
        workers = [threading.Thread(target=some, args=(fills // 20, worker)) for worker in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        found = [f"{size / 1e6:.1f}" for name in ("entries", "leases") for size in server.ask(sized.format(name))[0]]
        rows.append((f"{fills * part // 5:,}", *found, f"{fills * part / 5 / (time.perf_counter() - start):,.0f}"))
    table(("fills", "entries, MB", "its index", "leases, MB", "its index", "fills/s"), rows)
    ((updates, hot),) = server.ask(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'entries' AND schemaname = 'stampede'"
    )
    print(f"{hot / max(updates, 1):.0%} of the updates left the index alone\n")
    engine.close()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="calls,tasks,herds,sizes,churn")
    given = parser.parse_args()
    quick, cores = given.quick, os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    print(f"{machine()}\n")
    parts: dict[str, Callable[[], None]] = {
        "calls": lambda: calls(3 if quick else 15, 100 if quick else 500),
        "tasks": lambda: tasks(3 if quick else 11, 256 if quick else 1024),
        "sizes": lambda: sizes(3 if quick else 11, 100 if quick else 400, 20_000 if quick else 1_000_000),
        "herds": lambda: herds(1 if quick else given.runs),
        "churn": lambda: churn(2000 if quick else 1_000_000),
    }
    for name, part in parts.items():
        if name in given.only.split(","):
            part()
            if cores is not None:
                os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
