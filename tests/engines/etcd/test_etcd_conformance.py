"""The etcd engine passes the suites for every engine. Its peer is another engine on the same server."""

from __future__ import annotations

import pytest

pytest.importorskip("urllib3")

from etcd_server import shared_etcd

from stampede.engines import open_engine
from stampede.engines.cells import Cell
from stampede.engines.etcd import EtcdEngine, from_url
from stampede.model.ports import Engine
from stampede.testing.conformance import CellSuite, LocksSuite


class TestEtcdCell(CellSuite):
    slack = 3.0  # leases are in whole seconds, and end up to one later

    def make_cell(self) -> Cell:
        shared_etcd().empty()
        return _cell(from_url(shared_etcd().url, timeout=20))

    def make_peer(self, cell: Cell) -> Cell:
        return _cell(from_url(shared_etcd().url, timeout=20))


def _cell(engine: EtcdEngine) -> Cell:
    return engine._open.cell


class TestEtcdLocks(LocksSuite):
    short = 0.9  # the server makes it one second, and ends it up to half a second later
    slack = 0.4

    def make_engine(self) -> Engine:
        shared_etcd().empty()
        return open_engine(shared_etcd().url, timeout=20)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(shared_etcd().url, timeout=20)


class TestEtcdLocksAsync(TestEtcdLocks):
    suspending = True

    # These sleep for seconds, and test lines that both colours share.
    test_renewing_a_lock_moves_its_end = test_an_end_nobody_noticed_is_an_end = None  # type: ignore[assignment]
