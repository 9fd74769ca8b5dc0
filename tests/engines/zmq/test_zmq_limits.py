"""Limits on brokers: through `Limiter`, from both colours, by many threads at once, and after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from broker_server import BrokerThread, ZmqEngine
from herd import Herd
from server_process import PATIENCE, free_port
from watched_limits import Watched, pairwise_by

from stampede import EngineError, Limiter
from stampede.engines.zmq.limits import Counts
from stampede.engines.zmq.machine import Capacity, Refused
from stampede.model.ports import Rate
from stampede.runtime.colour import run_blocking as run

FIVE = Rate(5, 10.0)


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    made = BrokerThread()
    yield made
    made.stop()


@pytest.fixture
def engines(broker: BrokerThread) -> Iterator[list[ZmqEngine]]:
    made = [ZmqEngine(broker.place, timeout=PATIENCE) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def test_two_processes_share_a_limit(engines: list[ZmqEngine]) -> None:
    """Two engines on one broker share a limit: neither may use the whole of it alone."""
    ours, theirs = (Limiter("api", max=5, per=60, on=each) for each in engines)
    assert ours.acquire(cost=2) and theirs.try_acquire()
    assert asyncio.run(theirs.aacquire(cost=2))
    assert not ours.try_acquire()
    assert 55 < ours.ready_in() < 63
    assert theirs.used()[:3] == (Rate(5, 60.0), 5, 0)
    assert Limiter("other", max=5, per=60, on=engines[0]).try_acquire()
    ours.penalize(100)
    assert 95 < theirs.ready_in() <= 100
    limits = engines[0].blocking.limits
    assert limits is not None
    assert [name for name, _ in run(limits.listed()) or ()] == ["api", "other"]


def test_a_name_that_was_shortened_is_listed_with_the_others(engines: list[ZmqEngine]) -> None:
    """A shortened name ends in a hash, which is not text. It must not prevent the listing of all limits."""
    limits = engines[0].blocking.limits
    assert limits is not None
    for name in ("api", "x" * 500, "\ud800"):
        assert Limiter(name, max=5, per=60, on=engines[1]).try_acquire()
    names = [name for name, _ in run(limits.listed()) or ()]
    assert names[0] == "api" and names[1].startswith("x" * 369) and names[2] == "\ud800"


def test_never_more_than_there_may_be(engines: list[ZmqEngine]) -> None:
    """Even if many threads wait, no window has too many starts."""
    limiters = [Limiter("fast", max=20, per=0.2, on=each) for each in engines]
    watched = [Watched(each) for each in limiters]

    def work(limiter: Limiter) -> None:
        while sum(len(each.starts) for each in watched) < 100:
            limiter.acquire(wait=1)

    assert Herd(*[lambda each=each: work(each) for each in limiters * 4]).join() == [None] * 8
    starts = sorted(at for each in watched for at in each.starts)
    assert all(late - early > 200_000 for early, late in pairwise_by(20, starts))


def test_what_a_predecessor_has_let_through_counts_for_its_successor() -> None:
    """A restarted broker counts starts that its predecessor may have granted. Otherwise twice as many could start."""
    counts = Counts(100.0, quiet=30.0, most=10)
    reply = counts.take(b"l", FIVE, 1, 0, 101.0)
    assert not reply.booked
    assert 9 < reply.delay < 9.5  # until all starts of the predecessor have left the window
    assert not counts.take(b"long", Rate(5, 3600.0), 1, 0, 129.9).booked
    assert counts.take(b"long", Rate(5, 3600.0), 1, 0, 130.1).booked
    assert counts.take(b"l", FIVE, 5, 0, 110.5).booked
    assert not counts.take(b"l", FIVE, 1, 0, 120.0).booked
    assert Counts(100.0, quiet=0.0, most=10).take(b"l", FIVE, 5, 0, 100.0).booked


def test_what_another_broker_has_granted_counts() -> None:
    """Starts that another broker granted count. Otherwise each peer would grant the whole limit."""
    counts = Counts(100.0, quiet=0.0, most=10)
    for at in (100.0, 100.5, 103.0):
        counts.note(b"l", FIVE, 1, at, 100.5)
    assert counts.take(b"l", FIVE, 2, 0, 100.6).booked
    assert not counts.take(b"l", FIVE, 1, 0, 100.7).booked
    assert counts.used(b"l", 103.5).used == 5


def test_peers_share_their_limits() -> None:
    """Clients of two brokers share a limit. Otherwise they would have twice as many starts as allowed."""
    ports = [free_port(), free_port()]
    brokers = [BrokerThread(port=ports[each], peers=[f"127.0.0.1:{ports[1 - each]}"]) for each in (0, 1)]
    engines = [ZmqEngine(each.place, timeout=PATIENCE) for each in brokers]
    try:
        ours, theirs = (Limiter("api", max=5, per=60, on=each) for each in engines)
        end = time.monotonic() + PATIENCE
        for number, (teller, hearer) in enumerate(((engines[0], brokers[1]), (engines[1], brokers[0]))):
            while not hearer.broker.counts.used(b"met %d" % number, time.monotonic()).used:  # until they meet
                assert Limiter(f"met {number}", max=10**6, per=60, on=teller).try_acquire()
                assert time.monotonic() < end
        for _ in range(3):
            assert ours.try_acquire()
        while theirs.used().used < 3:
            assert time.monotonic() < end
        assert theirs.acquire(cost=2)
        while ours.used().used < 5:
            assert time.monotonic() < end
        assert not ours.try_acquire()
        assert not theirs.try_acquire()
        ours.penalize(500)
        while theirs.ready_in() < 400:
            assert time.monotonic() < end
    finally:
        for engine in engines:
            engine.close()
        for each in brokers:
            each.stop()


def test_what_makes_no_sense_is_refused(broker: BrokerThread, engines: list[ZmqEngine]) -> None:
    """Invalid rates and costs, and too many limits, are refused: they would stop the broker or fill its memory."""
    counts = Counts(0.0, quiet=0.0, most=2)
    for rate, cost in ((Rate(0, 1.0), 1), (Rate(5, 0.0), 1), (Rate(5, float("nan")), 1), (FIVE, 0), (FIVE, 6)):
        with pytest.raises(Refused):
            counts.take(b"l", rate, cost, 0, 1.0)
    for name in (b"1", b"2"):
        assert counts.take(name, FIVE, 1, 0, 1.0).booked
    with pytest.raises(Refused, match="--max-limits"):
        counts.take(b"3", FIVE, 1, 0, 2.0)
    assert counts.take(b"3", FIVE, 1, 0, 30.0).booked
    limits = engines[0].blocking.limits
    assert limits is not None
    for seconds in (-1.0, float("nan")):
        with pytest.raises(EngineError):
            run(limits.penalize("l", FIVE, seconds))
    assert run(limits.take("l", FIVE, 1, float("inf"))).booked
    assert broker.broker.machine.limits == Capacity(longest=3600.0)
