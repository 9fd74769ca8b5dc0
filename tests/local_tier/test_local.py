"""The local tier: what it stores, what it evicts, and that no table refers to a dead resident."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import weakref
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.errors import OptionError
from stampede.local_tier.residents import Resident, Residents
from stampede.model.entry import Entry
from stampede.model.ports import Ticket


def resident(key: str, value: object = None, *, scope: str = "f", keep: float = inf, **more: Any) -> Resident:
    return Resident(key, scope, Entry(value, b"12345678"), inf, inf, keep, **more)


def hit(tier: Residents, key: str) -> object:
    found = tier.get(key)
    assert found is not None
    found.hits += 1
    return found.value


def keys(tier: Residents) -> list[str]:
    """Return the keys, from the oldest to the newest."""
    assert [there.key for there in tier._residents.values()] == list(tier._residents)
    return list(tier._residents)


@pytest.mark.parametrize("entries", [0, -1, True, 1.5, "10", None])
def test_bound_that_cannot_be(entries: Any) -> None:
    """A wrong number of entries is refused: with a typo in the settings, a tier would keep nothing, or everything."""
    with pytest.raises(OptionError, match="entries is"):
        Residents(entries)


def test_resident_carries_its_ticket() -> None:
    """A resident has a ticket, by which a hit sees whether another process has changed the entry."""
    stamps = [7, 8]
    there = resident("a", ticket=Ticket(stamps, 1, 8))
    assert there.stamps is stamps and there.stamps[there.slot] == there.stamp == 8
    assert resident("a").stamp is None


def test_evicts_the_oldest_that_nobody_hit() -> None:
    """SIEVE evicts the oldest entry without a hit. A hit protects once, and the hand goes on from where it stopped."""
    tier = Residents(3)
    for key in "abc":
        tier.put(resident(key))
    hit(tier, "a")
    tier.put(resident("d"))
    assert keys(tier) == ["a", "c", "d"]  # the hand passed a, and evicted b
    tier.put(resident("e"))
    assert keys(tier) == ["a", "d", "e"]  # and went on with c
    assert tier.get("b") is None


def test_the_gone_get_no_second_chance() -> None:
    """An entry that may not be served any more is evicted even if it had hits."""
    tier = Residents(2)
    tier.put(resident("gone", keep=0.0))
    tier.put(resident("new"))
    hit(tier, "gone")
    tier.put(resident("newer"))
    assert keys(tier) == ["new", "newer"]


def test_a_new_value_keeps_its_place_and_counts_as_a_hit() -> None:
    """A new value takes the place of the old one and counts as a hit, so a refreshed key is not evicted first."""
    tier = Residents(2)
    first = resident("a", 1)
    tier.put(first)
    tier.put(resident("b"))
    tier.put(resident("a", 2))
    assert first.end == 0.0 and hit(tier, "a") == 2
    tier.put(resident("c"))
    assert keys(tier) == ["a", "c"]


def test_drop_kills_and_empties_the_homes() -> None:
    """`drop` removes a resident from the fast tables of functions. They must not serve an invalidated value."""
    tier, table = Residents(), dict[Any, Resident]()
    there = resident("a", 1)
    tier.put(there)
    tier.adopt(there, table, 1)
    tier.adopt(there, table, 1)
    tier.adopt(there, table, (1, 2))
    assert table == {1: there, (1, 2): there} and len(there.homes) == 4  # flat: a table and a key, twice
    assert tier.drop("a") is there
    assert there.end == 0.0 and table == {} and there.homes == ()
    assert tier.drop("a") is None and keys(tier) == []


@pytest.mark.parametrize("how", ["evicted", "replaced", "dropped", "cleared"])
def test_no_home_for_the_dead(how: str) -> None:
    """A dead resident is not added to a fast table: no invalidation would remove it from there."""
    tier, table = Residents(1), dict[Any, Resident]()
    there = resident("a")
    tier.put(there)
    match how:
        case "evicted":
            tier.put(resident("b"))
        case "replaced":
            tier.put(resident("a"))
        case "dropped":
            tier.drop("a")
        case "cleared":
            tier.clear()
    tier.adopt(there, table, 1)
    assert table == {} and there.homes == () and there.end == 0.0


def test_killing_the_old_leaves_the_new_at_home() -> None:
    """If an old resident is dropped, a newer one with the same fast key stays in the table."""
    tier, table = Residents(), dict[Any, Resident]()
    old, new = resident("a:1"), resident("a:2")
    for there in (old, new):
        tier.put(there)
        tier.adopt(there, table, 1)
    tier.drop("a:1")
    assert table == {1: new}


def test_drop_scope_and_clear() -> None:
    """`drop_scope` removes all values of a scope, and `clear` removes all values."""
    tier = Residents()
    for key, scope in [("a", "f"), ("b", "g"), ("c", "f")]:
        tier.put(resident(key, scope=scope))
    tier.drop_scope("f")
    assert keys(tier) == ["b"]
    tier.clear()
    assert keys(tier) == [] and len(tier) == 0
    tier.put(resident("d"))
    assert keys(tier) == ["d"]


def test_hits_are_counted_beyond_the_residents_lives() -> None:
    """`served` counts the hits of replaced and cleared residents too, so `stats()` does not forget them."""
    tier = Residents(2)
    for key, scope in [("a", "f"), ("b", "g")]:
        tier.put(resident(key, scope=scope))
        hit(tier, key)
    hit(tier, "b")
    tier.put(resident("a", scope="f"))
    hit(tier, "a")
    assert tier.served()[0] == {"f": 2, "g": 2}
    tier.clear()
    assert tier.served()[0] == {"f": 2, "g": 2}


def test_the_dead_hold_nobody() -> None:
    """A reference to a dead resident keeps no later one in memory."""

    class Value:
        pass

    tier, values = Residents(1), []
    held = resident("0", Value())
    tier.put(held)
    gc.disable()
    try:
        for number in range(1, 4):
            values.append(weakref.ref(value := Value()))
            tier.put(resident(str(number), value))
            del value
        assert [ref() is None for ref in values] == [True, True, False]
    finally:
        gc.enable()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["put", "hit", "drop", "adopt", "scope", "clear"]), st.integers(0, 6))),
)
def test_any_order_of_writes(entries: int, steps: list[tuple[str, int]]) -> None:
    """After any writes, the keys and their order are as in a simple SIEVE, and no table refers to a dead resident."""
    tier, table = Residents(entries), dict[Any, Resident]()
    queue: list[str] = []
    visited: set[str] = set()
    hand = 0
    for what, number in steps:
        key, scope = str(number), "fg"[number % 2]
        if what == "put":
            if key in queue:
                visited.add(key)
            else:
                if len(queue) == entries:
                    while hand >= len(queue) or queue[hand] in visited:
                        visited.discard(queue[hand] if hand < len(queue) else "")
                        hand = hand + 1 if hand < len(queue) else 0
                    queue.pop(hand)
                queue.append(key)
            tier.put(resident(key, scope=scope))
        elif what == "hit" and key in queue:
            visited.add(key)
            hit(tier, key)
        elif what == "adopt" and key in queue:
            tier.adopt(tier._residents[key], table, number)
        elif what in ("drop", "scope", "clear"):
            same = {k for k in queue if "fg"[int(k) % 2] == scope}
            leaving = {"drop": {key}, "scope": same, "clear": set(queue)}[what]
            hand -= len(leaving & set(queue[:hand]))
            queue = [k for k in queue if k not in leaving]
            visited -= leaving
            {"drop": partial(tier.drop, key), "scope": partial(tier.drop_scope, scope), "clear": tier.clear}[what]()
        assert keys(tier) == queue
        assert all(there is tier.get(there.key) and there.end for there in table.values())


def test_finalizers_may_write_to_the_tier() -> None:
    """A value whose `__del__` calls a cached function neither deadlocks nor breaks the queue."""
    tier = Residents(8)

    class Value:
        def __init__(self) -> None:
            self.me = self  # the garbage collector ends it at any moment

        def __del__(self) -> None:
            number = random.randrange(20)
            tier.put(resident(f"k{number}", None))
            tier.drop(f"k{(number + 1) % 20}")

    before = gc.get_threshold()
    gc.set_threshold(3, 2, 2)
    try:
        for number in range(3000):
            tier.put(resident(f"k{number % 20}", Value()))
            if number % 50 == 0:
                tier.drop_scope("f")
    finally:
        gc.set_threshold(*before)
        tier.clear()
        gc.collect()
    keys(tier)


@pytest.mark.parametrize("how", ["evicted", "replaced", "dropped", "cleared", "scope", "homeless", "postponed"])
def test_finalizers_run_outside_the_lock(how: str) -> None:
    """A value's `__del__` may wait for a thread that uses the cache: it runs outside the lock."""
    tier, ended = Residents(2), []

    class Value:
        def __del__(self) -> None:
            thread = threading.Thread(target=tier.put, args=(resident("other"),), daemon=True)
            thread.start()
            thread.join(20)
            ended.append(not thread.is_alive())

    def two_refused_adoptions(dead: list[object]) -> None:
        tier.adopt(resident("x", Value()), {}, 1)
        tier.adopt(resident("x"), {}, 1)

    tier.put(there := resident("b"))
    tier.put(resident("a", Value()))
    hit(tier, "b")
    {
        "evicted": lambda: tier.put(resident("c")),
        "replaced": lambda: tier.put(resident("a")),
        "dropped": lambda: tier.drop("a"),
        "cleared": tier.clear,
        "scope": lambda: tier.drop_scope("f"),
        "homeless": lambda: (tier.adopt(there, {1: resident("x", Value())}, 1), tier.drop("a")),
        "postponed": lambda: (tier._write(two_refused_adoptions), tier.drop("a")),
    }[how]()
    assert ended == [True] * len(ended)
    assert len(ended) == (2 if how in ("homeless", "postponed") else 1)


