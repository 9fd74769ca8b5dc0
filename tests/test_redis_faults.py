"""Promise 7 on Redis, through the public face: whatever becomes of the server, calls go on, and come back to it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("redis")

import redis
from herd import Herd, Origin, until
from proxy import Proxy
from servers import RedisServer, free_port, shared_redis

from stampede import Cache, EngineError, WaitTimeout, events
from stampede.colour import run_blocking
from stampede.engines.redis import RedisEngine, wire
from stampede.engines.redis.scripts import Scripts
from stampede.entry import Entry, new_id
from stampede.ports import Ask, Busy, Found, Granted

BRIEF = 0.2
"""Seconds that a reply may take here, and between two questions to a dead server: where that is not what is tested."""

LONG = 60.0

both = pytest.mark.parametrize("colour", ["sync", "async"])


class Face:
    """One cache, asked in one colour: by threads, or by tasks of one event loop."""

    def __init__(self, url: str, colour: str = "sync", *, pause: float = BRIEF, timeout: float = BRIEF, **options: Any):
        self.told: list[events.Event] = []
        query = f"?socket_timeout={timeout}&socket_connect_timeout={timeout}"
        options = {"early": 0, "lease": LONG, **options}
        self.cache = Cache(url + query, observers=[self.told.append], **options)
        outage = self.cache._core.outage
        assert outage is not None
        outage._breaker.pause = pause
        self._runner = asyncio.Runner() if colour == "async" else None

    def __call__(self, key: str, origin: Callable[[], Any], **terms: Any) -> Any:
        if self._runner is None:
            return self.cache.get_or_compute(key, origin, **terms)
        return self._runner.run(self.cache.aget_or_compute(key, origin, **terms))

    def herd(self, count: int, key: str, origin: Callable[[], Any], **terms: Any) -> list[Any]:
        """What so many callers at once are given."""
        if self._runner is None:
            return Herd(*[lambda: self.cache.get_or_compute(key, origin, **terms)] * count).join()

        async def suspending() -> Any:
            return await asyncio.to_thread(origin)

        async def all_of_them() -> list[Any]:
            calls = [self.cache.aget_or_compute(key, suspending, **terms) for _ in range(count)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

        return self._runner.run(all_of_them())

    def invalidate(self, key: str) -> None:
        if self._runner is None:
            self.cache.invalidate(key)
        else:
            self._runner.run(self.cache.ainvalidate(key))

    def lock(self, name: str) -> bool:
        lock = self.cache.lock(name)
        return lock.acquire(0) if self._runner is None else self._runner.run(lock.aacquire(0))

    def count(self, kind: type[events.Event]) -> int:
        return sum(isinstance(event, kind) for event in self.told)

    def close(self) -> None:
        self.cache.close()
        if self._runner is not None:
            self._runner.close()


class Number:
    """An origin that takes a moment, and answers with the number of its call."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls = 0
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.calls += 1
            number = self.calls
        time.sleep(self._seconds)
        return number


def never() -> Any:
    raise AssertionError("a second computation")


@pytest.fixture
def server() -> RedisServer:
    """The session's server, emptied."""
    shared = shared_redis()
    shared.cli("FLUSHALL")
    return shared


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server that the test may do anything to."""
    mine = RedisServer()
    yield mine
    mine.close()


@pytest.fixture
def face(request: pytest.FixtureRequest) -> Callable[..., Face]:
    """Faces that are closed at the end."""

    def made(*args: Any, **options: Any) -> Face:
        face = Face(*args, **options)
        request.addfinalizer(face.close)
        return face

    return made


@pytest.fixture
def before(request: pytest.FixtureRequest) -> Callable[[RedisServer], Proxy]:
    """A proxy before a server."""

    def made(server: RedisServer) -> Proxy:
        proxy = Proxy(server.port)
        request.addfinalizer(proxy.close)
        return proxy

    return made


Faces = Callable[..., Face]
Before = Callable[[RedisServer], Proxy]


# -- troubles: each begins, and ends --------------------------------------------------------------------------------


def down(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """Killed, and started again: empty, and without its scripts."""
    server.stop()
    yield
    server.start()


def hung(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """The kernel accepts, and the server never answers."""
    server.freeze()
    yield
    server.thaw()


def blackholed(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """A network that swallows."""
    proxy.hold()
    yield
    proxy.cut()
    proxy.let_go()


def full(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """maxmemory is reached, and nothing may be evicted."""
    server.cli("CONFIG", "SET", "maxmemory", "1kb")
    yield
    server.cli("CONFIG", "SET", "maxmemory", "0")


def replica(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """After a failover, what was the master refuses writes."""
    server.cli("REPLICAOF", "127.0.0.1", str(free_port()))
    yield
    server.cli("REPLICAOF", "NO", "ONE")


def password(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """Ours is wrong by now."""
    server.cli("CONFIG", "SET", "requirepass", "secret")
    proxy.cut()
    yield
    server.cli("-a", "secret", "--no-auth-warning", "CONFIG", "SET", "requirepass", "")


def crowded(server: RedisServer, proxy: Proxy) -> Iterator[None]:
    """maxclients is reached."""
    proxy.cut()
    with redis.Redis(port=server.port) as admin:
        admin.config_set("maxclients", 1)  # it stays connected, and is the one
        yield
        admin.config_set("maxclients", 1000)


troubles = pytest.mark.parametrize("trouble", [down, hung, blackholed, full, replica, password, crowded])
Trouble = Callable[[RedisServer, Proxy], Iterator[None]]


@both
@pytest.mark.parametrize("when", ["at start", "in use"])
@troubles
def test_an_engine_in_trouble_is_no_outage(
    own: RedisServer, before: Before, face: Faces, trouble: Trouble, when: str, colour: str
) -> None:
    """Promise 7: calls would fail, hang or all compute; a change would seem to be done; recovery would need a hand."""
    proxy, warm, origin = before(own), Number(), Number(0.02)
    asked = face(proxy.url, colour, local=True) if when == "in use" else None
    if asked is not None:
        assert [asked("warm", warm) for _ in range(3)] == [1, 1, 1]
    course = trouble(own, proxy)
    next(course)
    try:
        start = time.monotonic()
        if asked is None:
            asked = face(proxy.url, colour, local=True)
        assert asked.herd(8, "k", origin) == [1] * 8
        assert [asked("k", origin) for _ in range(3)] == [1] * 3
        assert time.monotonic() - start < 20 * BRIEF
        assert origin.calls == 1
        assert asked.count(events.EngineDown) == 1
        if trouble is not full:  # where what frees memory is done
            with pytest.raises(EngineError):
                asked.invalidate("k")
            assert asked("k", origin) == 2  # and yet it is gone here
        with pytest.raises(EngineError):
            asked.lock("l")
    finally:
        for _ in course:
            pass
    until(lambda: asked("other", Number()) and asked.count(events.EngineUp))
    time.sleep(0.05)  # the server may have lost the generation too, of which this is how long one may be believed
    asked.invalidate("k")
    assert asked("k", lambda: "stored") == "stored"
    assert asked.lock("l")
    assert face(own.url)("k", never) == "stored"
