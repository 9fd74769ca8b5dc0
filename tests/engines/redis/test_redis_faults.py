"""Faults that only Redis has: servers that refuse, lose their scripts, or no longer notify changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

pytest.importorskip("redis")

import both_colours
import redis
from both_colours import BRIEF, LONG, Number, never
from herd import PATIENCE, Herd, Origin, until
from proxy import Proxy
from servers import RedisServer, free_port

from stampede import Cache, ComputationFailed, EngineError, events
from stampede.engines.redis.scripts import Scripts
from stampede.model.entry import new_id


class Face(both_colours.Face):
    """A cache on Redis with short times. Only the timeout is long, unless a test needs a server that is silent."""

    def __init__(self, url: str, colour: str = "sync", *, timeout: float = PATIENCE, **options: Any) -> None:
        super().__init__(f"{url}?socket_timeout={timeout}&socket_connect_timeout={timeout}", colour, **options)


Faces = Callable[..., Face]
Before = Callable[[RedisServer], Proxy]


# -- troubles: each begins before its `yield`, and ends after it ----------------------------------------------------


def full(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """maxmemory is reached, and no entry may be evicted."""
    server.cli("CONFIG", "SET", "maxmemory", "1kb")
    yield
    server.cli("CONFIG", "SET", "maxmemory", "0")


def replica(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """After a failover, the old master is a replica and refuses writes."""
    server.cli("REPLICAOF", "127.0.0.1", str(free_port()))
    yield
    server.cli("REPLICAOF", "NO", "ONE")


def password(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """The password of the cache is no longer valid."""
    server.cli("CONFIG", "SET", "requirepass", "secret")
    proxy.cut()
    yield
    server.redis_cli("-a", "secret", "--no-auth-warning", "CONFIG", "SET", "requirepass", "")


def crowded(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """maxclients is reached."""
    proxy.cut()
    with redis.Redis(port=server.port) as admin:
        admin.config_set("maxclients", 1)  # it stays connected as the only client
        yield
        admin.config_set("maxclients", 1000)


troubles = pytest.mark.parametrize("trouble", [full, replica, password, crowded])
Trouble = Callable[[RedisServer, Proxy], Iterator[None]]


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed in trouble is kept until the trouble ends."""
    for name in ("REFUGE_TTL", "BRIEFLY"):
        monkeypatch.setattr(f"stampede.outages.outage.{name}", LONG)


@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("when", ["at start", "in use"])
@troubles
def test_a_server_that_refuses_is_no_outage(
    own: RedisServer, before: Before, face: Faces, trouble: Trouble, when: str, colour: str
) -> None:
    """Promise 7: if the server refuses, a key is computed once, changes raise, and the cache recovers by itself."""
    proxy, warm, origin = before(own), Number(), Number(0.02)
    asked = face(proxy.url, colour, local=True) if when == "in use" else None
    if asked is not None:
        assert [asked("warm", warm) for _ in range(3)] == [1, 1, 1]
    course = trouble(own, proxy)
    next(course)
    try:
        if asked is None:
            asked = face(proxy.url, colour, local=True)
        assert asked.herd(8, "k", origin) == [1] * 8
        assert [asked("k", origin) for _ in range(3)] == [1] * 3
        assert origin.calls == 1
        assert asked.count(events.EngineDown) == 1
        for change in ["clear"], ["set", "other", 1], ["expire", "k"], ["invalidate", "k"]:
            if trouble is full and change[0] in ("clear", "expire", "invalidate"):  # these changes need no memory
                asked.run(*change)
            else:
                with pytest.raises(EngineError):
                    asked.run(*change)
        assert asked("k", origin) == 2  # the value is gone here, in any case
        with pytest.raises(EngineError):
            asked.lock("l")
    finally:
        for _ in course:
            pass
    if trouble is not full:  # a full server answered all the time
        until(lambda: asked("other", Number()) and asked.count(events.EngineUp))
    time.sleep(0.05)  # as long as a generation is trusted: the server may have lost it
    asked.invalidate("k")
    assert asked("k", lambda: "stored") == "stored"
    assert asked.lock("l")
    assert face(own.url)("k", never) == "stored"


