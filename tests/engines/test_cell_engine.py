"""What an engine asks of a cell, and what it does with the replies: costs, times, failures, and foreign bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from herd import Herd, until
from hypothesis import given
from hypothesis import strategies as st
from known_generation import generation_of
from watched_cell import WatchedMemoryCell

from stampede import Cache
from stampede.engines.cells import CellEngine, Faster, Seen, Version, records, wire
from stampede.engines.kit import polling
from stampede.errors import EngineClosed, EngineError, TooLarge
from stampede.model.entry import UNREADABLE, Verdict, new_id
from stampede.model.ports import Ask, Asked, Busy, Found, Granted
from stampede.model.record import Kept, Lease, Past, Record
from stampede.runtime.colour import run_blocking
from stampede.testing import FakeClock
from stampede.testing.cells import MemoryCell
from stampede.testing.conformance.suite import LONG, some


class Counting(MemoryCell):
    """A cell that records what it is asked, and can be told to fail."""

    def __init__(self, **can: Any) -> None:
        super().__init__(**can)
        self.asked: list[str] = []
        self.names: list[int] = []
        self.fails: list[str] = []  # "before" or "behind" the change, for the next swaps

    def read(self, names: Sequence[str]) -> list[Seen]:
        seen = super().read(names)
        self.asked.append("read")  # only now: a test may wait for this, and then make a change
        self.names.append(len(names))
        return seen

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        self.asked.append("swap")
        fails = self.fails.pop(0) if self.fails else ""
        if fails == "before":
            raise ValueError("lost")
        swapped = super().swap(name, version, data, ttl)
        if fails:
            raise ValueError("lost")
        return swapped

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def cell() -> Counting:
    return Counting()


@pytest.fixture
def engine(cell: Counting) -> Iterator[CellEngine]:
    engine = CellEngine(cell)
    yield engine
    engine.close()


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters look only when they are told of a change."""
    monkeypatch.setattr(records, "SAFETY", LONG)


def claimed(engine: CellEngine, token: bytes = b"holder!!", key: str = "k", **terms: Any) -> Any:
    return run_blocking(engine.blocking.claims.claim(key, token, Ask(terms.pop("lease", LONG), **terms)))


def filled(engine: CellEngine, token: bytes = b"holder!!", value: bytes = b"value", key: str = "k") -> bool:
    return bool(run_blocking(engine.blocking.claims.fill(key, token, some(value))))


# -- requests -----------------------------------------------------------------------------------------------------


def test_a_hit_is_one_read_and_a_miss_three_round_trips(cell: Counting, engine: CellEngine) -> None:
    """A hit costs one read. A miss costs three round trips: a read, a swap for the lease, and a swap for the value."""
    assert isinstance(claimed(engine), Granted)
    assert cell.taken() == ["read", "swap"]
    assert run_blocking(engine.blocking.claims.renew("k", b"holder!!", LONG))
    assert cell.taken() == ["swap"]
    assert filled(engine)
    assert cell.taken() == ["swap"]
    assert isinstance(claimed(engine, b"another!"), Found)
    assert cell.taken() == ["read"]


def test_a_failed_computation_is_one_swap_more(cell: Counting, engine: CellEngine) -> None:
    """A failed computation costs one swap. A holder that has lost its lease sends no request."""
    claimed(engine)
    cell.taken()
    assert run_blocking(engine.blocking.claims.abandon("k", b"holder!!", Verdict("failed")))
    assert cell.taken() == ["swap"]
    claimed(engine, lease=0.001)
    time.sleep(0.002)
    cell.taken()
    assert not filled(engine)
    assert cell.taken() == []


def test_a_claim_is_one_round_trip_where_a_swap_tells_what_is_there() -> None:
    """If the cell's swap returns the stored item, a claim costs one round trip instead of two."""
    cell = Counting(tells=True)
    engine = CellEngine(cell)
    assert isinstance(claimed(engine), Granted)
    assert cell.taken() == ["swap"]
    assert isinstance(claimed(engine, b"another!"), Busy)
    assert cell.taken() == ["swap"]
    assert filled(engine)
    cell.taken()
    assert isinstance(claimed(engine, b"another!", awaited=b"holder!!"), Found)
    assert cell.taken() == ["read"]  # a waiter knows that something was stored: it does not try a write in vain


