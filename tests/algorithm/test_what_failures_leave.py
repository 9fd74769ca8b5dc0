"""A failed call leaves no reference cycles: its frames and their objects are freed without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from herd import until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache, WaitTimeout
from stampede.engines.kit.pipe import Timer
from stampede.runtime.colour import SUSPENDING


class Large:
    """An object that a computation holds when it fails."""


@pytest.fixture(params=["memory", "redis, beside", "postgres"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    urls = {"memory": lambda: "memory://", "disk": lambda: f"disk://{tmp_path}"}
    urls |= {"redis": lambda: shared_redis().url, "memcached": lambda: shared_memcached().url}
    urls |= {"postgres": lambda: prepared_postgres().postgres_url}
    engine, _, beside = request.param.partition(", ")
    terms: dict[str, Any] = {"patience": 9, "deadline": 9} if beside else {}
    with Cache(urls[engine](), namespace=tmp_path.name, ttl=60, stale=60, retry_after=0, **terms) as cache:
        yield cache


class Failing:
    """Computations that fail while they hold a large object."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Large]] = []
        self.go = threading.Event()
        self.go.set()
        self.begins: Callable[[], Awaitable[object]] = partial(asyncio.sleep, 0)  # awaited before the failure

    def left(self) -> list[Large]:
        return [large for each in self.held if (large := each()) is not None]

    def __call__(self, *_: Any) -> Any:
        large = Large()
        self.held.append(weakref.ref(large))
        self.go.wait(10)
        raise ValueError("in vain")

    async def suspending(self, *_: Any) -> Any:
        large = Large()
        self.held.append(weakref.ref(large))
        await self.begins()
        raise ValueError("in vain")


def call(cache: Cache, failing: Failing) -> None:
    with pytest.raises(ValueError, match="in vain"):
        cache.get_or_compute("k", failing)


def function(cache: Cache, failing: Failing) -> None:
    f = cache.cached(lambda n: failing())
    with pytest.raises(ValueError, match="in vain"):
        f(1)


def batch(cache: Cache, failing: Failing) -> None:
    with pytest.raises(ValueError, match="in vain"):
        cache.get_or_compute_many(["a", "b"], failing)


def many(cache: Cache, failing: Failing) -> None:
    f = cache.cached(lambda n: failing())
    with pytest.raises(ValueError, match="in vain"):
        f.many([(1,), (2,)])


def stale(cache: Cache, failing: Failing) -> None:
    cache.set("k", 1)
    cache.expire("k")
    assert cache.get_or_compute("k", failing) == 1


def answer(cache: Cache, failing: Failing) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="in vain"):
            cache.get_or_compute("k", failing, raises=ValueError)


def herd(cache: Cache, failing: Failing) -> None:
    failing.go.clear()
    waiting = [threading.Thread(target=call, args=(cache, failing)) for _ in range(3)]
    for each in waiting:
        each.start()
    until(lambda: failing.held)  # otherwise the next call would compute
    with pytest.raises(WaitTimeout):
        cache.get_or_compute("k", failing, wait=0.05)
    failing.go.set()
    for each in waiting:
        each.join()


def late(cache: Cache, failing: Failing) -> None:
    failing.go.clear()
    with pytest.raises(WaitTimeout):
        cache.get_or_compute("k", failing, deadline=0.1)
    with pytest.raises(WaitTimeout):
        cache.get_or_compute_many(["a", "b"], failing, deadline=0.1)
    until(lambda: len(failing.held) == 2)
    failing.go.set()


async def alate(cache: Cache, failing: Failing) -> None:
    with pytest.raises(WaitTimeout):
        await cache.aget_or_compute("k", failing.suspending, deadline=0)
    with pytest.raises(WaitTimeout):
        await cache.aget_or_compute_many(["a", "b"], failing.suspending, deadline=0)
    while len(failing.held) < 2:
        await asyncio.sleep(0)


async def acall(cache: Cache, failing: Failing) -> None:
    with pytest.raises(ValueError, match="in vain"):
        await cache.aget_or_compute("k", failing.suspending)


async def aherd(cache: Cache, failing: Failing) -> None:
    await asyncio.gather(*[acall(cache, failing) for _ in range(3)])


async def rested(cache: Cache, failing: Failing) -> None:
    async def begins() -> None:
        while guards := [task for task in asyncio.all_tasks() if task.get_name() == "stampede-guard"]:
            await asyncio.wait(guards)  # the next request starts a new guard in this task

    failing.begins = begins
    await aherd(cache, failing)


async def outlived(cache: Cache, failing: Failing) -> None:
    async def begins() -> None:
        beside.append(asyncio.ensure_future(asyncio.Event().wait()))
        await asyncio.sleep(0)

    beside: list[asyncio.Future[object]] = []
    failing.begins = begins
    await aherd(cache, failing)
    await all_gone(failing)
    for each in beside:
        each.cancel()


async def given_up(cache: Cache, failing: Failing) -> None:
    failing.begins = asyncio.Event().wait
    tasks = [asyncio.ensure_future(cache.aget_or_compute("k", failing.suspending)) for _ in range(3)]
    while not failing.held:
        await asyncio.sleep(0)
    for each in tasks:
        each.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
    )
    del tasks


