"""Locks in a Postgres database: the order of waiters, holders that die, and the record of how each lock was held."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from herd import until
from postgres_server import PgBouncer, PostgresServer, process, shared_postgres
from proxy import Proxy

from stampede import Cache, Lock, LockLost, OptionError
from stampede.contrib.postgres import on_commit
from stampede.engines.postgres import PostgresEngine, sweep
from stampede.engines.postgres.locks import lock_id
from stampede.engines.postgres.schema import grants
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted
from stampede.runtime.colour import run_blocking as run

LONG = 60.0
SOON = 10.0

NAMES = [
    "'; DROP SCHEMA stampede CASCADE; --",
    'a"$$ \\ %s $1 {}',
    "\0",
    "a\0b",
    "\ud800",
    "\u4e00\U0001f512\U0010ffff",
]

both = pytest.mark.parametrize("colour", ["sync", "async"])

Open = Callable[..., Cache]


@pytest.fixture
def server() -> PostgresServer:
    server = shared_postgres()
    server.prepare()
    return server


@pytest.fixture
def open_(server: PostgresServer, request: pytest.FixtureRequest) -> Open:
    """Open caches that are closed at the end of the test. They listen: their locks are bound to that connection."""

    def opened(url: str = "", **options: Any) -> Cache:
        engine = PostgresEngine(url or server.postgres_url, **options)
        cache, news = Cache(engine), engine._all.news
        request.addfinalizer(cache.close)
        news.start()
        until(lambda: news.listens or news.mute)
        return cache

    return opened


def record(server: PostgresServer, *columns: str) -> list[tuple[Any, ...]]:
    return server.ask(f"SELECT {', '.join(columns)} FROM stampede.history ORDER BY number")


def waiting(server: PostgresServer, count: int) -> None:
    """Wait until so many callers have a place in the queue."""
    until(lambda: server.ask("SELECT count(*) FROM stampede.waiting") == [(count,)])


def inside(lock: Lock, colour: str, work: Callable[[], object]) -> None:
    """Do `work` while this lock is held."""

    async def suspending() -> None:
        async with lock:
            work()

    if colour == "async":
        asyncio.run(suspending())
        return
    with lock:
        work()


HOLDS = """
lock = cache.lock("l", lease={lease})
lock.acquire()
print("there", flush=True)
sys.stdin.readline()
print(lock.lost, flush=True)
"""


@both
def test_a_killed_holder_is_followed_at_once(server: PostgresServer, open_: Open, colour: str) -> None:
    """If a holder is killed, the next waiter gets the lock at once. It does not wait for the end of the lease."""
    lock, took = open_().lock("l", wait=LONG), []
    with process(server.postgres_url, HOLDS.format(lease=LONG)) as holder:
        waiter = Thread(target=inside, args=(lock, colour, lambda: took.append(time.monotonic())))
        waiter.start()
        waiting(server, 1)
        killed = time.monotonic()
        holder.kill()
        waiter.join(SOON)
    assert took, "it waits for the end of the lease"
    print(f"taken over after {(took[0] - killed) * 1000:.0f} ms")
    assert record(server, "name", "process", "problem") == [("l", holder.pid, "disconnected"), ("l", os.getpid(), "")]


def test_a_holder_whose_connections_are_reset_comes_back(server: PostgresServer, open_: Open) -> None:
    """A holder whose connections are reset keeps its lock: it comes back before another caller may take over."""
    with closing(Proxy(server.port)) as proxy:
        holder = open_(server.postgres_url.replace(f":{server.port}/", f":{proxy.port}/"))
        lock, next_ = holder.lock("l", lease=LONG), open_().lock("l", wait=LONG)
        with lock:
            proxy.hold()
            proxy.cut()
            until(lambda: server.ask("SELECT FROM stampede.locks AS l WHERE stampede.gone(l)"))
            server.say("INSERT INTO stampede.missed SELECT pid, started, stampede.clock() + 60 FROM stampede.locks")
            waiter = Thread(target=inside, args=(next_, "sync", lambda: None))
            waiter.start()
            waiting(server, 1)  # it has seen that the holder is gone, and gives it a second, which begins in a minute
            proxy.let_go()
            until(lambda: server.ask("SELECT pid FROM stampede.locks") == [(None,)])
        waiter.join(SOON)
    assert record(server, "problem") == [("",), ("",)]


STANDS_STILL = """
    CREATE TABLE now (seconds float8);
    INSERT INTO now VALUES (1000);
    CREATE OR REPLACE FUNCTION stampede.clock() RETURNS float8 LANGUAGE sql VOLATILE AS 'SELECT seconds FROM public.now'
