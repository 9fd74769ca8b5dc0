"""Promises 4 and 7 together: a value that was invalidated before a server died is not served to later calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from math import inf
from typing import Any

import pytest
from herd import Herd, Origin, until

from stampede import Cache, events


@pytest.fixture(params=["redis", "memcached", "postgres"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server that only this test uses, and kills."""
    if request.param == "redis":
        pytest.importorskip("redis")
        from servers import RedisServer

        mine: Any = RedisServer()
    elif request.param == "postgres":
        pytest.importorskip("psycopg")
        from postgres_server import PostgresServer

        mine = PostgresServer()
        mine.prepare()
    else:
        pytest.importorskip("pymemcache")
        from memcached_server import MemcachedServer

        mine = MemcachedServer()
    with closing(mine):
        yield mine


@pytest.fixture
def opened(server: Any) -> Iterator[Callable[..., Cache]]:
    """Opens caches, as if they were those of several processes."""
    caches: list[Cache] = []

    def cache(**options: Any) -> Cache:
        caches.append(Cache(getattr(server, "postgres_url", server.url), ttl=60, **options))
        return caches[-1]

    yield cache
    for each in caches:
        each.close()


def _value(cache: Cache, colour: str, way: str, origin: Callable[[], Any]) -> Any:
    """The value of the key, asked for in one of the possible ways."""

    async def suspending() -> Any:
        return await asyncio.to_thread(origin)

    async def loading(keys: list[str]) -> dict[str, Any]:
        return dict.fromkeys(keys, await suspending())

    if way == "batch" and colour == "sync":
        return cache.get_or_compute_many(["k"], lambda keys: {"k": origin()})["k"]
    if way == "batch":
        return asyncio.run(cache.aget_or_compute_many(["k"], loading))["k"]
    if way == "refresh" and colour == "sync":
        return cache.cached(key="k")(origin).refresh()
    if way == "refresh":

        async def refreshed() -> Any:
            return await cache.cached(key="k")(suspending).refresh()

        return asyncio.run(refreshed())
    if colour == "sync":
        return cache.get_or_compute("k", origin)
    return asyncio.run(cache.aget_or_compute("k", suspending))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("way", ["call", "batch", "refresh"])
def test_what_was_begun_before_a_server_died_is_kept_for_nobody(
    server: Any, opened: Callable[..., Cache], way: str, local: bool, colour: str
) -> None:
    """A computation that began before the server died is not kept, since its key may have been invalidated. Otherwise,
    callers would get the old value for 5 s."""
    told: list[events.Event] = []
    asked, other = opened(local=local, observers=[told.append]), opened()
    under_way, later = Origin(), Origin(open=True)
    holding = Herd(lambda: _value(asked, colour, way, lambda: -under_way()))
    under_way.has_begun()
    following = Herd(lambda: _value(asked, colour, "call", later))
    until(lambda: any(flight.callers == 2 for flight in list(asked._core.flights._flights.values())))
    other.invalidate("k")
    server.stop()
    under_way.let_on()
    assert holding.join() == [-1]
    assert following.join() == [1]
    assert [_value(asked, colour, "call", later) for _ in range(3)] == [1] * 3  # computed during the outage, and kept
    assert not [each for each in told if isinstance(each, events.LeaseLost)]


def test_what_a_local_tier_has_no_news_of_is_not_served_when_both_are_down(
    server: Any, opened: Callable[..., Cache], colour: str
) -> None:
    """If server and origin are down, a value in memory that has outlived its short ttl is not served."""
    asked, other = opened(local={"entries": 10, "ttl": 0.02}, stale=60), opened()
    assert _value(asked, colour, "call", lambda: 1) == 1
    assert other.invalidate("k")
    believed = time.monotonic() + 0.05
    until(lambda: time.monotonic() > believed)
    server.stop()

    def failing() -> Any:
        raise OSError("the origin is down")

    with pytest.raises(OSError, match="the origin is down"):
        _value(asked, colour, "call", failing)


@pytest.mark.parametrize("server", ["redis", "postgres"], indirect=True)
def test_what_was_computed_here_is_true_until_another_changes_it(
    server: Any, opened: Callable[..., Cache], colour: str
) -> None:
    """If server and origin are down, a value computed here is served, unless another process has changed it."""
    asked, other = opened(local=True, stale=60), opened()
    root, called = asked._root, dict[str, float]()

    def change(keys: list[str]) -> None:
        for number, key in enumerate(keys):
            called[key] = time.monotonic()
            other.set(key, inf) if number % 2 else other.invalidate(key)

    def failing() -> Any:
        raise OSError("the origin is down")

    with asyncio.Runner() as runner:

        def value(key: str, origin: Callable[[], Any]) -> Any:
            async def suspending() -> Any:
                return origin()

            if colour == "sync":
                return asked.get_or_compute(key, origin)
            return runner.run(asked.aget_or_compute(key, suspending))

        def keep(key: str) -> None:
            """Have the key read again if it is not kept: news of its store came late, and ended what was computed."""
            until(lambda: value(key, time.monotonic) and root.hit(key))

        keep("first")
        for some in range(ROUNDS):
            value(f"kept {some}", time.monotonic)
            keys = [f"{some} {number}" for number in range(20)]
            changing = Herd(*[lambda keys=keys: change(keys)] * (some % 2))  # during these calls, or after them
            for key in keys:
                value(key, time.monotonic)
            changing.join()
            if not some % 2:
                change(keys)

            def old(keys: list[str] = keys) -> list[str]:
                hits = [(root.hit(key), key) for key in keys]
                return [key for hit, key in hits if hit is not None and hit.value < called[key]]

            until(lambda old=old: not old())
        for some in range(ROUNDS):
            keep(f"kept {some}")
        server.stop()
        local_tier = asked._core.local_tier

        def lost() -> Any:
            with suppress(OSError):  # kept values are served as soon as the loss is noticed
                value("first", failing)
            return local_tier.kept(root.prefix + "kept 0")

        until(lost)
        for some in range(ROUNDS):
            assert value(f"kept {some}", failing)
        for key, when in called.items():
            with suppress(OSError):
                assert value(key, failing) > when


ROUNDS = 4
