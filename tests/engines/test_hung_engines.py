"""An engine that hangs costs each waiting caller at most one time-out. Calls still work, and later use it again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
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

from stampede import Bulkhead, Cache, EngineError, Lock, LockTimeout, try_lock
from stampede.engines.kit import hang_detector
from stampede.testing import FakeClock

Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached", "postgres"])
TIMEOUT = 1.0
"""Seconds that an engine may take for a reply. A lock sends it two requests, on two connections."""

HUNG = 2.4
"""The same, where several callers have to ask before this time is over for the first one."""

MUCH = 20.0
"""Seconds of a lease: a test notices a wait for this long."""


def url_of(engine: str, port: int, timeout: float = TIMEOUT) -> str:
    return {
        "redis": f"redis://127.0.0.1:{port}?socket_timeout={timeout}",
        "memcached": f"memcached://127.0.0.1:{port}?timeout={timeout}&connect_timeout=0.5",
        "postgres": f"postgres://root@127.0.0.1:{port}/postgres?sslmode=disable&timeout={timeout}",
    }[engine]


def server_of(engine: str) -> Any:
    if engine == "postgres":
        return prepared_postgres()
    if engine == "redis":
        shared_redis().cli("FLUSHALL")
        return shared_redis()
    shared_memcached().empty()
    return shared_memcached()


class World:
    """A server behind a proxy that can stop everything, and a cache on it with callers of one colour."""

    def __init__(self, engine: str, colour: str, before: Before, timeout: float) -> None:
        self.proxy = before(server_of(engine))
        self.cache = Cache(url_of(engine, self.proxy.port, timeout))
        self.direct = Cache(url_of(engine, self.proxy.target))
        self.colour = colour

    def ask(self, count: int, key: Callable[[int], str], lease: float = MUCH) -> list[Any]:
        """What this many callers get that call at the same time."""
        if self.colour == "sync":
            return Herd(
                *[lambda n=n: self.cache.get_or_compute(key(n), lambda: n, lease=lease) for n in range(count)]
            ).join()

        async def computed(n: int) -> int:
            return n

        async def all_of_them() -> list[int]:
            asked = [self.cache.aget_or_compute(key(n), lambda n=n: computed(n), lease=lease) for n in range(count)]
            return await asyncio.gather(*asked)

        return asyncio.run(all_of_them())

    def acquire(self, lock: Lock) -> Any:
        return lock.acquire() if self.colour == "sync" else asyncio.run(lock.aacquire())

    def close(self) -> None:
        self.proxy.heal()
        self.cache.close()
        self.direct.close()


Worlds = Callable[..., World]


@pytest.fixture
def world(request: pytest.FixtureRequest, before: Before) -> Worlds:
    def made(engine: str, colour: str, timeout: float = TIMEOUT) -> World:
        world = World(engine, colour, before, timeout)
        request.addfinalizer(world.close)
        return world

    return made


def took(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


@pytest.mark.alone
@both
@engines
def test_calls_go_on_for_one_time_out(world: Worlds, engine: str, colour: str) -> None:
    """While the engine hangs, callers wait for one time-out in all. Requests of a web server do not pile up."""
    its = world(engine, colour)
    assert its.ask(8, lambda n: f"warm {n}") == list(range(8))
    its.proxy.hold()
    assert took(lambda: its.ask(8, lambda n: f"first {n}")) < 3 * TIMEOUT
    assert its.cache.stats().engine_downs == 1
    # From now on no call waits, except one each second.
    slow = [each for n in range(20) if (each := took(lambda n=n: its.ask(1, lambda _: f"next {n}"))) > TIMEOUT / 2]
    assert len(slow) <= 5


@engines
def test_it_is_used_again_soon(world: Worlds, engine: str, colour: str) -> None:
    """Once the engine works again, it is soon used again. No key remains locked by a lease that has no holder."""
    its = world(engine, colour)
    its.ask(1, lambda _: "warm")
    its.proxy.hold()
    its.ask(3, lambda n: f"k{n}", lease=1.0)
    its.proxy.let_go()
    with its.direct:
        its.direct.set("of another", 7)

        def asks() -> bool:
            its.ask(1, lambda _: "poke")
            return its.cache.get("of another") == 7 and its.cache.stats().engine_down_seconds > 0

        until(asks, 10.0)
        # When the engine resumed, it may have granted the earlier claims. The cache tried once to give them back.
        # A lease that is still valid ends by itself.
        for n in range(3):
            assert took(lambda n=n: its.direct.get_or_compute(f"k{n}", lambda: n)) < MUCH / 4


@both
@engines
def test_a_lock_whose_engine_hangs_is_an_error_soon(world: Worlds, engine: str, colour: str) -> None:
    """If the engine hangs, taking a lock soon raises an error that names the lock and the server."""
    its = world(engine, colour)
    # Each test has its own name: a lock that the server grants when it resumes may remain until its lease ends.
    lock = Lock(f"l {colour}", on=its.cache, wait=0.2, lease=MUCH)
    with lock:
        pass
    its.proxy.hold()

    def refused() -> None:
        with pytest.raises(EngineError, match=r"the lock 'l \w+' can't be taken.*127\.0\.0\.1"):
            its.acquire(lock)

    assert took(lambda: Herd(*[refused] * (4 if colour == "sync" else 1)).join()) < 8 * TIMEOUT
    its.proxy.let_go()


@engines
def test_who_waits_in_vain_is_told_so_and_not_that_it_hangs(world: Worlds, engine: str, colour: str) -> None:
    """If another process has the lock and the server works, a waiter gets a timeout, not an error of the engine."""
    its = world(engine, colour)
    held = Lock("l", on=its.direct, lease=MUCH)
    assert held.acquire()
    assert not its.acquire(Lock("l", on=its.cache, wait=0.2))
    with pytest.raises(LockTimeout):
        Lock("l", on=its.cache, wait=0).__enter__()
    held.release()
    with try_lock("l", on=its.direct) as lock:  # the lock is free, and reserved for no process
        assert lock


@engines
def test_a_server_that_is_slow_is_no_server_that_hangs(world: Worlds, engine: str, colour: str) -> None:
    """A server that replies slowly is not treated as hanging. Otherwise, a server far away could not be used."""
    its = world(engine, colour, 4 * TIMEOUT)
    its.proxy.delay = TIMEOUT / 5
    assert its.ask(2, lambda n: f"k{n}") == [0, 1]
    assert its.direct.get("k1") == 1
    lock = Lock("l", on=its.cache, wait=0, lease=MUCH)
    assert its.acquire(lock)
    lock.release()
    with Bulkhead("b", concurrency=2, on=its.cache, wait=5):
        pass


EXITS = """
import sys, threading
import stampede.leases.keeper
from stampede import Cache, Lock
stampede.leases.keeper.AT_EXIT = float(sys.argv[2])
cache = Cache(sys.argv[1])
held = [Lock(str(n), on=cache, lease=20) for n in range(5)]
assert all(lock.acquire() for lock in held)
begun = threading.Event()
threading.Thread(target=cache.get_or_compute, args=("k", lambda: begun.set() or threading.Event().wait()),
    daemon=True).start()
