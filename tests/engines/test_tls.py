"""The engines over TLS, with the tests' own authority: all data is encrypted, and no other authority is trusted."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from memcached_server import MemcachedServer
from servers import PATIENCE, Authority, RedisCluster, RedisServer, Sentinels, wait_until, with_certificate

from stampede import Cache
from stampede.engines.memcached import MemcachedEngine
from stampede.engines.redis import RedisEngine
from stampede.errors import EngineError, OptionError
from stampede.events import EngineDown, Event
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Busy, Engine, Found, Granted
from stampede.runtime.colour import run_blocking as run

pytestmark = pytest.mark.redis

LONG = 60.0
KINDS = ["one server", "cluster", "sentinels", "memcached"]
REDIS = KINDS[:3]

Make = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _trust_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust no other authorities. Each connection of the Redis client would read the machine's, in 15 ms or more."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)


@lru_cache(1)
def authority() -> Authority:
    return Authority()


@lru_cache(1)
def stranger() -> Authority:
    """An authority that has signed no server's certificate."""
    return Authority()


@lru_cache
def server(kind: str) -> Any:
    """The servers that all tests share. They accept only TLS."""
    made: dict[str, Callable[..., Any]] = {
        "one server": RedisServer, "cluster": RedisCluster, "memcached": MemcachedServer,
        "sentinels": partial(Sentinels, silence=600),  # no failover on a slow machine
    }  # fmt: skip
    return made[kind](tls=authority())


def nodes(kind: str) -> list[RedisServer]:
    """The servers that store values."""
    made = server(kind)
    return [made.master] if kind == "sentinels" else made.nodes if kind == "cluster" else [made]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(params=["sync", "async"])
