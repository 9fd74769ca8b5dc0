"""No operation blocks an event loop: while the servers are silent, the loop's other tasks go on."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disk_world import Connection, Other, other
from herd import until_async
from loop_pauses import BEAT, Pauses
from memcached_server import MemcachedServer, shared_memcached
from servers import RedisServer, shared_cluster, shared_redis, shared_sentinels

from stampede import Cache, Lock, cached, configure, try_lock
from stampede.api.registry import get_cache
from stampede.errors import EngineClosed, OptionError
from stampede.runtime.colour import run_blocking
from stampede.testing import isolated

MOMENT = 0.1
LIMIT = 0.35
"""Seconds: shorter than the time-out of any question, and longer than a busy machine delays a loop."""
PATIENT = "socket_timeout=5"
"""An option of Redis' URLs: the servers answer in time, however long they are silent."""

Servers = list[RedisServer | MemcachedServer]


class Place(NamedTuple):
    """An engine's address, and its servers."""

    url: str
    servers: Servers
    locks: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"locks": self.locks} if self.locks else {}


def redis() -> Place:
    pytest.importorskip("redis")
    return Place(f"{shared_redis().url}?{PATIENT}", [shared_redis()])


def cluster() -> Place:
    pytest.importorskip("redis")
    return Place(f"{shared_cluster().url}?{PATIENT}", [*shared_cluster().nodes])


def sentinel() -> Place:
    pytest.importorskip("redis")
    shared = shared_sentinels()
    return Place(f"{shared.url}?{PATIENT}", [shared.master, *shared.replicas, *shared.sentinels])


def memcached() -> Place:
    pytest.importorskip("pymemcache")
    return Place(f"{shared_memcached().url}?timeout=5", [shared_memcached()])


def paired() -> Place:
    return Place(memcached().url, [*memcached().servers, *redis().servers], redis().url)


BOTH = pytest.param(paired, marks=[pytest.mark.redis, pytest.mark.memcached])


@pytest.fixture(params=[redis, cluster, sentinel, memcached, BOTH])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with isolated():
        place: Place = request.param()
        with Cache(place.url, **place.options, local=True) as cache:  # packages are imported, and scripts are loaded
            asyncio.run(cache.aget_or_compute("warm", lambda: 1))
        yield place


@asynccontextmanager
async def silent(servers: Servers, *, from_now: bool = True) -> AsyncIterator[None]:
    """Freeze the servers, or let the body freeze them. Thaw them when the loop has run for a moment."""
    if from_now:
        await asyncio.to_thread(stop, servers)  # in a thread: it blocks, and would count as a pause
    again = asyncio.create_task(thawed(servers))
    try:
        yield
    finally:
        await again


async def thawed(servers: Servers) -> None:
    await asyncio.sleep(MOMENT)
    for each in servers:
        each.thaw()


def stop(servers: Servers) -> None:
    for each in servers:
        each.freeze()


async def computed(n: int) -> int:
    return n


async def the_end_of(keys: Any) -> None:
    async for _ in keys:
        pass


async def inside(lock: Any) -> None:
    async with lock:
        pass


def test_a_silent_server_stops_no_loop(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """While servers are silent, making a cache in a loop, or the first call of a function, does not block the loop."""

    async def use() -> Pauses:
        async with Pauses() as pauses:
            async with silent(place.servers):
                cache = Cache(place.url, **place.options, namespace="shop")
                configure(caches={"default": {"url": place.url, **place.options}})
                near = Cache(place.url, **place.options, local=True)
                blocking = cached(ttl=60)(len)
                thread = threading.Thread(target=blocking, args=("tea",))
                thread.start()
                await asyncio.sleep(0.02)  # by now the thread has asked the server, or waits for this thread
                get_cache()
                one = cached(ttl=60)(computed)

                @cached(ttl=60, namespace="other", stale=5)
                async def other(n: int) -> int:
                    return n

                @cached.many(ttl=60)
                async def several(ns: list[int]) -> dict[int, int]:
                    return {n: n for n in ns}

                locks = place.locks or place.url
                one.key(1), one.stats(), cache.stats(), repr(cache), cache.down
                work: list[Coroutine[Any, Any, object]] = [
                    one(1), other(1), several([1, 2]), several.one(3), one.many([(4,), (5,)]), one.peek(6),
                    one.status(7), one.set(8, 8), one.invalidate(9), one.expire(10), one.refresh(11),
                    other.invalidate_all(), other.expire_all(), cache.aget_or_compute("k", lambda: 1),
                    cache.aget_or_compute_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1)),
                    cache.aget("c"), cache.aset("d", 1), cache.aset_many({"e": 1}), cache.aget_many(["f"]),
                    cache.ainvalidate_many(["g"]), cache.aclear(), cache.aexpire_all(), cache.apeek("h"),
                    near.aget_or_compute("k", lambda: 1), inside(cache.lock("lock", wait=5)),
                    inside(Lock("another", on=locks, wait=5)), inside(try_lock("third", on=locks)),
                ]  # fmt: skip
                with suppress(OptionError):
                    work.append(the_end_of(cache.akeys()))
                await asyncio.gather(*work)
                await asyncio.to_thread(thread.join)
            await cache.aclose()
            await near.aclose()
        return pauses

    pauses = asyncio.run(use())
    assert pauses.longest < LIMIT, pauses.where


