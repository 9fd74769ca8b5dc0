"""Values kept in a process that was frozen: a hit may run before the thread that reads the news of changes."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from select import select
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("psycopg")

from herd import until
from postgres_server import prepared_postgres
from servers import shared_cluster, shared_redis

from stampede import Cache
from stampede.engines.kit.feed import LATELY, TICK
from stampede.engines.redis.routed import GENERATIONS, slot_of

both = pytest.mark.parametrize(
    "url",
    [
        pytest.param(lambda: shared_redis().url, id="redis", marks=pytest.mark.redis),
        pytest.param(lambda: prepared_postgres().postgres_url, id="postgres", marks=pytest.mark.postgres),
    ],
)


def feed_of(cache: Cache) -> Any:
    engine: Any = cache.engine
    return engine._all.news if engine.scheme == "postgres" else engine._servers.news


def is_kept(cache: Cache, key: str) -> bool:
    """Whether the value comes from the memory of this process."""
    before = cache.stats().hits
    cache.get_or_compute(key, lambda: "computed")
    return cache.stats().hits > before


@pytest.fixture
def freeze(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Stops the thread of a feed as soon as something has arrived for it."""
    frozen, waiting, goes_on = set[threading.Thread](), set[threading.Thread](), threading.Event()

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            me = threading.current_thread()
            waiting.add(me)
            ready = super().select(timeout)
            waiting.discard(me)
            if me in frozen and len(self.get_map()) > 1:  # the thread waits for its connection
                waiting.add(me)
                goes_on.wait()
            return ready

    def stop(feed: Any) -> None:
        frozen.add(feed._thread)
        until(lambda: feed._thread in waiting)  # it reads nothing any more

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    yield stop
    goes_on.set()


def has_come(feed: Any) -> bool:
    """Whether the server has sent something that the thread has not read."""
    until(lambda: feed._quiet)
    return bool(select(feed._quiet, [], [], 10)[0])


@both
@pytest.mark.parametrize("change", ["invalidate", "clear"])
def test_what_was_invalidated_meanwhile_is_not_served(url: Callable[[], str], change: str, freeze: Any) -> None:
    """A value that was invalidated during the freeze is not served, even if the thread has not read the news yet."""
    with closing(Cache(url(), local=True, early=0)) as cache, closing(Cache(url())) as other:
        values = iter(["old", "new"])

        @cache.cached(key="k", ttl=600)
        def value() -> str:
            return next(values)

        value()
        until(lambda: value() == "old" and value.stats().hits)
        freeze(feed_of(cache))
        if change == "clear":
            other.clear()
        else:
            other.invalidate("k")
        assert has_come(feed_of(cache)), "the server says nothing"
        time.sleep(LATELY)
        assert value() == "new"


@pytest.mark.redis
def test_what_was_cleared_meanwhile_is_not_served_from_another_shard(freeze: Any) -> None:
    """Only one shard of a cluster reports a clear. Cleared values of the other shards are not served, either."""
    shared_cluster().flush()
    url = shared_cluster().url
    with closing(Cache(url, local=True, early=0)) as cache, closing(Cache(url)) as other:
        servers: Any = cache.engine._servers  # type: ignore[attr-defined]
        other.set("warm", 1)
        assert cache.get("warm") == 1
        home = servers._owners[GENERATIONS]
        prefix = cache._root.prefix
        key = next(key for key in map(str, range(99)) if servers._owners[slot_of(prefix + key)] != home)
        other.set(key, "old")
        until(lambda: is_kept(cache, key))
        freeze(servers._shards[home].news)
        other.clear()
        assert has_come(servers._shards[home].news), "the server says nothing"
        time.sleep(LATELY)
        assert cache.get_or_compute(key, lambda: "new") == "new"


@pytest.mark.redis
def test_a_server_of_which_nothing_was_heard_is_asked() -> None:
    """If the server was silent for too long, hits ask it: if the machine was frozen, no news may have arrived."""
    with closing(Cache(shared_redis().url, local=True, early=0)) as cache:
        cache.set("k", 1)
        until(lambda: is_kept(cache, "k"))
        feed = feed_of(cache)
        until(lambda: feed.heard_until(feed.stamps.heard + TICK))
        assert feed.heard_until(time.monotonic() + 4 * TICK) == 0.0
