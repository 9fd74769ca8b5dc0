"""The memory engine beyond its ports: the tier and its bounds, finalizers, forks, cachetools, and threads."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from math import inf
from typing import Any

import pytest
from cachetools import LFUCache, LRUCache, TLRUCache, TTLCache
from herd import until

from stampede.engines.memory import MemoryEngine
from stampede.errors import OptionError, TooLarge
from stampede.local_tier.residents import Resident
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.lock_queue import TURN
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.runtime.colour import run_blocking
from stampede.testing.clock import FakeClock


def some(value: Any, fresh: float = 60.0, keep: float | None = None) -> Entry[Any]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh if keep is None else keep)


def put(engine: MemoryEngine, key: str, value: Any, **times: float) -> None:
    run_blocking(engine.blocking.store.set(key, some(value, **times)))


def claimed(engine: MemoryEngine, key: str, lease: float = 60.0, **terms: Any) -> tuple[bytes, Any]:
    token = new_id()
    return token, run_blocking(engine.blocking.claims.claim(key, token, Ask(lease, **terms)))


def resident_of(engine: MemoryEngine, key: str) -> Resident:
    assert engine.tier is not None
    resident = engine.tier.get(key)
    assert resident is not None
    return resident


# -- the tier -----------------------------------------------------------------------------------------------------


def test_what_is_filled_stands_in_the_tier_without_an_early_moment() -> None:
    """A value that is filled has no early moment in the tier yet. The cache draws one before it serves the value."""
    clock = FakeClock(100.0)
    engine = MemoryEngine(clock=clock)
    entry = some("v", fresh=10.0, keep=30.0)
    token, _ = claimed(engine, "k")
    assert run_blocking(engine.blocking.claims.fill("k", token, entry))
    resident = resident_of(engine, "k")
    assert (resident.end, resident.fresh, resident.keep) == (0.0, 110.0, 130.0)
    assert resident.entry is entry
    assert (entry.fresh, entry.keep) == (10.0, 30.0)


@pytest.mark.parametrize("verb", ["set", "expire", "invalidate", "bump"])
def test_a_change_kills_the_resident(verb: str) -> None:
    """A change ends the resident in the tier. Otherwise, a function's own table would still serve the old value."""
    engine = MemoryEngine()
    put(engine, "k", "old")
    resident = resident_of(engine, "k")
    resident.end = inf
    if verb == "set":
        put(engine, "k", "new")
    elif verb == "bump":
        run_blocking(engine.blocking.store.bump(""))
    else:
        run_blocking(getattr(engine.blocking.store, verb)("k"))
    assert resident.end == 0.0


def test_an_expired_resident_is_another_one() -> None:
    """`expire` makes a new resident. A caller that draws an early moment for the old one does not make it fresh."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)
    put(engine, "k", "v")
    before = resident_of(engine, "k")
    run_blocking(engine.blocking.store.expire("k"))
    after = resident_of(engine, "k")
    assert after is not before
    assert (after.end, after.fresh, after.keep) == (0.0, clock(), before.keep)
    assert after.entry is before.entry


def test_at_most_so_many_values() -> None:
    """The engine keeps no more values than its limit. Otherwise, memory would grow without end."""
    engine = MemoryEngine(10)
    for number in range(100):
        put(engine, f"k{number}", number)
    assert engine.tier is not None
    assert len(engine.tier) == 10


def test_sealed_has_no_tier() -> None:
    """An engine of sealed values has no tier. Otherwise, hits would get bytes instead of values."""
    engine = MemoryEngine(sealed=True)
    assert engine.shared
    assert engine.tier is None


# -- nothing is left behind ---------------------------------------------------------------------------------------


def test_dead_leases_verdicts_and_rests_are_swept() -> None:
    """Leases, verdicts, rests and locks that have ended are removed. Otherwise, each key would use memory for ever."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)
    keys, locks, _ = engine._parts
    for number in range(3_000):
        token, _ = claimed(engine, f"k{number}", lease=1.0)
        if number % 2:
            run_blocking(engine.blocking.claims.abandon(f"k{number}", token, Verdict("failed"), rest=2.0))
        run_blocking(engine.blocking.locks.acquire(f"l{number}", token, 1.0))
        clock.advance(0.1)
    assert len(keys.records) < 200
    assert len(locks.locks) < 200


