"""The behaviour of PostgreSQL and its pooler on which the engine is built."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from postgres_server import PgBouncer, PostgresServer, shared_postgres
from servers import wait_until


@pytest.fixture(scope="module")
def bouncer() -> Iterator[PgBouncer]:
    """A pooler with one connection to the server for all clients."""
    with closing(PgBouncer(shared_postgres(), "default_pool_size=1")) as made:
        yield made


@pytest.fixture
def lines(bouncer: PgBouncer) -> Iterator[list[Any]]:
    """Two connections to the pooler."""
    with ExitStack() as stack:
        yield [stack.enter_context(psycopg.connect(bouncer.postgres_url, autocommit=True)) for _ in range(2)]


def backend(line: Any) -> int:
    return int(line.execute("SELECT pg_backend_pid()", prepare=False).fetchone()[0])


def test_a_pooler_is_known_by_its_backend(lines: list[Any]) -> None:
    """Through a pooler, the backend's pid differs from the one told at the start. The engine detects poolers by it."""
    first, second = lines
    assert backend(first) == backend(second)
    assert backend(first) not in (first.info.backend_pid, second.info.backend_pid)
    with psycopg.connect(shared_postgres().postgres_url) as line:
        assert backend(line) == line.info.backend_pid


def test_what_is_prepared_is_in_the_way_behind_a_pooler(lines: list[Any]) -> None:
    """A prepared statement fails behind a pooler, so the engine prepares none there."""
    first, second = lines
    first.execute("SELECT 1 -- first", prepare=True)
    with pytest.raises(psycopg.errors.DuplicatePreparedStatement):
        second.execute("SELECT 1 -- second", prepare=True)


def test_who_listens_behind_a_pooler_is_told_nothing(lines: list[Any]) -> None:
    """A listener behind a pooler gets no notifications, so the engine needs a direct address or looks by itself."""
    first, second = lines
    first.execute("LISTEN stampede_tests", prepare=False)
    second.execute("NOTIFY stampede_tests, 'hello'", prepare=False)
    assert [each.payload for each in second.notifies(timeout=0)] == ["hello"]  # the other client is notified
    assert backend(first) == backend(second)
    assert [*first.notifies(timeout=0)] == []
    second.execute("UNLISTEN stampede_tests", prepare=False)


def test_one_statement_reads_what_was_there_before_it_waited() -> None:
    """A statement that waits for a lock reads an old snapshot: so functions that change a key read in later ones."""
    server = shared_postgres()
    with psycopg.connect(server.postgres_url) as first, psycopg.connect(server.postgres_url, autocommit=True) as second:
        server.say("CREATE TABLE snapshots (number int)")
        try:
            first.execute("SELECT pg_advisory_xact_lock(7)")
            seen: list[Any] = []
            question = "SELECT pg_advisory_xact_lock(7), (SELECT count(*) FROM snapshots)"
            asking = threading.Thread(target=lambda: seen.extend(second.execute(question)))
            asking.start()
            waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(lambda: bool(server.ask(waits)))
            first.execute("INSERT INTO snapshots VALUES (1)")
            first.commit()
            asking.join()
            assert [number for _, number in seen] == [0]  # it was 1 when the lock was granted
            assert second.execute("SELECT count(*) FROM snapshots").fetchone() == (1,)
        finally:
            server.say("DROP TABLE snapshots")


def test_unlogged_rows_are_lost_in_a_crash_and_nowhere_else() -> None:
    """Unlogged tables are empty after a crash and on a promoted replica, and keep their rows in an orderly restart."""
    with closing(PostgresServer()) as server:
        server.say("CREATE UNLOGGED TABLE entries (id int)", "CREATE TABLE locks (id int)")
        server.say("INSERT INTO entries VALUES (1)", "INSERT INTO locks VALUES (1)")
        server.shut_down()
        server.start()
        assert server.ask("SELECT * FROM entries") == [(1,)]
        with closing(server.replica()) as replica:
            replica.catch_up()
            with pytest.raises(psycopg.errors.FeatureNotSupported):
                replica.ask("SELECT * FROM entries")
            server.stop()
            replica.promote()
            assert replica.ask("SELECT * FROM entries") == []
            assert replica.ask("SELECT * FROM locks") == [(1,)]
        server.start()
        assert server.ask("SELECT * FROM entries") == []
        assert server.ask("SELECT * FROM locks") == [(1,)]
