"""`get_or_compute_many`: a flight and a lease for each key, one call of the function for what is missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from herd import PATIENCE, Herd, Origin, until, until_async

from stampede import Cache, CodecError, KeyingError, OptionError
from stampede.testing import isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(params=["memory://", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with Cache(f"disk://{tmp_path}/c" if request.param == "disk" else request.param) as cache:
        yield cache


class Loader:
    """Answers with its keys, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, keys: list[str]) -> dict[str, str]:
        self.asked.append(list(keys))
        return {key: key.upper() for key in keys}

    async def suspending(self, keys: list[str]) -> dict[str, str]:
        return self(keys)


def test_one_call_for_what_is_missing(cache: Cache) -> None:
    """The reason for batches: one query for ten rows, not ten; none for what is there."""
    load = Loader()
    cache.set("b", "there")
    assert cache.get_or_compute_many(["a", "b", "c"], load) == {"a": "A", "b": "there", "c": "C"}
    assert load.asked == [["a", "c"]]
    assert cache.get_or_compute_many(["c", "a"], load) == {"c": "C", "a": "A"}
    assert load.asked == [["a", "c"]]
    assert list(cache.get_or_compute_many(["c", "a", "c"], load)) == ["c", "a"]
    assert cache.get_or_compute_many([], load) == {}


def test_async(cache: Cache) -> None:
    """The same, awaited; the loader may be of either colour."""
    load = Loader()

    async def main() -> None:
        assert await cache.aget_or_compute_many(["a", "b"], load.suspending) == {"a": "A", "b": "B"}
        assert await cache.aget_or_compute_many(["a", "c"], load) == {"a": "A", "c": "C"}

    asyncio.run(main())
    assert load.asked == [["a", "b"], ["c"]]


def test_what_the_loader_leaves_out_is_left_out(cache: Cache) -> None:
    """A row that isn't there: no None is invented, nothing is kept, and its key isn't locked."""
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {"a": 1}) == {"a": 1}
    started = time.monotonic()
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {"b": 2}) == {"a": 1, "b": 2}
    assert time.monotonic() - started < 5


def test_what_the_loader_gives_besides_is_ignored(cache: Cache) -> None:
    """It holds no lease for that."""
    assert cache.get_or_compute_many(["a"], lambda keys: {"a": 1, "z": 26}) == {"a": 1}
    assert cache.get("z") is None


def test_a_loader_that_fails_locks_nothing(cache: Cache) -> None:
    """All its leases are given back: dogpile's leaks the second."""

    def fails(keys: list[str]) -> dict[str, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get_or_compute_many(["a", "b", "c"], fails)
    started = time.monotonic()
    assert cache.get_or_compute_many(["c", "b", "a"], Loader()) == {"c": "C", "b": "B", "a": "A"}
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("wrong", [lambda keys: [1], lambda keys: None, lambda keys: iter(keys)])
def test_a_loader_that_returns_no_mapping(cache: Cache, wrong: Any) -> None:
    """The error says what it must return; nothing is locked."""
    with pytest.raises(TypeError, match=r"map|iterator"):
        cache.get_or_compute_many(["a"], wrong)
    assert cache.get_or_compute_many(["a"], Loader()) == {"a": "A"}


def test_a_value_that_can_not_be_kept(cache: Cache) -> None:
    """One bad value among good ones: it is told, and locks no key."""
    with pytest.raises(CodecError):
        cache.get_or_compute_many(["a", "b", "c"], lambda keys: {"a": 1, "b": iter([]), "c": 3})
    started = time.monotonic()
    assert cache.get_or_compute_many(["c", "b"], Loader())["b"] == "B"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("keys", [[5], ["a", None], [b"a"]])
def test_wrong_keys_are_refused_before_anything_is_claimed(cache: Cache, keys: Any) -> None:
    """The loader isn't called, and the good ones among them are not locked."""
    load = Loader()
    with pytest.raises(KeyingError, match="give a str"):
        cache.get_or_compute_many(keys, load)
    assert load.asked == []


def test_wrong_options(cache: Cache) -> None:
    """As everywhere."""
    with pytest.raises(OptionError, match="did you mean 'ttl'"):
        cache.get_or_compute_many(["a"], Loader(), tll=5)


def test_a_batch_waits_for_who_computes_already(cache: Cache) -> None:
    """A key that another caller is computing isn't loaded again; the others don't wait for it to be loaded."""
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
    """And who asks for one key of a batch under way gets it from there."""
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
    """Each holds what the other waits for: waiting while holding would end with the lease."""
    keys = [str(n) for n in range(12)]
    for _ in range(5):
        jobs = [lambda o=order: cache.get_or_compute_many(o, Loader()) for order in (keys, keys[::-1])] * 3
        started = time.monotonic()
        assert Herd(*jobs).join() == [{key: key for key in keys}] * 6
        assert time.monotonic() - started < 5
        cache.clear()


def test_a_herd_of_batches_loads_each_key_once(cache: Cache) -> None:
    """The promise, for batches."""
    load = Loader()
    keys = [str(n) for n in range(20)]
    Herd(*[lambda s=shift: cache.get_or_compute_many(keys[s:] + keys[:s], load) for shift in range(8)]).join()
    asked = [key for batch in load.asked for key in batch]
    assert sorted(asked) == sorted(keys)


def test_a_cancelled_batch_locks_nothing(cache: Cache) -> None:
    """All leases are given back."""
    origin = Origin()

    async def load(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, await origin.suspending())

    async def main() -> None:
        task = asyncio.create_task(cache.aget_or_compute_many(["a", "b"], load, lease=60))
        await until_async(lambda: origin.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await asyncio.wait_for(cache.aget_or_compute_many(["b", "a"], Loader()), 5)
        assert again == {"b": "B", "a": "A"}

    asyncio.run(main())


def test_invalidation_wins_over_a_batch(cache: Cache) -> None:
    """A key that is invalidated while the batch loads it isn't stored; its neighbours are."""
    origin = Origin()
    batch = Herd(lambda: cache.get_or_compute_many(["a", "b"], lambda keys: dict.fromkeys(keys, origin())))
    origin.has_begun()
    cache.invalidate("a")
    origin.let_on()
    assert batch.join() == [{"a": 1, "b": 1}]
    assert cache.get_many(["a", "b"]) == {"b": 1}


def test_stale_values_are_served_when_the_loader_fails(cache: Cache) -> None:
    """As for single keys."""
    cache.set_many({"a": 1, "b": 2}, stale=60)
    cache.expire("a")

    def fails(keys: list[str]) -> dict[str, int]:
        raise ZeroDivisionError

    assert cache.get_or_compute_many(["a", "b"], fails, stale=60) == {"a": 1, "b": 2}


def test_options_of_a_batch(cache: Cache) -> None:
    """ttl, cache_if and raises hold for each key."""
    cache.get_or_compute_many(["a", "b"], lambda keys: {"a": 1, "b": None}, ttl=60, cache_if=lambda v: v is not None)
    entry = cache.peek("a")
    assert entry is not None
    assert entry.ttl == 60
    assert cache.peek("b") is None


def test_many_of_a_function_runs_together(cache: Cache) -> None:
    """`f.many` of an async function computes its calls at once, in the order asked for."""
    running: list[int] = []
    most: list[int] = []

    @cache.cached
    async def f(n: int) -> int:
        running.append(n)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.remove(n)
        return n

    assert asyncio.run(f.many([(n,) for n in range(5)])) == list(range(5))
    assert max(most) == 5


def test_many_of_a_function_that_fails(cache: Cache) -> None:
    """The error reaches the caller; the other calls are not left running, nor their keys locked."""

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
