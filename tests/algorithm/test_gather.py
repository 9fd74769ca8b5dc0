"""Many questions in one round trip: what one caller's batch asks goes out together, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from far_engine import Far

from stampede import Cache, CodecError, EngineError

KEYS = [f"k{n}" for n in range(10)]


def upper(keys: list[str]) -> dict[str, str]:
    return {key: key.upper() for key in keys}


def test_a_batch_takes_two_trips_and_then_one() -> None:
    """Ten keys would take twenty round trips, and then ten."""
    engine = Far()
    cache = Cache(engine=engine)
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)
    assert [(len(trip), set(trip)) for trip in engine.trips] == [(10, {"claim"}), (10, {"fill"})]
    engine.trips.clear()
    assert cache.get_or_compute_many([*KEYS, "new"], upper) == upper([*KEYS, "new"])
    assert [len(trip) for trip in engine.trips] == [11, 1]


def test_many_changes_take_one_trip() -> None:
    """Ten keys would take ten; and a value that is refused would leave half of them changed."""
    engine = Far()
    cache = Cache(engine=engine)
    cache.set_many(upper(KEYS))
    assert cache.invalidate_many([*KEYS[1:], "new"]) == 9
    assert [(len(trip), set(trip)) for trip in engine.trips] == [(10, {"set"}), (10, {"invalidate"})]
    with pytest.raises(CodecError):
        cache.set_many({"k0": "new", "k1": object()})
    assert cache.get_many(KEYS) == {"k0": "K0"}


def test_a_change_of_many_raises_what_came_in_its_way() -> None:
    """Whoever invalidates has to hear that it may still be there."""
    engine = Far()
    cache = Cache(engine=engine)
    cache.set_many({"a": 1, "b": 2})
    engine.breaks = EngineError("lost")
    with pytest.raises(EngineError, match="lost"):
        cache.invalidate_many(["a", "b"])
    with pytest.raises(EngineError, match="lost"):
        cache.set_many({"a": 3, "b": 4})


def test_a_failing_function_gives_every_lease_back_in_one_trip() -> None:
    """The keys would be locked for a lease, or given back one by one."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)

    def fails(keys: list[str]) -> dict[str, str]:
        raise LookupError(keys[0])

    with pytest.raises(LookupError):
        cache.get_or_compute_many(KEYS, fails)
    assert [set(trip) for trip in engine.trips] == [{"claim"}, {"abandon"}]
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)


def test_what_is_left_out_is_given_back() -> None:
    """The next caller of such a key would wait for a lease that nobody fills."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)
    assert cache.get_or_compute_many(KEYS, lambda keys: upper(keys[:3])) == upper(KEYS[:3])
    assert cache.get_or_compute("k9", lambda: "now") == "now"


def test_trouble_on_the_way_is_no_trouble_of_the_caller() -> None:
    """An engine that can't be asked would fail the batch, or lock its keys."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)
    engine.breaks = EngineError("cut")
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)
    engine.breaks = None
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)


def test_an_interruption_leaves_nothing_behind() -> None:
    """Ctrl-C in the middle of the round trip would lock all the keys for a lease."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)
    engine.breaks = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        cache.get_or_compute_many(KEYS, upper)
    engine.breaks = None
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)


def test_many_calls_of_a_function_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an engine without looks, `f.many` would take a round trip for every call that finds its value."""
    engine = Far()
    engine.tier = None  # type: ignore[assignment]
    cache = Cache(engine=engine, early=0)
    reads, get = [], engine.blocking.store.get  # type: ignore[union-attr]

    async def counted(keys: Sequence[str]) -> Any:
        reads.append(len(keys))
        return await get(keys)

    @cache.cached
    def root(x: int) -> float:
        return float(x**0.5) if x >= 0 else [][x]

    assert root.many([(1,), (4,), (9,), (4,)]) == [1.0, 2.0, 3.0, 2.0]
    monkeypatch.setattr(engine.blocking.store, "get", counted)
    monkeypatch.setattr(engine.blocking.claims, "claim", None)  # not to be called
    assert root.many([(1,), (4,), (9,), (4,)]) == [1.0, 2.0, 3.0, 2.0]
    assert reads == [3]