async def abatch(cache: Cache, failing: Failing) -> None:
    with pytest.raises(ValueError, match="in vain"):
        await cache.aget_or_compute_many(["a", "b"], failing.suspending)


async def cancelled(cache: Cache, failing: Failing) -> None:
    async def never() -> None:
        large = Large()
        failing.held.append(weakref.ref(large))
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()
    task = asyncio.ensure_future(cache.aget_or_compute("k", never))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_many(cache: Cache, failing: Failing) -> None:
    async def never(_: int) -> None:
        large = Large()
        failing.held.append(weakref.ref(large))
        begun.set()
        await asyncio.Event().wait()

    begun = asyncio.Event()
    task = asyncio.ensure_future(cache.cached(never).many([(1,), (2,)]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", [call, function, batch, many, stale, answer, herd, late])
def test_a_failed_call(cache: Cache, way: Callable[[Cache, Failing], None]) -> None:
    """A failed call frees its frames at once. Otherwise, they would hold connections until the collector runs."""
    cache.get_or_compute("warm", int)
    failing = Failing()
    gc.collect()
    gc.disable()
    try:
        way(cache, failing)
        assert failing.held
        if cache.policy.beside or way is late:
            until(lambda: not failing.left())  # a thread drops its references a moment later
        assert failing.left() == []
    finally:
        gc.enable()


async def all_gone(failing: Failing) -> None:
    assert failing.held
    deadline = time.monotonic() + 5
    while failing.left() and time.monotonic() < deadline:
        await asyncio.sleep(0)  # the loop still has to drop the last steps of the tasks
    assert failing.left() == []


@pytest.mark.parametrize("way", [acall, aherd, rested, outlived, given_up, abatch, alate, cancelled, cancelled_many])
def test_a_failed_async_call(cache: Cache, way: Callable[[Cache, Failing], Awaitable[None]]) -> None:
    """A failed async call frees its frames while the event loop goes on."""

    async def main() -> None:
        await cache.aget_or_compute("warm", int)
        failing = Failing()
        gc.collect()
        gc.disable()
        try:
            await way(cache, failing)
            await all_gone(failing)
        finally:
            gc.enable()

    asyncio.run(main())


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


_request: ContextVar[Large] = ContextVar("request")


def test_a_connection_keeps_nothing_of_who_was_the_first_to_ask(cache: Cache, uncollected: None) -> None:
    """A connection does not keep the context of the call that opened it, nor a request in that context."""
    failing = Failing()

    async def ask() -> None:
        large = Large()
        failing.held.append(weakref.ref(large))
        _request.set(large)
        await cache.aget_or_compute("k", int)

    async def main() -> None:
        await asyncio.create_task(ask())
        await all_gone(failing)

    asyncio.run(main())


def test_a_timer_keeps_nothing_of_who_was_the_first_to_ask() -> None:
    """A timer does not keep the context of the call that started it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        looked = loop.create_future()

        def look() -> bool:
            looked.set_result(_request.get(None))
            return False

        _request.set(Large())
        Timer(look).start(loop)
        assert await looked is None

    asyncio.run(main())


def test_a_value_that_no_engine_keeps(cache: Cache, uncollected: None) -> None:
    """If a value cannot be stored, the codec's error does not keep the value in memory."""
    failing = Failing()

    async def unkept() -> Any:
        large = Large()
        failing.held.append(weakref.ref(large))
        return lambda: large

    async def main() -> None:
        await cache.aget_or_compute("k", unkept)
        await cache.aclear()
        await all_gone(failing)

    asyncio.run(main())


def test_who_is_cancelled_while_something_is_brought_to_its_end(uncollected: None) -> None:
    """If a task is cancelled while a shielded step ends, the cancellation leaves no reference cycle."""
    failing = Failing()

    async def ask() -> None:
        large = Large()
        failing.held.append(weakref.ref(large))
        await SUSPENDING.shielded(asyncio.sleep(0.01))

    async def main() -> None:
        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await all_gone(failing)

    asyncio.run(main())


def test_a_batch_that_waits_in_vain(tmp_path: Path, uncollected: None) -> None:
    """A batch that gives up waiting for a key leaves no references to what its loader holds."""
    computing, waiting = Failing(), Failing()
    computing.go.clear()
    with Cache(f"disk://{tmp_path}", ttl=60) as cache, Cache(f"disk://{tmp_path}", ttl=60) as elsewhere:
        other = threading.Thread(target=call, args=(elsewhere, computing))
        other.start()
        until(lambda: computing.held)
        try:
            _wait_in_vain(cache, waiting)
            assert waiting.held
            assert waiting.left() == []
        finally:
            computing.go.set()
            other.join()


def _wait_in_vain(cache: Cache, waiting: Failing) -> None:
    large = Large()
    waiting.held.append(weakref.ref(large))
    with pytest.raises(WaitTimeout):
        cache.get_or_compute_many(["k"], lambda _: {"k": large}, wait=0.01)
