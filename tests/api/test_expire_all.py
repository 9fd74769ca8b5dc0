"""`expire_all`: all stored values become stale at once, and are served while one caller computes, on each engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from both_colours import Number
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import RedisServer, shared_redis, wait_until

from stampede import Cache, EngineError, OptionError
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired

URLS: dict[str, Callable[[Path], tuple[str, bool]]] = {
    "memory": lambda path: ("memory://", False),
    "disk": lambda path: (f"disk://{path}", False),
    "disk-local": lambda path: (f"disk://{path}", True),
    "redis": lambda path: (shared_redis().url, False),
    "redis-local": lambda path: (shared_redis().url, True),
    "memcached": lambda path: (shared_memcached().url, False),
    "memcached-local": lambda path: (shared_memcached().url, True),
    "postgres": lambda path: (prepared_postgres().postgres_url, False),
    "postgres-local": lambda path: (prepared_postgres().postgres_url, True),
}


@pytest.fixture(params=list(URLS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, bool]:
    return URLS[request.param](tmp_path)


@pytest.fixture
def cache(place: tuple[str, bool]) -> Iterator[Cache]:
    url, local = place
    with Cache(url, local=local, namespace="shop" if local else "", ttl=600, stale=600, early=0) as cache:
        cache.clear()
        yield cache


def run(answer: Any) -> Any:
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


def coloured(origin: Callable[[], Any], colour: str) -> Callable[..., Any]:
    def blocking(n: int) -> Any:
        return origin()

    async def suspending(n: int) -> Any:
        return origin()

    return blocking if colour == "sync" else suspending


SAID = {0: "old"}


def said(n: int) -> str:
    """A function that two processes have."""
    return SAID[0]


def test_all_of_a_function_is_stale_and_kept(cache: Cache, colour: str) -> None:
    """`expire_all` of a function makes all its values stale and keeps them. Other functions are not affected."""
    origin = Number()
    f, g = cache.cached(coloured(origin, colour)), cache.cached(version=2)(coloured(Number(), colour))
    assert [run(f(1)), run(f(2)), run(f(1)), run(g(1))] == [1, 2, 1, 1]
    run(f.expire_all())
    for key, value in ((1, 1), (2, 2)):
        entry = run(f.peek(key))
        assert (entry.value, entry.fresh <= 0 < entry.keep) == (value, True)
        assert run(f.status(key)).fresh == 0
    assert run(g.peek(1)).fresh > 0
    assert [run(f(1)), run(f(1)), run(f(2)), run(f(2)), run(g(1))] == [3, 3, 4, 4, 1]
    assert run(f.peek(1)).fresh > 0
    run(f.expire_all())
    assert [run(f(1)), run(f(1))] == [5, 5]
    run(f.invalidate_all())
    assert run(f.peek(1)) is None
    assert [run(f(1)), run(f(1))] == [6, 6]
    assert run(f.peek(1)).fresh > 0


def test_it_is_served_while_one_computes(cache: Cache, colour: str) -> None:
    """After `expire_all`, old values are served while one caller computes, or if the computation fails."""
    f = cache.cached(coloured(lambda: origin(), colour))
    origin: Any = Number()
    assert run(f(1)) == 1
    run(f.expire_all())
    begun, over = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        over.wait(10)
        return 2

    origin = slow
    thread = threading.Thread(target=lambda: run(f(1)))
    thread.start()
    begun.wait(10)
    origin = Number()
    assert run(f(1)) == 1
    over.set()
    thread.join()
    assert run(f(1)) == 2
    run(f.expire_all())

    def fail() -> int:
        raise ValueError

    origin = fail
    assert [run(f(1)) for _ in range(3)] == [2] * 3
    g = cache.cached(version=2, stale=0)(coloured(lambda: origin(), colour))  # with stale=0, no stale value is served
    origin = Number()
    assert run(g(1)) == 1
    run(g.expire_all())
    origin = fail
    with pytest.raises(ValueError):
        run(g(1))


def test_all_of_a_cache(cache: Cache, colour: str) -> None:
    """`expire_all` of a cache makes all values stale, also those of functions with and without `key=`."""
    f = cache.cached(coloured(Number(), colour))
    g = cache.cached(key="g:{n}")(coloured(Number(), colour))
    run(f(1)), run(g(1)), cache.set("k", 1)
    run(cache.expire_all() if colour == "sync" else cache.aexpire_all())
    assert cache.get_many(["k", "g:1"]) == {}
    entry = cache.peek("k")
    assert entry is not None
    assert entry.value == 1
    assert [run(f(1)), run(g(1)), run(f(1)), run(g(1))] == [2, 2, 2, 2]
    assert cache.get_or_compute("k", lambda: 2) == 2
    assert cache.get("k") == 2
    with pytest.raises(OptionError, match="expire_all"):
        g.expire_all()


def test_what_is_set_afterwards_is_fresh(cache: Cache) -> None:
    """Values that are stored after `expire_all` are fresh."""
    f = cache.cached(coloured(Number(), "sync"))
    f(1)
    f.expire_all()
    f.set(7, 1)
    assert f(1) == 7
    cache.set("a", 0)
    cache.expire_all()
    cache.set_many({"a": 1, "b": 2})
    assert cache.get_many(["a", "b"]) == {"a": 1, "b": 2}
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {}) == {"a": 1, "b": 2}
    assert cache.get_or_compute_many(["c"], lambda keys: dict.fromkeys(keys, 3)) == {"c": 3}
    assert cache.get("c") == 3
    cache.expire_all()
    assert cache.add("a", 3)
    assert cache.update("a", lambda n: n + 1) == 4
    assert cache.get("a") == 4
    f.expire_all()
    f.refresh(1)
    assert f(1) == 2
    assert f.many([(1,), (2,)]) == [2, 3]
    cache.expire_all()
    assert cache.touch("a", ttl=60)
    assert cache.get("a") == 4
    cache.expire_all()
    assert cache.invalidate("a")
    assert cache.peek("a") is None


def test_what_was_begun_before_is_stale(cache: Cache) -> None:
    """A value whose computation began before `expire_all` is stale."""
    values = iter(range(1, 9))
    begun, over = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        over.wait(10)
        return next(values)

    def ask() -> None:
        cache.get_or_compute("k", slow)

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait(10)
    cache.expire_all()
    over.set()
    thread.join()
    assert cache.get("k") is None
    assert cache.get_or_compute("k", slow) == 2
    assert cache.get_or_compute("k", slow) == 2


def test_other_processes_hear_of_it(cache: Cache, place: tuple[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes notice an `expire_all` and compute again."""
    if place[0] == "memory://":
        pytest.skip("there are none")
    with Cache(place[0], local=place[1], namespace=cache.namespace, ttl=600, stale=600, early=0) as other:
        f, g = cache.cached(said), other.cached(said)
        assert [f(1), g(1), g(1)] == ["old"] * 3
        monkeypatch.setitem(SAID, 0, "new")
        assert g(1) == "old"
        cache.set("k", 1)
        assert other.get("k") == 1
        f.expire_all()
        wait_until(lambda: g(1) == "new")
        wait_until(lambda: f(1) == "new")
        cache.expire_all()
        wait_until(lambda: other.get("k") is None)
        assert other.get_or_compute("k", lambda: 2) == 2
        wait_until(lambda: cache.get("k") == 2)