"""
"""The clock of a database goes on only when the test says so."""


def test_a_dead_holder_has_a_second_to_come_back(server: PostgresServer, open_: Open) -> None:
    """A holder that seems dead has one second to come back. After that, the lock is granted to another caller."""
    with server.database() as name:
        server.prepare(database=name)
        server.say(STANDS_STILL, database=name)
        engine = open_(server.url_of(database=name)).engine
        run(engine.blocking.locks.acquire("l", new_id(), LONG))
        server.say("UPDATE stampede.locks SET pid = 1073741824, started = 7", database=name)
        for seconds, expected in ((0, Busy), (0.9, Busy), (0.2, Granted)):
            server.say(f"UPDATE now SET seconds = seconds + {seconds}", database=name)
            assert isinstance(run(engine.blocking.locks.acquire("l", new_id(), LONG)), expected)


def test_a_lock_that_is_taken_as_the_listening_connection_ends_is_no_dead_ones(
    server: PostgresServer, open_: Open
) -> None:
    """A lock that is taken while the listening connection ends remains exclusive: its holder does not count as dead."""
    cache = open_()
    with cache.lock("first"):
        ((old,),) = server.ask("SELECT pid FROM stampede.locks")
    with psycopg.connect(server.postgres_url) as slow:
        slow.execute("SELECT stampede.alone_with(%s)", (lock_id("l"),))
        lock = cache.lock("l", lease=LONG)
        taker = Thread(target=lock.acquire)
        taker.start()
        until(lambda: server.ask("SELECT FROM pg_stat_activity WHERE wait_event = 'advisory'") != [])
        server.ask("SELECT pg_terminate_backend(%s, 5000)", old)
        until(
            lambda: server.ask("SELECT FROM pg_stat_activity WHERE query LIKE '%LISTEN%' AND pid <> pg_backend_pid()")
        )
    taker.join(SOON)
    until(lambda: server.ask("SELECT pid = %s FROM stampede.locks", old) != [(True,)])
    assert not open_().lock("l", wait=0).acquire()
    lock.release()


def test_a_frozen_holder_has_its_lease_and_no_more(server: PostgresServer, open_: Open) -> None:
    """A frozen holder has the lock until its lease ends, and then learns that it is lost. The next fence is higher."""
    lock = open_().lock("l", wait=LONG)
    with process(server.postgres_url, HOLDS.format(lease=0.5)) as holder:
        ((before,),) = server.ask("SELECT fence FROM stampede.locks")
        os.kill(holder.pid, signal.SIGSTOP)
        with lock:
            assert (lock.fence or 0) > before
            os.kill(holder.pid, signal.SIGCONT)
            print(file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "True\n"
    assert record(server, "process", "problem") == [(holder.pid, "expired"), (os.getpid(), "")]


def test_a_dead_holder_is_in_the_record_before_anybody_wants_its_lock(server: PostgresServer, open_: Open) -> None:
    """A dead holder is recorded before another caller wants its lock, and its row is removed."""
    with process(server.postgres_url, HOLDS.format(lease=LONG)) as holder:
        ((name, held_by),) = server.ask("SELECT name, process FROM stampede.held")
        assert (name, held_by) == ("l", holder.pid)
    until(lambda: record(server, "name", "process", "problem") == [("l", holder.pid, "disconnected")])
    reports = open_().engine.reports
    assert reports is not None
    (told,) = run(reports.released(failed=True, since=LONG, most=10))
    assert (told.name, told.pid, told.problem) == ("l", holder.pid, "disconnected")
    assert server.ask("SELECT count(*) FROM stampede.held") == [(0,)]
    lock = open_().lock("m")
    missed = "UPDATE stampede.missed SET since = since - 1 RETURNING pid"
    for seen in (missed, "SELECT name FROM stampede.released WHERE problem = 'disconnected'"):
        for _ in range(sweep.TAKEN):
            with lock:
                pass
        until(lambda: server.ask(seen) != [])
    assert server.ask("SELECT count(*) FROM stampede.locks WHERE token IS NOT NULL") == [(0,)]


def test_a_holder_whose_listening_connection_alone_is_gone_is_no_dead_one(server: PostgresServer, open_: Open) -> None:
    """If only the listening connection of a holder ends, the lock remains held, and no other caller gets it."""
    with open_().lock("l", lease=LONG), open_().lock("m", wait=0) as mine:
        ((pid,),) = server.ask("SELECT pid FROM stampede.locks WHERE name = 'l'")
        server.ask("SELECT pg_terminate_backend(%s, 5000)", pid)
        until(lambda: server.ask("SELECT pid FROM stampede.locks WHERE name = 'l'") == [(None,)])
        assert not open_().lock("l", wait=0).acquire()
        assert mine.held
    assert [problem for (problem,) in record(server, "problem")] == ["", ""]


def test_an_unbound_lock_stands_when_its_server_alone_hears_of_a_cut(server: PostgresServer, open_: Open) -> None:
    """With `bound=false`, a lock whose connections are cut is free only when its lease ends: its holder can't know."""
    url = f"{server.postgres_url}&bound=false"
    with closing(Proxy(server.port)) as proxy:
        before = set(server.ask("SELECT pid FROM pg_stat_activity"))
        holder = open_(url.replace(f":{server.port}/", f":{proxy.port}/"))
        lock = holder.lock("l", lease=2.0)
        assert lock.acquire()
        hold = lock._last.hold  # type: ignore[union-attr]
        theirs = set(server.ask("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'")) - before
        proxy.hold()
        assert [server.ask("SELECT pg_terminate_backend(%s, 5000)", *each) for each in theirs]
        with open_(url).lock("l", wait=LONG):
            assert hold.lost  # type: ignore[union-attr]
        proxy.let_go()
        with pytest.raises(LockLost):
            lock.release()


