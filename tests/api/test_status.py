"""`status` of a key: its stored value, its age, how long it is valid, and which caller computes it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from memcached_server import shared_memcached
from servers import shared_redis, wait_until

from stampede import Cache
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired

URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda path: "memory://",
    "disk": lambda path: f"disk://{path}",
    "redis": lambda path: shared_redis().url,
    "memcached": lambda path: shared_memcached().url,
}
HOST = socket.gethostname()


@pytest.fixture(params=list(URLS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URLS[request.param](tmp_path)


@pytest.fixture
def cache(url: str) -> Iterator[Cache]:
    with Cache(url, ttl=600, early=0) as cache:
        yield cache


def asked(cache: Cache, colour: str, key: str) -> Any:
    return cache.status(key) if colour == "sync" else asyncio.run(cache.astatus(key))


def test_what_is_kept(cache: Cache, colour: str) -> None:
    """`status` shows the stored value, its age, and how long it is fresh and stored."""
    nothing = asked(cache, colour, "k")
    assert (nothing.key, nothing.entry, nothing.age, nothing.fresh, nothing.kept) == ("k", None, None, 0, 0)
    assert nothing.holder is None
    cache.set("k", "value", ttl=100, stale=50)
    kept = asked(cache, colour, "k")
    assert kept.entry.value == "value"
    assert 0 <= kept.age < 5 and 95 < kept.fresh <= 100 and 145 < kept.kept <= 150
    assert kept.holder is None
    cache.expire("k")
    stale = asked(cache, colour, "k")
    assert stale.entry.value == "value"
    assert stale.fresh == 0 < 140 < stale.kept
    cache.set("k", "value", ttl=None)
    assert asked(cache, colour, "k").age is None


def test_who_computes_here(cache: Cache, colour: str) -> None:
    """If this process computes the key, `status` shows the host, the process, the thread and the time so far."""
    begun, over = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        over.wait(10)
        return 1

    thread = threading.Thread(target=cache.get_or_compute, args=("k", slow), name="the-slow-one")
    thread.start()
    begun.wait(10)
    holder = asked(cache, colour, "k").holder
    over.set()
    thread.join()
    assert (holder.host, holder.pid, holder.thread) == (HOST, os.getpid(), "the-slow-one")
    assert 0 <= holder.seconds < 5
    assert 0 < holder.lease <= 10
    assert str(holder).startswith(f"{HOST}:{os.getpid()}, in the-slow-one, for ")
    assert asked(cache, colour, "k").holder is None


def test_a_task_computes(cache: Cache) -> None:
    """`status` shows a task that computes the key, even if the same event loop asks."""

    async def main() -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def slow() -> int:
            begun.set()
            await over.wait()
            return 1

        task = asyncio.create_task(cache.aget_or_compute("k", slow))
        await begun.wait()
        holder = (await cache.astatus("k")).holder
        over.set()
        assert await task == 1
        assert holder is not None
        assert (holder.host, holder.pid) == (HOST, os.getpid())
        assert holder.thread is not None
        assert holder.seconds is not None

    asyncio.run(main())


PROGRAM = """
import sys
from stampede import Cache
cache = Cache(sys.argv[1], early=0)
def slow():
    print("begun", flush=True)
    sys.stdin.read()
    return 1
cache.get_or_compute("k", slow)
"""


def test_who_computes_elsewhere(cache: Cache, url: str) -> None:
    """If another process computes the key, `status` shows its host and its process id."""
    if url == "memory://":
        pytest.skip("there is no elsewhere")
    command = [sys.executable, "-c", PROGRAM, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"begun\n"
        assert cache.status("k").holder is not None
        wait_until(lambda: cache.status("k").holder.host is not None)  # type: ignore[union-attr]
        holder = cache.status("k").holder
        other.communicate()
    assert holder is not None
    assert (holder.host, holder.pid, holder.thread, holder.seconds) == (HOST, other.pid, None, None)
    assert holder.lease is not None
    assert 0 < holder.lease <= 10
    assert asyncio.run(cache.astatus("k")).holder is None


def test_functions_and_methods_have_it(colour: str) -> None:
    """Functions and methods have `status`, too. It does not change their statistics."""

    class Shop:
        def __stampede_key__(self) -> int:
            return 7

    def price(self: Any, article: str) -> float:
        return 9.5

    async def aprice(self: Any, article: str) -> float:
        return 9.5

    def run(answer: Any) -> Any:
        return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer

    with Cache("memory://", ttl=600, early=0) as cache:
        function: Any = price if colour == "sync" else aprice
        f, shop = cache.cached(function), Shop()
        function.__qualname__ = "Shop.price"
        Shop.price = cache.cached(function)  # type: ignore[attr-defined]
        run(f(shop, "tea"))
        assert run(f.status(shop, "tea")).entry.value == 9.5
        assert run(f.status(shop, "tea")).key == f.key(shop, "tea")
        before = f.stats()
        assert run(shop.price.status("tea")).entry is None  # type: ignore[attr-defined]
        run(shop.price("tea"))  # type: ignore[attr-defined]
        assert run(shop.price.status("tea")).entry.value == 9.5  # type: ignore[attr-defined]
        assert f.stats() == before


def test_what_an_engine_cannot_tell() -> None:
    """A pair of engines cannot tell the holder. `status` still shows a computation of this process."""
    with Cache(engine=Paired(MemoryEngine(sealed=True), MemoryEngine()), early=0) as cache:
        seen = []
        assert cache.get_or_compute("k", lambda: seen.append(cache.status("k")) or 1) == 1
        assert seen[0].holder is not None
        assert seen[0].holder.pid == os.getpid()
        assert seen[0].holder.lease is None
        status = cache.status("k")
        assert status.entry is not None
        assert (status.entry.value, status.holder) == (1, None)


def test_while_the_engine_is_down() -> None:
    """While the engine is down, `status` raises no error. It shows what the process keeps in its own memory."""
    from servers import RedisServer

    server = RedisServer()
    try:
        with Cache(server.url, early=0) as cache:
            cache.set("k", 1)
            server.stop()
            assert cache.get_or_compute("k", lambda: 2) == 2
            assert cache.down
            status = cache.status("k")
            assert status.entry is not None
            assert status.entry.value == 2
            seen = []
            cache.get_or_compute("other", lambda: seen.append(cache.status("other")))
            assert seen[0].holder.pid == os.getpid()
    finally:
        server.close()
