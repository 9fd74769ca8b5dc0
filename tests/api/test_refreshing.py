"""`refreshing()` and `bypassed()`: what calls do in such a block, and that other callers are not affected."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from both_colours import Number
from herd import Herd, had
from memcached_server import shared_memcached
from servers import shared_redis

import stampede
from stampede import Cache, RecursiveComputation
from stampede.api.overrides import _blocks, overrides
from stampede.testing import disabled

URLS: dict[str, Callable[[Path], tuple[str, bool]]] = {
    "memory": lambda path: ("memory://", False),
    "disk": lambda path: (f"disk://{path}", False),
    "disk-local": lambda path: (f"disk://{path}", True),
    "redis-local": lambda path: (shared_redis().url, True),
    "memcached": lambda path: (shared_memcached().url, False),
}


@pytest.fixture(params=list(URLS))
def any_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    url, local = URLS[request.param](tmp_path)
    with Cache(url, local=local, ttl=600, early=0) as cache:
        yield cache


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Cache("memory://", ttl=600, early=0) as cache:
        yield cache


class Counted:
    """A cached function of either colour that returns the number of its computation."""

    def __init__(self, cache: Cache, colour: str, **options: Any) -> None:
        self.calls = 0
        self.before: Callable[[], object] = lambda: None

        def number(key: int) -> int:
            self.calls += 1
            self.before()
            return self.calls

        async def suspending(key: int) -> int:
            await asyncio.sleep(0)
            return number(key)

        self.cached: Any = cache.cached(version=f"{colour}", **options)(number if colour == "sync" else suspending)

    async def __call__(self, key: int = 1) -> Any:
        answer = self.cached(key)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def verb(self, verb: str, *args: Any) -> Any:
        answer = getattr(self.cached, verb)(*args)
        return await answer if asyncio.iscoroutine(answer) else answer


def test_a_block_computes_anew_once_and_stores(any_cache: Cache, colour: str) -> None:
    """In a `refreshing()` block, each key is computed again once, and its value is stored for all callers."""

    async def main() -> None:
        f = Counted(any_cache, colour)
        assert [await f(), await f()] == [1, 1]
        with stampede.refreshing():
            assert [await f(), await f(), await f()] == [2, 2, 2]
            assert await f(2) == 3  # it was not stored before
        assert [await f(), await f(2), await f()] == [2, 3, 2]
        with stampede.refreshing():
            assert await f() == 4  # another block computes again
            assert [await f.verb("refresh", 1), await f()] == [5, 5]
            assert [await f.verb("refresh", 2), await f(2)] == [6, 6]  # also for later calls in the block

    asyncio.run(main())


def test_bypassed(any_cache: Cache, colour: str) -> None:
    """In a `bypassed()` block, calls run the function and store nothing. An explicit `set` still stores its value."""

    async def main() -> None:
        f = Counted(any_cache, colour)
        assert await f() == 1
        with stampede.bypassed():
            assert [await f(), await f()] == [2, 3]
            assert await f(2) == 4
            await f.verb("set", 50, 3)  # an explicit `set` is executed
        assert [await f(), (await f.verb("peek", 2)), await f(3)] == [1, None, 50]

    asyncio.run(main())


def test_a_herd_in_one_block_computes_once(any_cache: Cache) -> None:
    """Tasks and threads in one `refreshing()` block share one computation, and none gets the old value."""

    async def tasks() -> list[Any]:
        f = Counted(any_cache, "async")
        assert await f() == 1
        with stampede.refreshing():
            return list(await asyncio.gather(*[f() for _ in range(5)], *[asyncio.create_task(f()) for _ in range(5)]))

    assert asyncio.run(tasks()) == [2] * 10
    origin = Number(0.05)
    g = any_cache.cached(key="k")(lambda: origin())
    assert g() == 1
    with stampede.refreshing():
        contexts = [contextvars.copy_context() for _ in range(4)]
        assert Herd(*[lambda context=context: context.run(g) for context in contexts]).join() == [2] * 4
    assert g() == 2


def test_many_keys_in_a_block(any_cache: Cache) -> None:
    """Blocks apply to batches: `refreshing()` loads each key once, and `bypassed()` loads keys and stores none."""
    rounds: list[list[str]] = []

    def load(keys: list[str]) -> dict[str, int]:
        rounds.append(sorted(keys))
        return dict.fromkeys(keys, len(rounds))

    many = any_cache.get_or_compute_many
    assert many(["a", "b"], load) == {"a": 1, "b": 1}
    with any_cache.refreshing():
        assert many(["a"], load) == {"a": 2}
        assert many(["a", "b"], load) == {"a": 2, "b": 3}
        assert any_cache.get_or_compute("a", Number()) == 2
        assert many(["a", "b"], load) == {"a": 2, "b": 3}
    assert rounds == [["a", "b"], ["a"], ["b"]]
    assert asyncio.run(_many_of(any_cache, load)) == {"a": 4, "b": 4}
    with stampede.bypassed():
        assert many(["a", "b"], load) == {"a": 5, "b": 5}
    assert any_cache.get_many(["a", "b"]) == {"a": 4, "b": 4}


async def _many_of(cache: Cache, load: Any) -> Any:
    with cache.refreshing():
        first = await cache.aget_or_compute_many(["a", "b"], load)
        assert await cache.aget_or_compute("a", Number()) == first["a"]
        return first


def test_a_function_of_many_ids_in_a_block(any_cache: Cache, colour: str) -> None:
    """Blocks apply to a function of many ids, and to its `one`."""
    rounds: list[list[int]] = []

    def numbers(ids: list[int]) -> dict[int, int]:
        rounds.append(ids)
        return dict.fromkeys(ids, len(rounds))

    async def anumbers(ids: list[int]) -> dict[int, int]:
        return numbers(ids)

    async def main() -> None:
        f: Any = any_cache.cached.many(numbers if colour == "sync" else anumbers)

        async def had(answer: Any) -> Any:
            return await answer if asyncio.iscoroutine(answer) else answer

        assert await had(f([1, 2])) == {1: 1, 2: 1}
        with stampede.refreshing():
            assert await had(f.one(1)) == 2
            assert await had(f([1, 2])) == {1: 2, 2: 3}
            assert await had(f([1, 2])) == {1: 2, 2: 3}
        with stampede.bypassed():
            assert await had(f([1, 2])) == {1: 4, 2: 4}
            assert await had(f.one(1)) == 5
        assert await had(f([1, 2])) == {1: 2, 2: 3}

    asyncio.run(main())


def test_the_many_of_a_function_in_a_block(cache: Cache, colour: str) -> None:
    """Blocks apply to `f.many` of a decorated function."""

    async def main() -> None:
        f = Counted(cache, colour, background=True, stale=60)
        assert await f.verb("many", [(1,), (2,)]) == [1, 2]
        await f.verb("expire", 1)
        with stampede.refreshing():
            assert await f(1) == 3  # not the stale value, with a refresh in the background
            assert await f.verb("many", [(1,), (2,)]) == [3, 4]
            assert await f.verb("many", [(1,), (2,)]) == [3, 4]
        with stampede.bypassed():
            assert await f.verb("many", [(1,), (2,)]) == [5, 6]

    asyncio.run(main())


def test_nobody_else_is_concerned(cache: Cache) -> None:
    """A block affects only the task that opened it. Other tasks and threads get the stored value."""

    async def main() -> None:
        f = Counted(cache, "async")
        assert await f() == 1
        opened, done = asyncio.Event(), asyncio.Event()

        async def admin(block: Any) -> None:
            with block:
                opened.set()
                await done.wait()

        for block in (stampede.refreshing(), stampede.bypassed()):
            opened.clear()
            done.clear()
            task = asyncio.create_task(admin(block))
            await opened.wait()
            assert await f() == 1
            assert await asyncio.to_thread(asyncio.run, f()) == 1
            done.set()
            await task

    asyncio.run(main())


def test_generators_leave_their_blocks_in_any_order(cache: Cache) -> None:
    """Generators may leave their blocks in any order. No closed block remains in force for their caller."""
    f = Counted(cache, "sync")

    def reload() -> Iterator[int]:
        with stampede.refreshing():
            yield 0
            yield had(f())

    assert had(f()) == 1
    first, second = reload(), reload()
    assert next(first) == next(second) == 0
    first.close()
    assert next(second) == 2
    second.close()
    assert _blocks.get() == ()
    assert had(f()) == 2


def test_a_task_that_outlives_the_block_goes_the_usual_way(cache: Cache) -> None:
    """A task that was started in a block and outlives it uses the cache as usual."""

    async def main() -> None:
        f = Counted(cache, "async")
        with stampede.bypassed():
            over = asyncio.Event()

            async def later() -> Any:
                await over.wait()
                return [await f(), await f()]

            task = asyncio.create_task(later())
        over.set()
        with Cache("memory://") as other, other.bypassed():  # a block of another cache does not affect it
            assert await task == [1, 1]

    asyncio.run(main())


def test_what_is_called_inside_is_computed_anew_too(cache: Cache, colour: str) -> None:
    """In a `refreshing()` block, the cached functions that a computation calls are computed again, too."""

    async def main() -> None:
        part = Counted(cache, "sync", key="part:{key}")
        page = Counted(cache, colour, key="page:{key}")
        page.before = lambda: parts.append(part.cached(1))
        parts: list[int] = []
        await page()
        with stampede.refreshing():
            await page()
            assert part.cached(1) == 2
        assert parts == [1, 2]

    asyncio.run(main())


def test_a_computation_that_asks_for_itself_in_a_block(cache: Cache) -> None:
    """A computation that asks for its own key is refused in a block, too: it would call itself without end."""
    f = Counted(cache, "sync")
    f.before = lambda: f.cached(1)
    with stampede.refreshing(), pytest.raises(RecursiveComputation):
        f.cached(1)


def test_one_cache_of_two(cache: Cache) -> None:
    """A block of one cache does not affect other caches. The innermost block for a cache applies."""
    with Cache("memory://", early=0) as other:
        f, g = Counted(cache, "sync"), Counted(other, "sync")
        assert f.cached(1) == g.cached(1) == 1
        with cache.refreshing():
            assert (f.cached(1), g.cached(1)) == (2, 1)
            with g.cached.cache.bypassed(), stampede.refreshing():
                assert (f.cached(1), g.cached(1)) == (3, 2)  # the innermost block for each cache
                with g.cached.cache.bypassed():
                    assert (f.cached(1), g.cached(1), g.cached(1)) == (3, 3, 4)
        assert (f.cached(1), g.cached(1)) == (3, 2)


def test_a_failure_is_not_what_was_asked_for(any_cache: Cache, colour: str) -> None:
    """If a computation in a `refreshing()` block fails, the next call in the block computes again."""

    async def main() -> None:
        f = Counted(any_cache, colour, stale=600)
        assert await f() == 1

        def fail() -> None:
            raise ValueError

        with stampede.refreshing():
            f.before = fail
            with pytest.raises(ValueError):
                await f()
            f.before = lambda: None
            assert await f() == 3
        assert await f() == 3

    asyncio.run(main())


def steps(call: Callable[[], Any]) -> int:
    """Return the number of Python functions that a call runs."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # finalizers would count
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("block", [stampede.refreshing, stampede.bypassed, disabled])
def test_hits_are_as_fast_as_before(cache: Cache, block: Any) -> None:
    """Hits are slower while a block is open. After it, they are as fast as before."""
    f = Counted(cache, "sync").cached
    f(1), f(1), f(2), f(2)
    quick = steps(lambda: f(1))
    with block():
        f(2)
        assert steps(lambda: f(1)) > quick
    f(1), f(2)
    assert steps(lambda: f(1)) == steps(lambda: f(2)) == quick


def test_values_that_have_several_ways_to_them_live_in_a_table_once(cache: Cache) -> None:
    """An ignored parameter with many values, such as a session, does not leave a reference for each of them."""
    f = cache.cached(key="user:{id}")(lambda id, session: id)
    for session in range(100):
        f(1, session)
        f(1, session)
        with stampede.bypassed():
            pass
    [resident] = cache._core.local_tier.residents.residents()
    assert len(resident.homes) <= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_in_no_block_of_another_thread(cache: Cache) -> None:
    """A forked child is not in a block of another thread. Otherwise, its hits would stay slow."""
    opened, over = threading.Event(), threading.Event()

    def hold() -> None:
        with stampede.bypassed():
            opened.set()
            over.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    opened.wait(10)
    pid = os.fork()
    if pid == 0:
        os._exit(int(overrides.active))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with stampede.bypassed():
        pid = os.fork()
        if pid == 0:
            os._exit(int(overrides.active))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    over.set()
    thread.join()
    assert not overrides.active