def test_a_cached_function_asks_no_more_than_that(cell: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached function sends no more requests than the engine needs. A known generation is not read again."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", 600.0)
    with Cache(cell) as cache:
        cache.get_or_compute("warm", lambda: 1)
        cell.taken()
        assert cache.get_or_compute("k", lambda: 1) == 1
        assert cell.taken() == ["read", "swap", "swap"]
        assert cache.get_or_compute("k", lambda: 2) == 1
        assert cell.taken() == ["read"]


def test_many_keys_are_read_at_once(cell: Counting, engine: CellEngine) -> None:
    """A batch reads all its keys in one round trip."""
    assert engine.many is not None
    tokens = {f"k{number}": new_id() for number in range(20)}
    replies = engine.many.ask_many([Asked("claim", (key, token, Ask(LONG))) for key, token in tokens.items()])
    assert all(isinstance(reply, Granted) for reply in replies)
    assert (cell.asked.count("read"), cell.taken().count("swap")) == (1, 20)
    fills = [Asked("fill", (key, token, some(key.encode()))) for key, token in tokens.items()]
    assert engine.many.ask_many(fills) == [True] * 20
    assert cell.taken() == ["swap"] * 20
    found = engine.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in [*tokens, *tokens]])
    assert [reply.entry.value.decode() for reply in found] == [*tokens, *tokens]
    assert cell.taken() == ["read"]


def test_no_read_has_more_names_than_the_cell_takes(cell: Counting, engine: CellEngine) -> None:
    """If the cell limits the names in one read, a batch is split into several reads."""
    cell.at_once = 10
    entries = run_blocking(engine.blocking.store.get([f"k{number}" for number in range(25)]))
    assert entries == [None] * 25
    assert cell.names == [10, 10, 5]


def test_what_is_too_large_is_never_sent(cell: Counting) -> None:
    """A value that is too large is refused before it is sent. The store might remove the old value and then refuse."""
    cell.longest = 5_000
    engine = CellEngine(cell)
    run_blocking(engine.blocking.store.set("k", some(b"x" * 3_000)))
    with pytest.raises(TooLarge, match="4000 bytes are more than cell can store in one cell: at most 3976"):
        run_blocking(engine.blocking.store.set("k", some(b"x" * 4_000)))
    verdict = Verdict("failed", "E" * 1_000, "\ud800" * 5_000)
    for number in range(20):  # a value with a lease and failures beside it is no larger than the limit
        token = bytes([number]) * 8
        assert isinstance(claimed(engine, token, force=True), Granted)
        run_blocking(engine.blocking.claims.abandon("k", token, verdict))
    (seen,) = cell.read(["s:k"])
    assert seen.data is not None
    assert len(seen.data) <= 5_000


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["before", "behind"])
def test_what_a_lost_reply_has_done_is_found_out(cell: Counting, engine: CellEngine, lost: str) -> None:
    """If a reply is lost, the repeated request finds out what the first did. No lease locks out its own holder."""

    def insist(act: Callable[[], Any]) -> Any:
        cell.fails = [lost]
        with pytest.raises(EngineError, match="cell: ValueError: lost"):
            act()
        return act()

    assert isinstance(insist(lambda: claimed(engine)), Granted)
    assert insist(lambda: run_blocking(engine.blocking.claims.renew("k", b"holder!!", LONG))) is True
    entry = some()
    assert insist(lambda: run_blocking(engine.blocking.claims.fill("k", b"holder!!", entry))) is True
    reply = claimed(engine, b"another!")
    assert reply.entry.value == b"value"
    cell.fails = [lost]
    with pytest.raises(EngineError):
        claimed(engine, b"forgotten", force=True)
    run_blocking(
        engine.blocking.claims.abandon("k", b"forgotten")
    )  # as each caller does if the outcome of its claim is unknown
    assert isinstance(claimed(engine, b"next one", seen=reply.entry.id), Granted)