begun.wait()
print("held", flush=True)
sys.stdin.readline()
"""


@engines
@pytest.mark.parametrize("hangs", [False, True])
def test_the_end_of_a_program(world: Worlds, engine: str, hangs: bool) -> None:
    """A program ends soon even if its engine hangs. If the server works, all locks and leases are given back."""
    its = world(engine, "sync")
    words = (
        url_of(engine, its.proxy.port, 2 * TIMEOUT if hangs else MUCH),
        "0.5" if hangs else "20",
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", EXITS, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "held\n"
        if hangs:
            its.proxy.hold()
        assert took(lambda: program.communicate("\n", timeout=30)) < 15
    assert program.returncode == 0
    if not hangs:
        for name in map(str, range(5)):
            with try_lock(name, on=its.direct) as lock:
                assert lock
        assert its.direct.get_or_compute("k", lambda: 1, wait=MUCH / 4) == 1


# -- the first caller whose time-out ends tells all waiters ------------------------------------------------------------


@pytest.fixture
def cached(request: pytest.FixtureRequest, before: Before) -> Callable[..., tuple[Cache, Proxy]]:
    """A cache behind a proxy that can stop everything. The caller gets the cache and the proxy."""

    def made(engine: str, hung: float = TIMEOUT) -> tuple[Cache, Proxy]:
        proxy = before(server_of(engine))
        cache = Cache(url_of(engine, proxy.port, hung))
        request.addfinalizer(cache.close)
        request.addfinalizer(proxy.heal)
        return cache, proxy

    return made


Cached = Callable[..., tuple[Cache, Proxy]]


class Asker:
    """A thread or an event loop that has already used the cache. `sets` returns an error's text, or ""."""

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


