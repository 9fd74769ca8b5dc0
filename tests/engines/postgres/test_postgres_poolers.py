"""The Postgres engine behind pgbouncer, and where a database, a role or a server has settings that are in its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("psycopg")

import psycopg
from both_colours import Face
from herd import Herd, Origin, until, until_async
from postgres_server import PgBouncer, PostgresServer, shared_postgres
from proxy import Proxy

from stampede import Cache, EngineError, Lock, WaitTimeout, events, try_lock
from stampede.engines import open_engine
from stampede.engines.postgres import PostgresEngine, suspending
from stampede.engines.postgres.connect import of_url
from stampede.engines.postgres.schema import grants
from stampede.model.entry import new_id
from stampede.model.ports import Ask, Engine, Granted
from stampede.testing.conformance import ClaimsSuite, LocksSuite

__all__ = ["Face"]  # for the fixture of this name

Faces = Callable[..., Face]
Before = Callable[[Any], Proxy]

ways = pytest.mark.parametrize("way", ["listens", "looks"])
everywhere = pytest.mark.parametrize("way", ["direct", "listens", "looks"])


@contextmanager
def program_s_role(server: PostgresServer, **settings: object) -> Iterator[str]:
    """One that may do what the docs say it has to, and nothing else."""
    with server.role(**settings) as role:
        server.say(grants(role))
        yield role


@pytest.fixture(scope="module")
def bouncer() -> Iterator[PgBouncer]:
    """Two connections to the server for all who come: whoever asks twice is on another one."""
    with closing(PgBouncer(shared_postgres(), "default_pool_size=2", "server_round_robin=1")) as made:
        yield made


@pytest.fixture(scope="module")
def small() -> Iterator[PostgresServer]:
    """A server that takes six connections, and two more for its administrator."""
    settings = "max_connections=8", "superuser_reserved_connections=2", "max_wal_senders=0"
    with closing(PostgresServer(*settings)) as made:
        yield made


@pytest.fixture
def server() -> PostgresServer:
    server = shared_postgres()
    server.prepare()
    return server


def at(way: str, server: PostgresServer, bouncer: PgBouncer, **who: str) -> str:
    """Where a cache is to be: straight to the server, or through the pooler, with or without a way to be told."""
    if way == "direct":
        return server.url_of(**who)
    return bouncer.url_of(**who) + (f"&listen={quote(server.url_of(**who), safe='')}" if way == "listens" else "")


def untold(face: Face) -> list[events.Untold]:
    return [each for each in face.told if isinstance(each, events.Untold)]


def downs(face: Face) -> list[events.EngineDown]:
    return [each for each in face.told if isinstance(each, events.EngineDown)]


def kept(cache: Cache) -> int:
    """How many values are kept in this process."""
    return len(cache._core.local_tier.residents or ())


# -- what every engine has to do --------------------------------------------------------------------------------------


class _Pooled:
    short = 0.1
    way: str

    @pytest.fixture(autouse=True)
    def _behind(self, bouncer: PgBouncer) -> None:
        shared_postgres().prepare()
        self.url = at(self.way, shared_postgres(), bouncer)

    def make_engine(self) -> Engine:
        return open_engine(self.url)

    def make_peer(self, engine: Engine) -> Engine:
        return PostgresEngine(self.url)


class TestPostgresPooled(_Pooled, ClaimsSuite):
    """Without a way to be told."""

    way = "looks"


class TestPostgresPooledAndTold(_Pooled, LocksSuite):
    """With one, which is for those who wait."""

    way = "listens"
    suspending = True


# -- pgbouncer in transaction mode ------------------------------------------------------------------------------------


@ways
def test_a_herd_computes_once(face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str) -> None:
    """Each process behind a pooler would compute for itself, or fail where something was prepared."""
    origin, url = Origin(), at(way, server, bouncer)
    one, two = face(url, colour), face(url, colour)
    herds = Herd(*[lambda each=each: each.herd(8, "k", origin) for each in (one, two)])
    origin.has_begun()
    if way == "listens":  # the other process is noted at the lease
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE cardinality(homes) = 1"))
    origin.let_on()
    assert herds.join() == [[1] * 8] * 2
    assert origin.calls == 1
    assert not downs(one) and not downs(two)


def test_who_can_t_be_told_says_so_once(face: Faces, server: PostgresServer, bouncer: PgBouncer, colour: str) -> None:
    """Nobody would know why waiters are slow; or a log would be full of it."""
    looks, listens = (face(at(way, server, bouncer), colour) for way in ("looks", "listens"))
    for number in range(3):
        for each in (looks, listens):
            each(f"k{number}", lambda: 1)
    until(lambda: untold(looks))
    assert len(untold(looks)) == 1
    assert untold(listens) == []


def test_what_is_kept_in_the_process_follows(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, colour: str
) -> None:
    """A tier behind a pooler would serve for ever what was changed elsewhere."""
    url = at("listens", server, bouncer)
    one, two = face(url, colour, local=True), face(url, colour)

    def is_kept() -> bool:
        one("k", lambda: "old")
        return kept(one.cache) == 1

    until(is_kept)
    two.run("set", "k", "new")
    until(lambda: one.run("get", "k") == "new")
    server.terminate("stampede%")  # whoever listens does so again
    until(is_kept)
    two.run("set", "k", "newer")
    until(lambda: one.run("get", "k") == "newer")


def test_nothing_is_kept_where_nobody_tells(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, colour: str
) -> None:
    """It would never be heard that it was changed."""
    url = at("looks", server, bouncer)
    one, two = face(url, colour, local=True), face(url, colour)
    for value in ("old", "new", "newer"):
        two.run("set", "k", value)
        assert one.run("get", "k") == value
        assert kept(one.cache) == 0


@ways
def test_a_lock_excludes(face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str) -> None:
    """Two would have it, or none any more: what a session holds is anybody's behind a pooler."""
    url = at(way, server, bouncer)
    one, two = face(url, colour), face(url, colour)
    assert one.lock("nightly")
    assert not two.lock("nightly")
    one.release()
    assert two.lock("nightly")