def suspending(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    """Makes engines, and closes them at the end. By default, they trust the right authority."""

    def made(kind: str, trusts: Authority | None = None, **options: Any) -> Engine:
        trusted = trusts or authority()
        engine: Engine
        if kind == "memcached":
            engine = MemcachedEngine(server(kind).address, tls_context=trusted.trusted(), **options)
        else:
            engine = RedisEngine(server(kind).url.replace(authority().ca, trusted.ca), **options)
        request.addfinalizer(engine.close)
        return engine

    return made


class Caller:
    """A cache over an engine, called in one colour."""

    def __init__(self, engine: Engine, suspending: bool, **options: Any) -> None:
        self.told: list[Event] = []
        self.cache = Cache(engine=engine, early=0, observers=[self.told.append], **options)
        self._runner = asyncio.Runner() if suspending else None

    def get_or_compute(self, key: str, origin: Callable[[], Any]) -> Any:
        cache = self.cache
        return self._had(lambda: cache.aget_or_compute(key, origin), lambda: cache.get_or_compute(key, origin))

    def invalidate(self, key: str) -> Any:
        return self._had(lambda: self.cache.ainvalidate(key), lambda: self.cache.invalidate(key))

    def _had(self, awaited: Callable[[], Any], called: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return await awaited()

        return called() if self._runner is None else self._runner.run(call())

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


@pytest.fixture
def call(request: pytest.FixtureRequest, suspending: bool) -> Callable[..., Caller]:
    def made(engine: Engine, **options: Any) -> Caller:
        caller = Caller(engine, suspending, **options)
        request.addfinalizer(caller.close)
        return caller

    return made


def some(value: bytes = b"value") -> Entry[Any]:
    return Entry(value, new_id(), ttl=LONG, fresh=LONG, keep=LONG)


def unasked() -> Any:
    raise AssertionError("the engine has it")


def test_a_value_is_had_and_invalidated(kind: str, make: Make, call: Callable[..., Caller]) -> None:
    """Over TLS, values can be stored and invalidated, even if they are larger than a record of TLS."""
    mine, theirs, value = call(make(kind)), call(make(kind)), os.urandom(200_000)
    key = f"key {new_id().hex()}"
    assert mine.get_or_compute(key, lambda: value) == value
    assert theirs.get_or_compute(key, unasked) == value
    assert mine.invalidate(key) is True
    assert mine.invalidate(key) is False
    assert theirs.get_or_compute(key, lambda: b"new") == b"new"
    assert mine.get_or_compute(key, unasked) == b"new"
    assert not any(isinstance(event, EngineDown) for event in [*mine.told, *theirs.told])


def test_who_is_not_believed_is_not_asked(kind: str, make: Make, call: Callable[..., Caller]) -> None:
    """A server whose certificate is not trusted gets no values. Callers compute, and a change raises an error."""
    caller = call(make(kind, trusts=stranger()))
    assert caller.get_or_compute("key", lambda: "value") == "value"
    (down,) = [event for event in caller.told if isinstance(event, EngineDown)]
    assert "certificate" in str(down.error).lower()
    with pytest.raises(EngineError):
        caller.invalidate("key")


def test_many_at_once(kind: str, make: Make) -> None:
    """Each of many requests at the same time gets its own reply, however the replies are split into TLS records."""
    names = ("timeout", "connect_timeout") if kind == "memcached" else ("socket_timeout", "socket_connect_timeout")
    engine = make(kind, **dict.fromkeys(names, PATIENCE))
    keys = [f"{new_id().hex()} {number}" for number in range(100)]
    values = {key: os.urandom(20_000) for key in keys}
    assert engine.suspending.store is not None and engine.blocking.store is not None

    async def all_of_them() -> None:
        assert engine.suspending.store is not None and engine.suspending.claims is not None
        await asyncio.gather(*(engine.suspending.store.set(key, some(values[key])) for key in keys))
        asked = [engine.suspending.claims.claim(key, new_id(), Ask(LONG)) for key in keys]
        assert {key: reply.entry.value for key, reply in zip(keys, await asyncio.gather(*asked), strict=True)} == values

    asyncio.run(all_of_them())
    asyncio.run(all_of_them())  # another loop, another connection
    kept = run(engine.blocking.store.get(keys))
    assert {key: entry.value for key, entry in zip(keys, kept, strict=True) if entry is not None} == values


@pytest.mark.parametrize("kind", REDIS)
def test_news_are_pushed(kind: str, make: Make) -> None:
    """Over TLS, too, waiters are woken, and a value in memory is removed when another process invalidates it."""
    engine, other, key, token = make(kind, tracking=True), make(kind), new_id().hex(), new_id()
    assert engine.blocking.claims is not None and other.blocking.claims is not None and other.blocking.store is not None
    assert isinstance(run(other.blocking.claims.claim(key, token, Ask(LONG))), Granted)
    busy = run(engine.blocking.claims.claim(key, new_id(), Ask(LONG)))
    assert isinstance(busy, Busy)
    woken: list[Any] = []
    claims = engine.blocking.claims
    waiter = threading.Thread(target=lambda: woken.append(run(claims.wait(key, busy, LONG))))
    waiter.start()
    assert run(other.blocking.claims.fill(key, token, some(b"x" * 2000)))
    waiter.join(PATIENCE)
    assert woken, "it hangs"

    def ticket() -> Any:
        reply = run(claims.claim(key, new_id(), Ask(LONG)))
        return reply.ticket if isinstance(reply, Found) else None

    wait_until(lambda: ticket() is not None)
    kept = ticket()
    wait_until(lambda: any("cmd=ping" in node.cli("CLIENT", "LIST") for node in nodes(kind)))
    assert kept.stamps[kept.slot] == kept.stamp  # also if only replies to pings have arrived
    run(other.blocking.store.invalidate(key))
    wait_until(lambda: kept.stamps[kept.slot] != kept.stamp)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_leaves_the_parents_connections_alone(kind: str, make: Make) -> None:
    """A forked child uses its own connections. Otherwise, parent and child would use one state of one cipher."""
    engine, key = make(kind), new_id().hex()
    assert engine.blocking.store is not None and engine.suspending.store is not None
    store, astore = engine.blocking.store, engine.suspending.store
    run(store.set(key, some()))

    async def had() -> bool:
        (entry,) = await astore.get([key])
        return entry is not None and entry.value == b"value"

    async def parent_and_child() -> bool:
        assert await had()
        pid = os.fork()
        if pid == 0:
            (entry,) = run(store.get([key]))
            os._exit(0 if entry is not None and entry.value == b"value" else 1)
        assert os.waitpid(pid, 0)[1] == 0
        return await had()

    assert asyncio.run(parent_and_child())
    (entry,) = run(store.get([key]))
    assert entry is not None


# -- clients that the program has made ----------------------------------------------------------------------------


def clients(kind: str) -> Iterator[Any]:
    """Clients that a program has set up itself, in both colours."""
    its = {"ssl": True, "ssl_ca_certs": authority().ca}
    made = server(kind)
    for colour in (redis, redis.asyncio):
        if kind == "one server":
            yield colour.Redis(host="127.0.0.1", port=made.port, **its)
        elif kind == "cluster":
            yield colour.RedisCluster(host="127.0.0.1", port=made.nodes[0].port, **its)
        else:
            places = [("127.0.0.1", each.port) for each in made.sentinels]
            yield colour.sentinel.Sentinel(places, sentinel_kwargs=its, **its).master_for(made.service)


@pytest.mark.parametrize("kind", REDIS)
def test_clients_bring_their_trust_along(kind: str) -> None:
    """An engine that is made from a client uses the client's TLS settings, in both colours."""
    for client in clients(kind):
        engine = RedisEngine(client=client)
        assert engine.blocking.claims is not None and engine.suspending.claims is not None
        assert isinstance(run(engine.blocking.claims.claim(new_id().hex(), new_id(), Ask(LONG))), Granted)
        assert isinstance(asyncio.run(engine.suspending.claims.claim(new_id().hex(), new_id(), Ask(LONG))), Granted)
        engine.close()


def test_what_one_colour_can_not_check_it_does_not_believe() -> None:
    """If one colour cannot check a certificate as the client's options demand, its calls get an EngineError."""
    made = server("one server")
    client = redis.Redis(
        host="127.0.0.1", port=made.port, ssl=True, ssl_ca_certs=authority().ca, ssl_validate_ocsp=True
    )
    engine = RedisEngine(client=client)
    assert engine.suspending.claims is not None
    with pytest.raises(EngineError, match="ssl_validate_ocsp"):
        asyncio.run(engine.suspending.claims.claim("key", new_id(), Ask(LONG)))
    engine.close()


# -- the rest -----------------------------------------------------------------------------------------------------


def test_sentinels_may_speak_without(make: Make, suspending: bool) -> None:
    """The servers may use TLS although their sentinels do not."""
    master = server("one server")
    config = f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
    plain = RedisServer("--sentinel", *with_certificate(authority()), config=config)
    options = f"ssl=true&ssl_ca_certs={authority().ca}&sentinel_ssl=false"
    engine = RedisEngine(f"redis+sentinel://127.0.0.1:{plain.port}/main?{options}")
    try:
        if suspending:
            reply = asyncio.run(engine.suspending.claims.claim(new_id().hex(), new_id(), Ask(LONG)))
        else:
            reply = run(engine.blocking.claims.claim(new_id().hex(), new_id(), Ask(LONG)))
        assert isinstance(reply, Granted)
    finally:
        engine.close()
        plain.close()


def test_a_context_that_is_none_is_refused() -> None:
    """A `tls_context` that is no SSL context is refused. Otherwise, the server would always seem to be down."""
    with pytest.raises(OptionError, match="tls_context"):
        MemcachedEngine("127.0.0.1:11211", tls_context="ca.pem")