def in_vain(proxy: Proxy, asker: Asker) -> Herd:
    """Return a caller that waits for a reply that does not come, and has waited for a part of its time-out."""
    proxy.hold()
    before = proxy.heard
    herd = Herd(lambda: asker.sets("first"))
    until(lambda: proxy.heard > before)
    time.sleep(HUNG / 3)
    return herd


@engines
def test_both_colours_are_told(cached: Cached, asker: Askers, engine: str) -> None:
    """The first caller whose time-out ends wakes the waiters in threads and in event loops. Otherwise, each would wait
    for its own."""
    cache, proxy = cached(engine, HUNG)
    thread, loop = asker(cache, "sync"), asker(cache, "async")
    for first, second in (thread, loop), (loop, thread):
        until(lambda: thread.sets("k") == loop.sets("k") == "")
        herd = in_vain(proxy, first)
        assert hang_detector.NOT_TO_OTHERS in second.sets("k")
        assert hang_detector.NOT_TO_OTHERS not in herd.join()[0]
        proxy.let_go()


def test_an_event_loop_that_connects_is_told(cached: Cached, asker: Askers) -> None:
    """An event loop that is just connecting is told that the server hangs, although it has not yet sent a request."""
    cache, proxy = cached("redis", HUNG)
    herd = in_vain(proxy, asker(cache, "sync"))
    with pytest.raises(EngineError, match=hang_detector.NOT_TO_OTHERS):
        asyncio.run(cache.aset("k", 1))
    assert hang_detector.NOT_TO_OTHERS not in herd.join()[0]


@engines
def test_a_connection_that_is_dead_ends_no_others(cached: Cached, asker: Askers, engine: str, colour: str) -> None:
    """A lost reply on one connection ends no other request if the server still replies to others, even slowly."""
    cache, proxy = cached(engine, HUNG)
    its, other = asker(cache, colour), asker(cache, colour)
    proxy.delay = 0.15
    proxy.at(b"mute", answered=0, silent=True)
    dead = Herd(lambda: other.sets("mute"))
    until(lambda: proxy.met)
    while dead.waiting:
        assert its.sets("k") == ""
    assert dead.join() != [""]


@engines
def test_a_large_value_on_its_way_is_life(cached: Cached, asker: Askers, engine: str, colour: str) -> None:
    """A large value that arrives slowly is read as long as its bytes keep coming, also if another reply is lost."""
    cache, proxy = cached(engine, HUNG)
    value, asked = b"x" * 600_000, threading.Event()
    with Cache(url_of(engine, proxy.target)) as direct:
        direct.set("large", value)
        needle = b"large"
        if engine == "postgres":  # only the id that is made of the key is sent there
            ((needle,),) = shared_postgres().ask("SELECT id FROM stampede.entries")
    its, other = asker(cache, colour), asker(cache, colour)
    proxy.rate = len(value) / (2 * HUNG)
    proxy.at(needle, before=asked.set)
    proxy.at(b"mute", answered=0, silent=True)
    reads = Herd(lambda: its.gets("large"))
    assert asked.wait(10)
    assert other.sets("mute") != ""
    assert reads.join() == [value]


def test_who_is_told_that_a_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits older than `YOUNG` are told that a server hangs, unless the server has replied since."""
    clock, told = FakeClock(), []
    monkeypatch.setattr(hang_detector, "time", SimpleNamespace(monotonic=clock))  # of this module alone
    monkeypatch.setattr(hang_detector, "watch", SimpleNamespace(add=lambda watched, moment: None))
    its = hang_detector.HangDetector()
    its.waiters = told.append
    begun = clock()
    clock.advance(0.5)
    later = clock()
    its.ends(begun, 1.0)  # too soon: this is ignored
    clock.advance(0.5)
    its.ends(begun, None)  # a wait without a time-out
    its.heard = begun
    its.ends(begun, 1.0)
    assert not told
    assert not its.hangs(begun)
    its.heard = begun - 1
    young = clock() - hang_detector.YOUNG / 2
    its.ends(begun, 1.0)
    assert told.pop() == clock() - hang_detector.YOUNG
    assert its.hangs(later)
    assert not its.hangs(young)
    clock.advance(hang_detector.YOUNG)
    its.look(clock())
    assert young < told.pop() <= its.found
    assert its.hangs(young)
    assert not its.hangs(clock())  # a caller that has begun since may be the first to find that the server works
    its.heard = clock()
    its.look(clock())
    assert not told
    assert not its.hangs(later)
