"""A sweep removes what has expired, evicts entries beyond the limits, and touches nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from herd import until
from postgres_server import shared_postgres

from stampede.engines.postgres import PostgresEngine
from stampede.engines.postgres.sweep import WRITES, Sweeper
from stampede.engines.postgres.wire import names
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Granted
from stampede.runtime.colour import run_blocking

SWEPT = "SELECT over FROM stampede.sweep(%s, %s, %s, %s)"


@pytest.fixture
def engine() -> Iterator[PostgresEngine]:
    shared_postgres().prepare()
    engine = PostgresEngine(shared_postgres().postgres_url)
    yield engine
    engine.close()


@contextmanager
def session() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_postgres().postgres_url) as line:
        yield line


def store(engine: PostgresEngine, key: str, fresh: float, keep: float = 0.0, value: bytes = b"v") -> None:
    entry = Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=keep)
    assert engine.blocking.store is not None
    run_blocking(engine.blocking.store.set(key, entry))


def swept(most: int = 1000, room: float = inf, size: float = inf) -> int:
    with session() as line:
        return int(line.execute(SWEPT, (b"\0" * 16, most, room, size)).fetchall()[0][0])


def kept(engine: PostgresEngine, prefix: str = "") -> set[str]:
    assert engine.blocking.lists is not None
    found, cursor = run_blocking(engine.blocking.lists.page(prefix))
    while cursor is not None:
        more, cursor = run_blocking(engine.blocking.lists.page(prefix, cursor))
        found += more
    return set(found)


def over(*keys: str) -> None:
    """Make these entries expire long ago."""
    with session() as line:
        for key in keys:
            line.execute("UPDATE stampede.entries SET gone = 1, keep = 1, fresh = 1 WHERE id = %s", [names(key).id])


def rows() -> int:
    return int(shared_postgres().ask("SELECT count(*) FROM stampede.entries")[0][0])


def test_what_is_over_goes(engine: PostgresEngine) -> None:
    """A sweep removes expired entries and only these. Otherwise the table would grow with every key."""
    for number in range(20):
        store(engine, f"k{number}", 60.0)
    over(*(f"k{number}" for number in range(0, 20, 2)))
    assert swept() == 10
    assert kept(engine) == {f"k{number}" for number in range(1, 20, 2)}
    assert rows() == 10


def test_it_is_done_by_those_who_write() -> None:
    """Writers sweep, once every `WRITES` writes: there is no server of ours that could do it."""
    done = threading.Event()

    def ask(command: Any) -> Any:
        done.set()
        return [(0,)]

    sweeper = Sweeper(ask)
    for _ in range(WRITES - 1):
        sweeper.wrote()
    assert not done.is_set()
    sweeper.wrote()
    assert done.wait(10)


def test_a_process_that_writes_sweeps(engine: PostgresEngine) -> None:
    """The engine's own writes count, so that a process that writes also sweeps."""
    store(engine, "old", 60.0)
    over("old")
    assert rows() == 1

    def is_swept() -> bool:
        for number in range(WRITES):
            store(engine, f"k{number % 7}", 60.0)
        return shared_postgres().ask("SELECT count(*) FROM stampede.entries WHERE gone = 1") == [(0,)]

    until(is_swept)


def test_leases_that_hold_nothing_go(engine: PostgresEngine) -> None:
    """A sweep removes the leases of killed holders. Leases that are valid, or still delay the next try, remain."""
    assert engine.blocking.claims is not None
    for key, lease in (("dead", 0.001), ("stands", 60.0)):
        assert isinstance(run_blocking(engine.blocking.claims.claim(key, new_id(), Ask(lease))), Granted)
    token = new_id()
    run_blocking(engine.blocking.claims.claim("rests", token, Ask(60.0)))
    assert run_blocking(engine.blocking.claims.abandon("rests", token, None, 60.0))
    shared_postgres().say("UPDATE stampede.leases SET ends = 1 WHERE name = 'dead'")
    swept()
    left = shared_postgres().ask("SELECT convert_from(name, 'UTF8') FROM stampede.leases ORDER BY 1")
    assert left == [("rests",), ("stands",)]  # the first only because of its rest


