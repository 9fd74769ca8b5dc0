"""An engine that hangs costs each caller that waits at most one time-out, once; calls go on; then all is as before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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

from stampede import Bulkhead, Cache, EngineError, Lock, LockTimeout, try_lock
from stampede.engines.kit import hang_detector
from stampede.testing import FakeClock

pytestmark = pytest.mark.alone

Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached", "postgres"])
TIMEOUT = 1.0
"""Seconds that an engine may take for an answer; a lock has two questions of it, over two connections."""

MUCH = 20.0
"""Seconds of a lease: what hangs for so long is found."""


def url_of(engine: str, port: int, timeout: float = TIMEOUT) -> str:
    return {
        "redis": f"redis://127.0.0.1:{port}?socket_timeout={timeout}",
        "memcached": f"memcached://127.0.0.1:{port}?timeout={timeout}",
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
    """A server before which everything can stop, and a cache on it whose callers are of one colour."""

    def __init__(self, engine: str, colour: str, before: Before) -> None:
        self.proxy = before(server_of(engine))
        self.cache = Cache(url_of(engine, self.proxy.port))
        self.direct = Cache(url_of(engine, self.proxy.target))
        self.colour = colour

    def ask(self, count: int, key: Callable[[int], str], lease: float = MUCH) -> list[Any]:
        """What so many callers get who ask side by side."""
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


@pytest.fixture
def world(request: pytest.FixtureRequest, before: Before) -> Callable[[str, str], World]:
    def made(engine: str, colour: str) -> World:
        world = World(engine, colour, before)
        request.addfinalizer(world.close)
        return world

    return made


Worlds = Callable[[str, str], World]


def took(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


@both
@engines
def test_calls_go_on_for_one_time_out(world: Worlds, engine: str, colour: str) -> None:
    """Each of a web server's requests would wait, one after the other, for as long as the engine hangs."""
    its = world(engine, colour)
    assert its.ask(8, lambda n: f"warm {n}") == list(range(8))
    its.proxy.hold()
    assert took(lambda: its.ask(8, lambda n: f"first {n}")) < 3 * TIMEOUT
    assert its.cache.stats().engine_downs == 1
    # From now on nobody waits, but for one caller a second.
    slow = [each for n in range(20) if (each := took(lambda n=n: its.ask(1, lambda _: f"next {n}"))) > TIMEOUT / 2]
    assert len(slow) <= 2


@engines
def test_it_is_used_again_soon(world: Worlds, engine: str, colour: str) -> None:
    """A fleet would compute for itself long after its engine is back; or wait for leases that nobody holds."""
    its = world(engine, colour)
    its.ask(1, lambda _: "warm")
    its.proxy.hold()
    its.ask(3, lambda n: f"k{n}", lease=1.0)
    its.proxy.let_go()
    back = time.monotonic()
    with its.direct:
        its.direct.set("of another", 7)

        def asks() -> bool:
            its.ask(1, lambda _: "poke")
            return its.cache.get("of another") == 7 and its.cache.stats().engine_down_seconds > 0

        until(asks)
        assert time.monotonic() - back < 4
        # The engine may have granted the earlier claims when it went on. One attempt was made to give each back; what
        # is still valid ends by itself.
        for n in range(3):
            assert took(lambda n=n: its.direct.get_or_compute(f"k{n}", lambda: n)) < MUCH / 4


@both
@engines
def test_a_lock_whose_engine_hangs_is_an_error_soon(world: Worlds, engine: str, colour: str) -> None:
    """`with Lock` would keep its caller for as long as its server is frozen, and not say which server that is."""
    its = world(engine, colour)
    # A name for each test: what the server grants when it goes on may stand until its lease ends.
    lock = Lock(f"l {colour}", on=its.cache, wait=0.2, lease=MUCH)
    with lock:
        pass
    its.proxy.hold()

    def refused() -> None:
        with pytest.raises(EngineError, match=r"the lock 'l \w+' can't be taken.*127\.0\.0\.1"):
            its.acquire(lock)

    assert took(lambda: Herd(*[refused] * (4 if colour == "sync" else 1)).join()) < 4 * TIMEOUT
    its.proxy.let_go()


