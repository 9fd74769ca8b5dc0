"""A server that hangs is found out once, for all who wait; and one that is slow is no server that hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")

from herd import Herd, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres, shared_postgres
from proxy import Proxy
from servers import shared_redis

from stampede import Cache, EngineError
from stampede.engines.kit import vigil
from stampede.testing import FakeClock

pytestmark = pytest.mark.alone

Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached", "postgres"])
HUNG = 1.0
"""Seconds for which a reply is waited for."""


def url_of(engine: str, port: int, hung: float = HUNG) -> str:
    return {
        "redis": f"redis://127.0.0.1:{port}?socket_timeout={hung}",
        "memcached": f"memcached://127.0.0.1:{port}?timeout={hung}",
        "postgres": f"postgres://root@127.0.0.1:{port}/postgres?sslmode=disable&timeout={hung}",
    }[engine]


def server_of(engine: str) -> Any:
    if engine == "postgres":
        return prepared_postgres()
    if engine == "redis":
        shared_redis().cli("FLUSHALL")
        return shared_redis()
    shared_memcached().empty()
    return shared_memcached()


@pytest.fixture
def cached(request: pytest.FixtureRequest, before: Before) -> Callable[..., tuple[Cache, Proxy]]:
    """A cache before whose server everything can stop. Who asks is told of it."""

    def made(engine: str, hung: float = HUNG) -> tuple[Cache, Proxy]:
        proxy = before(server_of(engine))
        cache = Cache(url_of(engine, proxy.port, hung))
        request.addfinalizer(cache.close)
        request.addfinalizer(proxy.heal)
        return cache, proxy

    return made


Cached = Callable[..., tuple[Cache, Proxy]]


class Asker:
    """A thread, or an event loop, that has asked before; what goes wrong, if anything, is told."""

    def __init__(self, cache: Cache, colour: str) -> None:
        self._cache = cache
        self._runner = asyncio.Runner() if colour == "async" else None
        assert self.sets("warm") == ""

    def sets(self, key: str) -> str:
        try:
            if self._runner is None:
                self._cache.set(key, 1)
            else:
                self._runner.run(self._cache.aset(key, 1))
        except EngineError as error:
            return str(error)
        return ""

    def gets(self, key: str) -> Any:
        return self._cache.get(key) if self._runner is None else self._runner.run(self._cache.aget(key))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


Askers = Callable[[Cache, str], Asker]


@pytest.fixture
def asker(request: pytest.FixtureRequest) -> Askers:
    def made(cache: Cache, colour: str) -> Asker:
        asker = Asker(cache, colour)
        request.addfinalizer(asker.close)
        return asker

    return made


@both
@engines
def test_all_who_wait_are_let_go_with_the_first(cached: Cached, asker: Askers, engine: str, colour: str) -> None:
    """Each would find out for itself, and wait for a second of its own."""
    cache, proxy = cached(engine)
    askers = [asker(cache, colour) for _ in range(10)]
    proxy.hold()
    first = Herd(lambda: askers[0].sets("first"))
    time.sleep(2 * vigil.YOUNG)
    later = Herd(*[lambda n=n: askers[n].sets(f"k{n}") for n in range(1, 10)])
    assert vigil.NOT_TO_OTHERS not in first.join()[0]
    ended = time.monotonic()
    assert all(vigil.NOT_TO_OTHERS in said for said in later.join())
    assert time.monotonic() - ended < HUNG / 2
    proxy.let_go()
    until(lambda: askers[0].sets("k") == "")


@engines
def test_both_colours_are_told(cached: Cached, asker: Askers, engine: str) -> None:
    """A thread that waits is told by an event loop, and the other way round."""
    cache, proxy = cached(engine)
    thread, loop = asker(cache, "sync"), asker(cache, "async")
    for first, second in (thread, loop), (loop, thread):
        until(lambda: thread.sets("k") == loop.sets("k") == "")
        proxy.hold()
        herd = Herd(lambda first=first: first.sets("first"))
        time.sleep(2 * vigil.YOUNG)
        assert vigil.NOT_TO_OTHERS in second.sets("k")
        assert vigil.NOT_TO_OTHERS not in herd.join()[0]
        proxy.let_go()


def test_an_event_loop_that_connects_is_told(cached: Cached, asker: Askers) -> None:
    """It isn't asking yet, and would wait for as long as others have."""
    cache, proxy = cached("redis")
    thread = asker(cache, "sync")
    proxy.hold()
    herd = Herd(lambda: thread.sets("first"))
    time.sleep(2 * vigil.YOUNG)
    with pytest.raises(EngineError, match=vigil.NOT_TO_OTHERS):
        asyncio.run(cache.aset("k", 1))
    assert vigil.NOT_TO_OTHERS not in herd.join()[0]


@both
@engines
def test_a_connection_that_is_dead_ends_no_others(cached: Cached, asker: Askers, engine: str, colour: str) -> None:
    """A server that answers others, if slowly, is well: they would all have an error for one lost reply."""
    cache, proxy = cached(engine)
    its, other = asker(cache, colour), asker(cache, colour)
    proxy.delay = 0.15
    proxy.at(b"mute", answered=0, silent=True)
    dead = Herd(lambda: other.sets("mute"))
    until(lambda: proxy.met)
    while dead.waiting:
        assert its.sets("k") == ""
    assert dead.join() != [""]


@both
@engines
def test_a_large_value_on_its_way_is_life(cached: Cached, asker: Askers, engine: str, colour: str) -> None:
    """It would be cut off, whenever another's reply is lost meanwhile; and never come over a slow link."""
    cache, proxy = cached(engine, 0.4)
    value, asked = b"x" * 600_000, threading.Event()
    with Cache(url_of(engine, proxy.target)) as direct:
        direct.set("large", value)
        needle = b"large"
        if engine == "postgres":  # of which no more goes there than what is made of it
            ((needle,),) = shared_postgres().ask("SELECT id FROM stampede.entries")
    its, other = asker(cache, colour), asker(cache, colour)
    proxy.rate = 4e5  # so it takes one and a half seconds
    proxy.at(needle, before=asked.set)
    proxy.at(b"mute", answered=0, silent=True)
    reads = Herd(lambda: its.gets("large"))
    assert asked.wait(10)
    assert other.sets("mute") != ""
    assert reads.join() == [value]


def test_who_is_told_that_a_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who has only just asked; not before it is sure; and nobody, if it has spoken since."""
    clock, told = FakeClock(), []
    monkeypatch.setattr(vigil.time, "monotonic", clock)
    monkeypatch.setattr(vigil.watch, "add", lambda watched, moment: None)
    its = vigil.Vigil()
    its.waiters = told.append
    begun = clock()
    clock.advance(0.5)
    later = clock()
    its.ends(begun, 1.0)  # it refuses
    clock.advance(0.5)
    its.ends(begun, None)  # it may take as long as it likes
    its.heard = begun
    its.ends(begun, 1.0)
    assert not told
    assert not its.hangs(begun)
    its.heard = begun - 1
    young = clock() - vigil.YOUNG / 2
    its.ends(begun, 1.0)
    assert told.pop() == clock() - vigil.YOUNG
    assert its.hangs(later)
    assert not its.hangs(young)
    clock.advance(vigil.YOUNG)
    its.look(clock())
    assert young < told.pop() <= its.found
    assert its.hangs(young)
    assert not its.hangs(clock())  # who has begun since may be the first to find it well
    its.heard = clock()
    its.look(clock())
    assert not told
    assert not its.hangs(later)