def test_contention_ends(cell: Counting) -> None:
    """If a store refuses every swap, a claim gives up with an EngineError. It does not try for ever."""

    class Refusing(Counting):
        def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
            self.asked.append("swap")
            return Faster()

    refusing = Refusing()
    with pytest.raises(EngineError, match="other processes change this key too often"):
        claimed(CellEngine(refusing))
    assert refusing.asked.count("swap") == 50


def test_those_who_are_too_late_get_their_turn(cell: Counting) -> None:
    """If several engines change one key at the same time, all of their changes succeed."""
    engines = [CellEngine(cell) for _ in range(4)]
    herd = Herd(*[
        lambda engine=engine, number=number: run_blocking(engine.blocking.store.set("k", some(b"%d" % number)))
        for engine in engines for number in range(8)
    ])  # fmt: skip
    assert herd.join() == [None] * 32


def test_a_closed_engine_wakes_those_who_wait(rarely: None) -> None:
    """Closing an engine wakes its waiters with EngineClosed. Otherwise, they would wait until the lease ends."""
    cell = Watched()
    engine = CellEngine(cell)
    claimed(engine)
    busy = claimed(engine, b"another!")
    herd = Herd(lambda: run_blocking(engine.blocking.claims.wait("k", busy, LONG)))
    until(lambda: cell.watchers == 1)
    engine.close()
    assert isinstance(herd.join()[0], EngineClosed)
    with pytest.raises(EngineClosed):
        claimed(engine)


def test_a_forked_child_holds_nothing(cell: Counting, engine: CellEngine) -> None:
    """A forked child knows no leases of its parent, and opens its own connections."""
    started: list[int] = []
    cell.start_again = lambda: started.append(os.getpid())  # type: ignore[method-assign]
    claimed(engine)
    cell.taken()
    pid = os.fork()
    if not pid:
        filled(engine)
        os._exit(0 if cell.asked[0] == "read" and started == [os.getpid()] else 1)  # the child knows no version
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert started == []


# -- foreign bytes ------------------------------------------------------------------------------------------------


def test_what_is_none_of_ours_is_nothing(cell: Counting, engine: CellEngine) -> None:
    """A damaged or foreign cell is unreadable, which the codec reports. It does not block its key."""
    run_blocking(engine.blocking.store.set("other", some(b"of another key")))
    (seen,) = cell.read(["s:other"])
    assert seen.data is not None
    flipped = bytes([*seen.data[:-1], seen.data[-1] ^ 1])
    others: list[Any] = ["text", "long text" * 9, 12, 1.5]  # as in a column that takes any type
    for data in (b"", b"x", b"SC", seen.data, seen.data[:40], flipped, b"\x00" * 300, *others):
        (there,) = cell.read(["s:k"])
        assert not isinstance(cell.swap("s:k", there.version, data, LONG), Faster)
        (found,) = run_blocking(engine.blocking.store.get(["k"]))
        assert found is not None
        assert (found.value, found.id) == (UNREADABLE.value, UNREADABLE.id)
        assert isinstance(claimed(engine), Granted)
        assert filled(engine)
        run_blocking(engine.blocking.store.invalidate("k"))
    (there,) = cell.read(["s:k"])
    cell.swap("s:k", there.version, b"damaged", LONG)
    run_blocking(engine.blocking.store.invalidate("k"))
    assert cell.read(["s:k"]) == [Seen(None)]


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(body: bytes) -> None:
    """No bytes in a cell raise an error. A lease or failure that they describe ends."""
    assert wire.opened("n", body) is None
    there = wire.record_of(memoryview(body), 0.0, 0.0)
    assert there.lease is None or there.lease.end <= 1e9
    assert there.past is None or there.past.end <= 1e9