def test_standing_leases_are_never_swept() -> None:
    """A lease that is valid is never removed. Otherwise, its key would be computed twice."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)
    first, _ = claimed(engine, "first", lease=1_000.0)
    for number in range(1_000):
        claimed(engine, f"k{number}", lease=0.5)
        clock.advance(0.1)
    _, reply = claimed(engine, "first")
    assert isinstance(reply, Busy)
    assert reply.token == first


def test_a_key_that_fails_for_hours_keeps_few_verdicts() -> None:
    """A key that fails for hours keeps only a few verdicts in memory."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)
    for _ in range(1_000):
        token, _ = claimed(engine, "k")
        run_blocking(engine.blocking.claims.abandon("k", token, Verdict("failed")))
        clock.advance(1.0)
    assert 1 <= len(engine._parts[0].records["k"].past.verdicts) <= 6


def test_a_rest_outlives_its_verdict() -> None:
    """A rest also applies to waiters, after their verdict has ended. They do not call an origin that should rest."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)
    token, _ = claimed(engine, "k")
    run_blocking(engine.blocking.claims.abandon("k", token, Verdict("failed", "E"), rest=60.0))
    clock.advance(30.0)
    _, reply = claimed(engine, "k", awaited=token)
    assert isinstance(reply, Failed)
    assert reply.rest == 30.0


def test_what_was_stored_for_waiters_only_goes_when_they_have_had_it() -> None:
    """A value that is stored only for waiters, with `ttl=0`, is soon removed. A value that replaces it remains."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)
    put(engine, "meanwhile kept", 1, fresh=0.0)
    put(engine, "meanwhile kept", 2)
    for number in range(100):
        put(engine, f"k{number}", number, fresh=0.0)
        clock.advance(0.25)
    assert engine.tier is not None
    assert len(engine.tier) <= 6
    assert engine.tier.get("meanwhile kept") is not None


def test_close_lets_waiters_go() -> None:
    """Closing the engine wakes its waiters. Otherwise, a shutdown would wait until the leases end."""
    engine = MemoryEngine()
    claimed(engine, "k")
    _, busy = claimed(engine, "k")
    waiter = threading.Thread(target=lambda: run_blocking(engine.blocking.claims.wait("k", busy, 60.0)))
    waiter.start()
    engine.close()
    waiter.join(10)
    assert not waiter.is_alive()


# -- finalizers ---------------------------------------------------------------------------------------------------


class Mine:
    """A value whose finalizer uses the engine that removes it."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine

    def __del__(self) -> None:
        run_blocking(self.engine.blocking.store.invalidate("other"))
        put(self.engine, "from a finalizer", 1)


@pytest.mark.parametrize("verb", ["set", "fill", "replace", "invalidate", "evict", "bump"])
def test_a_finalizer_may_use_the_engine(verb: str) -> None:
    """A value's `__del__` may use the engine that removes the value. It does not wait for a lock of its own thread."""
    engine = MemoryEngine(4)
    put(engine, "k", Mine(engine))
    put(engine, "other", 1)

    def act() -> None:
        if verb == "set":
            put(engine, "k", 2)
        elif verb == "fill":
            token, _ = claimed(engine, "k", force=True)
            run_blocking(engine.blocking.claims.fill("k", token, some(2)))
        elif verb == "replace":
            run_blocking(engine.blocking.store.replace("k", resident_of(engine, "k").entry.id, some(2)))
        elif verb == "invalidate":
            run_blocking(engine.blocking.store.invalidate("k"))
        elif verb == "bump":
            run_blocking(engine.blocking.store.bump(""))
        else:
            for number in range(3):
                put(engine, f"k{number}", number)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert run_blocking(engine.blocking.store.get(["from a finalizer"]))[0] is not None


