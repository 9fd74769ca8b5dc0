"""Event loops that come and go, one for each request or test. They leave nothing behind, with any engine."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from herd import PATIENCE, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache
from stampede.runtime.event_loops import Loop

ENGINES = ["memory", "sealed", "disk", "redis", "memcached", "postgres", "paired"]
ROUNDS = 6


def url_of(engine: str, folder: Path) -> str:
    if engine == "redis":
        return shared_redis().url
    if engine == "memcached":
        return shared_memcached().url
    if engine == "postgres":
        return prepared_postgres().postgres_url
    return {"disk": f"disk://{folder}/c", "sealed": "memory://?codec=sealed"}.get(engine, "memory://")


@pytest.fixture(params=ENGINES)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    if request.param == "redis":
        shared_redis().cli("FLUSHALL")
    if request.param == "memcached":
        shared_memcached().empty()
    if request.param == "postgres":
        prepared_postgres()
    locks = f"file://{tmp_path}" if request.param == "paired" else None
    with Cache(url_of(request.param, tmp_path), locks=locks) as cache:
        yield cache


Make = Callable[[], Loop]


def ran(make: Make, work: Callable[[], Coroutine[Any, Any, Any]]) -> weakref.ref[Loop]:
    """Run the work as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(work())
        return weakref.ref(runner.get_loop())


def closed(make: Make, work: Callable[[], Coroutine[Any, Any, Any]]) -> weakref.ref[Loop]:
    """Run the work and close the loop, and nothing else."""
    loop = make()
    loop.run_until_complete(work())
    loop.close()
    return weakref.ref(loop)


def uvloops() -> Loop:
    made: Loop = pytest.importorskip("uvloop").new_event_loop()
    return made


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def alive(loops: list[weakref.ref[Loop]]) -> int:
    gc.collect()
    return sum(loop() is not None for loop in loops)


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloops], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(ran, marks=pytest.mark.filterwarnings("error")),
        pytest.param(closed, marks=pytest.mark.filterwarnings("ignore::ResourceWarning")),  # asyncio warns, too
    ],
)
def test_a_loop_leaves_nothing(cache: Cache, end: Callable[..., weakref.ref[Loop]], make: Make) -> None:
    """A program with one loop for each request (Django's async_to_sync) does not run out of memory or files."""

    async def ask() -> None:
        await cache.aget_or_compute("k", lambda: 1)
        await asyncio.gather(*[cache.aget_or_compute(f"k{number}", lambda: 1, ttl=0) for number in range(3)])
        await cache.aset("k", 2)

    loops = [end(make, ask)]
    gc.collect()
    before = files()
    loops += [end(make, ask) for _ in range(ROUNDS)]
    until(lambda: alive(loops) == 0)  # a thread that answered one may refer to it a little longer
    until(lambda: files() < before + ROUNDS)  # disk opens some for its own threads


def test_a_loop_is_as_fast_as_before(cache: Cache) -> None:
    """The library does not ask for a loop's `__dict__`. After that, CPython would run the loop slower by a fifth."""

    async def ask() -> list[object]:
        await cache.aget_or_compute("k", lambda: 1)
        return gc.get_referents(asyncio.get_running_loop())

    assert not [each for each in asyncio.run(ask()) if type(each) is dict and "_ready" in each]


def test_no_task_of_ours_stays(cache: Cache) -> None:
    """No task of the library stays. Otherwise a server that waits for all other tasks before it ends would hang."""

    async def ask() -> None:
        await asyncio.gather(*[cache.aget_or_compute(f"k{number}", lambda: 1) for number in range(3)])
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:  # a task that watches questions ends soon after the last one
            await asyncio.wait(tasks, timeout=PATIENCE)
        assert [task for task in tasks if not task.done()] == []

    asyncio.run(ask())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloops], ids=["asyncio", "uvloop"])
def test_a_loop_that_is_closed_in_the_middle_leaves_nothing(cache: Cache, make: Make) -> None:
    """A computation, its followers and a background refresh do not keep their closed loop alive."""

    async def begin(number: int) -> None:
        async def hanging() -> None:
            began.set()
            await asyncio.get_running_loop().create_future()

        began = asyncio.Event()
        tasks = [asyncio.create_task(cache.aget_or_compute(f"k{number}", hanging, lease=0.3)) for _ in range(3)]
        await began.wait()
        await asyncio.sleep(0)
        await cache.aset("stale", 1, stale=60)
        await cache.aexpire("stale")
        began.clear()
        assert await cache.aget_or_compute("stale", hanging, background=True, stale=60, lease=0.3) == 1
        await began.wait()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    loops = [closed(make, partial(begin, number)) for number in range(ROUNDS)]
    until(lambda: alive(loops) == 0)  # the keeper notices when it would renew
