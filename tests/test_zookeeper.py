"""Locks on ZooKeeper: what they cost, whose turn it is, and what killed servers and holders leave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("kazoo")

from disk_world import Connection, other
from herd import Herd, until
from proxy import Proxy
from zookeeper_server import ZooKeeperEnsemble, shared_zookeeper

from stampede import EngineError, Lock
from stampede.colour import run_blocking as run
from stampede.engines import check_url
from stampede.engines.zookeeper import ZooKeeperEngine, from_url
from stampede.entry import new_id
from stampede.errors import OptionError
from stampede.ports import Busy, Granted

LEASE = 3.0


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., ZooKeeperEngine]:
    def opened(url: str = "") -> ZooKeeperEngine:
        engine = from_url(url or shared_zookeeper().url)
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[..., ZooKeeperEngine]


def waiting(engine: ZooKeeperEngine) -> int:
    (held,) = run(engine.locks.held())
    assert held.pid == os.getpid()
    return held.waiting


def test_a_release_wakes_the_next_one(open_: Open) -> None:
    """All would come at each release, or the first of them last."""
    shared_zookeeper().empty()
    holder, crowd, order = open_(), [open_() for _ in range(3)], list[int]()
    lock = Lock("l", on=holder)
    assert lock.acquire()
    herd = []
    for number, engine in enumerate(crowd):

        def visit(number: int = number, engine: ZooKeeperEngine = engine) -> int | None:
            with Lock("l", on=engine, wait=20) as mine:
                order.append(number)
                return mine.fence

        herd.append(Herd(visit))
        until(lambda number=number: waiting(holder) == number + 1)
    fences = [lock.fence]
    lock.release()
    fences += [fence for each in herd for fence in each.join()]
    assert order == [0, 1, 2]
    assert fences == sorted(set(fences))  # type: ignore[type-var]


@pytest.mark.parametrize("lost", ["question", "answer"])
@pytest.mark.parametrize("step", ["acquire", "release"])
def test_a_cut_connection_leaves_no_contender(open_: Open, step: str, lost: str) -> None:
    """A node whose creation or removal had no answer would stand for as long as its process does."""
    shared_zookeeper().empty()
    proxy = Proxy(shared_zookeeper().port)
    try:
        engine, far = open_(f"zookeeper://127.0.0.1:{proxy.port}?timeout=1"), open_()
        with Lock("l", on=engine):
            pass  # there is a session, and the lock's node
        token = new_id()
        if step == "release":
            assert isinstance(run(engine.locks.acquire("l", token, LEASE)), Granted)
        proxy.at(token.hex().encode(), **({"sent": 0} if lost == "question" else {"answered": 0}))  # type: ignore[arg-type]
        locks = engine.locks
        with pytest.raises(EngineError):
            run(locks.acquire("l", token, LEASE) if step == "acquire" else locks.release("l", token))  # type: ignore[type-var]
        until(lambda: run(far.locks.holder("l")) == [], LEASE / 2)
        assert isinstance(run(far.locks.acquire("l", new_id(), LEASE)), Granted)
        assert not any(each.dead for each in engine._sessions._sessions.values())  # nor did they end it
    finally:
        proxy.close()


def hold(pipe: Connection, url: str) -> None:
    """Take the lock, and say so."""
    lock = Lock("l", on=from_url(url), lease=1.0)
    assert lock.acquire()
    pipe.send(lock.fence)
    pipe.recv()


def test_a_killed_holder_blocks_nobody_beyond_its_session(open_: Open) -> None:
    """The lock would be its own for ever."""
    shared_zookeeper().empty()
    engine = open_()
    with other(hold, shared_zookeeper().url) as one:
        old = one.hear()
        assert isinstance(run(engine.locks.acquire("l", new_id(), LEASE)), Busy)
        one.kill()
        with Lock("l", on=engine, wait=20) as lock:
            assert lock.fence > old


def test_a_forked_child_has_a_session_of_its_own(open_: Open) -> None:
    """It would speak on its parent's connection, or end what that has."""
    shared_zookeeper().empty()
    engine = open_()
    token = new_id()
    assert isinstance(run(engine.locks.acquire("l", token, LEASE)), Granted)
    pid = os.fork()
    if pid == 0:
        try:
            busy = isinstance(run(engine.locks.acquire("l", new_id(), LEASE)), Busy)
            mine = isinstance(run(engine.locks.acquire("other", new_id(), LEASE)), Granted)
            os._exit(0 if busy and mine else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run(engine.locks.renew("l", token, LEASE))
    assert run(engine.locks.release("l", token))


def test_a_lock_is_not_extended_beyond_its_session(open_: Open) -> None:
    """A frozen holder would wake up in a lock that the servers have given to another."""
    shared_zookeeper().empty()
    engine, token = open_(), new_id()
    assert isinstance(run(engine.locks.acquire("l", token, 1.0)), Granted)
    with pytest.raises(EngineError, match="session="):
        run(engine.locks.renew("l", token, 60.0))
    assert run(engine.locks.renew("l", token, 1.0))
    assert run(engine.locks.release("l", token))


def test_a_lease_that_no_session_outlasts_is_refused(open_: Open) -> None:
    """Its holder would believe in it for longer than the servers do."""
    with pytest.raises(EngineError, match="maxSessionTimeout"):
        run(open_().locks.acquire("l", new_id(), 1000.0))


@pytest.mark.parametrize("url", ["zookeeper://", "zookeeper://h?timeout=0", "zookeeper://h?key=k", "zookeeper://h:x"])
def test_bad_urls(url: str) -> None:
    """They would be found out in production."""
    with pytest.raises(OptionError):
        check_url(url)


@cache
def _ensemble() -> ZooKeeperEnsemble:
    return ZooKeeperEnsemble()


def test_locks_outlive_the_leader(open_: Open) -> None:
    """Its holder would lose the lock with a server, or another have it too; who waits would never be told."""
    ensemble = _ensemble()
    holder, waiter = open_(ensemble.url), open_(ensemble.url)
    lock = Lock("l", on=holder, lease=10.0)
    assert lock.acquire()

    def visit() -> Any:
        with Lock("l", on=waiter, lease=10.0, wait=30) as mine:
            return mine.fence

    herd = Herd(visit)
    until(lambda: waiting(holder) == 1)
    ensemble.leader().stop()
    began = time.monotonic()
    own = holder._desk._owned["l", lock.token]  # type: ignore[index]
    end = own.end
    until(lambda: own.end > max(end, began), 12)
    assert lock.held
    fence = lock.fence
    lock.release()
    (mine,) = herd.join()
    assert mine > fence
