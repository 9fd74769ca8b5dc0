"""Locks on a cluster of three etcd members. Members and lock holders are killed or frozen."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("urllib3")

from disk_world import Connection, other, others
from etcd_server import EtcdCluster, shared_etcd
from herd import PATIENCE, Herd, until

from stampede import EngineError, Lock
from stampede.engines.etcd import EtcdEngine, from_url
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Granted
from stampede.runtime.colour import run_blocking as run

LEASE, LONG = 3.0, 60.0


@cache
def _cluster() -> EtcdCluster:
    return EtcdCluster()


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Three members, all running and empty."""
    made = _cluster()
    made.members[0].empty()
    yield made
    for each in made.members:
        if each._process is None:
            each.start()
        else:
            each.thaw()
    until(lambda: all(each.ask("/v3/maintenance/status").get("leader") for each in made.members))


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[[str], EtcdEngine]:
    def opened(url: str) -> EtcdEngine:
        engine = from_url(url if "?" in url else f"{url}?timeout={PATIENCE}")
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[[str], EtcdEngine]


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_locks_outlive_the_leader(cluster: EtcdCluster, open_: Open, how: str) -> None:
    """If the leader is killed or frozen, the holder keeps its lock, and the waiters get it in their order."""
    url = f"{cluster.url}?timeout=6"  # a third of it is lost to a frozen member, and an election takes a second
    holder, waiters = open_(url), [open_(url) for _ in range(2)]
    lock, order = Lock("l", on=holder, lease=LONG), list[int]()
    assert lock.acquire() and lock.token is not None
    token, first = lock.token, lock.fence
    herd = []
    for number, engine in enumerate(waiters):

        def visit(number: int = number, engine: EtcdEngine = engine) -> int | None:
            with Lock("l", on=engine, lease=LONG) as mine:
                order.append(number)
                return mine.fence

        herd.append(Herd(visit))
        until(lambda number=number: [each.waiting for each in run(holder.blocking.locks.held())] == [number + 1])
    leader = cluster.leader()
    leader.stop() if how == "killed" else leader.freeze()

    def is_renewed() -> bool:
        with suppress(EngineError):  # the election takes its time
            assert run(holder.blocking.locks.renew("l", token, LONG)), "the lock is lost"
            return True
        return False

    until(is_renewed)
    assert lock.held
    assert not order
    assert sorted({**holder.facts()}) == sorted(cluster.url[7:].split(","))
    lock.release()
    fences = [first, *(fence for each in herd for fence in each.join())]
    assert all(isinstance(each, int) for each in fences), fences
    assert order == [0, 1]
    assert fences == sorted(set(fences))  # type: ignore[type-var]