@pytest.mark.alone  # a waiter that does not come within 0.2 s of its call loses its turn
def test_eight_processes_have_it_in_the_order_of_their_arrival(server: PostgresServer, open_: Open) -> None:
    """Eight processes share a lock: never two at once, and each gets it once before one of them gets it twice."""
    herd = """
    cache.close()
    for number in range(8):
        told, tells = os.pipe()
        if os.fork() == 0:
            lock = Cache(sys.argv[1]).lock("l", wait=60)
            print("there", flush=True) if number == 7 else None
            with lock as held:
                held.release()
            for _ in range(3):
                with lock:
                    pass
            os._exit(0)
    for number in range(8):
        os.wait()
    print("done", flush=True)
    """
    mine = open_().lock("l")
    with mine as held, process(server.postgres_url, herd) as others:
        waiting(server, 8)
        arrived = server.ask("SELECT token FROM stampede.waiting ORDER BY arrival")
        assert len(arrived) == 8
        held.release()
        assert others.stdout.readline() == "done\n"
    holders = record(server, "process", "taken", "released", "problem")
    assert len(holders) == 1 + 8 * 4
    assert {problem for *_, problem in holders} == {""}
    assert all(released <= taken for (_, _, released, _), (_, taken, _, _) in pairwise(holders))
    assert len({process for process, *_ in holders[1:9]}) == 8, (
        "somebody was inside twice before another one was at all"
    )


@both
def test_an_error_of_the_block_is_in_the_record(server: PostgresServer, open_: Open, colour: str) -> None:
    """If the block of a lock fails, the record shows the error, its message and its traceback."""

    def imports_the_orders() -> None:
        raise ValueError("no \0 such \ud800 file: \u4e00")

    with pytest.raises(ValueError, match="no "):
        inside(open_().lock("l"), colour, imports_the_orders)
    ((problem, exception, message, traceback, program, host),) = record(
        server, "problem", "exception", "message", "traceback", "program", "host"
    )
    assert (problem, exception, message) == ("failed", "ValueError", "no \\0 such \\ud800 file: \u4e00")
    assert "in imports_the_orders" in traceback
    assert program == os.path.basename(sys.argv[0])
    assert host


