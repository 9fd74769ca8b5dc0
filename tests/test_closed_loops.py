"""A loop that is closed under a computation: nobody waits for what will never land."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from time import monotonic

import pytest
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache

LEASE = 60  # seconds
SOON = 5


@pytest.fixture(autouse=True)
def _nobody_collects() -> Iterator[None]:
    """What a closed loop leaves refers to itself: it may take long until the collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(params=["memory", "disk", "paired", "redis", "memcached", "postgres"])
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cache, Cache]]:
    """Two that share an engine's values and leases, and nothing in this process."""
    urls = {
        "memory": lambda: "memory://?codec=sealed",
        "disk": lambda: f"disk://{tmp_path}/d",
        "paired": lambda: f"disk://{tmp_path}/d",
        "redis": lambda: shared_redis().url,
        "memcached": lambda: shared_memcached().url,
        "postgres": lambda: prepared_postgres().postgres_url,
    }
    locks = f"file://{tmp_path}/f" if request.param == "paired" else None
    one = Cache(urls[request.param](), lease=LEASE, locks=locks, namespace=str(tmp_path))
    two = Cache(engine=one.engine, lease=LEASE, namespace=str(tmp_path))
    with closing(one), closing(two):
        yield one, two


def left_behind(cache: Cache, key: str, turns: int | None) -> asyncio.Task[int]:
    """A computation whose loop is closed, when it computes or after so many turns."""
    computes = Event()

    async def compute() -> int:
        computes.set()
        await asyncio.sleep(LEASE)
        return 1

    async def main() -> asyncio.Task[int]:
        task = asyncio.ensure_future(cache.aget_or_compute(key, compute))
        for _ in range(turns or 1_000_000):
            if computes.is_set():
                break
            await asyncio.sleep(0)
        return task

    with closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
def test_a_loop_that_is_closed_under_a_computation(caches: tuple[Cache, Cache]) -> None:
    """The next, in another process, would wait for a third of the lease."""
    one, two = caches
    task, began = left_behind(one, "k", None), monotonic()
    assert two.get_or_compute("k", lambda: 2) == 2
    assert monotonic() - began < SOON
    del task


@pytest.mark.parametrize("caches", ["memory", "disk", "paired"], indirect=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
def test_a_loop_that_is_closed_on_the_way_to_a_computation(caches: tuple[Cache, Cache]) -> None:
    """The lease that a thread was still to take would stand to its end: nobody renews it, and nobody gives it back."""
    one, two = caches
    tasks = []
    for turns in range(1, 12):
        tasks.append(left_behind(one, f"k{turns}", turns))
        began = monotonic()
        assert two.get_or_compute(f"k{turns}", lambda: 2) == 2
        assert monotonic() - began < SOON


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_loop_that_is_closed_in_a_lock_s_block(caches: tuple[Cache, Cache], colour: str) -> None:
    """The lock would be renewed until somebody collects the task, which may be never."""
    one, two = caches
    lock = one.lock(f"l {colour}", lease=LEASE)

    async def block() -> None:
        if colour == "sync":
            with lock:
                await asyncio.sleep(LEASE)
        else:
            async with lock:
                await asyncio.sleep(LEASE)

    async def main() -> asyncio.Task[None]:
        task = asyncio.ensure_future(block())
        while lock.token is None:
            await asyncio.sleep(0.001)
        return task

    with closing(asyncio.new_event_loop()) as loop:
        task = loop.run_until_complete(main())
    other = two.lock(f"l {colour}", wait=SOON)
    assert other.acquire()
    other.release()
    assert not lock.held
    del task
