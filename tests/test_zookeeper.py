"""Locks on three ZooKeeper servers, of which the leader is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("kazoo")

from herd import Herd, until
from zookeeper_server import ZooKeeperEnsemble

from stampede import Lock
from stampede.colour import run_blocking as run
from stampede.engines.zookeeper import ZooKeeperEngine, from_url


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., ZooKeeperEngine]:
    def opened(url: str) -> ZooKeeperEngine:
        engine = from_url(url)
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[..., ZooKeeperEngine]


def waiting(engine: ZooKeeperEngine) -> int:
    (held,) = run(engine.locks.held())
    assert held.pid == os.getpid()
    return held.waiting


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