@engines
def test_who_waits_in_vain_is_told_so_and_not_that_it_hangs(world: Worlds, engine: str, colour: str) -> None:
    """Another process has the lock, and the server is well."""
    its = world(engine, colour)
    held = Lock("l", on=its.direct, lease=MUCH)
    assert held.acquire()
    assert not its.acquire(Lock("l", on=its.cache, wait=0.2))
    with pytest.raises(LockTimeout):
        Lock("l", on=its.cache, wait=0).__enter__()
    held.release()
    with try_lock("l", on=its.direct) as lock:  # nobody has it, and for nobody it is kept
        assert lock


@engines
def test_a_server_that_is_slow_is_no_server_that_hangs(world: Worlds, engine: str, colour: str) -> None:
    """Nobody would have a lock, or a value, whose server is far away."""
    its = world(engine, colour)
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
from stampede import Cache, Lock
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
    """It would take a time-out for each lock that it holds; or give none of them back where the server is well."""
    its = world(engine, "sync")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", EXITS, url_of(engine, its.proxy.port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "held\n"
        if hangs:
            its.proxy.hold()
        assert took(lambda: program.communicate("\n", timeout=30)) < 5
    assert program.returncode == 0
    if not hangs:
        for name in map(str, range(5)):
            with try_lock(name, on=its.direct) as lock:
                assert lock
        assert its.direct.get_or_compute("k", lambda: 1, wait=MUCH / 4) == 1


# -- the first to find out tells all who wait --------------------------------------------------------------------------


@pytest.fixture
def cached(request: pytest.FixtureRequest, before: Before) -> Callable[..., tuple[Cache, Proxy]]:
    """A cache before whose server everything can stop. Who asks is told of it."""

    def made(engine: str, hung: float = TIMEOUT) -> tuple[Cache, Proxy]:
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
    time.sleep(2 * hang_detector.YOUNG)
    later = Herd(*[lambda n=n: askers[n].sets(f"k{n}") for n in range(1, 10)])
    assert hang_detector.NOT_TO_OTHERS not in first.join()[0]
    ended = time.monotonic()
    assert all(hang_detector.NOT_TO_OTHERS in said for said in later.join())
    assert time.monotonic() - ended < TIMEOUT / 2
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
        time.sleep(2 * hang_detector.YOUNG)
        assert hang_detector.NOT_TO_OTHERS in second.sets("k")
        assert hang_detector.NOT_TO_OTHERS not in herd.join()[0]
        proxy.let_go()


def test_an_event_loop_that_connects_is_told(cached: Cached, asker: Askers) -> None:
    """It isn't asking yet, and would wait for as long as others have."""
    cache, proxy = cached("redis")
    thread = asker(cache, "sync")
    proxy.hold()
    herd = Herd(lambda: thread.sets("first"))
    time.sleep(2 * hang_detector.YOUNG)
    with pytest.raises(EngineError, match=hang_detector.NOT_TO_OTHERS):
        asyncio.run(cache.aset("k", 1))
    assert hang_detector.NOT_TO_OTHERS not in herd.join()[0]


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
    monkeypatch.setattr(hang_detector.time, "monotonic", clock)
    monkeypatch.setattr(hang_detector.watch, "add", lambda watched, moment: None)
    its = hang_detector.HangDetector()
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
    young = clock() - hang_detector.YOUNG / 2
    its.ends(begun, 1.0)
    assert told.pop() == clock() - hang_detector.YOUNG
    assert its.hangs(later)
    assert not its.hangs(young)
    clock.advance(hang_detector.YOUNG)
    its.look(clock())
    assert young < told.pop() <= its.found
    assert its.hangs(young)
    assert not its.hangs(clock())  # who has begun since may be the first to find it well
    its.heard = clock()
    its.look(clock())
    assert not told
    assert not its.hangs(later)
