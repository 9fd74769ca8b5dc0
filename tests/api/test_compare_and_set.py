"""`add`, `update` and `touch`: each changes a stored value in one step, and no change is lost."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from herd import Herd
from memcached_server import shared_memcached
from servers import shared_redis

from stampede import Cache
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired

URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda path: "memory://",
    "disk": lambda path: f"disk://{path}",
    "redis": lambda path: shared_redis().url,
    "memcached": lambda path: shared_memcached().url,
}


@pytest.fixture(params=list(URLS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URLS[request.param](tmp_path)


@pytest.fixture
def prefix(colour: str) -> str:
    """The prefix of the verbs of this colour."""
    return "" if colour == "sync" else "a"


@pytest.fixture
def cache(url: str, prefix: str) -> Iterator[Cache]:
    with Cache(url, namespace="shop" if prefix else "", ttl=600, early=0) as cache:
        cache.clear()
        yield cache


def asked(cache: Cache, prefix: str, verb: str, *args: Any, **options: Any) -> Any:
    answer = getattr(cache, prefix + verb)(*args, **options)
    return asyncio.run(answer) if inspect.isawaitable(answer) else answer


def test_add(cache: Cache, prefix: str) -> None:
    """`add` stores a value only if no fresh value is stored, and returns whether it did."""
    assert asked(cache, prefix, "add", "k", 1, ttl=60)
    assert not asked(cache, prefix, "add", "k", 2)
    assert cache.get("k") == 1
    cache.expire("k")
    assert asked(cache, prefix, "add", "k", 3)  # a stale value does not count
    assert cache.get("k") == 3
    cache.invalidate("k")
    assert asked(cache, prefix, "add", "k", 4)
    assert cache.peek("k").ttl == 600  # type: ignore[union-attr]


def test_update(cache: Cache, prefix: str) -> None:
    """`update` computes the new value from the stored one, or from the default if none is stored."""
    assert [asked(cache, prefix, "update", "n", lambda n: n + 1, 0) for _ in range(3)] == [1, 2, 3]
    assert asked(cache, prefix, "update", "new", lambda value: [value]) == [None]
    cache.invalidate("n")
    assert asked(cache, prefix, "update", "n", lambda n: n + 1, 10) == 11
    with pytest.raises(ZeroDivisionError):
        asked(cache, prefix, "update", "n", lambda n: n / 0)
    assert cache.get("n") == 11


def test_an_update_in_place(cache: Cache, prefix: str) -> None:
    """With `in_place`, a new value ends when the one that it replaces would have ended, as a counter for a period does,
    and has its tags. A first value, and one in place of a stale one, get the ttl and the tags of the call."""
    count = partial(asked, cache, prefix, "update", "n", lambda n: n + 1, 0, in_place=True)
    assert count(ttl=60, stale=30) == 1
    assert count(ttl=900) == 2
    entry = cache.peek("n")
    assert entry is not None and entry.ttl == 60 and 50 < entry.fresh <= 60 and 80 < entry.keep <= 91
    cache.expire("n")
    assert count(ttl=900) == 1
    assert cache.peek("n").ttl == 900  # type: ignore[union-attr]
    cache.set("n", 5, tags=["one"])
    assert count(tags=["two"]) == 6
    cache.invalidate_tags("two")
    assert count() == 7
    cache.invalidate_tags("one")
    assert count(tags=["two"]) == 1
    cache.invalidate_tags("two")
    assert cache.get("n") is None


def test_no_update_is_lost(cache: Cache) -> None:
    """Concurrent updates are all applied. A read and a write in two steps would lose changes."""

    def add_25() -> None:
        for _ in range(25):
            cache.update("n", lambda n: n + 1, 0)

    Herd(*[add_25] * 4).join()
    assert cache.get("n") == 100


def test_touch(cache: Cache, prefix: str) -> None:
    """`touch` gives a stored value a new ttl and does not change the value."""
    assert not asked(cache, prefix, "touch", "k")
    cache.set("k", "v", ttl=5)
    assert asked(cache, prefix, "touch", "k", ttl=5000)
    entry = cache.peek("k")
    assert entry is not None
    assert entry.value == "v"
    assert entry.fresh > 1000


def test_a_computation_under_way_does_not_replace_it(cache: Cache) -> None:
    """Promise 4: a computation that began before `update` does not replace the updated value."""
    assert cache.get_or_compute("k", lambda: (cache.update("k", lambda n: 2, 0), 1)[1]) == 1
    assert cache.get("k") == 2


def test_over_another_engines_locks(prefix: str) -> None:
    """`add`, `update` and `touch` also work if values and locks are on two engines."""
    paired = Cache(engine=Paired(MemoryEngine(), MemoryEngine()))
    assert asked(paired, prefix, "add", "k", 1) is True
    assert asked(paired, prefix, "add", "k", 2) is False
    assert asked(paired, prefix, "update", "k", lambda n: n + 1) == 2
    assert asked(paired, prefix, "touch", "k", ttl=60) is True
    assert paired.get_or_compute("l", lambda: (paired.update("l", lambda n: n + 1, 0), 7)[1]) == 7
    assert paired.get("k") == 2
    assert paired.get("l") == 1


def test_aclose(url: str) -> None:
    """`aclose` closes the cache, so that async code leaves no connections open."""
    cache = Cache(url)
    asyncio.run(cache.aclose())
    with pytest.raises(Exception, match="closed"):
        cache.set("k", 1)