def test_an_error_that_can_not_say_what_it_is_is_recorded_all_the_same(server: PostgresServer, open_: Open) -> None:
    """An error whose `__str__` fails, or that is very long, is recorded in short, and the lock is released."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with pytest.raises(Odd), open_().lock("odd"):
        raise Odd
    with pytest.raises(ValueError, match="x"), open_().lock("long"):
        raise ValueError("x" * 1_000_000)
    assert [problem for (problem,) in record(server, "problem")] == ["failed", "failed"]
    assert server.ask("SELECT max(length(message)) <= 4000, max(length(traceback)) < 20000 FROM stampede.released") == [
        (True, True)
    ]


def test_names_are_of_any_characters(server: PostgresServer, open_: Open) -> None:
    """Names of any characters are separate locks, and no name is read as SQL."""
    engine = open_().engine
    tokens = [new_id() for _ in NAMES]
    for name, token in zip(NAMES, tokens, strict=True):
        assert isinstance(run(engine.blocking.locks.acquire(name, token, LONG)), Granted)
        assert isinstance(run(engine.blocking.locks.acquire(name, new_id(), LONG)), Busy)
    assert server.ask("SELECT count(DISTINCT name) FROM stampede.held") == [(len(NAMES),)]
    for name, token in zip(NAMES, tokens, strict=True):
        assert run(engine.blocking.locks.release(name, token)) is True
    readable = [name for (name,) in record(server, "name")]
    assert (readable[0], readable[3], readable[5]) == (NAMES[0], "a\\000b", NAMES[5])


def test_a_release_that_is_sent_again_is_answered_the_same(server: PostgresServer) -> None:
    """A release that is sent again because its reply was lost gets the same reply."""
    acquire = "SELECT granted FROM stampede.acquire(%s, 'l', %s, 9, 'h', 1, 'p', NULL, NULL, false, '', NULL, 9, 9, 1)"
    release = "SELECT stood FROM stampede.release(%s, %s, %s, '', NULL, NULL, NULL)"
    id = b"i" * 16
    assert server.ask(acquire, id, b"mine") == [(True,)]
    assert server.ask(release, id, b"mine", b"call") == [(True,)]
    assert server.ask(acquire, id, b"other") == [(True,)]
    assert server.ask(release, id, b"mine", b"call") == [(True,)]
    assert server.ask(release, id, b"mine", b"later") == [(False,)]
    assert server.ask("SELECT token FROM stampede.locks") == [(b"other",)]


def test_the_record_is_as_long_as_it_may_be(server: PostgresServer, open_: Open) -> None:
    """`history_rows` and `history` limit the record. Otherwise it would fill the disk."""
    lock = open_(history_rows=5).lock("l")
    for _ in range(20):
        with lock:
            pass
    assert len(record(server, "number")) <= 6
    server.say("UPDATE stampede.released SET released = released - interval '1 hour'")
    lock = open_(history="30m").lock("l")
    for _ in range(3):
        with lock:
            pass
    assert len(record(server, "number")) <= 4


def test_behind_a_pooler_only_the_end_of_a_lease_counts(server: PostgresServer, open_: Open, colour: str) -> None:
    """Behind a pooler, locks are not bound to connections: one that closes does not mean that a holder is dead."""
    with closing(PgBouncer(server, "default_pool_size=2", "server_round_robin=1")) as bouncer:
        cache = open_(bouncer.postgres_url)
        lock, other = cache.lock("l", lease=4.0), open_(bouncer.postgres_url).lock("l", wait=LONG)

        def work() -> None:
            until(lambda: server.ask("SELECT ends - given > taken FROM stampede.locks") == [(True,)])  # renewed
            assert server.ask("SELECT pid FROM stampede.locks") == [(None,)]

        waiter = Thread(target=inside, args=(other, colour, lambda: None))

        def begin() -> None:
            waiter.start()
            work()

        inside(lock, colour, begin)
        waiter.join(SOON)
        assert [problem for (problem,) in record(server, "problem")] == ["", ""]


def server_connection(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url.replace("postgres://", "postgresql://"))


@contextmanager
def transaction(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with server_connection(server.postgres_url) as connection:
        connection.execute("SELECT FROM pg_stat_activity")  # the transaction sees this state until it ends
        yield connection


def test_a_release_is_a_part_of_the_commit(server: PostgresServer, open_: Open) -> None:
    """With `on_commit`, the commit releases the lock. Until then, no other caller gets it."""
    cache = open_()
    with transaction(server) as connection:
        with cache.lock("l", release_via=on_commit(connection)):
            connection.execute("SELECT 1")
        assert not cache.lock("l", wait=0).acquire()
        waiter = Thread(target=inside, args=(cache.lock("l", wait=LONG), "sync", lambda: None))
        waiter.start()
        waiting(server, 1)
        connection.commit()
        waiter.join(SOON)
    assert [problem for (problem,) in record(server, "problem")] == ["", ""]
    assert server.ask("SELECT count(*) FROM stampede.releasing") == [(0,)]


def test_a_rollback_releases_nothing(server: PostgresServer, open_: Open) -> None:
    """A rollback does not release the lock: the work is not done. If the block fails, the lock is released at once."""
    cache = open_()
    with transaction(server) as connection:
        with cache.lock("l", release_via=on_commit(connection)):
            pass
        connection.rollback()
        assert not cache.lock("l", wait=0).acquire()
        with pytest.raises(ZeroDivisionError), cache.lock("m", release_via=on_commit(connection)):
            raise ZeroDivisionError
        other = cache.lock("m", wait=0)
        assert other.acquire()
        other.release()


def test_a_commit_fails_whose_lock_was_lost(server: PostgresServer, open_: Open) -> None:
    """A commit fails if the lock was lost before it: another holder may have been inside."""
    cache = open_()
    with transaction(server) as connection:
        with cache.lock("l", release_via=on_commit(connection)):
            connection.execute("CREATE TABLE never (id int)")
        assert server.ask("UPDATE stampede.locks SET ends = stampede.clock() RETURNING id") != []
        with pytest.raises(psycopg.Error, match="another holder may have been inside"):
            connection.commit()
    assert server.ask("SELECT to_regclass('never')") == [(None,)]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_commit_that_sees_nothing_new_releases_nothing(server: PostgresServer, open_: Open, isolation: str) -> None:
    """`on_commit` requires READ COMMITTED: otherwise the transaction would not see the work of the last holder."""
    cache = open_()
    with transaction(server) as connection:
        connection.rollback()
        connection.execute(f"BEGIN ISOLATION LEVEL {isolation}".encode())
        with (
            pytest.raises(psycopg.Error, match="READ COMMITTED"),
            cache.lock("l", release_via=on_commit(connection)),
        ):
            pass


def test_a_release_without_a_transaction_is_at_once(server: PostgresServer, open_: Open) -> None:
    """If no transaction is open, `on_commit` releases at once. It does not wait for a later commit."""
    cache = open_()
    with transaction(server) as connection:
        connection.commit()
        with cache.lock("l", release_via=on_commit(connection)):
            pass
        with cache.lock("l", wait=0):
            pass


def test_a_release_with_the_commit_of_a_loops_connection(server: PostgresServer, open_: Open) -> None:
    """`on_commit` works with an async connection, and then refuses a plain `with`."""

    async def main() -> None:
        url = server.postgres_url.replace("postgres://", "postgresql://")
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await connection.execute("SELECT 1")
            async with cache.lock("l", release_via=on_commit(connection)):
                pass
            assert not await cache.lock("l", wait=0).aacquire()
            await connection.commit()
            async with cache.lock("l", wait=0):
                pass
            await connection.execute("SELECT 1")
            with pytest.raises(OptionError, match="async with"), cache.lock("m", release_via=on_commit(connection)):
                pass

    cache = open_()
    asyncio.run(main())


def test_a_commit_elsewhere_releases_nothing(server: PostgresServer, open_: Open) -> None:
    """`on_commit` fails with a connection to another database, and the lock is released at once."""
    cache = open_()
    with ExitStack() as stack:
        url = server.url_of(database=stack.enter_context(server.database())).replace("postgres://", "postgresql://")
        connection = stack.enter_context(psycopg.connect(url))
        connection.execute("SELECT 1")
        with pytest.raises(psycopg.Error), cache.lock("l", release_via=on_commit(connection)):
            pass
    with cache.lock("l", wait=0):
        pass


def test_a_program_s_role_has_the_rights_it_needs(server: PostgresServer, open_: Open) -> None:
    """The rights in the docs are enough for a program's role, and its locks outlive a limit of idle time."""
    with server.role(idle_session_timeout="1800ms") as role:  # a connection must lift this limit in time
        server.say(grants(role))
        url = server.url_of(user=role)
        cache, other = open_(url), open_(url)
        with server_connection(url) as connection:
            connection.execute("SELECT 1")
            inside(cache.lock("l", release_via=on_commit(connection)), "sync", lambda: None)
            connection.commit()
        with cache.lock("l", lease=6.0):  # renewed after the connections would have ended
            with pytest.raises(ZeroDivisionError):
                other.get_or_compute("k", lambda: 1 // 0)
            until(lambda: server.ask("SELECT ends - given > taken FROM stampede.locks") == [(True,)])  # renewed
            assert not other.lock("l", wait=0.01).acquire()
        assert [problem for (problem,) in record(server, "problem")] == ["", ""]
        cache.close()
        other.close()
