"""Batches: the requests of one step for all keys take one round trip together, and none is lost."""

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
    """A batch takes one round trip to claim all keys, and one to store all computed values."""
    engine = Far()
    cache = Cache(engine=engine)
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)
    assert [(len(trip), set(trip)) for trip in engine.trips] == [(10, {"claim"}), (10, {"fill"})]
    engine.trips.clear()
    assert cache.get_or_compute_many([*KEYS, "new"], upper) == upper([*KEYS, "new"])
    assert [len(trip) for trip in engine.trips] == [11, 1]


def test_many_changes_take_one_trip() -> None:
    """`set_many` and `invalidate_many` take one round trip. If one value cannot be stored, no key is changed."""
    engine = Far()
    cache = Cache(engine=engine)
    cache.set_many(upper(KEYS))
    assert cache.invalidate_many([*KEYS[1:], "new"]) == 9
    assert [(len(trip), set(trip)) for trip in engine.trips] == [(10, {"set"}), (10, {"invalidate"})]
    with pytest.raises(CodecError):
        cache.set_many({"k0": "new", "k1": object()})
    assert cache.get_many(KEYS) == {"k0": "K0"}


def test_a_change_of_many_raises_what_came_in_its_way() -> None:
    """If the engine fails, `invalidate_many` and `set_many` raise the error: old values may still be stored."""
    engine = Far()
    cache = Cache(engine=engine)
    cache.set_many({"a": 1, "b": 2})
    engine.breaks = EngineError("lost")
    with pytest.raises(EngineError, match="lost"):
        cache.invalidate_many(["a", "b"])
    with pytest.raises(EngineError, match="lost"):
        cache.set_many({"a": 3, "b": 4})


def test_a_failing_function_gives_every_lease_back_in_one_trip() -> None:
    """If the loader fails, the batch gives back all leases in one round trip."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)

    def fails(keys: list[str]) -> dict[str, str]:
        raise LookupError(keys[0])

    with pytest.raises(LookupError):
        cache.get_or_compute_many(KEYS, fails)
    assert [set(trip) for trip in engine.trips] == [{"claim"}, {"abandon"}]
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)


def test_what_is_left_out_is_given_back() -> None:
    """A batch gives back the lease of each key that its loader leaves out."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)
    assert cache.get_or_compute_many(KEYS, lambda keys: upper(keys[:3])) == upper(KEYS[:3])
    assert cache.get_or_compute("k9", lambda: "now") == "now"


def test_trouble_on_the_way_is_no_trouble_of_the_caller() -> None:
    """If the engine cannot be reached, the batch returns its values all the same, and no key remains locked."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)
    engine.breaks = EngineError("cut")
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)
    engine.breaks = None
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)


def test_an_interruption_leaves_nothing_behind() -> None:
    """A KeyboardInterrupt during a round trip leaves no key locked."""
    engine = Far()
    cache = Cache(engine=engine, lease=60)
    engine.breaks = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        cache.get_or_compute_many(KEYS, upper)
    engine.breaks = None
    assert cache.get_or_compute_many(KEYS, upper) == upper(KEYS)


def test_many_calls_of_a_function_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an engine without looks, `f.many` reads all stored values in one round trip."""
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
    monkeypatch.setattr(engine.blocking.claims, "claim", None)  # must not be called
    assert root.many([(1,), (4,), (9,), (4,)]) == [1.0, 2.0, 3.0, 2.0]
    assert reads == [3]