def test_caches_are_closed_beside_a_loop(place: Place) -> None:
    """Closing a cache does not block the loop, even if leases go back to a server that hangs."""

    async def use() -> Pauses:
        configure(url=place.url, **place.options, local=True)
        caches = [Cache(place.url, **place.options), Cache(place.url, **place.options), get_cache()]
        over = asyncio.Event()
        computations = [await begun(cache, str(number), over) for number, cache in enumerate(caches)]
        async with silent(place.servers), Pauses() as pauses:
            caches[0].close()
            configure(url="memory://")
            for cache in caches[::2]:  # a closed cache refuses calls at once, before the leases have gone back
                with pytest.raises(EngineClosed):
                    run_blocking(cache.aset("other", 1))
                with pytest.raises(EngineClosed):
                    await cache.aget_or_compute("other", lambda: 1)
            await caches[1].aclose()
        over.set()
        assert await asyncio.gather(*computations) == [1, 1, 1]
        return pauses

    pauses = asyncio.run(use())
    assert pauses.longest < LIMIT, pauses.where


async def begun(cache: Cache, key: str, over: asyncio.Event) -> asyncio.Task[int]:
    """Start a computation that runs until `over` is set. Return its task."""
    begins = asyncio.Event()

    async def compute() -> int:
        begins.set()
        await over.wait()
        return 1

    computation = asyncio.create_task(cache.aget_or_compute(key, compute))
    await begins.wait()
    return computation


@pytest.mark.parametrize("place", [redis, cluster, sentinel], indirect=True)
def test_a_cache_is_closed_while_it_connects(place: Place) -> None:
    """Closing a cache that connects does not block the loop, even if the thread that listens waits for the server."""

    async def use() -> Pauses:
        cache = Cache(place.url, **place.options, local=True)
        async with silent(place.servers), Pauses() as pauses:
            asking = asyncio.ensure_future(cache.aget("k"))
            await asyncio.sleep(0.02)  # the cache connects
            cache.close()
            with pytest.raises(EngineClosed):
                await asking
        return pauses

    pauses = asyncio.run(use())
    assert pauses.longest < LIMIT, pauses.where


@pytest.mark.parametrize("place", [redis, memcached], indirect=True)
def test_a_computation_that_is_never_begun_stops_no_loop(place: Place) -> None:
    """If a computation's task is cancelled before its first step, the loop's thread does not give its lease back."""

    async def use() -> Pauses:
        loop = asyncio.get_running_loop()

        def make(loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
            task = asyncio.Task(work, loop=loop, **options)
            if work.__name__ == "compute":
                stop(place.servers)
                task.cancel()
            return task

        async with aclosing(Cache(place.url, **place.options)) as cache:
            await cache.aget("k")
            loop.set_task_factory(make)
            async with silent(place.servers, from_now=False), Pauses() as pauses:
                with pytest.raises(asyncio.CancelledError):
                    await cache.aget_or_compute("k", lambda: 1)
                loop.set_task_factory(None)
                await asyncio.sleep(BEAT)
            assert await cache.aget_or_compute("k", lambda: 2, wait=5) == 2  # the lease was given back
        return pauses

    pauses = asyncio.run(use())
    assert pauses.longest < LIMIT, pauses.where


@pytest.mark.parametrize("place", [redis, memcached], indirect=True)
def test_who_stops_to_wait_for_a_lock_stops_no_loop(place: Place) -> None:
    """If a coroutine that waits for a lock is closed, it does not withdraw on the loop's thread and block it."""

    async def use() -> Pauses:
        async with aclosing(Cache(place.url, **place.options)) as cache, cache.lock("l", wait=5):
            asking = cache.lock("l", wait=60).aacquire()
            answer = asking.send(None)
            await until_async(answer.done)
            asking.send(None)  # now it waits for the lock
            async with silent(place.servers), Pauses() as pauses:
                asking.close()
                await asyncio.sleep(BEAT)
        return pauses

    pauses = asyncio.run(use())
    assert "withdraw" not in pauses.where, pauses.where


def lock_the_file(pipe: Connection, directory: Path) -> None:
    (file,) = directory.glob("*.sqlite")
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    pipe.send("locked")
    pipe.recv()


def test_a_file_that_is_locked_stops_no_loop(tmp_path: Path) -> None:
    """While another program locks the file, opening a directory or a connection to its file does not block the loop."""
    directory = tmp_path / "c"
    url = f"disk://{directory}?timeout=5"
    with Cache(url) as cache:
        cache.set("k", 1)

    async def use(locker: Other) -> Pauses:
        async with Pauses() as pauses, aclosing(Cache(url)) as cache:
            asking = asyncio.gather(
                cache.aget_or_compute("k", lambda: 2), cache.aget("k"), cache.apeek("k"), cache.aset("n", 1),
                inside(cache.lock("l", wait=5)), cache.astatus("k"), the_end_of(cache.akeys()),
            )  # fmt: skip
            await asyncio.sleep(MOMENT)
            assert not asking.done()
            locker.tell("let go")
            assert (await asking)[:2] == [1, 1]
        return pauses

    with other(lock_the_file, directory) as locker:
        assert locker.hear() == "locked"
        pauses = asyncio.run(use(locker))
    assert pauses.longest < LIMIT, pauses.where
