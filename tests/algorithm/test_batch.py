"""`get_or_compute_many` and `f.many`: each key has its own flight and lease, and one call loads all missing keys."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import pytest
from both_colours import Suspending, blocking
from herd import PATIENCE, Herd, Origin, had, until, until_async
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede import Cache, CodecError, KeyingError, OptionError, RecursiveComputation, cached
from stampede.algorithm.background import _refreshers
from stampede.testing import disabled, isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


WAYS = [("memory://", "sync", ""), ("disk", "async", "shop")]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(filter(None, way)))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    url, colour, namespace = request.param
    with Cache(f"disk://{tmp_path}/c" if url == "disk" else url, namespace=namespace) as cache:
        yield cache if colour == "sync" else cast("Cache", Suspending(cache))


class Loader:
    """A loader that returns its keys in upper case and records the keys of each call."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, keys: list[str]) -> dict[str, str]:
        self.asked.append(list(keys))
        return {key: key.upper() for key in keys}

    async def suspending(self, keys: list[str]) -> dict[str, str]:
        return self(keys)


def test_one_call_for_what_is_missing(cache: Cache) -> None:
    """A batch calls the loader once for all missing keys, and not at all if every key is stored."""
    load = Loader()
    cache.set("b", "there")
    assert cache.get_or_compute_many(["a", "b", "c"], load) == {"a": "A", "b": "there", "c": "C"}
    assert load.asked == [["a", "c"]]
    assert cache.get_or_compute_many(["c", "a"], load) == {"c": "C", "a": "A"}
    assert load.asked == [["a", "c"]]
    assert list(cache.get_or_compute_many(["c", "a", "c"], load)) == ["c", "a"]
    assert cache.get_or_compute_many([], load) == {}


def test_async(cache: Cache) -> None:
    """An async batch accepts an async loader and a sync loader."""
    load = Loader()

    async def main() -> None:
        assert await cache.aget_or_compute_many(["a", "b"], load.suspending) == {"a": "A", "b": "B"}
        assert await cache.aget_or_compute_many(["a", "c"], load) == {"a": "A", "c": "C"}

    asyncio.run(main())
    assert load.asked == [["a", "b"], ["c"]]


def test_what_the_loader_leaves_out_is_left_out(cache: Cache) -> None:
    """A key that the loader leaves out is missing from the result. Nothing is stored for it, and it is not locked."""
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {"a": 1}) == {"a": 1}
    started = time.monotonic()
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {"b": 2}) == {"a": 1, "b": 2}
    assert time.monotonic() - started < 5


def test_what_the_loader_gives_besides_is_ignored(cache: Cache) -> None:
    """A value for a key that was not asked for is not stored, because the batch has no lease for it."""
    assert cache.get_or_compute_many(["a"], lambda keys: {"a": 1, "z": 26}) == {"a": 1}
    assert cache.get("z") is None