def test_processes_that_are_gone_are_told_nothing(engine: PostgresEngine) -> None:
    """A sweep removes the keepers of dead processes. Otherwise each change would be notified for ever."""
    shared_postgres().say("SELECT stampede.keep('dead', 1, 1)")
    with session() as alive:
        alive.autocommit = True
        alive.execute(
            "SELECT stampede.keep('alive', pid, date_part('epoch', backend_start))"
            " FROM pg_stat_get_activity(pg_backend_pid())"
        )
        swept()
        homes = shared_postgres().ask("SELECT home FROM stampede.keepers")
        assert ("alive",) in homes and ("dead",) not in homes
    shared_postgres().say("DELETE FROM stampede.keepers")


def test_two_sweep_at_once(engine: PostgresEngine) -> None:
    """Two sweeps at the same time do not wait for each other, nor for a row that another session has locked."""
    for number in range(50):
        store(engine, f"k{number}", 60.0)
    over(*(f"k{number}" for number in range(50)))
    shared_postgres().say("SELECT stampede.keep('dead', 1, 1)")
    with session() as one, session() as other:
        for each in (one, other):
            each.execute("SET LOCAL lock_timeout = '5s'")
        one.execute("SELECT FROM stampede.entries WHERE id = %s FOR UPDATE", [names("k7").id])
        assert other.execute(SWEPT, (b"\0" * 16, 1000, inf, inf)).fetchall() == [(49,)]
        assert one.execute(SWEPT, (b"\0" * 16, 1000, inf, inf)).fetchall() == [(1,)]  # skips the other sweep's rows
    assert rows() == 0


def test_what_was_stored_anew_stays(engine: PostgresEngine) -> None:
    """An entry that is stored again during a sweep is not removed as the old one."""
    store(engine, "k", 60.0)
    over("k")
    with session() as writer:
        writer.execute("UPDATE stampede.entries SET gone = 'infinity', keep = 'infinity' WHERE name = 'k'")
        assert swept() == 0
        writer.commit()
    assert swept() == 0
    assert kept(engine) == {"k"}


def test_it_is_as_large_as_it_may_be(engine: PostgresEngine) -> None:
    """A limit on entries evicts as many as needed: first the stale ones, then the oldest."""
    for number in range(100):
        store(engine, f"k{number:02}", 60.0)
    shared_postgres().say("UPDATE stampede.entries SET fresh = 1 WHERE name IN ('k90', 'k91')")
    assert swept(room=60.0) == 40
    assert kept(engine) == {f"k{number:02}" for number in range(38, 100)} - {"k90", "k91"}


def test_by_bytes(engine: PostgresEngine) -> None:
    """A limit on bytes evicts entries until their size fits."""
    for number in range(100):
        store(engine, f"k{number:02}", 60.0, value=b"v" * 1000)
    assert swept(size=50_000.0) == 50
    assert swept(size=50_000.0) == 0


def test_a_flood_of_new_keys(engine: PostgresEngine) -> None:
    """The limit also holds while many new keys are written."""
    bounded = PostgresEngine(shared_postgres().postgres_url, entries=2000)
    try:
        for number in range(3000):
            store(bounded, f"k{number}", 60.0)
        until(lambda: rows() <= 2600)  # the last sweeps may be under way
    finally:
        bounded.close()
    assert rows() > 1000


def test_a_sample_tells_how_many_there_are(engine: PostgresEngine) -> None:
    """The number of entries is estimated well from a sample. Otherwise a sweep would evict too many or too few."""
    for number in range(3000):
        store(engine, f"k{number}", 60.0)
    ((about,),) = shared_postgres().ask(
        "SELECT avg(about) FROM generate_series(0, 200, 20) AS n,"
        " stampede.sweep(decode(lpad(to_hex(n), 2, '0'), 'hex'), 200, 'infinity', 'infinity')"
    )
    assert 2600 < about < 3400
