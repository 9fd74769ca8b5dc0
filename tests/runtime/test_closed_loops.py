"""If a loop is closed under a computation, or its task is destroyed, other callers do not wait for it for ever."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, ref

import pytest
import trio
from bare_cache import until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache, Limiter
from stampede.algorithm.admission import run_in_place
from stampede.leases.keeper import keeper
from stampede.model.ports import Engine

LEASE = 3  # seconds
SOON = 20  # what is renewed although its loop was closed ends later, after `max_hold`
NEVER = 60


@pytest.fixture(autouse=True)
def _nobody_collects() -> Iterator[None]:
    """A closed loop leaves objects that refer to each other. The tests must not depend on when they are collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(params=["memory", "disk", "paired", "redis", "memcached", "postgres"])
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cache, Cache]]:
    """Two caches that share an engine's values and leases, and nothing in this process."""
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


def keeper_looks() -> None:
    """Have the keeper look at all leases, as it does after a third of their length."""
    for hold in keeper.holds():
        keeper.look_at(hold, monotonic())


def left_behind(cache: Cache, key: str, turns: int | None) -> asyncio.Task[int]:
    """Start a computation. Close its loop when it computes, or after this number of turns."""
    computes = Event()

    async def compute() -> int:
        computes.set()
        await asyncio.sleep(NEVER)
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
    """If a loop is closed under a computation, the lease is not renewed any more, and the next caller computes soon."""
    one, two = caches
    task, began = left_behind(one, "k", None), monotonic()
    keeper_looks()
    assert two.get_or_compute("k", lambda: 2) == 2
    assert monotonic() - began < SOON
    del task


