"""A new generation and a change of a key at the same time: an invalidation wins, whichever thread is slower."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bare_cache import Gate, Room, until
from interrupting import Line, lines_in, lines_of, looked
from memcached_server import shared_memcached
from servers import shared_redis

from stampede import Cache, RecursiveComputation
from stampede.runtime.colour import Bell, run_blocking

LONG = 10


@pytest.fixture(params=["memory://", "disk://{}", "redis", "memcached"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    servers = {"redis": shared_redis, "memcached": shared_memcached}
    url = servers[request.param]().url if request.param in servers else request.param.format(tmp_path)
    with Cache(url, local=request.param != "memory://", ttl=600, early=0) as cache:
        yield cache


@contextmanager
def begun_by_another_thread(cache: Cache, begin: Callable[[], Any]) -> Iterator[None]:
    """Hold another thread inside `begin`: the engine has the new generation, and nothing else is done yet."""
    begun, go = threading.Event(), threading.Event()
    store: Any = cache.engine.blocking.store
    bump = store.bump

    async def lingering(scope: str) -> None:
        await bump(scope)
        begun.set()
        go.wait(LONG)

    store.bump = lingering
    thread = threading.Thread(target=begin)
    thread.start()
    assert begun.wait(LONG)
    store.bump = bump
    try:
        yield
    finally:
        go.set()
        thread.join(LONG)


def test_a_change_while_another_thread_begins_a_generation(cache: Cache) -> None:
    """After `invalidate` has returned, no value of an older generation remains in the function's table."""
    source = 1
    f = cache.cached(lambda number: source)
    assert f(1) == f(1) == f(1) == 1
    with begun_by_another_thread(cache, f.invalidate_all):
        assert f(2) == 1  # so that this process knows of the new generation
        source = 2
        f.invalidate(1)
        assert f(1) == 2
    assert f(1) == 2


def test_a_value_that_arrives_while_another_thread_begins_a_generation() -> None:
    """A value that was computed in an older generation is not stored after `invalidate` has returned."""
    source = 0
    with Cache("memory://", ttl=600) as cache:
        f = cache.cached(lambda number: source)
        f(-1)  # binds the function to the cache
        store, name = cache.engine.blocking.store, f.key(0).rpartition(":")[0]
        assert store is not None
        others = count(-2, -1)
        lines = looked(lambda: lines_in(partial(f, next(others))))
        for number, (where, always) in enumerate(lines.items(), start=1):
            changed: list[int] = []

            def at(line: Line, number: int = number, where: Line = where, changed: list[int] = changed) -> None:
                nonlocal source
                if changed and line[0].endswith(
                    ("generations.py", "stored.py", "scope.py", "core.py", "cached.py", "tier.py")
                ):
                    with suppress(RecursiveComputation):  # raised if the call has not read the current generation yet
                        assert f(number) == source, line
                elif line == where and not changed:
                    run_blocking(store.bump(name))  # another thread's `invalidate_all` has come this far
                    source += 1
                    f.invalidate(number)
                    changed.append(source)

            lines_of(partial(f, number), at)
            assert changed or not always, where
            assert f(number) == source


def test_what_is_kept_dies_before_thousands_are_woken() -> None:
    """`invalidate_all` ends stored values before it wakes waiters. Otherwise, other threads could still hit them."""
    source = 1
    hits: list[int] = []
    computing, go = threading.Event(), threading.Event()

    def compute(number: int) -> int:
        if number == 0 and not computing.is_set():
            computing.set()
            go.wait(LONG)
        return source

    with Cache("memory://", ttl=600) as cache, Room() as room:
        f = cache.cached(compute)
        f(1)
        leader = room.run(f, 0)
        assert computing.wait(LONG)
        (flight,) = cache._core.flights._flights.values()
        flight.bell = Bell()
        flight.bell.listen(lambda: hits.append(f(1)))  # runs while the waiters are woken
        source = 2
        f.invalidate_all()
        go.set()
        leader.result(LONG)
    assert set(hits) == {2}


@pytest.mark.parametrize("server", ["redis", "memcached"])
def test_who_came_after_a_clear_gets_nothing_from_before_it(server: str) -> None:
    """A call that begins after another process's `clear` does not get a value that was computed before it."""
    url = (shared_redis if server == "redis" else shared_memcached)().url
    with (
        Cache(url, namespace="g") as one,
        Cache(url, namespace="g") as two,
        ThreadPoolExecutor() as pool,
    ):
        old = Gate("old")
        first = pool.submit(one.get_or_compute, "k", old)
        until(lambda: old.calls == 1)
        one.set("told", True)
        assert one.get("told")  # it knows the current generation
        two.clear()
        joined = pool.submit(one.get_or_compute, "k", lambda: "new")
        elsewhere = pool.submit(two.get_or_compute, "k", lambda: "new")
        until(lambda: one.get("told") is None)
        old.open.set()
        assert (first.result(LONG), elsewhere.result(LONG), joined.result(LONG)) == ("old", "new", "new")
