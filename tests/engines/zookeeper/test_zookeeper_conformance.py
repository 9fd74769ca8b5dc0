"""The zookeeper engine passes the conformance suites. Its peer is another engine on the same server."""

from __future__ import annotations

import pytest

pytest.importorskip("kazoo")

from zookeeper_server import shared_zookeeper

from stampede.engines import open_engine
from stampede.engines.cells import Cell
from stampede.engines.zookeeper import from_url
from stampede.model.ports import Engine
from stampede.testing.conformance import CellSuite, LocksSuite


class TestZooKeeperCell(CellSuite):
    def make_cell(self) -> Cell:
        shared_zookeeper().empty()
        return from_url(shared_zookeeper().url, timeout=20)._open.cell

    def make_peer(self, cell: Cell) -> Cell:
        return from_url(shared_zookeeper().url, timeout=20)._open.cell


class TestZooKeeperLocks(LocksSuite):
    short = 0.4  # the sessions are long enough for the extended leases
    slack = 0.2

    def make_engine(self) -> Engine:
        shared_zookeeper().empty()
        return open_engine(f"{shared_zookeeper().url}?session=64", timeout=20)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(f"{shared_zookeeper().url}?session=64", timeout=20)


class TestZooKeeperLocksAsync(TestZooKeeperLocks):
    suspending = True