@pytest.mark.parametrize("caches", ["memory", "disk", "paired"], indirect=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
def test_a_loop_that_is_closed_on_the_way_to_a_computation(caches: tuple[Cache, Cache]) -> None:
    """If a loop is closed while a thread takes the lease for it, the lease is not renewed, and ends."""
    one, two = caches
    tasks = [left_behind(one, f"k{turns}", turns) for turns in range(1, 12)]
    began = monotonic()
    for turns in range(1, 12):
        assert two.get_or_compute(f"k{turns}", lambda: 2) == 2
    assert monotonic() - began < SOON
    del tasks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
def test_a_loop_that_is_closed_in_a_lock_s_block(caches: tuple[Cache, Cache]) -> None:
    """If a loop is closed inside a lock's block, the lock is not renewed, and another caller gets it."""
    one, two = caches
    lock = one.lock("l", lease=LEASE)

    async def block() -> None:
        async with lock:
            await asyncio.sleep(NEVER)

    async def main() -> asyncio.Task[None]:
        task = asyncio.ensure_future(block())
        while lock.token is None:
            await asyncio.sleep(0.001)
        return task

    with closing(asyncio.new_event_loop()) as loop:
        task = loop.run_until_complete(main())
    keeper_looks()
    other = two.lock("l", wait=SOON)
    assert other.acquire()
    other.release()
    assert not lock.held
    del task


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
def test_a_limit_keeps_no_loop_that_is_closed_under_those_who_wait() -> None:
    """A limit does not keep closed loops whose tasks waited for it. A limit in a module would keep many of them."""
    limiter = Limiter("l", max=1, per=60, on=Cache())
    assert limiter.try_acquire()

    async def main() -> None:
        waiting = [asyncio.ensure_future(limiter.aacquire(wait=200)) for _ in range(3)]
        while limiter.used().ahead < len(waiting):
            await asyncio.sleep(0.001)

    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(main())
    closed = ref(loop)
    del loop
    gc.collect()
    assert closed() is None
    assert limiter.used().ahead == 3


CAPPED = pytest.mark.parametrize("capped", ["memory", "disk", "redis"], indirect=True)


@pytest.fixture
def capped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    """Return a function that makes caches on one engine, with the given caps for their origin."""
    urls = {"memory": lambda: "memory://", "disk": lambda: f"disk://{tmp_path}/d", "redis": lambda: shared_redis().url}
    engine: Engine | None = None
    with ExitStack() as stack:

        def made(**caps: Any) -> Cache:
            nonlocal engine
            options: dict[str, Any] = {"lease": LEASE, "namespace": str(tmp_path), "origins": {str(tmp_path): caps}}
            cache = Cache(urls[request.param](), **options) if engine is None else Cache(engine=engine, **options)
            engine = cache.engine
            return stack.enter_context(closing(cache))

        yield made


def left_at_origin(cache: Cache, origin: str, calls: int) -> list[asyncio.Task[Any]]:
    """Begin so many calls. Close their loop when one of them computes and the others wait for their places."""
    computes = Event()

    async def compute() -> None:
        computes.set()
        await asyncio.sleep(NEVER)

    async def main() -> list[asyncio.Task[Any]]:
        ask = partial(cache.aget_or_compute, origin=origin)
        asked = [asyncio.ensure_future(ask(f"k{number}", compute)) for number in range(calls)]
        while not computes.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        return asked

    with closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(main())


@CAPPED
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never awaited")
def test_a_loop_that_is_closed_under_a_computation_at_an_origin(capped: Callable[..., Cache], tmp_path: Path) -> None:
    """If a loop is closed under a computation at an origin, the computation's place is not kept until `max_hold`."""
    one, two, origin = capped(concurrency=1), capped(concurrency=1), str(tmp_path)
    tasks = left_at_origin(one, origin, 2)
    keeper_looks()
    assert two.get_or_compute("k", lambda: 2, origin=origin, wait=SOON) == 2
    del tasks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a holding may be collected first
def test_computations_at_an_origin_that_are_destroyed(tmp_path: Path) -> None:
    """Computations that are destroyed give their places back, although they cannot await anything any more."""
    one = Cache(f"disk://{tmp_path}/d", lease=0.3, origins={"db": {"concurrency": 2, "rate": "1/60s"}})
    tasks = WeakSet(left_at_origin(one, "db", 2))
    with closing(Cache(engine=one.engine, origins={"db": {"concurrency": 1}})) as two:
        del one  # and its limit, on whose bell a task waits
        until(lambda: gc.collect() >= 0 and not tasks)  # the keeper drops the tasks when it checks their leases
        assert two.get_or_compute("k", lambda: 2, origin="db", wait=SOON) == 2


def test_a_computation_that_is_destroyed_by_another_task() -> None:
    """A computation that another task destroys ends in another context than it began in. It ends without an error."""

    class Sleep:
        def __await__(self) -> Iterator[None]:
            yield

    async def compute() -> None:
        await Sleep()

    call: Any = SimpleNamespace(now=0.0, resources=SimpleNamespace(scope=""))
    place: Any = SimpleNamespace(origin="db", ended=lambda *_, **__: None)
    work = run_in_place(call, place, compute())
    copy_context().run(work.send, None)
    work.close()


def test_a_task_factory_that_fails(caches: tuple[Cache, Cache]) -> None:
    """If a task factory fails, the key is not locked by a flight or a lease of a computation that never begins."""
    cache, _ = caches
    fails: list[bool] = []

    @cache.cached
    async def function(number: int) -> int:
        return number

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        if fails and fails.pop():
            raise MemoryError
        return asyncio.Task(work, loop=loop, **options)

    async def main() -> None:
        await function(0)
        asyncio.get_running_loop().set_task_factory(factory)
        for number in range(1, 10):
            fails[:] = [True] + [False] * (number - 1)
            with suppress(MemoryError):
                await function(number)
            fails.clear()
            assert await asyncio.wait_for(function(number), SOON) == number

    asyncio.run(main())


def test_where_no_asyncio_loop_runs(caches: tuple[Cache, Cache]) -> None:
    """A call under trio is refused before it claims. Otherwise it would leave the key locked."""
    cache, _ = caches
    with pytest.raises(RuntimeError, match="need a running asyncio loop"):
        trio.run(cache.aget_or_compute, "k", lambda: "value")
    assert cache.get_or_compute("k", lambda: "value") == "value"
