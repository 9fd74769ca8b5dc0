"""The Redis engine behind sentinels: it finds the master, and the next one if the master is demoted or dies."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

import redis.asyncio.sentinel
import redis.sentinel
from servers import RedisServer, Sentinels, free_port, moved_sentinels, shared_sentinels, wait_until

from stampede import Cache
from stampede.engines import open_engine
from stampede.engines.redis import RedisEngine, wire
from stampede.engines.redis.sentinel import of_sentinel_url
from stampede.errors import EngineError, OptionError
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Engine, Found, Granted, Ticket
from stampede.runtime.colour import run_blocking as run
from stampede.testing.conformance import LocksSuite

LONG = 60.0


def flushed() -> Sentinels:
    shared = shared_sentinels()
    shared.master.cli("FLUSHALL")
    # If a sentinel could not run for a second, it considers its master down until the master replies.
    wait_until(lambda: all("_down" not in each.cli("SENTINEL", "MASTER", shared.service) for each in shared.sentinels))
    return shared


class TestRedisSentinel(LocksSuite):
    short = 0.1

    def make_engine(self) -> Engine:
        return RedisEngine(flushed().url)

    def make_peer(self, engine: Engine) -> Engine:
        return RedisEngine(shared_sentinels().url)


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., RedisEngine]:
    """Opens engines, and closes them at the end of the test."""

    def opened(url: str, **options: Any) -> RedisEngine:
        engine = RedisEngine(url, **{"tracking": True, **options})
        request.addfinalizer(engine.close)
        return engine

    return opened


def test_a_closed_engine_leaves_no_connection_to_a_sentinel() -> None:
    """A closed cache leaves no connection to a sentinel open."""
    house = flushed()
    with Cache(house.url) as cache:
        cache.get_or_compute("k", lambda: 1)
        assert any(_connected(sentinel.port) for sentinel in house.sentinels)
    wait_until(lambda: not any(_connected(each.port) for each in house.sentinels))  # one may be opening at this moment


def test_who_asks_a_sentinel_of_a_closed_engine_leaves_no_connection() -> None:
    """The thread of the news may ask for the master while another thread closes the engine."""
    house = flushed()
    server = of_sentinel_url(house.url, {})
    server.close()
    assert server.master() == ("127.0.0.1", house.master.port)
    assert not any(_connected(each.port) for each in house.sentinels)


def _connected(port: int) -> bool:
    """Whether this process has a connection to this port of the loopback address."""
    ours: set[str] = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it by now
            ours.add(os.readlink(f"/proc/self/fd/{each}"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(int(line[2].split(":")[1], 16) == port and f"socket:[{line[9]}]" in ours for line in lines)


@pytest.fixture
def own() -> Iterator[RedisServer]:
    mine = RedisServer()
    yield mine
    mine.close()


Open = Callable[..., RedisEngine]


def some(value: bytes = b"value", fresh: float = LONG) -> Entry[Any]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


def claim(engine: RedisEngine, key: str = "k", token: bytes | None = None, **terms: Any) -> Any:
    return run(engine.blocking.claims.claim(key, token or new_id(), Ask(LONG, **terms)))


def holds(ticket: Ticket) -> bool:
    return ticket.stamps[ticket.slot] == ticket.stamp


def answered(ask: Callable[[], Any]) -> Any:
    """The first reply of an engine that is about to work again."""
    answers: list[Any] = []

    def tried() -> bool:
        try:
            answers.append(ask())
        except EngineError:
            return False
        return True

    wait_until(tried)
    return answers[0]


# -- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, says",
    [
        ("redis+sentinel://h:1,g:2", "name the service"),
        ("redis+sentinel://:secret@h:1/", "name the service"),
        ("redis+sentinel:///main", "host:port,host:port"),
        ("redis+sentinel://h:port/main", "'port' is not a port"),
        ("redis+sentinel://h:1/main/zero", "'zero' is not a database number"),
        ("redis+sentinel://h:1/main?socket_timeout=soon", "socket_timeout"),
        ("redis+sentinel://h:1/main?sokket_timeout=1", "sokket_timeout"),
        ("redis+sentinel://h:1/main?sentinel_sokket_timeout=1", "sokket_timeout"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(url: str, says: str) -> None:
    """A malformed URL is refused when the engine is opened. The error names the mistake, but not the password."""
    with pytest.raises(OptionError, match=says) as wrong:
        open_engine(url)
    assert "secret" not in str(wrong.value)


def test_one_sentinel_is_enough(open_: Open) -> None:
    """The engine needs only one sentinel that knows the service. It skips those that are down or do not know it."""
    shared, stranger = flushed(), RedisServer("--sentinel", config="")
    try:
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{stranger.port},127.0.0.1:{shared.sentinels[1].port}"
        engine = open_(f"redis+sentinel://{hosts}/{shared.service}/3?sentinel_socket_timeout=10")
        assert isinstance(claim(engine), Granted)
        assert shared.master.redis_cli("-n", "3", "DBSIZE") == "1"

        async def suspending() -> Any:
            return await engine.suspending.claims.claim("k", new_id(), Ask(LONG, force=True))

        assert isinstance(asyncio.run(suspending()), Granted)
    finally:
        stranger.close()


def test_threads_look_for_the_master_side_by_side() -> None:
    """Two threads at the same time find the master, although each moves its sentinel to the front of the list."""
    shared = flushed()
    with socket.create_server(("127.0.0.1", 0)) as dumb, ThreadPoolExecutor(2) as pool:
        hosts = f"127.0.0.1:{dumb.getsockname()[1]},127.0.0.1:{shared.sentinels[1].port}"
        server = of_sentinel_url(f"redis+sentinel://{hosts}/{shared.service}?sentinel_socket_timeout=10", {})
        looks, asked = [], []
        for _ in range(2):
            looks.append(pool.submit(server.master))
            asked.append(dumb.accept()[0])
        for look, connection in zip(looks, asked, strict=True):
            connection.close()
            assert look.result(20) == ("127.0.0.1", shared.master.port)


def test_a_client_leads_to_its_master() -> None:
    """The engine finds the master through a client that redis-py's Sentinel made. A client of a replica is refused."""
    shared = flushed()
    places = [("127.0.0.1", each.port) for each in shared.sentinels]
    for colour in (redis.sentinel, redis.asyncio.sentinel):
        watch = colour.Sentinel(places, socket_timeout=10)
        engine = RedisEngine(client=watch.master_for(shared.service, db=2))
        assert isinstance(claim(engine, force=True), Granted)
        assert shared.master.redis_cli("-n", "2", "DBSIZE") == "1"
        engine.close()
        with pytest.raises(OptionError, match="master_for"):
            RedisEngine(client=watch.slave_for(shared.service))