@pytest.mark.usefixtures("lasting")
@troubles
def test_what_was_computed_in_trouble_holds_for_a_while(
    own: RedisServer, before: Before, face: Faces, trouble: Trouble, colour: str
) -> None:
    """Promise 7: while the trouble lasts, a computed value is kept. A good answer in between is not a recovery."""
    proxy, pause = before(own), 0.05
    asked = face(proxy.url, colour, pause=pause)
    there = [Number() for _ in range(3)]
    for number, origin in enumerate(there):
        asked(f"there {number}", origin)
    missing = [Number() for _ in range(3)]
    course = trouble(own, proxy)
    next(course)
    try:
        end = time.monotonic() + 6 * pause
        while time.monotonic() < end:
            for number in range(3):
                assert asked.herd(3, f"there {number}", there[number]) == [there[number].calls] * 3
                assert asked.herd(3, f"missing {number}", missing[number]) == [1] * 3
            time.sleep(pause / 10)  # callers, but no load
    finally:
        for _ in course:
            pass
    assert [origin.calls for origin in missing] == [1] * 3
    # A full server still serves its values; the others don't answer, or can't be trusted.
    assert [origin.calls for origin in there] == [1 if trouble is full else 2] * 3
    assert (asked.count(events.EngineDown), asked.count(events.EngineUp)) == (1, 0)


@pytest.mark.parametrize("refusal", ["maxclients", "requirepass"])
def test_a_server_that_takes_no_new_connections(own: RedisServer, face: Faces, refusal: str, colour: str) -> None:
    """If the server accepts no new connections, callers use the existing ones, and it does not count as down."""
    asked = face(own.url, colour)
    asked("warm", Number())
    clients = int(own.cli("INFO", "clients").split("connected_clients:")[1].split()[0])
    own.cli("CONFIG", "SET", *([refusal, str(clients - 1)] if refusal == "maxclients" else [refusal, "secret"]))
    for _ in range(5):
        keys = [new_id().hex() for _ in range(6)]
        origins = [Number() for _ in keys]
        if colour == "sync":
            pairs = zip(keys, origins, strict=True)
            calls = [lambda key=key, origin=origin: asked(key, origin) for key, origin in pairs]
            assert Herd(*calls).join() == [1] * 6
        assert asked.herd(4, keys[0], origins[0]) == [1] * 4
        assert max(origin.calls for origin in origins) == 1
    assert asked.count(events.EngineDown) == 0


def test_a_password_that_changes(own: RedisServer, face: Faces, colour: str) -> None:
    """If the password becomes wrong, the error says so and shows none. The cache works again once it is right."""
    own.cli("CONFIG", "SET", "requirepass", "first")
    asked = face(own.url.replace("redis://", "redis://:first@"), colour)
    assert asked("k", Number()) == 1
    admin = redis.Redis(port=own.port, password="first")
    with admin:
        admin.config_set("requirepass", "second")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        until(lambda: asked(new_id().hex(), Number()) and asked.count(events.EngineDown))
        (down,) = [event for event in asked.told if isinstance(event, events.EngineDown)]
        assert "invalid username-password" in str(down.error)
        assert "second" not in str(down.error)
        assert "first" not in str(down.error)
        admin.config_set("requirepass", "first")
    until(lambda: asked("other", Number()) and asked.count(events.EngineUp))
    assert asked("k", never) == 1