_seconds = st.floats(0.001, 1e8)
_verdicts = st.builds(Verdict, st.text(max_size=9), st.text(), st.text())
_told = st.dictionaries(st.binary(max_size=9), st.tuples(_verdicts, _seconds))


@given(
    st.none() | st.tuples(st.binary(), _seconds, _seconds | st.just(float("inf")), st.booleans()),
    st.none() | st.builds(Lease, st.binary(min_size=1, max_size=40), _seconds, st.integers(0, 2**63), st.just("h:1")),
    st.none()
    | st.builds(Past, st.dictionaries(st.binary(max_size=9), st.tuples(_verdicts, _seconds)), _seconds, _verdicts),
    _seconds,
)
def test_a_record_comes_back_as_it_was(
    kept: tuple[bytes, float, float, bool] | None, lease: Lease | None, past: Past | None, later: float
) -> None:
    """A lease, a failure and a value come back from the store unchanged, with times by the reader's clock."""
    value = None
    if kept is not None:
        data, fresh, more, raised = kept
        value = Kept(some(data, raised=raised), fresh, fresh + more)
    body = wire.body_of(Record(value, lease, past), 0.0)
    assert wire.opened("n", wire.sealed("n", body, 5.0)) == (body, 5.0)
    there = wire.record_of(memoryview(body), later, later)
    assert (there.lease is None, there.kept is None, there.past is None) == (lease is None, kept is None, past is None)
    if lease is not None:
        assert there.lease == Lease(lease.token, later + lease.end, lease.fence, lease.holder)
    if value is not None and there.kept is not None:
        assert (there.kept.fresh, there.kept.keep) == (later + value.fresh, later + value.keep)
        assert (there.kept.entry.value, there.kept.entry.raised) == (value.entry.value, value.entry.raised)
    if past is not None and there.past is not None:
        assert there.past.rest == later + past.rest
        assert there.past.verdicts == {each: (told, later + end) for each, (told, end) in past.verdicts.items()}


# -- times --------------------------------------------------------------------------------------------------------


class Machine:
    """A process with its own engine, on a machine whose wall clock is wrong by this many seconds."""

    def __init__(self, cell: MemoryCell, clock: FakeClock, wrong: float = 0.0) -> None:
        self.engine = CellEngine(cell, clock=clock, wall=lambda: clock() + wrong)

    def claim(self, token: bytes = b"another!", **terms: Any) -> Any:
        return claimed(self.engine, token, **terms)

    def kept(self) -> Any:
        return run_blocking(self.engine.blocking.store.get(["k"]))[0]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mute(clock: FakeClock) -> MemoryCell:
    """A cell that knows nothing of time."""
    return MemoryCell(ends=False, grows=False, ages=False, clock=clock)


@pytest.mark.parametrize("wrong", [0.0, 3600.0, -3600.0])
def test_a_lease_ends_by_the_clock_of_who_watches_it(mute: MemoryCell, clock: FakeClock, wrong: float) -> None:
    """A lease ends by the clock of the process that watches it, from the moment when it first saw the lease. If wall
    clocks were compared, it could end at once or an hour late."""
    holder, watcher = Machine(mute, clock), Machine(mute, clock, wrong)
    assert isinstance(holder.claim(b"holder!!", lease=10), Granted)
    clock.advance(9)
    assert watcher.claim().lease == 10  # the watcher sees the lease for the first time
    clock.advance(9)
    assert watcher.claim().lease == 1
    clock.advance(1.1)
    assert isinstance(watcher.claim(), Granted)
    assert not filled(holder.engine)
    assert watcher.claim(b"a third!").token == b"another!"


def test_a_renewed_lease_is_another(mute: MemoryCell, clock: FakeClock) -> None:
    """A lease that is renewed in time does not end for a process that watches it."""
    holder, watcher = Machine(mute, clock), Machine(mute, clock)
    holder.claim(b"holder!!", lease=10)
    for _ in range(5):
        assert watcher.claim(lease=10).token == b"holder!!"
        clock.advance(9)
        assert run_blocking(holder.engine.blocking.claims.renew("k", b"holder!!", 10))
    assert filled(holder.engine)


