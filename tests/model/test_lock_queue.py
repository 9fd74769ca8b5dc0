"""Who is inside a lock with room for more than one, by time that is an argument."""

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
    """What was asked, and a clock that somebody sets."""

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
    """Two writers would be inside, or three where one said two; or somebody be passed who came before."""
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
    """While readers come and go, he would wait for ever. And the readers behind him go in together."""
    history = History()
    assert history.enters(b"a", inf) and history.enters(b"b", inf)
    assert not history.enters(b"writer", 1, waits=True)
    assert not history.enters(b"c", inf, waits=True) and not history.enters(b"d", inf, waits=True)
    assert not history.enters(b"e", inf)  # nor does one who doesn't wait
    assert history.leaves(b"a") and history.called == []
    assert history.leaves(b"b") and history.called == [b"writer"]
    assert not history.enters(b"c", inf, waits=True)
    assert history.enters(b"writer", 1)
    assert history.leaves(b"writer") and history.called == [b"c", b"d"]
    assert history.enters(b"d", inf) and history.enters(b"c", inf)
    assert history.fences == [1, 2, 3, 4, 5]


def test_the_dead_cost_a_turn() -> None:
    """A waiter that died would keep all others out: as the next, or behind those who stay inside."""
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
    """Whose loop is busy for a moment would queue again; or a writer that looks rarely be passed by readers."""
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
    assert not history.enters(b"late", 1, waits=True)  # before it, and not with it
    assert history.enters(b"c", inf, waits=True) and not history.enters(b"d", inf)
    history.now += 5 * SILENCE
    assert not history.enters(b"d", inf) and history.called == [b"late"]
    assert not history.enters(b"late", 1, waits=True)  # it lives
    history.now += TURN
    assert not history.enters(b"d", inf) and history.called == []
    history.now += SILENCE + TURN
    assert not history.enters(b"d", inf) and history.called == [b"late"]
    history.now += TURN
    assert history.enters(b"d", inf) and history.leaves(b"d") and history.leaves(b"c")
    assert history.enters(b"late", 1, waits=True)


def test_the_least_room_holds() -> None:
    """Where one process says two and another five, there would be five beside the one who wanted two."""
    history = History()
    assert [history.enters(bytes([number]), 5) for number in range(2)] == [True] * 2
    assert not history.enters(b"two", 2)
    assert history.leaves(b"\0")
    assert history.enters(b"two", 2)
    assert not history.enters(b"again", 5)
    assert history.enters(b"two", 2)  # its own token, as its reply was lost
    assert history.leaves(b"two") and not history.leaves(b"two")
    assert history.enters(b"again", 5)


@pytest.mark.parametrize("step", [-1e6, 1e6])
def test_a_clock_that_is_set(step: float) -> None:
    """Set back, a lease would stand for eleven days; set forward, it ends, and nothing else happens."""
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
    """What another program has put there would be an error that nobody expects, or take all memory."""
    try:
        found = lock_queue.load(raw)
    except ValueError:
        return
    assert lock_queue.dump(found) == raw