def test_before_the_first_news(
    server: RedisServer, before: Before, face: Faces, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first notification can arrive, the local tier keeps nothing, and waiters look by themselves."""
    monkeypatch.setattr("stampede.engines.redis.verbs.SAFETY", LONG)  # they must not rely on messages
    proxy, gate, origin = before(server), threading.Event(), Origin()
    proxy.at(b"HELLO", before=lambda: gate.wait(LONG), times=1000)  # only the feed's connection sends that
    other, asked = face(server.url), face(proxy.url, colour, local=True)
    try:
        assert asked("k", lambda: 1) == 1
        other.cache.set("k", 2)
        assert asked("k", never) == 2
        other.invalidate("k")
        assert asked("k", lambda: 3) == 3
        other.cache.clear()
        time.sleep(0.05)  # as long as a generation is trusted
        assert asked("k", lambda: 4) == 4
        holding = Herd(lambda: other("l", origin))
        origin.has_begun()
        waiting = Herd(lambda: asked.herd(4, "l", never))
        threading.Timer(0.25, origin.let_on).start()  # after the first look
        assert waiting.join() + holding.join() == [[1] * 4, 1]
        assert asked.cache.stats().hits == 0
    finally:
        gate.set()
    until(lambda: asked("k", never) == 4 and asked.cache.stats().hits > 0)
    other.cache.set("k", 5)
    until(lambda: asked("k", never) == 5)


# -- how long, and how often ----------------------------------------------------------------------------------------


def swallows(proxy: Proxy) -> None:
    """No reply arrives."""
    proxy.hold()


def dawdles(proxy: Proxy) -> None:
    """Each reply arrives after its question was given up."""
    proxy.delay = 2 * BRIEF


@pytest.mark.parametrize("trouble", [swallows, dawdles])
def test_a_dead_engine_is_hardly_asked(
    own: RedisServer, before: Before, face: Faces, trouble: Callable[[Proxy], None], colour: str
) -> None:
    """Promise 7: a dead engine is asked only now and then. Otherwise each call would wait for it."""
    proxy = before(own)
    asked = face(proxy.url, colour, pause=LONG, timeout=BRIEF)
    asked("warm", Number())
    trouble(proxy)
    asked("k", Number())
    knocks = proxy.accepted
    for _ in range(50):
        asked(new_id().hex(), Number())
    assert proxy.accepted - knocks <= 3  # each call that asks makes a connection: the last one was given up


@pytest.mark.usefixtures("default_timeouts")
def test_by_default_a_hung_engine_costs_a_second(own: RedisServer, request: pytest.FixtureRequest) -> None:
    """By default, a call waits about a second for a hung engine. The client library would wait for ever."""
    near, far = (Cache(own.url, early=0) for _ in range(2))  # each finds out by itself
    for cache in (near, far):
        request.addfinalizer(cache.close)

    def sync(key: str) -> float:
        start = time.monotonic()
        assert near.get_or_compute(key, lambda: 1) == 1
        return time.monotonic() - start

    def suspending(key: str) -> float:
        start = time.monotonic()
        assert asyncio.run(far.aget_or_compute(key, lambda: 1)) == 1
        return time.monotonic() - start

    until(lambda: sync(new_id().hex()) and suspending(new_id().hex()) and not near.down and not far.down)
    own.freeze()
    try:
        seconds = Herd(lambda: sync("k"), lambda: suspending("k")).join()
    finally:
        own.thaw()
    assert all(0.4 < each < 10 for each in seconds)


def test_without_channel_rights(own: RedisServer, face: Faces, colour: str) -> None:
    """If a user may not publish, values are still stored, and waiters do not sleep until the lease ends."""
    own.cli("ACL", "SETUSER", "app", "on", ">secret", "~*", "resetchannels", "+@all")
    url, origin = f"redis://app:secret@127.0.0.1:{own.port}/0", Origin()
    holder, waiter = face(url), face(url, colour, local=True)
    holding = Herd(lambda: holder("k", origin))
    origin.has_begun()
    waiting = Herd(lambda: waiter.herd(4, "k", never))
    threading.Timer(0.1, origin.let_on).start()
    assert waiting.join() == [[1] * 4]
    assert holding.join() == [1]
    holder.invalidate("k")
    until(lambda: waiter("k", lambda: 2) == 2)
    assert not waiter.count(events.EngineDown)
    assert own.cli("KEYS", "{*}l") == ""


# -- notifications and the local tier ---------------------------------------------------------------------------------

SCRIPTS = Scripts()


def test_connections_that_break_under_a_herd(
    server: RedisServer, before: Before, face: Faces, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If connections break at any step of a wait, the waiters still get the value and do not compute."""
    for often in ("kit.feed.AGAIN", "redis.verbs.LOOK", "redis.verbs.SAFETY"):
        monkeypatch.setattr(f"stampede.engines.{often}", 0.02)
    proxy, origin, claim = before(server), Origin(), SCRIPTS.claim.hash
    holder, waiter = face(server.url), face(proxy.url, colour)
    holding = Herd(lambda: holder("k", origin))
    origin.has_begun()
    waiter("warm", Number())

    def at(step: bytes, when: str, act: Callable[[], object] = int) -> None:
        happened = threading.Event()
        proxy.at(step, **{when: lambda: (act(), happened.set())})  # type: ignore[arg-type]
        assert happened.wait(PATIENCE)

    proxy.at(b"SUBSCRIBE", sent=0, times=2)
    proxy.at(b"SUBSCRIBE", answered=0, times=2)
    waiting = Herd(lambda: waiter.herd(4, "k", never))
    for when, step in product(("before", "after"), (claim, b"GETEX")):
        for _ in range(2):  # a question that is cut twice may be given up: wait for a new one
            at(claim, "before")
        at(step, when, proxy.cut)
    until(lambda: proxy.met == 4 + 4 * 3)
    origin.let_on()
    assert waiting.join() + holding.join() == [[1] * 4, 1]


@pytest.mark.parametrize("trouble", ["down", "hung"])
def test_server_and_origin_both_down(
    own: RedisServer, face: Faces, trouble: str, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If server and origin are both down, the local tier serves values that were valid when the server went away, even
    a second after its last connection has ended."""
    monkeypatch.setattr("stampede.engines.kit.stamps.SOON", 0.05)
    asked = face(own.url, colour, timeout=0.5, local=True, ttl=600, stale=600)

    def kept() -> bool:
        hits = asked.cache.stats().hits
        return asked("k", lambda: "kept") == "kept" and asked.cache.stats().hits > hits

    def failing() -> str:
        raise OSError("the origin is down")

    until(kept)
    stamps = asked.cache._core.engine._servers.news.stamps
    until(lambda: time.monotonic() > stamps.heard + 0.3)  # the notification of its own fill may still arrive
    until(kept)
    own.stop() if trouble == "down" else own.freeze()
    until(lambda: stamps._lost, bound=20)
    for _ in range(3):
        ended = time.monotonic()
        until(lambda ended=ended: time.monotonic() > ended + 0.1)  # longer than connections take to end together
        assert asked("k", failing) == "kept"
    asked.cache.close()


def test_an_idle_reader_that_was_cut_keeps_nothing(server: RedisServer, face: Faces) -> None:
    """If an idle reader is cut, the local tier keeps none of its values: the server no longer notifies changes."""
    asked, other = face(server.url, local=True), face(server.url)

    def kept() -> bool:
        hits = asked.cache.stats().hits
        return asked("k", lambda: "old") == "old" and asked.cache.stats().hits > hits

    until(kept)
    for line in server.cli("CLIENT", "LIST").splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        if "t" in fields["flags"]:  # the server tracks its reads
            server.cli("CLIENT", "KILL", "ID", fields["id"])
    other.cache.set("k", "new")
    until(lambda: asked("k", never) == "new")


def test_what_a_closed_connection_had_read_is_not_believed(
    own: RedisServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a connection was closed here, values read over it are not served when server and origin are down: they may
    have been invalidated since. A loop that ends closes its connection, and so does an interrupted call."""

    def fails() -> Any:
        raise OSError("the origin is down")

    async def suspending() -> Any:
        fails()

    def interrupted(wire: Any) -> Any:
        raise KeyboardInterrupt

    with Cache(own.url, local=True, ttl=60, stale=600) as ours, Cache(own.url, ttl=60) as theirs:

        async def read() -> None:
            while ours._root.hit("k") is None:
                await ours.aget_or_compute("k", suspending)

        theirs.set("k", "old")
        if colour == "async":
            asyncio.run(read())
        else:
            until(lambda: ours.get_or_compute("k", fails) and ours._root.hit("k") is not None)
            with monkeypatch.context() as patch:
                patch.setattr("stampede.engines.redis.blocking._Wire.received", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ours.get_or_compute("another", fails)
        theirs.invalidate("k")
        own.stop()
        with pytest.raises(OSError, match="origin is down"):
            ours.get_or_compute("k", fails)


@pytest.mark.usefixtures("steady")
def test_what_was_true_when_the_server_went_away(face: Callable[..., Face], colour: str) -> None:
    """If server and origin are both down, `stale` values are served, if they were valid when the server went away."""

    def fails() -> Any:
        raise OSError("the origin is down")

    server = RedisServer()
    try:
        ours = face(server.url, colour, local=True, ttl=60, stale=600)
        theirs = face(server.url, "sync", ttl=60, stale=600)
        for key in ("kept", "changed", "ours"):
            theirs.cache.set(key, "old")  # stored by another cache: a notification of our own fill could come late
            until(lambda key=key: ours(key, fails) and ours.cache._root.hit(key) is not None)
        for key in ("computed", "computed, then changed"):
            ours(key, lambda: "old")
            until(lambda key=key: ours.cache._root.hit(key) is not None)  # without another question to the server
        for key in ("changed", "computed, then changed"):
            theirs.cache.invalidate(key)
            until(lambda key=key: ours.cache._root.hit(key) is None)
        server.stop()
        until(lambda: ours.cache._root.hit("kept") is None)
        with pytest.raises(EngineError):
            ours.run("invalidate", "ours")
        scope, local_tier = ours.cache._root, ours.cache._core.local_tier
        until(
            lambda: local_tier.kept(scope.prefix + "kept") is not None
        )  # the end of one connection does not mean the end of the server
        for _ in range(2):
            assert ours("kept", fails) == ours("computed", fails) == "old"
            for key in ("changed", "ours", "computed, then changed"):
                with pytest.raises(OSError, match="origin is down"):
                    ours(key, fails)
        with pytest.raises((OSError, ComputationFailed), match="origin is down"):  # the key may still rest
            ours("kept", fails, stale=0)
    finally:
        server.close()


def test_a_server_that_was_shut_down_is_said_to_have_closed_the_connection(
    own: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """If a server was shut down, the log speaks of closed connections, not of a fault of the protocol."""
    with Cache(own.url) as cache:
        gate = threading.Barrier(4)
        Herd(*[lambda n=n: cache.get_or_compute(f"k{n}", gate.wait) for n in range(4)]).join()  # four connections
        own.stop()
        assert cache.get_or_compute("x", lambda: 1) == 1
    (told,) = [record.getMessage() for record in caplog.records if " is down" in record.getMessage()]
    assert "OutOfStep" not in told
