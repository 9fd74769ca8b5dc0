"""An engine that hangs costs each caller that waits at most one time-out, once; calls go on; then all is as before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")

from herd import Herd, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from proxy import Proxy
from servers import shared_redis

from stampede import Bulkhead, Cache, EngineError, Lock, LockTimeout, try_lock

pytestmark = pytest.mark.alone

Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])
engines = pytest.mark.parametrize("engine", ["redis", "memcached", "postgres"])
TIMEOUT = 1.0
"""Seconds that an engine may take for an answer; a lock has two questions of it, over two connections."""

MUCH = 20.0
"""Seconds of a lease: what hangs for so long is found."""


def url_of(engine: str, port: int) -> str:
    return {
        "redis": f"redis://127.0.0.1:{port}?socket_timeout={TIMEOUT}",
        "memcached": f"memcached://127.0.0.1:{port}?timeout={TIMEOUT}",
        "postgres": f"postgres://root@127.0.0.1:{port}/postgres?sslmode=disable&timeout={TIMEOUT}",
    }[engine]


class World:
    """A server before which everything can stop, and a cache on it whose callers are of one colour."""

    def __init__(self, engine: str, colour: str, before: Before) -> None:
        if engine == "redis":
            shared_redis().cli("FLUSHALL")
        elif engine == "memcached":
            shared_memcached().empty()
        server: Any = {"redis": shared_redis, "memcached": shared_memcached, "postgres": prepared_postgres}[engine]()
        self.proxy, self.engine = before(server), engine
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


@both
@engines
def test_it_is_used_again_soon(world: Worlds, engine: str, colour: str) -> None:
    """A fleet would compute for itself long after its engine is back; or wait for leases that nobody holds."""
    its = world(engine, colour)
    its.ask(1, lambda _: "warm")
    its.proxy.hold()
    its.ask(3, lambda n: f"k{n}")
    its.proxy.let_go()
    back = time.monotonic()
    with its.direct:
        its.direct.set("of another", 7)

        def asks() -> bool:
            its.ask(1, lambda _: "poke")
            return its.cache.get("of another") == 7 and its.cache.stats().engine_down_seconds > 0

        until(asks)
        assert time.monotonic() - back < 4
        # The claims of before may have been granted when the engine went on: they were given back.
        for n in range(3):
            assert took(lambda n=n: its.direct.get_or_compute(f"k{n}", lambda: n)) < MUCH / 4


@both
@engines
def test_a_lock_whose_engine_hangs_is_an_error_soon(world: Worlds, engine: str, colour: str) -> None:
    """`with Lock` would keep its caller for as long as its server is frozen, and not say which server that is."""
    its = world(engine, colour)
    lock = Lock("l", on=its.cache, wait=0.2, lease=MUCH)
    with lock:
        pass
    its.proxy.hold()

    def refused() -> None:
        with pytest.raises(EngineError, match=r"the lock 'l' can't be taken.*127\.0\.0\.1"):
            its.acquire(lock)

    assert took(lambda: Herd(*[refused] * (4 if colour == "sync" else 1)).join()) < 4 * TIMEOUT
    its.proxy.let_go()


@both
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


@both
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
