"""The Postgres engine behind pgbouncer, and with difficult settings of a database, a role or a server."""

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

both = pytest.mark.parametrize("colour", ["sync", "async"])
ways = pytest.mark.parametrize("way", ["listens", "looks"])
everywhere = pytest.mark.parametrize("way", ["direct", "listens", "looks"])


@contextmanager
def program_s_role(server: PostgresServer, **settings: object) -> Iterator[str]:
    """A role with the rights that the docs name, and no others."""
    with server.role(**settings) as role:
        server.say(grants(role))
        yield role


@pytest.fixture(scope="module")
def bouncer() -> Iterator[PgBouncer]:
    """A pooler with two connections to the server for all clients. Each question goes over another one."""
    with closing(PgBouncer(shared_postgres(), "default_pool_size=2", "server_round_robin=1")) as made:
        yield made


@pytest.fixture(scope="module")
def small() -> Iterator[PostgresServer]:
    """A server that accepts six connections, and two more for its administrator."""
    settings = "max_connections=8", "superuser_reserved_connections=2", "max_wal_senders=0"
    with closing(PostgresServer(*settings)) as made:
        yield made


@pytest.fixture
def server() -> PostgresServer:
    server = shared_postgres()
    server.prepare()
    return server


def at(way: str, server: PostgresServer, bouncer: PgBouncer, **who: str) -> str:
    """The URL of a cache: directly to the server, or through a pooler, with or without a direct address for LISTEN."""
    if way == "direct":
        return server.url_of(**who)
    return bouncer.url_of(**who) + (f"&listen={quote(server.url_of(**who), safe='')}" if way == "listens" else "")


def untold(face: Face) -> list[events.Untold]:
    return [each for each in face.told if isinstance(each, events.Untold)]


def downs(face: Face) -> list[events.EngineDown]:
    return [each for each in face.told if isinstance(each, events.EngineDown)]


def kept(cache: Cache) -> int:
    """How many values this process keeps in memory."""
    return len(cache._core.local_tier.residents or ())


# -- the suites for every engine --------------------------------------------------------------------------------------


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
    """Without a direct address, so that no notifications arrive."""

    way = "looks"


class TestPostgresPooledAndTold(_Pooled, LocksSuite):
    """With a direct address, so that notifications wake the waiters."""

    way = "listens"
    suspending = True


# -- pgbouncer in transaction mode ------------------------------------------------------------------------------------


@ways
def test_a_herd_computes_once(face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str) -> None:
    """Behind a pooler, callers in two processes compute a key once, and no prepared statement fails."""
    origin, url = Origin(), at(way, server, bouncer)
    one, two = face(url, colour), face(url, colour)
    assert one("warm", lambda: 0) == two("warm", lambda: 1) == 0
    if way == "listens":
        until(lambda: home_of(one) and home_of(two))
    herds = Herd(*[lambda each=each: each.herd(8, "k", origin) for each in (one, two)])
    origin.has_begun()
    if way == "listens":  # the other process is registered in the lease
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE cardinality(homes) = 1"))
    origin.let_on()
    assert herds.join() == [[1] * 8] * 2
    assert origin.calls == 1
    assert not downs(one) and not downs(two)


def test_who_can_t_be_told_says_so_once(face: Faces, server: PostgresServer, bouncer: PgBouncer, colour: str) -> None:
    """If no notifications arrive, the cache reports it once, and not with each call."""
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
    """A local tier behind a pooler follows changes if it has a direct address for LISTEN."""
    url = at("listens", server, bouncer)
    one, two = face(url, colour, local=True), face(url, colour)

    def is_kept() -> bool:
        before = one.cache.stats().hits
        one("k", lambda: "old")
        return one.cache.stats().hits > before

    until(is_kept)
    two.run("set", "k", "new")
    until(lambda: one.run("get", "k") == "new")
    server.terminate("stampede%")  # each listener connects again
    until(is_kept)
    two.run("set", "k", "newer")
    until(lambda: one.run("get", "k") == "newer")


def test_nothing_is_kept_where_nobody_tells(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, colour: str
) -> None:
    """Without notifications, the local tier keeps nothing: it would not hear of changes."""
    url = at("looks", server, bouncer)
    one, two = face(url, colour, local=True), face(url, colour)
    for value in ("old", "new", "newer"):
        two.run("set", "k", value)
        assert one.run("get", "k") == value
        assert kept(one.cache) == 0


@ways
def test_a_lock_excludes(face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str) -> None:
    """A lock is exclusive behind a pooler, where clients share the sessions of the server."""
    url = at(way, server, bouncer)
    one, two = face(url, colour), face(url, colour)
    assert one.lock("nightly")
    assert not two.lock("nightly")
    one.release()
    assert two.lock("nightly")