@pytest.mark.parametrize("wrong", [3600.0, -3600.0])
def test_what_was_seen_to_come_is_aged_by_no_wall_clock(mute: MemoryCell, clock: FakeClock, wrong: float) -> None:
    """If a process has seen that a value was not yet stored, it computes the value's age from its own clock. A wrong
    wall clock does not matter."""
    holder, watcher = Machine(mute, clock), Machine(mute, clock, wrong)
    holder.claim(b"holder!!")
    assert isinstance(watcher.claim(), Busy)
    clock.advance(2)
    assert filled(holder.engine)  # fresh for a minute
    assert 58 <= watcher.claim().entry.fresh <= 60  # the lease was still there two seconds ago
    clock.advance(61)
    assert watcher.kept() is None


def test_what_nobody_has_seen_come_is_aged_by_its_writers_clock(mute: MemoryCell, clock: FakeClock) -> None:
    """If a process has not seen when a value was stored, it uses the wall clock of the writer. Otherwise, a new process
    would serve an old value for a whole ttl."""
    run_blocking(Machine(mute, clock).engine.blocking.store.set("k", some()))
    clock.advance(50)
    assert Machine(mute, clock).kept().fresh == 10
    assert Machine(mute, clock, -3600).kept().fresh == 60  # at most a full ttl
    assert Machine(mute, clock, 3600).kept() is None
    clock.advance(20)
    assert Machine(mute, clock).kept() is None


def test_a_clock_of_the_store_that_is_set_back_keeps_no_lease(clock: FakeClock) -> None:
    """If the store's clock is set back, a lease still ends in time. A dead holder does not block its key for longer."""
    server = FakeClock()
    cell = MemoryCell(ends=False, clock=server)
    holder, watcher = Machine(cell, clock), Machine(cell, clock)
    holder.claim(b"holder!!", lease=10)
    assert isinstance(watcher.claim(), Busy)
    clock.advance(9)
    server.advance(9)
    server._now -= 8
    assert watcher.claim().lease == 1
    clock.advance(1.1)
    server.advance(1.1)
    assert isinstance(watcher.claim(), Granted)


def test_fences_grow_where_nothing_else_does(mute: MemoryCell) -> None:
    """Fences grow even if the store has deleted the lock. Otherwise, a holder that lost the lock could be let in."""
    fences = []
    for number in range(6):
        engine, token = CellEngine(mute), new_id()
        reply = run_blocking(engine.blocking.locks.acquire("l", token, LONG))
        fences.append(reply.fence)
        assert run_blocking(engine.blocking.locks.acquire("l", token, LONG)).fence == reply.fence  # it is already held
        run_blocking(engine.blocking.locks.release("l", token))
        if number == 3:
            mute._names.clear()
            time.sleep(0.01)
    assert fences == sorted(set(fences))


def test_a_question_that_comes_late_takes_no_lock_that_was_released(cell: Counting, engine: CellEngine) -> None:
    """A request for a lock that arrives after the lock was released does not take it. Otherwise, the lock would be
    taken without a holder for a whole lease."""
    late: list[tuple[Any, ...]] = []
    swap = cell.swap

    def losing(*args: Any) -> Any:
        late.append(args)
        raise ValueError("it comes late")

    run_blocking(engine.blocking.locks.acquire("l", b"before!!", LONG))
    run_blocking(engine.blocking.locks.release("l", b"before!!"))
    cell.swap = losing  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        run_blocking(engine.blocking.locks.acquire("l", b"holder!!", LONG))
    cell.swap = swap  # type: ignore[method-assign]
    assert isinstance(run_blocking(engine.blocking.locks.acquire("l", b"holder!!", LONG)), Granted)
    assert run_blocking(engine.blocking.locks.release("l", b"holder!!"))
    assert isinstance(swap(*late[0]), Faster)
    assert isinstance(run_blocking(engine.blocking.locks.acquire("l", b"the next", LONG)), Granted)