def test_a_question_outlasts_an_election(cluster: EtcdCluster, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for the end of an election. Otherwise a waiter for a lock would get an error within a quarter of
    a second, as if the cluster was down."""
    engine = open_(f"{cluster.url}?timeout=15")
    asked, tried = list[Any](), engine._gateway._tried

    def counted(member: Any, *args: Any, **options: Any) -> dict[str, Any]:
        asked.append(member)
        return tried(member, *args, **options)

    monkeypatch.setattr(engine._gateway, "_tried", counted)
    dead = cluster.members[:2]
    for each in dead:
        each.stop()
    herd = Herd(lambda: run(engine.blocking.locks.acquire("l", new_id(), LEASE)))
    until(lambda: len(asked) > 5 * len(cluster.members) or not herd.waiting)
    starts = Herd(*[each.start for each in dead])
    (told,) = herd.join()
    assert isinstance(told, Granted), told
    starts.join()


def test_without_a_majority_nobody_is_let_in(cluster: EtcdCluster, open_: Open) -> None:
    """Without a majority of the members no lock is granted, and a holder learns that its lock is lost."""
    lock = Lock("l", on=open_(f"{cluster.url}?timeout=5"), lease=1.0)
    assert lock.acquire()
    for each in cluster.members[:2]:
        each.stop()
    with pytest.raises(EngineError):
        run(open_(f"{cluster.url}?timeout=0.5").blocking.locks.acquire("other", new_id(), LEASE))
    until(lambda: lock.lost)
    for each in cluster.members[:2]:
        threading.Thread(target=each.start).start()
    with pytest.raises(EngineError):  # `_left` turns LockLost into it, once they are back
        raise _left(lock)
    until(lambda: all(each._process is not None for each in cluster.members))


def _left(lock: Lock) -> Exception:
    try:
        lock.release()
    except Exception as error:
        return error if isinstance(error, EngineError) else EngineError(str(error))
    raise AssertionError("it was lost without a word")


# -- processes --------------------------------------------------------------------------------------------------------


def hold(pipe: Connection, url: str) -> None:
    """Takes the lock, and says so."""
    lock = Lock("l", on=from_url(url, timeout=PATIENCE), lease=1.0)
    assert lock.acquire()
    pipe.send(lock.fence)
    pipe.recv()


def test_a_killed_holder_blocks_nobody_beyond_its_lease(open_: Open) -> None:
    """If a holder is killed, its lock can be acquired when its lease has ended."""
    shared_etcd().empty()
    engine = open_(shared_etcd().url)
    with other(hold, shared_etcd().url) as one:
        old = one.hear()
        assert isinstance(run(engine.blocking.locks.acquire("l", new_id(), LEASE)), Busy)
        one.kill()
        with Lock("l", on=engine, wait=20) as lock:
            assert lock.fence > old


def increment(pipe: Connection, url: str, number: int) -> None:
    """Enters the lock again and again, and records the fences. A process with an odd number does so in a task."""
    import asyncio

    lock = Lock("l", on=from_url(url, timeout=PATIENCE), lease=LONG)
    fences = list[tuple[float, int | None, float]]()

    async def suspending() -> None:
        for _ in range(8):
            async with lock:
                fences.append((time.monotonic(), lock.fence, 0.0))
                await asyncio.sleep(0.001)
                fences[-1] = fences[-1][0], lock.fence, time.monotonic()

    def blocking() -> None:
        for _ in range(8):
            with lock:
                fences.append((time.monotonic(), lock.fence, 0.0))
                time.sleep(0.001)
                fences[-1] = fences[-1][0], lock.fence, time.monotonic()

    pipe.send("ready")
    pipe.recv()
    asyncio.run(suspending()) if number % 2 else blocking()
    pipe.send(fences)
    pipe.recv()


def test_one_at_a_time_of_many_processes_on_many_members(cluster: EtcdCluster) -> None:
    """Processes enter one at a time, in the order of their fences, also while a member is killed."""
    with others(1, increment, cluster.url, 0) as (a,), others(1, increment, cluster.url, 1) as (b,):
        assert [each.hear() for each in (a, b)] == ["ready"] * 2
        for each in (a, b):
            each.tell()
        victim = next(each for each in cluster.members if each is not cluster.leader())
        victim.stop()
        visits = sorted(visit for each in (a, b) for visit in each.hear())
    fences = [fence for _, fence, _ in visits]
    assert len(visits) == 16
    assert fences == sorted(set(fences))
    assert all(left <= entered for (_, _, left), (entered, _, _) in pairwise(visits))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_none_of_its_parent_s(open_: Open) -> None:
    """A forked child does not use the locks, the connections or the threads of its parent."""
    shared_etcd().empty()
    engine = open_(shared_etcd().url)
    lock = Lock("l", on=engine)
    assert lock.acquire()
    waiter = Herd(lambda: _visit(engine))
    until(lambda: engine._watches._watches)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            assert isinstance(run(engine.blocking.locks.acquire("l", new_id(), LEASE)), Busy)
            with Lock("other", on=engine):
                assert not Lock("l", on=engine).acquire(wait=0.2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lock.held
    lock.release()
    assert waiter.join() == [True]


def _visit(engine: EtcdEngine) -> bool:
    with Lock("l", on=engine) as lock:
        return lock.held


def test_many_loops_one_after_the_other(open_: Open) -> None:
    """Several event loops, one after the other and at once, can use one engine."""
    import asyncio

    shared_etcd().empty()
    engine, entered = open_(shared_etcd().url), list[Any]()

    async def visit() -> None:
        async with Lock("l", on=engine) as lock:
            entered.append(lock.fence)

    async def many() -> None:
        await asyncio.gather(*[visit() for _ in range(3)])

    for _ in range(3):
        asyncio.run(many())
    assert Herd(*[lambda: asyncio.run(many())] * 3).join() == [None] * 3
    assert entered == sorted(set(entered))
    assert len(entered) == 18
    assert isinstance(run(engine.blocking.locks.acquire("l", new_id(), LEASE)), Granted)
