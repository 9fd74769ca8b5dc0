"""The verbs of functions and caches besides the call: what each does, in blocking and in async code."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from herd import logged_here
from memcached_server import shared_memcached
from servers import shared_redis

from stampede import Cache, OptionError

URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda path: "memory://",
    "disk": lambda path: f"disk://{path}",
    "redis": lambda path: shared_redis().url,
    "memcached": lambda path: shared_memcached().url,
}


@pytest.fixture(params=list(URLS))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with Cache(URLS[request.param](tmp_path), ttl=600, early=0) as cache:
        yield cache


def coloured(function: Callable[..., Any], colour: str) -> Callable[..., Any]:
    if colour == "sync":
        return function

    @functools.wraps(function)
    async def suspending(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return suspending


def run(answer: Any) -> Any:
    return asyncio.run(answer) if inspect.isawaitable(answer) else answer


# -- refresh ------------------------------------------------------------------------------------------------------


def test_refresh_of_a_key(cache: Cache) -> None:
    """`refresh` of a cache computes and stores the value, whatever is stored. A failure leaves what is stored."""
    cache.set("k", 1)
    assert cache.refresh("k", lambda: 2, ttl=60) == 2
    entry = cache.peek("k")
    assert entry is not None and (entry.value, entry.ttl) == (2, 60)

    async def three() -> int:
        return 3

    async def again() -> tuple[int, int]:
        return await cache.arefresh("k", three), await cache.aget("k")

    assert asyncio.run(again()) == (3, 3)
    with pytest.raises(ZeroDivisionError):
        cache.refresh("k", lambda: 1 // 0)
    assert cache.get("k") == 3
    assert cache.refresh("new", lambda: None) is None and cache.get("new", "nothing") is None


# -- set ----------------------------------------------------------------------------------------------------------


def test_set_has_a_ttl_of_its_own(cache: Cache, colour: str) -> None:
    """`set` of a function takes a ttl for one value."""

    def double(number: int) -> int:
        return 2 * number

    f = cache.cached(coloured(double, colour))
    run(f.set(7, 1, ttl="1m", stale=30))
    entry = run(f.peek(1))
    assert (entry.value, entry.ttl) == (7, 60)
    assert 60 < entry.keep <= 90
    assert run(f(1)) == 7
    run(f.set(8, number=2))
    assert run(f.peek(2)).ttl == 600
    with pytest.raises(OptionError, match="ttl is -1"):
        run(f.set(7, 1, ttl=-1))


def test_set_of_a_method_has_a_ttl_of_its_own(cache: Cache, colour: str) -> None:
    """`set` of a method takes a ttl for one value, called on an object or on the class."""

    def double(self: Any, number: int) -> int:
        return 2 * number

    double.__qualname__ = "Shop.double"
    shop = type("Shop", (), {"__stampede_key__": lambda self: 1, "double": cache.cached(coloured(double, colour))})()
    run(shop.double.set(7, 1, ttl=60))
    assert run(shop.double.peek(1)).ttl == 60
    run(type(shop).double.set(8, shop, 1, ttl=70))
    assert run(shop.double.peek(1)).ttl == 70


def test_a_parameter_of_that_name_is_the_functions(cache: Cache, colour: str) -> None:
    """If a function has a parameter `ttl`, the `ttl` of `set` is an argument of the function, and no option."""

    def of(ttl: int, stale: int = 0) -> int:
        return ttl

    def anything(**what: int) -> int:
        return 0

    f, g = cache.cached(coloured(of, colour)), cache.cached(coloured(anything, colour))
    run(f.set(7, ttl=3))
    run(g.set(8, ttl=3))
    assert (run(f.peek(3)).value, run(f.peek(3)).ttl) == (7, 600)
    assert (run(g.peek(ttl=3)).value, run(g.peek(ttl=3)).ttl) == (8, 600)


# -- a ttl of 0 ---------------------------------------------------------------------------------------------------


class Missing(Exception):
    """An answer that must not be stored."""


def ttl_of(result: Any) -> float:
    return 0 if isinstance(result, Missing) or result is None else 600


@pytest.mark.parametrize("due", [False, True], ids=["stale", "early"])
def test_an_exception_that_is_not_to_be_kept_leaves_what_is(
    cache: Cache, colour: str, due: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception whose ttl is 0 is not stored, and the stored value remains."""
    results: list[Any] = [1]

    def origin() -> int:
        if isinstance(results[-1], Exception):
            raise results[-1]
        return results[-1]

    f = cache.cached(ttl=ttl_of, stale=600, raises=Missing)(coloured(origin, colour))
    assert run(f()) == 1
    id = run(f.peek()).id
    if not due:
        run(f.expire())
    results.append(Missing("gone"))
    with pytest.raises(Missing, match="gone"):
        run(f.refresh() if due else f())
    entry = run(f.peek())
    assert (entry.value, entry.raised, entry.id, entry.fresh > 0) == (1, False, id, due)
    results.append(2)
    assert run(f()) == (1 if due else 2)  # the lease is free
    assert logged_here(caplog) == []  # no warning: the user wants it so


