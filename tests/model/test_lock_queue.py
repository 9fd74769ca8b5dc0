"""The rules by which callers enter a lock that has room for several holders. The time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.model import lock_queue
from stampede.model.lock_queue import EMPTY, SILENCE, TURN, Room
from stampede.model.ports import Granted

ROOMS = st.sampled_from([1, 2, 3, inf])
TOKENS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), TOKENS, ROOMS, st.booleans()),
        st.tuples(st.just("renew"), TOKENS, st.just(1), st.just(False)),
        st.tuples(st.just("release"), TOKENS, st.just(1), st.just(False)),
        st.tuples(st.just("pass"), st.just(b""), st.floats(-400, 400), st.just(False)),
    ),
    max_size=40,
)


@dataclass
class History:
    """The state of a lock, and a clock that the test sets."""

    now: float = 1000.0
    it: Room = field(default_factory=lambda: EMPTY)
    fences: list[int] = field(default_factory=list)

    def enters(self, token: bytes, its: float = 1, *, waits: bool = False, lease: float = 30.0) -> bool:
        before = {each.token for each in self.it.inside}
        self.it, answer, told = lock_queue.acquire(self.it, token, lease, its, self.now, waits=waits)
        self.called = [*told.called]
        if isinstance(answer, Granted) and token not in before:
            self.fences.append(answer.fence)
        if not isinstance(answer, Granted):
            assert answer.lease > 0 and answer.token != token
        return isinstance(answer, Granted)

    def leaves(self, token: bytes) -> bool:
        self.it, stood, told = lock_queue.release(self.it, token, self.now)
        self.called = [*told.called]
        return stood

    @property
    def inside(self) -> list[bytes]:
        return [each.token for each in self.it.inside]


@settings(max_examples=300)
@given(STEPS)
def test_the_rule_holds(steps: list[tuple[str, bytes, float, bool]]) -> None:
    """There are never more holders than the smallest room allows, and no caller passes a waiter that came before it."""
    history, leases = History(), {b"a": 10.0, b"b": 30.0, b"c": 100.0, b"d": 5.0, b"e": 50.0}
    for verb, token, number, waits in steps:
        before, waiting = history.inside, [each.token for each in history.it.queue.values()]
        if verb == "pass":
            history.now += number
        elif verb == "renew":
            history.it, stood, _ = lock_queue.renew(history.it, token, leases[token], history.now)
            assert stood == (token in history.inside)
            assert token in before or not stood
        elif verb == "release":
            stood = history.leaves(token)
            assert token in before or not stood
            assert token not in history.inside and token not in [each.token for each in history.it.queue.values()]
        elif history.enters(token, number, waits=waits, lease=leases[token]):
            still = [each.token for each in history.it.queue.values() if each.turn is None and each.due > history.now]
            assert token in before or token in waiting or not set(still) & set(waiting)
        there = [each.room for each in history.it.inside] + [
            each.room for each in history.it.queue.values() if each.turn is not None
        ]
        assert not there or len(there) <= min(there)
        assert len({*history.inside}) == len(history.inside)
        assert [each.token for each in history.it.queue.values()] == sorted(
            history.it.queue, key=[*waiting, token].index
        )
        assert all(each.end <= history.now + each.lease for each in history.it.inside) or verb == "pass"
        assert lock_queue.load(lock_queue.dump(history.it)) == Room(
            [*history.it.inside], history.it.queue, history.it.fence
        )
    assert history.fences == sorted(set(history.fences))


def test_readers_don_t_pass_a_writer() -> None:
    """Readers that come later do not pass a waiting writer. When the writer leaves, the readers enter together."""
    history = History()
    assert history.enters(b"a", inf) and history.enters(b"b", inf)
    assert not history.enters(b"writer", 1, waits=True)
    assert not history.enters(b"c", inf, waits=True) and not history.enters(b"d", inf, waits=True)
    assert not history.enters(b"e", inf)  # a reader that does not wait is refused, too
    assert history.leaves(b"a") and history.called == []
    assert history.leaves(b"b") and history.called == [b"writer"]
    assert not history.enters(b"c", inf, waits=True)
    assert history.enters(b"writer", 1)
    assert history.leaves(b"writer") and history.called == [b"c", b"d"]
    assert history.enters(b"d", inf) and history.enters(b"c", inf)
    assert history.fences == [1, 2, 3, 4, 5]


def test_the_dead_cost_a_turn() -> None:
    """A dead waiter delays the others for a short time only, also if it is next or if a holder stays inside."""
    history = History()
    assert history.enters(b"a", 1)
    assert not history.enters(b"dead", 1, waits=True) and not history.enters(b"b", 1, waits=True)
    assert history.leaves(b"a") and history.called == [b"dead"]
    assert not history.enters(b"b", 1, waits=True)
    history.now += TURN
    assert history.enters(b"b", 1, waits=True)
    history.leaves(b"b")

    assert history.enters(b"reader", inf)
    assert not history.enters(b"dead writer", 1, waits=True)
    assert not history.enters(b"c", inf, waits=True) and history.called == []
    history.now += SILENCE
    assert not history.enters(b"c", inf, waits=True) and history.called == [b"dead writer"]
    assert not history.enters(b"c", inf, waits=True) and history.called == []
    history.now += TURN
    assert history.enters(b"c", inf, waits=True)
    assert history.inside == [b"reader", b"c"]


def test_the_living_keep_their_places() -> None:
    """A waiter that misses its turn keeps its place in the queue. Readers do not pass a writer that asks rarely."""
    history = History()
    assert history.enters(b"a", 1)
    assert not history.enters(b"late", 1, waits=True) and not history.enters(b"b", 1, waits=True)
    assert history.leaves(b"a") and history.called == [b"late"]
    history.now += TURN
    assert history.enters(b"b", 1, waits=True)
    assert not history.enters(b"c", inf, waits=True) and not history.enters(b"late", 1, waits=True)
    assert history.leaves(b"b") and history.called == [b"late"]
    history.now += TURN
    assert not history.enters(b"d", inf) and history.called == [b"c"]
    assert not history.enters(b"late", 1, waits=True)  # it comes before c, and cannot be inside together with c
    assert history.enters(b"c", inf, waits=True) and not history.enters(b"d", inf)
    history.now += 5 * SILENCE
    assert not history.enters(b"d", inf) and history.called == [b"late"]
    assert not history.enters(b"late", 1, waits=True)  # it is alive
    history.now += TURN
    assert not history.enters(b"d", inf) and history.called == []
    history.now += SILENCE + TURN
    assert not history.enters(b"d", inf) and history.called == [b"late"]
    history.now += TURN
    assert history.enters(b"d", inf) and history.leaves(b"d") and history.leaves(b"c")
    assert history.enters(b"late", 1, waits=True)


def test_the_least_room_holds() -> None:
    """If callers name different rooms, the smallest room of the holders limits their number."""
    history = History()
    assert [history.enters(bytes([number]), 5) for number in range(2)] == [True] * 2
    assert not history.enters(b"two", 2)
    assert history.leaves(b"\0")
    assert history.enters(b"two", 2)
    assert not history.enters(b"again", 5)
    assert history.enters(b"two", 2)  # asks again with its own token, because the reply was lost
    assert history.leaves(b"two") and not history.leaves(b"two")
    assert history.enters(b"again", 5)


@pytest.mark.parametrize("step", [-1e6, 1e6])
def test_a_clock_that_is_set(step: float) -> None:
    """If the clock is set back, a lease lasts no longer than it was granted. If it is set forward, the lease ends."""
    history = History(now=2e6)
    assert history.enters(b"a", 1, lease=30)
    assert not history.enters(b"b", 1, waits=True)
    history.now += step
    assert history.enters(b"b", 1, waits=True) is (step > 0)
    history.now += 30
    history.enters(b"b", 1, waits=True)
    assert history.enters(b"b", 1, waits=True)


@given(st.binary(max_size=80))
def test_foreign_bytes_are_no_room(raw: bytes) -> None:
    """Bytes are either the state of a lock, or they raise ValueError. They raise no other error."""
    try:
        found = lock_queue.load(raw)
    except ValueError:
        return
    assert lock_queue.dump(found) == raw