def test_what_another_process_had_begun(cache: Cache, place: tuple[str, bool]) -> None:
    """If another process calls `expire_all` during a computation, the value does not count as fresh anywhere."""
    if place[0] == "memory://":
        pytest.skip("there is none")
    with Cache(place[0], local=place[1], namespace=cache.namespace, ttl=600, stale=600, early=0) as other:
        begun, over = threading.Event(), threading.Event()

        def slow() -> str:
            begun.set()
            over.wait(10)
            return "old"

        threads = [threading.Thread(target=lambda: other.get_or_compute("k", slow))]
        threads[0].start()
        begun.wait(10)
        other.set("mark", 1)
        assert other.get("mark") == 1
        cache.expire_all()
        wait_until(lambda: other.get("mark") is None)
        got: list[Any] = []
        threads.append(threading.Thread(target=lambda: got.append(cache.get_or_compute("k", lambda: "new"))))
        threads[1].start()
        wait_until(lambda: cache._core.flights._flights or got)
        over.set()
        for thread in threads:
            thread.join()
        assert got == ["new"]
        assert other.get("k") in ("new", None)
        assert other.get_or_compute("k", lambda: "newer") in ("new", "newer")


def test_an_engine_that_can_not_be_asked() -> None:
    """If the engine is down, `expire_all` raises an error. Otherwise, old values would be fresh after the outage."""
    server = RedisServer()
    try:
        with Cache(server.url, stale=600, early=0) as cache:
            f = cache.cached(coloured(Number(), "sync"))
            assert f(1) == 1
            server.stop()
            for verb in (cache.expire_all, f.expire_all):
                with pytest.raises(EngineError):
                    verb()
    finally:
        server.close()


def test_a_pair_of_engines() -> None:
    """With a pair of engines, `expire_all` changes the engine that stores the values."""
    with Cache(engine=Paired(MemoryEngine(sealed=True), MemoryEngine()), stale=600, early=0) as cache:
        cache.set("k", 1)
        cache.expire_all()
        assert cache.get("k") is None
        assert cache.peek("k") is not None
        assert cache.get_or_compute("k", lambda: 2) == 2
        assert cache.get("k") == 2


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_an_update_is_applied_once_beside_anothers_expire_all(kind: str, tmp_path: Path) -> None:
    """If another process calls `expire_all` during an update, the update is applied once."""
    url = URLS[kind](tmp_path)[0]
    with Cache(url, early=0) as mine, Cache(url, early=0) as other:
        mine.clear()
        mine.set("n", 5)
        seen: list[int] = []

        def add(n: int) -> int:
            seen.append(n)
            if len(seen) == 1:
                other.expire_all()
            return n + 1

        assert mine.update("n", add, default=0) == 6
        assert seen == [5]
        assert (mine.get("n"), other.get("n")) == (6, 6)