def test_an_exception_that_is_not_to_be_kept_is_not_kept_as_stale(cache: Cache, colour: str) -> None:
    """If nothing is stored, an exception whose ttl is 0 is not stored as a stale one."""
    results: list[Any] = [Missing("gone")]

    def origin() -> int:
        if isinstance(results[-1], Exception):
            raise results[-1]
        return results[-1]

    f = cache.cached(ttl=ttl_of, stale=600, raises=Missing)(coloured(origin, colour))
    with pytest.raises(Missing, match="gone"):
        run(f())
    assert run(f.peek()) is None


def test_a_value_whose_ttl_is_0_replaces_what_is_kept(cache: Cache, colour: str) -> None:
    """A value whose ttl is 0 replaces the stored one. Otherwise a deleted user would still be served as stale."""
    results: list[Any] = [1]
    f = cache.cached(ttl=ttl_of, stale=600)(coloured(lambda: results[-1], colour))
    assert run(f()) == 1
    run(f.expire())
    results.append(None)
    assert run(f()) is None
    entry = run(f.peek())
    assert entry.value is None
    assert entry.fresh <= 0 < entry.keep


def test_a_value_that_cache_if_refuses_leaves_what_is_kept(cache: Cache, colour: str) -> None:
    """A value that `cache_if` refuses is not stored, and the stored value remains. A ttl of 0 would replace it."""
    results: list[Any] = [1]
    f = cache.cached(ttl=600, stale=600, cache_if=lambda value: value is not None)(
        coloured(lambda: results[-1], colour)
    )
    assert run(f()) == 1
    run(f.expire())
    results.append(None)
    assert run(f()) is None
    assert run(f.peek()).value == 1


# -- keys ---------------------------------------------------------------------------------------------------------


def keys(cache: Cache, colour: str, prefix: str = "") -> list[str]:
    async def akeys() -> list[str]:
        return [key async for key in cache.akeys(prefix)]

    return sorted(cache.keys(prefix) if colour == "sync" else asyncio.run(akeys()))


@pytest.mark.parametrize("namespace", ["", "shop"])
@pytest.mark.parametrize("engine", ["memory", "disk", "redis"])
def test_keys_by_prefix(engine: str, namespace: str, tmp_path: Path, colour: str) -> None:
    """`keys` lists exactly the keys with the prefix, in its own namespace, and none that were cleared."""
    url = URLS[engine](tmp_path)
    with Cache(url, namespace=namespace) as cache, Cache(url, namespace="other") as other:
        assert keys(cache, colour) == []
        cache.set_many({"user:1": 1, "user:1:name": 2, "user:2": 3, "*": 4})
        other.set("user:1", 5)
        f, by_id = cache.cached(lambda n: n), cache.cached(key="user:{id}")(lambda id: id)
        f(1), by_id(7)
        assert keys(cache, colour) == ["*", "user:1", "user:1:name", "user:2", "user:7"]
        assert keys(cache, colour, "user:1") == ["user:1", "user:1:name"]
        assert keys(cache, colour, "*") == ["*"]
        assert keys(cache, colour, "u?er") == []
        assert keys(other, colour) == ["user:1"]
        cache.clear()
        assert keys(cache, colour) == []
        cache.set("user:3", 1)
        assert keys(cache, colour, "user:") == ["user:3"]


def test_keys_of_more_than_a_page(tmp_path: Path, colour: str) -> None:
    """`keys` lists all keys of a large cache. If `clear` is called in the middle, it lists the new keys, too."""
    with Cache(f"disk://{tmp_path}") as cache:
        names = [f"k{number:04}" for number in range(1_200)]
        cache.set_many(dict.fromkeys(names, 1))
        assert keys(cache, colour) == names
        listed = cache.keys()
        first = next(listed)
        cache.clear()
        cache.set("new", 1)
        rest = [*listed]
        assert first in names
        assert "new" in rest
        assert len(rest) <= 1_000


def test_an_engine_that_can_not_list_says_so(colour: str) -> None:
    """An engine that cannot list its keys raises. An empty list would be taken for the truth."""
    with Cache(shared_memcached().url) as cache, pytest.raises(OptionError, match="cannot list its keys"):
        cache.keys() if colour == "sync" else cache.akeys()


# -- expire_many --------------------------------------------------------------------------------------------------


def test_many_are_made_stale(cache: Cache, colour: str) -> None:
    """`expire_many` makes its keys stale and keeps their values, also in a local tier. Other keys stay fresh."""
    cache.set_many({"a": 1, "b": 2, "c": 3}, stale=60)
    cache.get_many(["a", "b", "c"])
    cache.expire("b")
    answer = cache.expire_many(["a", "b", "no such"]) if colour == "sync" else run(cache.aexpire_many(["a", "b", "no"]))
    assert answer == 1
    assert cache.get_many(["a", "b", "c"]) == {"c": 3}
    entry = cache.peek("a")
    assert entry is not None
    assert (entry.value, entry.fresh <= 0 < entry.keep) == (1, True)
    assert cache.get_or_compute("a", lambda: 4, stale=60) == 4


def test_many_ids_are_made_stale(cache: Cache, colour: str) -> None:
    """`expire_many` of a batch function makes the given ids stale, and no others."""

    def load(ids: list[int]) -> dict[int, int]:
        return dict.fromkeys(ids, 1)

    users: Any = cache.cached.many(coloured(load, colour))
    assert run(users([1, 2])) == {1: 1, 2: 1}
    assert run(users.expire_many([1, 3])) == 1
    assert run(users.peek(1)).fresh <= 0 < run(users.peek(2)).fresh