def test_a_service_that_nobody_knows_is_an_engine_error(open_: Open) -> None:
    """If no sentinel knows the service, calls get an EngineError. Any other error would not count as an outage."""
    engine = open_(f"{flushed().url.rpartition('/main')[0]}/other")
    with pytest.raises(EngineError, match="other"):
        claim(engine)

    async def suspending() -> None:
        with pytest.raises(EngineError, match="other"):
            await engine.suspending.claims.claim("k", new_id(), Ask(LONG))

    asyncio.run(suspending())


# -- masters that became replicas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_replica_is_left(own: RedisServer, open_: Open, colour: str) -> None:
    """If the server became a replica, the engine opens a new connection. The replica would refuse every call."""
    engine, master = open_(own.url, tracking=False), RedisServer()

    async def ask() -> Any:
        return await engine.suspending.claims.claim("k", new_id(), Ask(LONG, force=True))

    with asyncio.Runner() as runner:

        def asked() -> Any:
            return claim(engine, force=True) if colour == "sync" else runner.run(ask())

        assert isinstance(asked(), Granted)
        own.cli("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        own.cli("REPLICAOF", "127.0.0.1", str(master.port))
        connections = int(own.cli("INFO", "stats").split("total_connections_received:")[1].split()[0])
        with pytest.raises(EngineError, match=r"(?i)read.only|replica"):
            asked()
        now = int(own.cli("INFO", "stats").split("total_connections_received:")[1].split()[0])
        assert now >= connections + 2  # one by this INFO command, and one by the engine
        own.cli("REPLICAOF", "NO", "ONE")
        assert isinstance(asked(), Granted)
    master.close()


def test_a_sentinel_that_names_a_replica_is_not_believed(own: RedisServer, open_: Open) -> None:
    """If a sentinel names a server that is a replica now, the engine reads no stale values from it."""
    config = f"sentinel monitor main 127.0.0.1 {own.port} 1\nsentinel down-after-milliseconds main 60000\n"
    sentinel, master = RedisServer("--sentinel", config=config), RedisServer()
    try:
        engine = open_(f"redis+sentinel://127.0.0.1:{sentinel.port}/main")
        run(engine.blocking.store.set("k", some()))
        own.cli("REPLICAOF", "127.0.0.1", str(master.port))
        own.cli("CLIENT", "KILL", "TYPE", "normal")
        for ask in (engine.blocking.claims.look("k"), engine.blocking.claims.claim("k", new_id(), Ask(LONG))):
            with pytest.raises(EngineError, match=r"(?i)read.only|replica"):
                run(ask)
    finally:
        sentinel.close()
        master.close()


def test_a_failover_while_a_value_is_computed() -> None:
    """Promise 7: during a failover, calls of threads and tasks still return. After it, values are stored again."""
    mine = Sentinels(silence=600)
    cache = Cache(mine.url, early=0, lease=2.0)
    engine = RedisEngine(mine.url, tracking=True)
    computed: dict[str, int] = {}
    lock = threading.Lock()

    def origin(key: str, meanwhile: Callable[[], object] = lambda: None) -> str:
        with lock:
            computed[key] = computed.get(key, 0) + 1
        meanwhile()
        return key

    async def herd(key: str) -> list[str]:
        calls = [cache.aget_or_compute(key, lambda: origin(key)) for _ in range(20)]
        return list(await asyncio.gather(*calls))

    try:
        with asyncio.Runner() as runner:
            assert cache.get_or_compute("warm", lambda: origin("warm")) == "warm"
            assert runner.run(herd("warm")) == ["warm"] * 20
            assert computed == {"warm": 1}
            run(engine.blocking.store.set("k", some()))
            tickets: list[Ticket] = []

            def ticketed() -> bool:
                reply = claim(engine)
                tickets[:] = [reply.ticket] if isinstance(reply, Found) and reply.ticket else []
                return bool(tickets) and holds(tickets[0])

            wait_until(ticketed)

            # The master dies during a computation: this call and the next ones still return.
            old = mine.named()
            assert cache.get_or_compute("sync", lambda: origin("sync", mine.master.stop)) == "sync"
            mine.wait_for(1.0)
            assert runner.run(herd("async")) == ["async"] * 20
            assert computed["sync"] == computed["async"] == 1
            wait_until(lambda: not holds(tickets[0]))

            # Another server becomes master: values are stored again, and the program has to do nothing.
            wait_until(lambda: mine.named() != old)
            mine.wait_for(600)

            def kept(key: str, call: Callable[[], object]) -> bool:
                before = computed.get(key, 0)
                call()
                return computed.get(key, 0) == before

            wait_until(lambda: kept("sync", lambda: cache.get_or_compute("sync", lambda: origin("sync"))))
            wait_until(lambda: kept("async", lambda: runner.run(herd("async"))))
            new = next(each for each in mine.replicas if each.port == mine.named())
            answered(lambda: run(engine.blocking.store.set("k", some(b"new"))))
            assert new.cli("EXISTS", wire.names("k").entry) == "1"
            wait_until(ticketed)  # now the engine hears of changes from the new master

            # The old server comes back as an empty master, and remains one for the ten seconds that sentinels need.
            mine.master.start()
            assert claim(engine).entry.value == b"new"
    finally:
        cache.close()
        engine.close()
        mine.close()


def test_a_planned_failover(open_: Open) -> None:
    """After a planned failover, leases and values are looked up on the new master, although the old one still runs."""
    shared = flushed()
    moved_sentinels()
    engine, token = open_(shared.url), new_id()
    assert isinstance(claim(engine, token=token), Granted)
    old = shared.named()
    wait_until(lambda: shared.replicas[0].cli("DBSIZE") == shared.replicas[1].cli("DBSIZE") == "1")
    shared.sentinels[0].cli("SENTINEL", "FAILOVER", shared.service)
    wait_until(lambda: shared.named() != old)
    new = next(each for each in shared.replicas if each.port == shared.named())

    async def suspending() -> None:
        await engine.suspending.store.set("async", some())

    def moved() -> bool:
        try:
            run(engine.blocking.store.set("sync", some()))
            asyncio.run(suspending())
        except EngineError:
            return False
        return new.cli("EXISTS", wire.names("sync").entry, wire.names("async").entry) == "2"

    start = time.monotonic()
    wait_until(moved)
    assert time.monotonic() - start < 8.0  # the old server remains a master for ten more seconds
    assert answered(lambda: run(engine.blocking.claims.fill("k", token, some()))) is True  # the replica had the lease
    assert new.cli("EXISTS", wire.names("k").entry) == "1"