def test_a_drop_inside_a_write_counts_at_once() -> None:
    """A `drop` inside a write, as from a finalizer or a signal handler, ends the value before it returns."""
    tier = Residents()
    there = resident("a")
    tier.put(there)
    ends = []

    def interrupted(dead: list[object]) -> None:
        tier.drop("a")
        ends.append(there.end)

    tier._write(interrupted)
    assert ends == [0.0] and keys(tier) == []


def test_a_write_that_fails_halfway_is_mended_by_the_next() -> None:
    """After a write that failed, the tier works. A write that was postponed meanwhile does not undo a newer one."""
    tier = Residents(3)
    for key in "abc":
        tier.put(resident(key))

    def fails(dead: list[object]) -> None:
        tier.put(resident("c", "older"))
        raise MemoryError

    with pytest.raises(MemoryError):
        tier._write(fails)
    tier.put(resident("c", "newer"))
    assert keys(tier) == ["a", "b", "c"]
    assert hit(tier, "c") == "newer"
    for key in "defg":
        tier.put(resident(key))
    assert len(keys(tier)) == 3


def test_what_is_dropped_is_not_remembered() -> None:
    """A tier that is never full does not remember the keys that were dropped."""
    tier = Residents(10)
    for number in range(1000):
        tier.put(resident(f"k{number}"))
        if number >= 5:
            tier.drop(f"k{number}")
    assert len(tier._since) <= 21
    assert keys(tier) == [f"k{number}" for number in range(5)]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals on this platform")
