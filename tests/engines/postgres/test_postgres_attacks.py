"""Attempts to break the promises of the Postgres engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from herd import until
from postgres_server import PostgresServer, shared_postgres

from stampede import Cache
from stampede.contrib.postgres import on_commit
from stampede.engines.postgres import PostgresEngine
from stampede.engines.postgres.locks import lock_id
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Asked, Found, Granted
from stampede.runtime.colour import run_blocking as run

LONG = 60.0
BLOCKED = "SELECT FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
HELD = """INSERT INTO stampede.locks (id, name, token, room, fence, taken, given, ends, pid, started, server)
    VALUES (%s, 'x', 'old', 1, 1, 0, 60, stampede.clock() + %s, %s, 0, stampede.begin_run())"""


@pytest.fixture
def server() -> PostgresServer:
    server = shared_postgres()
    server.prepare()
    return server


@pytest.fixture
def cache(server: PostgresServer) -> Iterator[Cache]:
    cache = Cache(PostgresEngine(server.postgres_url))
    yield cache
    cache.close()


def test_a_lock_that_is_taken_while_others_are_reaped_stands(server: PostgresServer) -> None:
    """A new lock is not removed by a cleanup of dead holders that began before its holder connected."""
    url = server.postgres_url
    with psycopg.connect(url) as first, psycopg.connect(f"{url}&application_name=reaps", autocommit=True) as reaps:
        # The backend of the first holder is gone; the leases of the others have ended.
        for name, seconds, pid in [("a", LONG, 2**30), ("b", -1.0, None), ("c", -1.0, None)]:
            first.execute(HELD, (lock_id(name), seconds, pid))
        first.execute("INSERT INTO stampede.missed VALUES (%s, 0, stampede.clock() - 1)", (2**30,))
        first.commit()
        first.execute("SELECT FROM stampede.locks WHERE id = %s FOR UPDATE", (lock_id("b"),))
        reaper = Thread(target=reaps.execute, args=("SELECT stampede.reap(100)",))
        reaper.start()
        until(lambda: server.ask(BLOCKED, "reaps") != [])
        with closing(Cache(PostgresEngine(url))) as cache, cache.lock("c", lease=LONG) as lock:
            first.rollback()
            reaper.join(LONG)
            assert server.ask("SELECT id FROM stampede.locks") == [(lock_id("c"),)], "two may be inside now"
            assert not lock.lost


def test_a_lock_that_a_transaction_releases_twice_is_released_once(server: PostgresServer, cache: Cache) -> None:
    """A transaction that releases its lock twice still commits: it held the lock to the end."""
    with psycopg.connect(server.postgres_url) as connection:
        lock = cache.lock("l", release_via=on_commit(connection))
        with lock:
            connection.execute("SELECT 1")
            (token,) = (row[0] for row in server.ask("SELECT token FROM stampede.locks"))
            connection.execute("SELECT stampede.release_at_commit(%s, %s)", (lock_id("l"), token))
        connection.commit()
    assert server.ask("SELECT problem FROM stampede.released") == [("",)]


def test_no_fence_comes_twice_where_commits_do_not_wait_for_the_disk() -> None:
    """A fence is not given twice, even after a crash of a server that does not wait for its disk."""
    server = PostgresServer("synchronous_commit=off", "wal_writer_delay=10s")
    try:
        server.prepare()
        server.say("CHECKPOINT")
        fences: list[Any] = []
        for _ in range(2):
            with closing(PostgresEngine(server.postgres_url)) as engine:
                granted = run(engine.blocking.locks.acquire(f"l{len(fences)}", os.urandom(8), LONG))
                assert isinstance(granted, Granted)
                fences.append(granted.fence)
                server.stop()
            server.start()
        assert fences[0] < fences[1]
    finally:
        server.close()


def test_who_takes_long_to_hear_a_large_value_holds_nobody_up(server: PostgresServer, cache: Cache) -> None:
    """A process that is frozen while it claims a large value does not prevent others from invalidating the key."""
    with closing(Cache(f"{server.postgres_url}&timeout=30")) as patient:  # a busy server needs seconds
        patient.set("k", os.urandom(24_000_000), ttl=LONG)
    ((id,),) = server.ask("SELECT id FROM stampede.entries")
    terms = "$1, $2, 'k', 'token', 9, NULL, 0, NULL, NULL, false, 'h:1', NULL, NULL, false"
    ready = (
        "SELECT FROM pg_stat_activity WHERE application_name = 'frozen' AND query LIKE '%%claim%%' AND state = 'idle'"
    )
    with closing(psycopg.connect(f"{server.postgres_url}&application_name=frozen", autocommit=True)) as frozen:
        lock = b"%d" % int.from_bytes(id[:8], signed=True)
        frozen.pgconn.send_query_params(f"SELECT * FROM stampede.claim({terms})".encode(), [id, lock], None, [1, 0])
        until(lambda: server.ask(ready) != [])
        assert cache.invalidate("k")


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 1 << 20])
def test_a_large_value_that_is_claimed_is_whole(server: PostgresServer, size: int) -> None:
    """A large value, which is fetched in a second step, comes back whole and as the value of its own key."""
    engine = PostgresEngine(server.postgres_url)
    try:
        assert engine.blocking.claims is not None and engine.blocking.store is not None and engine.many is not None
        entry = Entry(os.urandom(size), new_id(), ttl=LONG, fresh=LONG, keep=LONG)
        run(engine.blocking.store.set("k", entry))
        for claim in (
            lambda: run(engine.blocking.claims.claim("k", new_id(), Ask(9.0))),
            lambda: engine.many.ask_many([Asked("claim", ("k", new_id(), Ask(9.0)))])[0],
        ):
            found = claim()
            assert isinstance(found, Found) and found.entry.value == entry.value
        granted = run(engine.blocking.claims.claim("k", new_id(), Ask(9.0, seen=entry.id)))
        assert isinstance(granted, Granted) and granted.entry is not None and granted.entry.value == entry.value
    finally:
        engine.close()