def test_a_loader_that_fails_locks_nothing(cache: Cache) -> None:
    """If the loader fails, the batch gives back all leases. Otherwise, the next batch would wait for them."""

    def fails(keys: list[str]) -> dict[str, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_compute_many(["a", "b", "c"], fails)
    started = time.monotonic()
    assert cache.get_or_compute_many(["c", "b", "a"], Loader()) == {"c": "C", "b": "B", "a": "A"}
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("wrong", [lambda keys: [1], lambda keys: None, lambda keys: iter(keys)])
def test_a_loader_that_returns_no_mapping(cache: Cache, wrong: Any) -> None:
    """If a loader returns no mapping, the batch raises a TypeError that says so. No key remains locked."""
    with pytest.raises(TypeError, match=r"map|iterator"):
        cache.get_or_compute_many(["a"], wrong)
    assert cache.get_or_compute_many(["a"], Loader()) == {"a": "A"}


def test_a_value_that_can_not_be_kept(cache: Cache) -> None:
    """If one value cannot be stored, the batch raises CodecError. No key remains locked."""
    with pytest.raises(CodecError):
        cache.get_or_compute_many(["a", "b", "c"], lambda keys: {"a": 1, "b": iter([]), "c": 3})
    started = time.monotonic()
    assert cache.get_or_compute_many(["c", "b"], Loader())["b"] == "B"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("keys", [[5], ["a", None], [b"a"]])
def test_wrong_keys_are_refused_before_anything_is_claimed(cache: Cache, keys: Any) -> None:
    """If one key of a batch is invalid, the batch raises KeyingError and does not call the loader."""
    load = Loader()
    with pytest.raises(KeyingError, match="give a str"):
        cache.get_or_compute_many(keys, load)
    assert load.asked == []


def test_wrong_options(cache: Cache) -> None:
    """A misspelt option of a batch raises OptionError, which suggests the right name."""
    with pytest.raises(OptionError, match="did you mean 'ttl'"):
        cache.get_or_compute_many(["a"], Loader(), tll=5)


def test_a_batch_waits_for_who_computes_already(cache: Cache) -> None:
    """A key that another caller computes is not loaded again. The other keys are loaded without waiting for it."""
    origin, load = Origin(), Loader()
    single = Herd(lambda: cache.get_or_compute("b", origin))
    origin.has_begun()
    batch = Herd(lambda: cache.get_or_compute_many(["a", "b", "c"], load))
    until(lambda: load.asked)
    assert load.asked == [["a", "c"]]
    assert batch.waiting == 1
    origin.let_on()
    assert single.join() == [1]
    assert batch.join() == [{"a": "A", "b": 1, "c": "C"}]
    assert load.asked == [["a", "c"]]


def test_others_wait_for_the_batch(cache: Cache) -> None:
    """A caller of one key that a running batch loads gets the value from the batch."""
    origin = Origin()

    def load(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, origin())

    batch = Herd(lambda: cache.get_or_compute_many(["a", "b"], load))
    origin.has_begun()
    singles = Herd(*[lambda: cache.get_or_compute("b", lambda: "alone")] * 3)
    until(lambda: sum(flight.callers for flight in list(cache._core.flights._flights.values())) == 5)
    origin.let_on()
    assert batch.join() == [{"a": 1, "b": 1}]
    assert singles.join() == [1] * 3


def test_batches_in_opposite_order_do_not_block_each_other(cache: Cache) -> None:
    """Batches with the same keys in opposite order do not block each other: none waits while it holds leases."""
    keys = [str(n) for n in range(12)]
    for _ in range(5):
        jobs = [lambda o=order: cache.get_or_compute_many(o, Loader(), lease=60) for order in (keys, keys[::-1])] * 3
        assert Herd(*jobs).join() == [{key: key for key in keys}] * 6
        cache.clear()


def test_a_herd_of_batches_loads_each_key_once(cache: Cache) -> None:
    """If several batches ask for the same keys at the same time, each key is loaded once."""
    load = Loader()
    keys = [str(n) for n in range(20)]
    Herd(*[lambda s=shift: cache.get_or_compute_many(keys[s:] + keys[:s], load) for shift in range(8)]).join()
    asked = [key for batch in load.asked for key in batch]
    assert sorted(asked) == sorted(keys)


def test_a_cancelled_batch_locks_nothing(cache: Cache) -> None:
    """A cancelled batch gives back the leases of all keys."""
    origin = Origin()

    async def load(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, await origin.suspending())

    async def main() -> None:
        task = asyncio.create_task(cache.aget_or_compute_many(["a", "b"], load, lease=60))
        await until_async(lambda: origin.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await asyncio.wait_for(cache.aget_or_compute_many(["b", "a"], Loader()), PATIENCE)
        assert again == {"b": "B", "a": "A"}

    asyncio.run(main())


def test_invalidation_wins_over_a_batch(cache: Cache) -> None:
    """A key that is invalidated while the batch loads it is not stored. The other keys are stored."""
    origin = Origin()
    batch = Herd(lambda: cache.get_or_compute_many(["a", "b"], lambda keys: dict.fromkeys(keys, origin())))
    origin.has_begun()
    cache.invalidate("a")
    origin.let_on()
    assert batch.join() == [{"a": 1, "b": 1}]
    assert cache.get_many(["a", "b"]) == {"b": 1}


def test_stale_values_are_served_when_the_loader_fails(cache: Cache) -> None:
    """If the loader fails, the batch returns the stale values."""
    cache.set_many({"a": 1, "b": 2}, stale=60)
    cache.expire("a")

    def fails(keys: list[str]) -> dict[str, int]:
        raise ZeroDivisionError

    assert cache.get_or_compute_many(["a", "b"], fails, stale=60) == {"a": 1, "b": 2}


def test_options_of_a_batch(cache: Cache) -> None:
    """`ttl` and `cache_if` apply to each key of a batch."""
    cache.get_or_compute_many(["a", "b"], lambda keys: {"a": 1, "b": None}, ttl=60, cache_if=lambda v: v is not None)
    entry = cache.peek("a")
    assert entry is not None
    assert entry.ttl == 60
    assert cache.peek("b") is None


def test_many_of_a_function_runs_together(cache: Cache) -> None:
    """`f.many` of an async function runs its calls at the same time. It returns the values in their order."""
    running: list[int] = []

    @cache.cached
    async def f(n: int) -> int:
        running.append(n)
        await until_async(lambda: len(running) == 5)
        return n

    assert asyncio.run(f.many([(n,) for n in range(5)])) == list(range(5))


def test_many_of_a_function_that_fails(cache: Cache) -> None:
    """If one call fails, the caller gets its error. The other calls are cancelled, and no key remains locked."""

    @cache.cached(lease=60)
    async def f(n: int) -> int:
        if n == 2 and not healed:
            raise ZeroDivisionError
        await asyncio.sleep(0 if healed else PATIENCE)
        return n

    healed: list[int] = []

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(f.many([(1,), (2,), (3,)]), 5)
        healed.append(1)
        assert await asyncio.wait_for(f.many([(1,), (2,), (3,)]), 5) == [1, 2, 3]

    asyncio.run(main())


def test_what_a_batch_leaves_out_others_ask_for_themselves(tmp_path: Path) -> None:
    """Callers that wait for a key that the batch leaves out ask again. They get no internal exception."""
    with Cache(f"disk://{tmp_path}/c") as here, Cache(f"disk://{tmp_path}/c") as there:
        origin = Origin()

        def leaves_out(keys: list[str]) -> dict[str, int]:
            origin()
            return {}

        first = Herd(lambda: here.get_or_compute_many(["k"], leaves_out))
        origin.has_begun()
        batches = Herd(*[lambda cache=cache: cache.get_or_compute_many(["k"], leaves_out) for cache in (here, there)])
        singles = Herd(*[lambda cache=cache: cache.get_or_compute("k", lambda: 42) for cache in (here, there)])
        until(lambda: sum(flight.callers for flight in list(here._core.flights._flights.values())) == 3)
        until(lambda: there._core.flights._flights)
        origin.let_on()
        assert singles.join() == [42, 42]
        assert first.join() == [{}]
        assert all(each in ({}, {"k": 42}) for each in batches.join())  # a batch that asks again may find the stored 42


def test_what_is_stale_is_served_while_a_batch_refreshes_it_beside(cache: Cache) -> None:
    """With `background=True`, a batch returns stale values at once and refreshes them in the background."""
    cache = blocking(cache)  # a loop that lives for one call cannot run a refresh in the background
    origin = Origin()
    options: dict[str, Any] = {"stale": 60, "background": True}
    cache.set_many({"a": "old", "b": "old", "c": "old"}, stale=60)

    def load(keys: list[str]) -> dict[str, Any]:
        return dict.fromkeys(keys, origin())

    cache.expire("a")
    cache.expire("b")
    cache.invalidate("c")
    assert cache.get_or_compute_many(["a", "b"], load, **options) == {"a": "old", "b": "old"}
    origin.has_begun()  # otherwise the next batch could be the first to claim the stale keys
    assert cache.get_or_compute_many(["a", "c"], Loader(), **options) == {"a": "old", "c": "C"}
    assert cache.get_or_compute("b", lambda: "mine", **options) == "old"
    origin.let_on()
    until(lambda: cache.get_many(["a", "b"]) == {"a": 1, "b": 1})
    assert origin.calls == 1


def test_an_async_batch_refreshes_beside(cache: Cache) -> None:
    """With `background=True`, an async batch returns stale values at once and refreshes them in the background."""
    origin = Origin()

    async def load(keys: list[str]) -> dict[str, Any]:
        return dict.fromkeys(keys, await origin.suspending())

    async def main() -> None:
        cache.set_many({"a": "old", "b": "there"}, stale=60)
        cache.expire("a")
        got = await cache.aget_or_compute_many(["a", "b"], load, stale=60, background=True)
        assert got == {"a": "old", "b": "there"}
        await until_async(lambda: origin.calls)
        origin.let_on()
        await until_async(lambda: cache.get("a") == 1)

    asyncio.run(main())


def test_a_loop_that_ends_leaves_no_refresh_of_a_batch(cache: Cache) -> None:
    """If the event loop ends while a batch refreshes a key in the background, the key does not remain locked."""

    async def load(keys: list[str]) -> dict[str, Any]:
        await asyncio.sleep(PATIENCE)
        return {}

    async def main() -> None:
        cache.set("a", "old", stale=60)
        cache.expire("a")
        await cache.aget_or_compute_many(["a"], load, stale=60, background=True, lease=60)

    asyncio.run(main())
    assert cache.get_or_compute("a", lambda: "now", stale=60) == "now"


def test_many_of_a_function_refreshes_beside(colour: str, cache: Cache) -> None:
    """With `background=True`, `f.many` returns stale values at once, as single calls do."""
    origin = Origin(open=True)

    def numbered(n: int) -> tuple[int, int]:
        return n, origin()

    async def anumbered(n: int) -> tuple[int, int]:
        return n, await origin.suspending()

    f: Any = cache.cached(stale=60, background=True)(numbered if colour == "sync" else anumbered)

    async def main() -> None:
        assert await gone_on(f.many([(1,), (2,)])) == [(1, 1), (2, 2)]
        await gone_on(f.expire(1))
        origin.hold()
        assert await gone_on(f.many([(1,), (2,)])) == [(1, 1), (2, 2)]
        await until_async(lambda: origin.calls == 3)
        origin.let_on()
        found: list[Any] = []
        while found != [(1, 3)]:
            found = await gone_on(f.many([(1,)]))
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def gone_on(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


def test_many_of_a_function_is_its_calls_one_by_one(colour: str, cache: Cache) -> None:
    """If a call of `f.many` fails, its stale value is returned. Without one, `f.many` raises the first error."""
    broken: set[int] = set()

    def compute(n: int) -> int:
        if n in broken:
            raise LookupError(n)
        return n

    async def acompute(n: int) -> int:
        return compute(n)

    f: Any = cache.cached(stale=60)(compute if colour == "sync" else acompute)
    had(f(1))
    had(f.expire(1))
    broken |= {1}
    assert had(f.many([(1,), (2,), (3,)])) == [1, 2, 3]
    broken |= {5, 6}
    with pytest.raises(LookupError, match="5"):
        had(f.many([(4,), (5,), (6,)]))
    assert had(f.many([(4,), (1,)])) == [4, 1]


KEPT, ENDS = ["nothing", "fresh", "stale"], ["value", "error", "answer", "refused", "code"]


@pytest.mark.parametrize("url", ["memory://", "memory://?codec=sealed"])
@pytest.mark.parametrize("colour", ["sync", "async", "threads"])
@given(
    calls=st.lists(st.integers(0, 3), max_size=6),  # no more keys than threads for refreshes
    kept=st.lists(st.sampled_from(KEPT), min_size=4, max_size=4),
    ends=st.lists(st.sampled_from(ENDS), min_size=4, max_size=4),
    background=st.booleans(),
)
@settings(max_examples=30)
def test_many_gives_what_calls_would(
    url: str, colour: str, calls: list[int], kept: list[str], ends: list[str], background: bool
) -> None:
    """`f.many` returns the same values as single calls, or raises the same error."""

    def compute(n: int) -> Any:
        match ends[n]:
            case "error":
                raise LookupError(n)
            case "answer":
                raise OSError(n)
            case "refused":
                return None
            case "code":
                return test_wrong_options
            case _:
                return n

    async def acompute(n: int) -> Any:
        return compute(n)

    def cached(cache: Cache) -> Any:
        options: dict[str, Any] = {"stale": 60, "raises": OSError, "cache_if": lambda value: value is not None}
        f: Any = cache.cached(background=background, **options)(acompute if colour == "async" else compute)
        for n, state in enumerate(kept):
            if state != "nothing":
                had(f.set("kept", n))
            if state == "stale":
                had(f.expire(n))
        return f

    with Cache(url) as one, Cache(url) as other:
        f, g = cached(one), cached(other)

        async def each() -> Any:
            return [await f(n) for n in calls]

        async def many() -> Any:
            return await g.many([(n,) for n in calls])

        if background:  # whether a refresh in the background ends before the next call is a matter of luck
            calls = [*dict.fromkeys(calls)]
        if colour == "async":
            assert ended(lambda: asyncio.run(many())) == ended(lambda: asyncio.run(each()))
        else:
            terms = {"workers": 3} if colour == "threads" else {}
            idle()
            assert ended(lambda: g.many([(n,) for n in calls], **terms)) == ended(
                lambda: [idle() or f(n) for n in calls]
            )


def idle() -> None:
    """Wait until a background thread is free: without one, the caller computes the value itself."""
    until(lambda: not _refreshers.taken)


def ended(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), error.args


def test_many_of_a_function_that_calls_itself(colour: str, cache: Cache) -> None:
    """A call of a batch may ask for another call of the same batch. Only real recursion raises RecursiveComputation."""

    def fibonacci(n: int) -> int:
        return n if n < 2 else f(n - 1) + f(n - 2)

    async def afibonacci(n: int) -> int:
        return n if n < 2 else await f(n - 1) + await f(n - 2)

    def circle(n: int) -> int:
        return g((n + 1) % 3)

    async def acircle(n: int) -> int:
        return await g((n + 1) % 3)

    f: Any = cache.cached(fibonacci if colour == "sync" else afibonacci)
    g: Any = cache.cached(lease=0.2)(circle if colour == "sync" else acircle)
    assert had(f.many([(10,), (9,), (8,), (11,)])) == [55, 34, 21, 89]
    with pytest.raises(RecursiveComputation):
        had(g.many([(0,), (1,), (2,)]))


# -- threads ----------------------------------------------------------------------------------------------------------


def test_many_by_threads(cache: Cache) -> None:
    """With `workers=3`, three calls run at once, in the caller's context. The values come in the calls' order."""
    together, running, most = threading.Barrier(3), [], []
    inside: ContextVar[str] = ContextVar("inside", default="nobody")

    @cache.cached
    def f(n: int) -> tuple[int, str]:
        running.append(n)
        most.append(len(running))
        together.wait(PATIENCE)
        who = inside.get()
        inside.set(f"the call of {n}")
        running.remove(n)
        return n, who

    inside.set("the caller")
    assert f.many([(n,) for n in range(6)], workers=3) == [(n, "the caller") for n in range(6)]
    assert max(most) == 3
    assert inside.get() == "the caller"
    assert f.many([(n,) for n in range(6)], workers=9) == [(n, "the caller") for n in range(6)]
    assert f.stats().computations == 6


def test_many_by_threads_of_a_method() -> None:
    """In worker threads, too, the calls of a method are bound to its object."""
    together = threading.Barrier(2)

    class Shop:
        def __stampede_key__(self) -> str:
            return "shop"

        @cached
        def price(self, n: int) -> int:
            together.wait(PATIENCE)
            return n

    assert Shop().price.many([(1,), {"n": 2}], workers=2) == [1, 2]


def test_many_by_threads_that_fail(cache: Cache) -> None:
    """`f.many` raises the first error in the order of the calls. No later call begins, and no key remains locked."""
    together, begun, failed, caller = threading.Barrier(3), [], [], threading.get_ident()

    def helpers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "many" in thread.name]

    @cache.cached(lease=60)
    def f(n: int) -> int:
        begun.append(n)
        if not healed:
            together.wait(PATIENCE)
            if threading.get_ident() != caller:  # two calls fail, and their threads end, while this thread's still runs
                failed.append(n)
                raise LookupError(n)
            until(lambda: not helpers())
        return n

    healed: list[int] = []
    with pytest.raises(LookupError) as raised:
        f.many([(n,) for n in range(6)], workers=3)
    assert len(failed) == 2
    assert raised.value.args == (min(failed),)
    assert sorted(begun) == [0, 1, 2]
    assert helpers() == []
    healed.append(1)
    assert f.many([(n,) for n in range(6)], workers=3) == list(range(6))
    assert begun.count(({0, 1, 2} - {*failed}).pop()) == 1


def test_many_by_threads_that_are_interrupted(cache: Cache) -> None:
    """`f.many` raises the KeyboardInterrupt of the caller even if other calls fail, and waits until those calls end."""
    together, ended, caller = threading.Barrier(2), [], threading.get_ident()

    @cache.cached(lease=60)
    def f(n: int) -> int:
        if healed:
            return n
        together.wait(PATIENCE)
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        ended.append(n)
        raise LookupError

    healed: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        f.many([(n,) for n in range(6)], workers=2)
    assert len(ended) == 1
    healed.append(1)
    assert f.many([(n,) for n in range(6)], workers=2) == list(range(6))


def test_many_by_threads_of_a_function_that_calls_itself(cache: Cache) -> None:
    """Worker threads may ask for each other's calls. A circle of calls is an error, and not a deadlock."""
    together = threading.Barrier(3)

    @cache.cached
    def fibonacci(n: int) -> int:
        return n if n < 2 else sum(fibonacci.many([(n - 1,), (n - 2,)], workers=2))

    @cache.cached(lease=0.2)  # a computation waits at most this long for another one
    def circle(n: int) -> int:
        together.wait(PATIENCE)
        return circle((n + 1) % 3)

    assert fibonacci.many([(10,), (9,), (8,), (11,)], workers=4) == [55, 34, 21, 89]
    with pytest.raises(RecursiveComputation):
        circle.many([(0,), (1,), (2,)], workers=3)


def test_many_by_threads_that_ask_for_each_other_s(cache: Cache) -> None:
    """A key that one thread computes is not computed again by another thread."""
    second, computed = threading.Event(), []

    @cache.cached
    def f(n: int) -> int:
        computed.append(n)
        if n == 1:
            assert second.wait(PATIENCE)
            return f(3) + f(4)
        second.set()
        time.sleep({2: 0.03, 3: 0.06, 4: 0.06}[n])  # f(1) begins f(3); the other thread begins f(4) meanwhile
        return n

    assert f.many([(1,), (2,), (3,), (4,)], workers=2) == [7, 2, 3, 4]
    assert sorted(computed) == [1, 2, 3, 4]


def test_many_where_there_are_no_threads(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the caller's thread makes all calls."""
    monkeypatch.setattr("stampede.api.many_calls.begun", lambda *args: None)
    assert cache.cached(lambda n: n).many([(1,), (2,), (3,)], workers=3) == [1, 2, 3]


@pytest.mark.parametrize("workers", [0, True, "3", 2.0])
def test_wrong_workers(cache: Cache, workers: Any) -> None:
    """Invalid `workers` raise OptionError, and so do any `workers` for an async function."""
    with pytest.raises(OptionError, match="workers is"):
        cache.cached(lambda n: n).many([(1,)], workers=workers)

    @cache.cached
    async def f(n: int) -> int:
        return n

    with pytest.raises(OptionError, match="is async"):
        f.many([(1,)], workers=2)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_many_takes_arguments_by_name(colour: str, cache: Cache) -> None:
    """`f.many` accepts a dict as the named arguments of a call. Such a call has the same key as one by position."""

    def compute(n: int, *, factor: int = 2) -> int:
        return n * factor

    async def acompute(n: int, *, factor: int = 2) -> int:
        return compute(n, factor=factor)

    f: Any = cache.cached(compute if colour == "sync" else acompute)
    assert had(f.many([{"n": 1}, (2,), {"n": 3, "factor": 3}, {"factor": 2, "n": 1}])) == [2, 4, 9, 2]
    assert had(f(1)) == 2
    assert f.stats().computations == 3
    with disabled():
        assert had(f.many([{"n": 1}, (2,)])) == [2, 4]
    with pytest.raises(TypeError, match="m"):
        had(f.many([{"m": 1}]))

    class Shop:
        def __stampede_key__(self) -> str:
            return "shop"

        @cache.cached
        def price(self, n: int, *, factor: int = 1) -> int:
            return n * factor

    assert Shop().price.many([{"n": 1, "factor": 5}, (1,)]) == [5, 1]


def test_batches_in_a_namespace() -> None:
    """In a namespace, the loader is called with the caller's keys, and its values are found under these keys."""
    load = Loader()
    with Cache(namespace="shop") as cache:
        assert cache.get_or_compute_many(["a", "b"], load) == {"a": "A", "b": "B"}
        assert cache.get_or_compute_many(["b", "c"], load) == {"b": "B", "c": "C"}
        assert asyncio.run(cache.aget_or_compute_many(["c", "d"], load)) == {"c": "C", "d": "D"}
    assert load.asked == [["a", "b"], ["c"], ["d"]]


def test_a_batch_fills_the_local_tier(tmp_path: Path) -> None:
    """A batch stores its values in the local tier. Otherwise, each batch would read them from the engine again."""
    with Cache(f"disk://{tmp_path}/c", local={"entries": 10}) as cache:
        cache.get_or_compute_many(["a", "b"], Loader())
        cache.get_or_compute_many(["a", "b"], Loader())
        hits = cache.stats().hits
        assert cache.get_or_compute_many(["a", "b"], Loader()) == {"a": "A", "b": "B"}
        assert cache.stats().hits == hits + 2


def test_a_refresh_that_failed_in_a_batch_is_tried_again() -> None:
    """If an early refresh in a batch fails, the next batch refreshes the key."""
    cache, failed = Cache(ttl=60), []
    cache.get_or_compute_many(["k"], lambda keys: {"k": 1})
    (resident,) = cache._core.local_tier.residents.residents()
    resident.end = time.monotonic()  # the moment of its early refresh

    def fails(keys: list[str]) -> dict[str, int]:
        failed.append(keys)
        raise ZeroDivisionError

    assert cache.get_or_compute_many(["k"], fails) == {"k": 1}
    assert failed == [["k"]]
    # After a failure, the key is not refreshed for as long as the computation took.
    until(lambda: cache.get_or_compute_many(["k"], Loader()) == {"k": "K"})