def test_signal_handlers_may_write_to_the_tier() -> None:
    """A signal handler that writes to the tier during a write does not deadlock the main thread."""
    tier, seen = Residents(8), []

    def handler(*_: object) -> None:
        seen.append(1)
        tier.put(resident(f"s{len(seen) % 10}"))
        tier.drop(f"k{len(seen) % 20}")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        number = 0
        while len(seen) < 300:
            number += 1
            tier.put(resident(f"k{number % 20}"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    keys(tier)


def test_threads_that_write_at_once() -> None:
    """Threads that write at once leave no dead value in a fast table, and no value under another key."""
    interval = sys.getswitchinterval()
    tier, tables = Residents(16), [dict[Any, Resident]() for _ in range(3)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(4000):
            key = dice.randrange(24)
            there = tier.get(str(key))
            if there is None:
                there = resident(str(key), key, scope="fg"[key % 2])
                tier.put(there)
            if there.value != key:
                wrong.append(there)
            there.hits += 1
            tier.adopt(there, dice.choice(tables), key)
            match dice.randrange(200):
                case 0:
                    tier.clear()
                case 1:
                    tier.drop_scope("f")
                case number if number < 30:
                    tier.drop(str(key))

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    keys(tier)
    for table in tables:
        for fast, there in table.items():
            assert there is tier.get(str(fast)) and there.end > 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # on purpose
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_fork_in_the_middle_of_a_write() -> None:
    """A process that is forked while another thread writes can write to its tier."""
    tier = Residents(4)
    for key in "abcd":
        tier.put(resident(key))
    inside, leave = threading.Event(), threading.Event()

    def write(dead: list[object]) -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=tier._write, args=(write,))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        good = False
        try:
            signal.alarm(5)  # the signal ends the child if it hangs
            tier.put(resident("e"))
            good = len(keys(tier)) == 4 and tier.drop("e") is not None and len(keys(tier)) == 3
        finally:
            os._exit(0 if good else 1)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(keys(tier)) == 4


def test_tiers_end_with_their_owners() -> None:
    """The list of tiers that a fork has to repair does not keep them in memory."""
    tier = Residents()
    tier.put(resident("a"))
    ref = weakref.ref(tier)
    del tier
    gc.collect()
    assert ref() is None
