"""Changes after another process's `clear`: a process that has not yet heard of the `clear` gets no older value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stampede import Cache
from stampede.engines.kit.generations import Beliefs


def _redis(_: Path) -> str:
    pytest.importorskip("redis")
    from servers import shared_redis

    shared_redis().cli("FLUSHALL")
    return shared_redis().url


def _cluster(_: Path) -> str:
    pytest.importorskip("redis")
    from servers import shared_cluster

    return shared_cluster().url


def _memcached(_: Path) -> str:
    pytest.importorskip("pymemcache")
    from memcached_server import shared_memcached

    return shared_memcached().url


def _postgres(_: Path) -> str:
    pytest.importorskip("psycopg")
    from postgres_server import prepared_postgres

    return prepared_postgres().postgres_url


URLS: dict[str, Callable[[Path], str]] = {
    "disk": lambda directory: f"disk://{directory}/c",
    "redis": _redis,
    "cluster": _cluster,
    "memcached": _memcached,
    "postgres": _postgres,
}


@pytest.fixture(params=list(URLS))
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cache, Cache]]:
    """Two caches, as in two processes: `here` knows a generation, and `there` ends it."""
    url = URLS[request.param](tmp_path)
    with (
        Cache(url, ttl=600, namespace=request.node.name) as here,
        Cache(url, ttl=600, namespace=request.node.name) as there,
    ):
        yield here, there


CHANGES: dict[str, Callable[[Cache], object]] = {
    "invalidate": lambda cache: cache.invalidate("k"),
    "expire": lambda cache: cache.expire("k"),
    "set": lambda cache: cache.set("k", "new"),
    "invalidate_many": lambda cache: cache.invalidate_many(["j", "k"]),
    "set_many": lambda cache: cache.set_many({"j": "new", "k": "new"}),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_nothing_older_than_a_change(caches: tuple[Cache, Cache], change: str) -> None:
    """Promise 4: after a `clear` and a change, no process gets the value from before them."""
    here, there = caches
    assert here.get_or_compute("k", lambda: "old") == "old" == here.get_or_compute("k", lambda: "new")
    for _ in range(3):
        there.clear()
    with Cache.of(there.settings) as third:  # it knows none of the generations that ended
        CHANGES[change](third)
        assert here.get_or_compute("k", lambda: "new") == "new"
        assert there.get_or_compute("k", lambda: "new") == "new"


def test_nothing_older_than_a_change_of_a_function(caches: tuple[Cache, Cache]) -> None:
    """After `invalidate_all`, `clear` and `invalidate`, no process gets a function's older value."""
    values = ["old"]
    f, g = (
        cache.cached(ttl=600)(_asking(values))  # the same function in two processes
        for cache in caches
    )
    assert f(1) == "old" == f(1)
    g.invalidate_all()
    caches[1].clear()
    g.invalidate_all()
    values[0] = "new"
    g.invalidate(1)
    assert f(1) == "new" == g(1)


def _asking(values: list[str]) -> Callable[[int], str]:
    def f(n: int) -> str:
        return values[0]

    return f


def test_nothing_older_than_a_change_after_all_was_forgotten(caches: tuple[Cache, Cache]) -> None:
    """If the server loses its data, a process that remembers the old generation still sees later changes."""
    here, there = caches
    assert here.get_or_compute("k", lambda: "old") == there.get("k") == "old"
    _empty(here)
    assert here.get_or_compute("k", lambda: "older") == "older"
    there.set("k", "new")
    assert here.get("k") == "new"


def _empty(cache: Cache) -> None:
    scheme = cache._root.core.engine.scheme
    if scheme == "redis":
        from servers import shared_redis

        shared_redis().cli("FLUSHALL")
    elif scheme == "memcached":
        from memcached_server import shared_memcached

        shared_memcached().empty()
    elif scheme == "postgres":
        from postgres_server import shared_postgres

        shared_postgres().empty()
    else:
        pytest.skip("it is never emptied")


def test_what_was_asked_before_a_clear_is_not_believed() -> None:
    """A generation that was requested before a `clear` is not used after it."""
    now = 1000.0
    beliefs = Beliefs(lambda: now)
    asked = now
    now += 0.1
    beliefs.clear()
    beliefs.learn("", "old", asked)
    assert beliefs.at_hand("") is None
    beliefs.learn("", "new", now)
    assert beliefs.at_hand("") == "new"
