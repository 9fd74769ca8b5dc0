"""A hung origin on each engine: no caller waits longer than `max_hold`, and a late value is not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from bare_cache import LONG, Gate, Room
from memcached_server import shared_memcached
from servers import shared_cluster, shared_redis

from stampede import Cache

ENGINES = ["memory", "disk", "redis", "cluster", "memcached", "redis and file", "down"]
LASTING: dict[str, Any] = {"lease": 60, "max_hold": 60}  # a busy machine loses no lease of who computes in time


@pytest.fixture(params=ENGINES)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    locks = None
    match request.param:
        case "memory":
            url = "memory://"
        case "disk":
            url = f"disk://{tmp_path}"
        case "cluster":
            url = shared_cluster().url
        case "memcached":
            url = f"memcached://127.0.0.1:{shared_memcached().port}"
        case "down":  # the process uses its own memory instead
            url = "redis://127.0.0.1:1"
        case _:
            url = shared_redis().url
            locks = f"file://{tmp_path}" if request.param != "redis" else None
    with Cache(url, locks=locks, namespace=uuid4().hex, ttl=60, early=0, lease=0.3, max_hold=0.3) as cache:
        yield cache


@pytest.mark.parametrize("leader", ["thread", "loop"])
def test_nobody_is_kept_longer_than_max_hold(cache: Cache, leader: str) -> None:
    """If an origin hangs, other callers wait no longer than `max_hold`, and one of them computes."""
    hung, again = Gate("too late"), Gate("in time")
    again.open.set()
    with Room() as room:
        if leader == "thread":
            first = room.run(cache.get_or_compute, "k", hung)
        else:
            first = room.loop(lambda: cache.aget_or_compute("k", hung.suspending))
        try:
            assert hung.begun.wait(LONG)
            threads = [room.run(partial(cache.get_or_compute, "k", again, **LASTING)) for _ in range(3)]
            tasks = room.loop(lambda: _three(cache, again))
            assert [each.result(LONG) for each in threads] + tasks.result(LONG) == ["in time"] * 6
            assert again.calls == 1
        finally:
            hung.open.set()
        assert first.result(LONG) == "too late"
        assert cache.get_or_compute("k", again) == "in time"
    assert again.calls == 1


async def _three(cache: Cache, again: Gate) -> list[str]:
    return await asyncio.gather(*(cache.aget_or_compute("k", again, **LASTING) for _ in range(3)))