def test_an_invalidation_in_the_middle_of_a_fill_wins() -> None:
    """If code inside a fill invalidates the key, as a finalizer or `getsizeof` may, the filled value is not stored."""
    engine = MemoryEngine(
        store=LRUCache(10, getsizeof=lambda _: run_blocking(engine.blocking.store.invalidate("k")) or 1)
    )
    token, _ = claimed(engine, "k")
    assert not run_blocking(engine.blocking.claims.fill("k", token, some("old")))
    assert run_blocking(engine.blocking.store.get(["k"])) == [None]


# -- forks --------------------------------------------------------------------------------------------------------

FORK = """
import os, sys
from stampede.runtime import process_lock
from stampede.runtime.colour import run_blocking
from stampede.engines.memory import MemoryEngine
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Busy, Granted

engine = MemoryEngine()
held = new_id()
run_blocking(engine.blocking.store.set("kept", Entry("v", new_id())))
assert isinstance(run_blocking(engine.blocking.claims.claim("k", held, Ask(60.0))), Granted)
assert isinstance(run_blocking(engine.blocking.locks.acquire("l", held, 60.0)), Granted)
process_lock.lock.acquire()  # as if another thread were in the middle of a verb
child = os.fork()
if child == 0:
    entry, = run_blocking(engine.blocking.store.get(["kept"]))
    fine = (
        entry is not None
        and entry.value == "v"
        and not run_blocking(engine.blocking.claims.fill("k", held, Entry("mine", new_id())))
        and isinstance(run_blocking(engine.blocking.claims.claim("k", new_id(), Ask(60.0))), Granted)
        and isinstance(run_blocking(engine.blocking.locks.acquire("l", new_id(), 60.0)), Granted)
    )
    os._exit(0 if fine else 1)
process_lock.lock.release()
assert os.waitpid(child, 0)[1] == 0
assert isinstance(run_blocking(engine.blocking.claims.claim("k", new_id(), Ask(60.0))), Busy)
assert run_blocking(engine.blocking.claims.fill("k", held, Entry("mine", new_id())))
"""


def test_a_forked_child_has_the_values_and_not_the_leases() -> None:
    """A forked child has its parent's values, but not its leases. Otherwise, gunicorn's workers would wait for a
    computation that never ends for them."""
    subprocess.run([sys.executable, "-W", "error", "-c", FORK], check=True, timeout=30)


# -- cachetools ---------------------------------------------------------------------------------------------------


def test_cachetools_evicts_by_its_own_policy() -> None:
    """A mapping of cachetools evicts values by its own policy."""
    engine = MemoryEngine(store=LFUCache(2))
    assert engine.tier is None
    put(engine, "often", 1)
    put(engine, "seldom", 2)
    for _ in range(3):
        run_blocking(engine.blocking.store.get(["often"]))
    put(engine, "new", 3)
    kept = run_blocking(engine.blocking.store.get(["often", "seldom", "new"]))
    assert [entry is not None for entry in kept] == [True, False, True]


def test_cachetools_ends_by_its_own_time() -> None:
    """A value that a TTLCache has dropped is a miss, even if its own ttl has not ended."""
    clock = FakeClock()
    engine = MemoryEngine(store=TTLCache(10, ttl=5.0, timer=clock), clock=clock)
    put(engine, "k", 1, fresh=60.0)
    clock.advance(6.0)
    assert run_blocking(engine.blocking.store.get(["k"])) == [None]
    assert isinstance(claimed(engine, "k")[1], Granted)


def test_cachetools_measures_values() -> None:
    """A `getsizeof` of the user measures the user's values, not our entries."""
    store: Any = LRUCache(10, getsizeof=len)
    engine = MemoryEngine(store=store)
    put(engine, "a", "xxxxxx")
    put(engine, "b", "xxxxxx")
    assert [entry is None for entry in run_blocking(engine.blocking.store.get(["a", "b"]))] == [True, False]