@ways
def test_who_waits_for_a_lock_has_it_next(server: PostgresServer, bouncer: PgBouncer, way: str) -> None:
    """All waiters for a lock get it, one at a time, also behind a pooler."""
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
    """A restart of the pooler loses no computation and no lock, and causes no error."""
    origin, url = Origin(), at(way, server, bouncer)
    one, two = face(url, colour), face(url, colour)
    assert two.lock("nightly")
    herd = Herd(lambda: one.herd(2, "k", origin))
    origin.has_begun()
    until(lambda: any(flight.callers == 2 for flight in list(one.cache._core.flights._flights.values())))
    bouncer.restart()  # the second caller asks nothing any more: a connection that it opens now would be refused
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
    """An abandon waits for the cancelled claim before it, even if another connection of the loop is faster."""
    monkeypatch.setattr(suspending, "BUSY", 0)  # each question opens one more connection
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
        assert await claims.claim("another", new_id(), ask)  # other claims do not wait
        late.set()
        assert await abandon
        assert isinstance(await claims.claim("k", new_id(), ask), Granted)

    with closing(PostgresEngine(f"postgres://root@127.0.0.1:{proxy.port}/postgres?sslmode=disable")) as engine:
        asyncio.run(taken_back(engine))


@both
def test_values_larger_than_all_buffers(face: Faces, server: PostgresServer, bouncer: PgBouncer, colour: str) -> None:
    """Behind a pooler, commands are sent one by one. Each is sent whole, although the socket takes only a part."""
    cache = face(bouncer.postgres_url, colour, on_engine_error="raise")
    values = {"small": b"", "large": bytes(16 << 20)}
    cache.run("set_many", values)
    assert cache.run("get_many", list(values)) == values


# -- settings of a database, and of a role ----------------------------------------------------------------------------


@pytest.fixture(params=["repeatable read", "serializable"])
def apart(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database whose transactions see only what was stored when they began."""
    server = shared_postgres()
    with server.database(default_transaction_isolation=request.param) as name:
        server.prepare(database=name)
        yield name


@pytest.mark.parametrize("way", ["direct"])
def test_decisions_in_databases_of_another_isolation(
    apart: str, face: Faces, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """If the database's default isolation is stricter, each key is still computed once, and no call is refused."""
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
    """Behind a pooler to such a database, the error names the remedy. A decision on an old snapshot could be wrong."""
    url = at("looks", shared_postgres(), bouncer, database=apart)
    with Cache(url, on_engine_error="raise") as cache, pytest.raises(EngineError, match="ALTER ROLE"):
        cache.get_or_compute("k", lambda: 1)


@pytest.mark.parametrize("way", ["direct"])
def test_an_isolation_that_is_changed_later(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """If the default isolation changes later, new connections still work."""
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
    """The connection that is the sign of life of this cache, if there is one."""
    engine = face.cache.engine
    assert isinstance(engine, PostgresEngine)
    return engine._all.news.home_backend


@everywhere
def test_a_role_of_few_rights_whose_connections_end(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """If the server ends connections of a role with few rights, calls get no error and do not compute twice."""
    with program_s_role(server, **LIMITS) as role:
        url = at(way, server, bouncer, user=role)
        one, two = face(url, colour), face(url, colour)
        assert one("k", lambda: 1) == 1
        assert two("k", lambda: 2) == 1
        ended = {home_of(each) for each in (one, two)} - {None}
        server.terminate("stampede%")
        until(lambda: not {home_of(each) for each in (one, two)} & ended)  # until then, the process would count as dead
        assert two("k", lambda: 2) == 1
        one.invalidate("k")
        assert two("k", lambda: 3) == 3
        assert one.lock("nightly")
        assert not two.lock("nightly")
        assert not downs(one) and not downs(two)
        one.cache.close(), two.cache.close()


def test_who_listens_may_be_idle(server: PostgresServer) -> None:
    """The listening connection has no limit of idle time, although the role has one."""
    with program_s_role(server, **LIMITS) as role:
        line = of_url(server.url_of(user=role), {}).listening()
        assert line is not None
        with line:
            assert line.execute("SHOW idle_session_timeout").fetchone() == ("0",)


@everywhere
def test_a_lock_that_is_not_to_be_had_in_time(
    face: Faces, server: PostgresServer, bouncer: PgBouncer, way: str, colour: str
) -> None:
    """If the lock of one key can't be taken in time, other keys still work, and the caller computes."""
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
    """A question that the server cancels because of a conflict is asked again, and causes no error."""
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
    """If `listen=` leads to another server, that connection is no sign of life: each lease would seem to be free."""
    small.prepare()
    url, origin = f"{bouncer.postgres_url}&listen={quote(small.postgres_url, safe='')}", Origin()
    one, two = face(url, colour), face(url, colour)
    for each in (one, two):
        each("warm", lambda: 0)
    until(lambda: small.ask("SELECT FROM pg_stat_activity WHERE application_name = 'stampede'") == [])
    herd = Herd(lambda: one.herd(2, "k", origin))
    origin.has_begun()
    with pytest.raises(WaitTimeout):
        two("k", lambda: 2, wait=1)  # enough time for a reply
    origin.let_on()
    assert herd.join() == [[1, 1]]


# -- no connections left ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["server", "pooler"])
def test_no_connection_is_left(face: Faces, small: PostgresServer, colour: str, full: str) -> None:
    """If no further connection can be made, calls wait for an existing one and do not fail."""
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