@ways
def test_who_waits_for_a_lock_has_it_next(server: PostgresServer, bouncer: PgBouncer, way: str) -> None:
    """He would wait for ever, or be told too early."""
    url, order = at(way, server, bouncer), list[int]()

    def work(number: int) -> None:
        with Lock("nightly", on=url, wait=20):
            order.append(number)
            with try_lock("nightly", on=url) as other:
                assert not other

    with Lock("nightly", on=url):
        herd = Herd(*[lambda number=number: work(number) for number in range(4)])
        until(lambda: server.ask("SELECT count(*) FROM stampede.waiting") == [(4,)])
        assert order == []
    assert herd.join() == [None] * 4
    assert sorted(order) == [0, 1, 2, 3]


@ways
def test_a_pooler_that_is_restarted(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """What was computed meanwhile would be lost, or computed again, and a lock be anybody's."""
    origin, url = Origin(), at(way, server, bouncer)
    one, two = face(url, colour), face(url, colour)
    assert two.lock("nightly")
    herd = Herd(lambda: one.herd(2, "k", origin))
    origin.has_begun()
    bouncer.restart()
    assert two("other", lambda: 7) == 7
    origin.let_on()
    assert herd.join() == [[1, 1]]
    assert one.run("get", "k") == two.run("get", "k") == 1
    assert not one.lock("nightly")
    two.release()
    assert one.lock("nightly")
    assert not downs(one) and not downs(two)


@pytest.mark.parametrize("way", ["direct", "looks"])
def test_what_is_taken_back_comes_behind_it(
    server: PostgresServer, bouncer: PgBouncer, before: Before, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connection of the loop would be faster: the key is granted to nobody, and nobody is let in."""
    monkeypatch.setattr(suspending, "BUSY", 0)  # each question has one more made
    proxy, ask, token = before(server if way == "direct" else bouncer), Ask(60.0), new_id()
    on_its_way, late = threading.Event(), threading.Event()

    def dawdle() -> None:
        on_its_way.set()
        late.wait(20)

    async def taken_back(engine: PostgresEngine) -> None:
        claims = engine.suspending.claims
        while sum(pipe.wire is not None for pipe in engine._all.aline._per_loop.to(None).pipes) < 2:
            await asyncio.gather(*[claims.claim("warm", new_id(), ask) for _ in range(8)])
        proxy.at(token, before=dawdle)
        claim = asyncio.create_task(claims.claim("k", token, ask))
        await until_async(on_its_way.is_set)
        claim.cancel()
        await asyncio.wait([claim])
        abandon = asyncio.create_task(claims.abandon("k", token))
        await asyncio.sleep(0)
        assert await claims.claim("another", new_id(), ask)  # it waits for nobody
        late.set()
        assert await abandon
        assert isinstance(await claims.claim("k", new_id(), ask), Granted)

    with closing(PostgresEngine(f"postgres://root@127.0.0.1:{proxy.port}/postgres?sslmode=disable")) as engine:
        asyncio.run(taken_back(engine))


# -- settings of a database, and of a role ----------------------------------------------------------------------------


@pytest.fixture(params=["repeatable read", "serializable"])
def apart(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database whose transactions see what was there when they began."""
    server = shared_postgres()
    with server.database(default_transaction_isolation=request.param) as name:
        server.prepare(database=name)
        yield name


@pytest.mark.parametrize("way", ["direct"])
def test_decisions_in_databases_of_another_isolation(
    apart: str, face: Faces, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """Each of two processes would be granted the lease, who has waited for the other; or be refused by the server."""
    url = at(way, shared_postgres(), bouncer, database=apart)
    one, two = face(url, colour), face(url, colour)
    calls: list[int] = []

    def compute(number: int) -> int:
        calls.append(number)
        return number

    def work(each: Face) -> list[Any]:
        return [each.herd(2, f"k{number}", partial(compute, number)) for number in range(10)]

    assert Herd(lambda: work(one), lambda: work(two)).join() == [[[number] * 2 for number in range(10)]] * 2
    assert sorted(calls) == [*range(10)]
    one.invalidate("k3")
    assert two.run("get", "k3") is None
    assert one.lock("nightly") and not two.lock("nightly")
    assert not downs(one) and not downs(two)


def test_a_pooler_before_such_a_database_is_told_with_what_to_do(apart: str, bouncer: PgBouncer) -> None:
    """A decision that sees only what was there when it began would be granted twice."""
    url = at("looks", shared_postgres(), bouncer, database=apart)
    with Cache(url, on_engine_error="raise") as cache, pytest.raises(EngineError, match="ALTER ROLE"):
        cache.get_or_compute("k", lambda: 1)


@pytest.mark.parametrize("way", ["direct"])
def test_an_isolation_that_is_changed_later(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """New connections would refuse everything."""
    with server.database() as name:
        server.prepare(database=name)
        cache = face(at(way, server, bouncer, database=name), colour)
        assert cache("k", lambda: 1) == 1
        server.say(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
        server.terminate(database=name)
        assert cache("other", lambda: 2) == 2
        assert cache.run("get", "other") == 2
        assert not downs(cache)


LIMITS = dict.fromkeys(
    ["statement_timeout", "lock_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout"], "10s"
)


def home_of(face: Face) -> object:
    """The connection that is its sign of life, if it has one."""
    engine = face.cache.engine
    assert isinstance(engine, PostgresEngine)
    return engine._all.news.home_backend


@everywhere
def test_a_role_of_few_rights_whose_connections_end(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """What the server has ended while it was idle would be an outage, and a herd compute twice."""
    with program_s_role(server, **LIMITS) as role:
        url = at(way, server, bouncer, user=role)
        one, two = face(url, colour), face(url, colour)
        assert one("k", lambda: 1) == 1
        assert two("k", lambda: 2) == 1
        ended = {home_of(each) for each in (one, two)} - {None}
        server.terminate("stampede%")
        until(lambda: not {home_of(each) for each in (one, two)} & ended)  # until then it would be taken for dead
        assert two("k", lambda: 2) == 1
        one.invalidate("k")
        assert two("k", lambda: 3) == 3
        assert one.lock("nightly")
        assert not two.lock("nightly")
        assert not downs(one) and not downs(two)
        one.cache.close(), two.cache.close()


def test_who_listens_may_be_idle(server: PostgresServer) -> None:
    """All would be taken from a process, in the middle, that has nothing to say for a while."""
    with program_s_role(server, **LIMITS) as role:
        line = of_url(server.url_of(user=role), {}).listening()
        assert line is not None
        with line:
            assert line.execute("SHOW idle_session_timeout").fetchone() == ("0",)


@everywhere
def test_a_lock_that_is_not_to_be_had_in_time(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """One key that many are at would be an outage of all others."""
    with program_s_role(server, lock_timeout="20ms") as role:
        cache = face(at(way, server, bouncer, user=role), colour)
        assert cache("k", lambda: 0) == 0
        ((id,),) = server.ask("SELECT id FROM stampede.entries")
        cache.invalidate("k")
        with psycopg.connect(server.postgres_url) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", (int.from_bytes(id[:8], signed=True),))
            assert cache("k", lambda: 1) == 1
            assert cache("other", lambda: 2) == 2
        assert server.ask("SELECT FROM stampede.entries WHERE position('other'::bytea IN name) > 0")
        cache.cache.close()


COLLIDES = """
CREATE SEQUENCE collisions;
CREATE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('collisions') % 3 = 1 THEN
        RAISE 'every third time' USING ERRCODE = TG_ARGV[0];
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER collides BEFORE INSERT ON stampede.leases FOR EACH ROW EXECUTE FUNCTION collide('{}');
CREATE TRIGGER collides BEFORE INSERT ON stampede.locks FOR EACH ROW EXECUTE FUNCTION collide('{}')
"""


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03"])
def test_who_collides_asks_once_more(server: PostgresServer, face: Faces, colour: str, code: str) -> None:
    """What the server takes back so that another one may go on would be an outage, or a lock that can't be had."""
    with server.database() as name:
        server.prepare(database=name)
        server.say(COLLIDES.format(code, code), database=name)
        cache = face(server.url_of(database=name), colour)
        assert cache("k", lambda: 1) == 1
        assert cache.many(["a", "b"], lambda keys: dict.fromkeys(keys, 2)) == {"a": 2, "b": 2}
        assert cache.lock("nightly")
        assert server.ask("SELECT count(*) FROM stampede.entries", database=name) == [(3,)]
        assert not downs(cache)
        cache.close()


def test_listen_leads_to_another_server(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, small: PostgresServer, colour: str
) -> None:
    """Nobody there knows the connection that says whether we live: each would take the key from the one before."""
    small.prepare()
    url, origin = f"{bouncer.postgres_url}&listen={quote(small.postgres_url, safe='')}", Origin()
    one, two = face(url, colour), face(url, colour)
    for each in (one, two):
        each("warm", lambda: 0)
    until(lambda: small.ask("SELECT FROM pg_stat_activity WHERE application_name = 'stampede'") == [])
    herd = Herd(lambda: one.herd(2, "k", origin))
    origin.has_begun()
    with pytest.raises(WaitTimeout):
        two("k", lambda: 2, wait=1)  # by then it has been answered
    origin.let_on()
    assert herd.join() == [[1, 1]]


# -- no connections left ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["server", "pooler"])
def test_no_connection_is_left(face: Faces, small: PostgresServer, colour: str, full: str) -> None:
    """Calls would fail, or compute for themselves, while the process has a connection that it could wait for."""
    small.prepare()
    with ExitStack() as stack:
        user = stack.enter_context(program_s_role(small))
        url = small.url_of(user=user)
        if full == "pooler":
            pooler = stack.enter_context(closing(PgBouncer(small, "max_client_conn=4", "default_pool_size=2")))
            url = pooler.url_of(user=user)
        cache = face(url, colour)
        stack.callback(cache.cache.close)
        assert cache("first", lambda: 0) == cache.cache.get("first") == 0  # over a connection of each colour
        with suppress(psycopg.OperationalError):
            while True:
                stack.enter_context(psycopg.connect(url))
        together = threading.Barrier(8, timeout=20)
        herd = Herd(*[lambda n=n: cache.cache.get_or_compute(f"k{n}", lambda: together.wait() and n) for n in range(8)])
        assert set(map(type, herd.join())) == {int}
        assert cache.run("get", "first") == 0
        assert cache.lock("nightly")
        assert not downs(cache)
        assert {cache.run("get", f"k{n}") is not None for n in range(8)} == {True}