def test_what_cachetools_has_no_room_for_is_too_large() -> None:
    """A value that the mapping has no room for raises TooLarge. The older value is removed."""
    store: Any = LRUCache(10, getsizeof=len)
    engine = MemoryEngine(store=store)
    put(engine, "k", "old")
    token, _ = claimed(engine, "k", force=True)
    with pytest.raises(TooLarge):
        run_blocking(engine.blocking.claims.fill("k", token, some("x" * 11)))
    assert run_blocking(engine.blocking.store.get(["k"])) == [None]
    assert isinstance(claimed(engine, "k")[1], Busy)  # its holder is expected to abandon it


@pytest.mark.parametrize("store", [{}, [], 7, object()])
def test_other_stores_are_refused(store: Any) -> None:
    """A store that is not of cachetools is refused. A plain dict, for example, would grow without end."""
    with pytest.raises(OptionError, match="cachetools"):
        MemoryEngine(store=store)


def test_a_store_that_times_what_it_does_not_know_is_refused() -> None:
    """A TLRUCache is refused. Its `ttu` would be called with our entries, and fail at each call."""
    with pytest.raises(OptionError, match="ttl= a function"):
        MemoryEngine(store=TLRUCache(10, ttu=lambda key, value, now: now + value["expires"]))


def test_what_others_put_into_the_store_is_no_entry() -> None:
    """An object that another program has put into the mapping is a miss, not an error."""
    store: Any = LRUCache(10)
    store["k"] = "not ours"
    engine = MemoryEngine(store=store)
    assert run_blocking(engine.blocking.store.get(["k"])) == [None]
    assert run_blocking(engine.blocking.store.invalidate("k")) is False


# -- many threads at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [None, LRUCache(10)], ids=["tier", "cachetools"])
def test_no_value_outlives_its_invalidation(store: Any) -> None:
    """Whatever the interleaving of claims, fills and invalidations by threads, no old value is stored."""
    engine = MemoryEngine(store=store)
    origin = announced = 0
    wrong: list[str] = []
    computed = [0]
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            least = announced  # its invalidation has returned
            token = new_id()
            reply = run_blocking(engine.blocking.claims.claim("k", token, Ask(60.0)))
            if isinstance(reply, Granted):
                seen = origin
                time.sleep(0)  # let other threads run
                if random.random() < 0.1:
                    run_blocking(engine.blocking.claims.abandon("k", token))
                elif run_blocking(engine.blocking.claims.fill("k", token, some(seen))):
                    computed[0] += 1
            elif isinstance(reply, Found) and reply.entry.value < least:
                wrong.append(f"{reply.entry.value} after {least}")
            elif isinstance(reply, Busy):
                run_blocking(engine.blocking.claims.wait("k", reply, 1.0))

    readers = [threading.Thread(target=read, daemon=True) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(1, 150):
        origin, before = number, computed[0]
        run_blocking(engine.blocking.store.invalidate("k"))
        announced = number
        time.sleep(0)
        if number % 30 == 0:  # on a busy machine, no reader may have run meanwhile
            until(lambda before=before: computed[0] > before or wrong)
    stop.set()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()
    assert not wrong, wrong[:3]


def test_who_misses_its_turn_keeps_its_place() -> None:
    """A waiter that misses its turn keeps its place in the queue. A loop that is often busy does not wait for ever."""
    clock = FakeClock()
    engine = MemoryEngine(clock=clock)

    def has(token: bytes) -> bool:
        return isinstance(run_blocking(engine.blocking.locks.acquire("l", token, 60.0, waits=True)), Granted)

    assert has(b"holder")
    assert not has(b"first") and not has(b"second")
    assert run_blocking(engine.blocking.locks.release("l", b"holder"))
    clock.advance(TURN + 0.1)  # this was the first waiter's turn
    assert has(b"second")
    assert not has(b"third") and not has(b"first")
    assert run_blocking(engine.blocking.locks.release("l", b"second"))
    assert not has(b"third")
    assert has(b"first")
    assert run_blocking(engine.blocking.locks.release("l", b"first"))
    assert has(b"third")