# -- generations --------------------------------------------------------------------------------------------------


def test_an_ended_generation_is_noted_while_others_believe_in_it(clock: FakeClock) -> None:
    """A generation that has ended is listed while other processes may still use it, so that changes reach them."""
    for cell in (MemoryCell(clock=clock), MemoryCell(ends=False, ages=False, clock=clock)):
        one, other = Machine(cell, clock, 3600.0).engine, Machine(cell, clock).engine
        believed = generation_of(one, "f")
        run_blocking(other.blocking.store.bump("f"))
        clock.advance(0.9)
        assert generation_of(one, "f") == believed
        run_blocking(other.blocking.store.bump("f"))
        today, *ended = run_blocking(other.blocking.store.generations("f"))
        assert believed in ended
        assert len({today, *ended}) == 3
        clock.advance(0.2)
        assert generation_of(one, "f") == today
        assert run_blocking(Machine(cell, clock, 3600.0).engine.blocking.store.generations("f")) == [today, *ended]
        clock.advance(4)
        assert len(run_blocking(other.blocking.store.generations("f"))) == 1


# -- polling --------------------------------------------------------------------------------------------------------


def waiting(engine: CellEngine, *keys: str) -> Herd:
    """One waiter for each of these keys, which the holder computes."""
    busy = {key: claimed(engine, b"another!", key) for key in keys}
    return Herd(*[lambda key=key: run_blocking(engine.blocking.claims.wait(key, busy[key], LONG)) for key in keys])


def test_a_waiter_is_soon_behind_however_long_it_took(
    cell: Counting, engine: CellEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that has waited for a minute still looks every 0.04 seconds, and so gets the value soon."""
    pauses: list[float] = []

    def later(waited: float, *terms: Any) -> float:
        pauses.append(polling.pause(60.0 + waited, *terms))
        return 0.001

    monkeypatch.setattr(records, "pause", later)
    claimed(engine)
    herd = waiting(engine, "k")
    until(lambda: len(pauses) > 5)
    filled(engine)
    assert herd.join()[0].entry.value == b"value"
    assert max(pauses) <= 0.04


# -- watching -----------------------------------------------------------------------------------------------------


class Watched(WatchedMemoryCell, Counting):
    """A cell that counts its watchers."""

    @property
    def watchers(self) -> int:
        return sum(map(len, self._told.values()))


def test_who_is_told_looks_no_more_than_that(rarely: None) -> None:
    """If the store tells its waiters of changes, they read only once before they wait, and once when they are told."""
    cell = Watched()
    one, other = CellEngine(cell), CellEngine(cell)
    assert one.pushes
    claimed(one)
    busy = claimed(other, b"another!")
    cell.taken()
    herd = Herd(*[lambda: run_blocking(other.blocking.claims.wait("k", busy, LONG))] * 4)
    until(lambda: cell.watchers == 4 and cell.asked.count("read") == 4)
    began = time.monotonic()
    filled(one)
    found = herd.join()
    assert time.monotonic() - began < 5
    assert [each.entry.value for each in found] == [b"value"] * 4
    assert cell.taken() == ["read"] * 4 + ["swap"] + ["read"] * 4
    assert cell.watchers == 0


def test_who_is_told_nothing_looks_all_the_same() -> None:
    """If a message is lost, a waiter still looks after a while. Otherwise, it would wait for a whole lease."""

    class Silent(Watched):
        def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
            return super().watch(name, lambda: None)

    cell = Silent()
    one, other = CellEngine(cell), CellEngine(cell)
    claimed(one)
    busy = claimed(other, b"another!")
    herd = Herd(lambda: run_blocking(other.blocking.claims.wait("k", busy, LONG)))
    until(lambda: cell.watchers == 1)
    filled(one)
    assert herd.join()[0].entry.value == b"value"
