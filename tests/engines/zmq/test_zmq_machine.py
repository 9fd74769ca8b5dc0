"""The decisions of a broker, with a simulated clock, compared with those of a slow and obviously correct machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest

pytest.importorskip("zmq")

from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.engines.zmq.machine import TURN, Capacity, ClientSession, Machine, Refused

CLIENTS, NAMES, TOKENS = 2, 2, 4


@dataclass
class Inside:
    token: bytes
    client: int
    room: float
    ends: float
    taken: bool


@dataclass
class Plain:
    """The rules for one name, in their simplest form."""

    inside: list[Inside] = field(default_factory=list)
    queue: list[tuple[bytes, int, float]] = field(default_factory=list)  # in the order of arrival

    def fits(self, room: float) -> bool:
        return len(self.inside) + 1 <= min([room, *(each.room for each in self.inside)])

    def pass_time(self, now: float) -> None:
        """End the leases that are over, one after the other, the earliest first."""
        while ended := [each for each in self.inside if each.ends <= now]:
            first = min(ended, key=lambda each: each.ends)
            self.inside.remove(first)
            self.advance(now)

    def advance(self, now: float) -> None:
        while self.queue and self.fits(self.queue[0][2]):
            token, client, room = self.queue.pop(0)
            self.inside.append(Inside(token, client, room, now + TURN, False))

    def took(self, client: int, token: bytes, lease: float, now: float) -> bool:
        for each in self.inside:
            if each.token == token:
                each.client, each.ends, each.taken = client, now + lease, True
                return True
        return False

    def acquire(self, client: int, token: bytes, lease: float, room: float, waits: bool, now: float) -> bool:
        if self.took(client, token, lease, now):
            return True
        if not self.queue and self.fits(room):
            self.inside.append(Inside(token, client, room, now + lease, True))
            return True
        if waits:
            for number, (queued, by, _) in enumerate(self.queue):
                if queued == token:
                    if by != client:
                        self.queue[number] = (token, client, room)
                    return False
            self.queue.append((token, client, room))
        return False

    def renew(self, client: int, token: bytes, lease: float, now: float) -> bool:
        return self.took(client, token, lease, now)

    def release(self, client: int, token: bytes, now: float) -> bool:
        for each in self.inside:
            if each.token == token:
                self.inside.remove(each)
                self.advance(now)
                return each.taken
        if any(each[0] == token for each in self.queue):
            self.queue = [each for each in self.queue if each[0] != token]
            self.advance(now)
        return False

    def lose(self, client: int, now: float, *, holds: bool) -> None:
        self.queue = [each for each in self.queue if each[1] != client]
        self.advance(now)
        while holds and (its := [each for each in self.inside if each.client == client]):
            self.inside.remove(its[0])
            self.advance(now)


clients = st.integers(0, CLIENTS - 1)
names = st.sampled_from([0, 0, 0, 1]).map(lambda number: b"n%d" % number)
tokens = st.integers(0, TOKENS - 1).map(lambda number: b"t%d" % number)
leases = st.sampled_from([0.5, 2.0, 10.0])
rooms = st.sampled_from([1.0, 1.0, 2.0, 3.0, inf, inf])
steps = st.one_of(
    st.tuples(st.just("acquire"), clients, names, tokens, leases, rooms, st.booleans()),
    st.tuples(st.just("renew"), clients, names, tokens, leases),
    st.tuples(st.just("release"), clients, names, tokens),
    st.tuples(st.just("sleep"), st.sampled_from([0.1, 0.7, 3.0])),
    st.tuples(st.sampled_from(["dies", "silent"]), clients),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(steps, max_size=60))
def test_it_decides_as_the_rule_says(history: list[tuple]) -> None:
    """The machine decides like the simple rules: no two exclusive holders, and no waiter is passed over or stuck."""
    now, fences = 1000.0, dict[bytes, int]()
    machine = Machine(now, quiet=0.0, fence=5, limits=Capacity())
    sessions = [machine.hello(b"c%d" % number, f"h:{number}", now)[0] for number in range(CLIENTS)]
    plain = {b"n%d" % number: Plain() for number in range(NAMES)}
    for verb, *args in history:
        for each in plain.values():
            each.pass_time(now)
        machine.pass_time(now)
        if verb == "acquire":
            client, name, token, lease, room, waits = args
            reply = machine.acquire(sessions[client], name, token, lease, room, waits, now)
            assert reply.granted == plain[name].acquire(client, token, lease, room, waits, now)
            if not reply.granted:
                assert reply.token in {each.token for each in plain[name].inside}
            elif fences.setdefault(name + token, reply.fence) != reply.fence:
                assert reply.fence > max(fences.values())
                fences[name + token] = reply.fence
        elif verb == "renew":
            client, name, token, lease = args
            assert machine.renew(sessions[client], name, token, lease, 1.0, 0, now) == plain[name].renew(
                client, token, lease, now
            )
        elif verb == "release":
            client, name, token = args
            assert machine.release(sessions[client], name, token, now) == plain[name].release(client, token, now)
        elif verb == "sleep":
            # In small steps, each seen by both: leases that end within a step end in order, not at their exact times.
            for _ in range(int(args[0] / 0.1)):
                now += 0.1
                machine.pass_time(now)
                for each in plain.values():
                    each.pass_time(now)
        else:
            client = args[0]
            session = sessions[client]
            if verb == "dies":
                machine.end(session, now)
                sessions[client] = machine.hello(session.id, "h:1", now)[0]
            else:
                machine.give_up(session, now)
            for each in plain.values():
                each.lose(client, now, holds=verb == "dies")
        for name, each in plain.items():
            assert {token for token, _ in machine.inside(name, now)} == {one.token for one in each.inside}
        machine.notices.clear()
    for session in sessions:
        machine.end(session, now)
    machine.pass_time(now + 100)
    assert machine.leases == 0
    assert not machine._locks
    assert machine.next_due() == inf


def begun(quiet: float = 0.0, **limits: float) -> tuple[Machine, ClientSession, ClientSession]:
    machine = Machine(0.0, quiet=quiet, fence=100, limits=Capacity(**limits))
    return machine, machine.hello(b"a", "h:1", 0.0)[0], machine.hello(b"b", "h:2", 0.0)[0]


def test_who_waits_is_told_when_its_turn_has_come_and_has_a_moment_to_hear() -> None:
    """A waiter is notified of its turn. If it does not react within `TURN`, the next waiter is notified."""
    machine, a, b = begun()
    assert machine.acquire(a, b"l", b"1", 10, 1, False, 0.0).granted
    for token in (b"2", b"3"):
        assert not machine.acquire(b, b"l", token, 10, 1, True, 0.0).granted
    assert machine.release(a, b"l", b"1", 1.0)
    assert [(notice.session, notice.turn, notice.what) for notice in machine.notices] == [(b, True, b"2")]
    assert machine.acquire(a, b"l", b"4", 10, 1, False, 1.0).token == b"2"
    machine.notices.clear()
    machine.pass_time(1.0 + TURN)
    assert [notice.what for notice in machine.notices] == [b"3"]


def test_who_missed_its_turn_waits_behind_the_others() -> None:
    """A waiter that missed its turn goes to the end of the queue. It is neither forgotten nor let in early."""
    machine, a, b = begun()
    assert machine.acquire(a, b"l", b"1", 10, 1, False, 0.0).granted
    for token in (b"2", b"3"):
        assert not machine.acquire(b, b"l", token, 10, 1, True, 0.0).granted
    assert machine.release(a, b"l", b"1", 1.0)
    machine.pass_time(1.0 + TURN)  # 2 has missed its turn, now it is the turn of 3
    assert not machine.acquire(b, b"l", b"2", 10, 1, True, 2.0).granted
    assert machine.acquire(b, b"l", b"3", 10, 1, True, 2.0).granted
    assert machine.release(b, b"l", b"3", 2.0)
    assert machine.notices[-1].what == b"2"


def test_who_only_watches_is_told_that_somebody_left() -> None:
    """A client that only watches a lock is notified when it comes free. Otherwise it would have to poll."""
    machine, a, b = begun()
    assert machine.acquire(a, b"l", b"1", 10, 1, False, 0.0).granted
    assert machine.watch(b, b"l", b"1", 0.0)
    assert not machine.watch(b, b"l", b"2", 0.0)
    machine.pass_time(10.0)
    assert [(notice.session, notice.turn, notice.what) for notice in machine.notices] == [(b, False, b"l")]
    assert not machine.watch(b, b"l", b"1", 10.0)


def test_after_a_restart_only_holders_have_what_they_had() -> None:
    """A restarted broker knows no holders: it restores leases that are renewed with a fence, and new callers wait."""
    machine, a, b = begun(quiet=30.0)
    reply = machine.acquire(b, b"l", b"2", 10, 1, True, 1.0)
    assert not reply.granted and reply.left == 29.0
    assert machine.renew(a, b"l", b"1", 10, 1, 70, 2.0)
    assert not machine.renew(a, b"m", b"1", 10, 1, 0, 2.0)  # without a fence nothing is restored
    assert not machine.renew(b, b"l", b"3", 10, 1, 60, 2.0)  # lower than 70: this lease had ended before 70 was granted
    assert machine.renew(a, b"l", b"1", 40 - 11, 1, 70, 11.0)
    machine.pass_time(30.0)
    assert not machine.acquire(a, b"l", b"4", 10, 1, False, 31.0).granted
    assert not machine.renew(a, b"m", b"5", 10, 1, 71, 31.0)
    machine.pass_time(40.0)
    assert [notice.what for notice in machine.notices] == [b"2"]
    fence = machine.acquire(b, b"l", b"2", 10, 1, True, 40.0).fence
    assert fence > 100


def test_of_two_who_say_that_they_had_it_the_later_one_has() -> None:
    """If two clients renew one lock after a restart, the higher fence wins: the other lease has ended."""
    machine, a, b = begun(quiet=30.0)
    assert machine.renew(a, b"l", b"1", 10, 1, 70, 1.0)
    assert machine.renew(b, b"l", b"2", 10, 1, 80, 2.0)
    assert not machine.renew(a, b"l", b"1", 10, 1, 70, 3.0)
    assert machine.renew(b, b"l", b"2", 10, 1, 80, 3.0)


def test_readers_are_again_inside_together_after_a_restart() -> None:
    """After a restart all readers get back their shared lock. Otherwise all but one would lose it."""
    machine, a, b = begun(quiet=30.0)
    assert machine.renew(a, b"l", b"1", 10, inf, 70, 1.0)
    assert machine.renew(b, b"l", b"2", 10, inf, 71, 1.0)
    assert {token for token, _ in machine.inside(b"l", 1.0) if token} == {b"1", b"2"}


def test_nobody_has_more_than_there_may_be() -> None:
    """Clients, leases, waiters and lease lengths are limited. Otherwise one client could use all the memory."""
    machine, a, b = begun(clients=2, locks=3, queue=2, longest=20)
    with pytest.raises(Refused, match="clients"):
        machine.hello(b"c", "h:3", 0.0)
    for name in (b"l", b"m", b"n"):
        assert machine.acquire(a, name, b"1", 10, 1, False, 0.0).granted
    with pytest.raises(Refused, match="leases"):
        machine.acquire(a, b"o", b"1", 10, 1, False, 0.0)
    assert machine.acquire(a, b"l", b"1", 10, 1, False, 0.0).granted
    for lease, room in ((20.1, 1), (0, 1), (-1, 1), (float("nan"), 1), (10, 0.5), (10, float("nan"))):
        with pytest.raises(Refused):
            machine.acquire(b, b"l", b"2", lease, room, False, 0.0)
    machine.release(a, b"n", b"1", 0.0)
    for token in (b"2", b"3"):
        machine.acquire(b, b"l", token, 10, 1, True, 0.0)
    with pytest.raises(Refused, match="wait for this lock"):
        machine.acquire(b, b"l", b"4", 10, 1, True, 0.0)


def test_what_was_given_back_takes_no_room() -> None:
    """The heap of lease ends does not grow with locks that are released before their leases end."""
    machine, a, _ = begun(longest=1e6)
    for number in range(10_000):
        assert machine.acquire(a, b"l", b"%d" % number, 1e5, 1, False, 0.0).granted
        assert machine.release(a, b"l", b"%d" % number, 0.0)
    assert len(machine._due) < 2000
    assert not machine._locks


def test_a_writer_is_not_passed_by_readers() -> None:
    """Readers that come later do not pass a waiting writer. Otherwise it would wait for as long as readers come."""
    machine, a, b = begun()
    assert machine.acquire(a, b"l", b"1", 10, inf, False, 0.0).granted
    assert not machine.acquire(b, b"l", b"2", 10, 1, True, 0.0).granted
    assert not machine.acquire(a, b"l", b"3", 10, inf, False, 0.0).granted
    assert not machine.acquire(a, b"l", b"4", 10, inf, True, 0.0).granted
    assert machine.release(a, b"l", b"1", 1.0)
    assert [notice.what for notice in machine.notices] == [b"2"]
    assert machine.acquire(b, b"l", b"2", 10, 1, True, 1.0).granted
    machine.give_up(a, 2.0)  # the waiting reader has become silent
    assert machine.release(b, b"l", b"2", 2.0)
    assert machine.acquire(b, b"l", b"5", 10, inf, False, 2.0).granted
