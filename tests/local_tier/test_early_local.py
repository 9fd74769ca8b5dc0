"""Early moments in a local tier: drawn when a value enters the process, and counted back from its real end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from herd import until
from memcached_server import shared_memcached
from servers import shared_redis

from stampede import Cache
from stampede.engines.redis.news import RedisNews
from stampede.model.entry import Entry, new_id
from stampede.runtime.colour import run_blocking

ALWAYS = 1e9  # a draw so large that the early moment is half of ttl
LONG = 60.0


@pytest.fixture
def caches(engine: str, tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    """Open caches with local tiers of their own, as if in several processes."""
    url = f"disk://{tmp_path}"
    if engine != "disk":
        url = shared_redis().url if engine == "redis" else shared_memcached().url
    opened: list[Cache] = []

    def another(**options: Any) -> Cache:
        opened.append(Cache(url, local=True, namespace=tmp_path.name, **options))
        return opened[-1]

    yield another
    for cache in opened:
        cache.close()


@pytest.mark.parametrize(
    "engine, background", [("disk", False), ("disk", True), ("redis", False), ("redis", True), ("memcached", False)]
)
def test_who_sees_it_first_in_its_early_moment_refreshes_it(
    caches: Callable[..., Cache], engine: str, colour: str, background: bool
) -> None:
    """A process that asks only once refreshes a value in its early moment. Otherwise a caller would wait at its end."""
    first, late, computed = caches(), caches(early=ALWAYS, background=background), Event()
    # After this both know the generation of their keys and hear of changes. No change of this key is announced.
    first.get("other"), late.get("other")
    old = Entry("old", new_id(), cost=1.0, ttl=LONG, fresh=LONG / 3, keep=LONG / 3)  # its early moment has come
    run_blocking(first._root.store.set(first._root.prefix + first._key("k"), old))

    async def asks() -> None:
        await late.aget_or_compute("k", computed.set)
        await asyncio.to_thread(computed.wait, 5)  # the refresh may run in the background

    if engine == "redis":
        until(lambda: late.engine.blocking.claims._news.reporter)  # type: ignore[union-attr]  # else it keeps no value
    if colour == "async":
        asyncio.run(asks())
    else:
        late.get_or_compute("k", computed.set)
        computed.wait(5)
    assert computed.is_set()


@pytest.mark.parametrize("engine", ["redis"])
def test_the_first_look_refreshes_it_before_changes_are_told(
    caches: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a process does not hear of changes, its local tier keeps nothing. Its first call still refreshes early."""
    monkeypatch.setattr(RedisNews, "start", lambda news: None)  # it never connects
    first, late, computed = caches(), caches(early=ALWAYS), Event()
    old = Entry("old", new_id(), cost=1.0, ttl=LONG, fresh=LONG / 3, keep=LONG / 3)
    run_blocking(first._root.store.set(first._root.prefix + first._key("k"), old))
    late.get_or_compute("k", computed.set)
    assert computed.is_set()


@pytest.mark.parametrize("engine", ["disk", "redis", "memcached"])
def test_a_value_that_is_believed_for_a_second_is_not_refreshed_all_the_time(caches: Callable[..., Cache]) -> None:
    """If an engine can't announce changes, values are kept for a second. Their early moment counts from the real end:
    otherwise expensive values would be refreshed at each call."""
    first, second = caches(), caches()
    first.get_or_compute("k", lambda: time.sleep(0.2))  # its margin is more than a second
    again: list[int] = []
    for _ in range(3):
        first.get_or_compute("k", lambda: again.append(1))
        second.get_or_compute("k", lambda: again.append(2))
    assert again == []
