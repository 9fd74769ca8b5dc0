"""The DynamoDB engine does what every engine has to do, on moto's server; and its plain verbs on dynalite."""

from __future__ import annotations

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

from dynamodb_server import shared_moto

from stampede.engines import open_engine
from stampede.engines.cells import Cell
from stampede.engines.dynamodb import from_url
from stampede.ports import Engine
from stampede.testing.conformance import CellSuite, ClaimsSuite, LocksSuite, StoreSuite


class TestDynamodbCell(CellSuite):
    slack = 1.5  # its clock is told in whole seconds

    def make_cell(self) -> Cell:
        server = shared_moto()
        server.empty()
        return from_url(server.url)

    def make_peer(self, cell: Cell) -> Cell:
        return from_url(shared_moto().url)


class TestDynamodb(ClaimsSuite, StoreSuite, LocksSuite):  # what it decides, test_cells.py compares with the record
    largest = 390_000
    slack = 0.2  # what has been asked so far has narrowed its clock down to that

    def make_engine(self) -> Engine:
        server = shared_moto()
        server.empty()
        return open_engine(server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(shared_moto().url)


class TestDynamodbAsync(ClaimsSuite):  # what a store and a lock are in this colour, every cell's suite says
    suspending, largest, slack = True, TestDynamodb.largest, TestDynamodb.slack

    make_engine, make_peer = TestDynamodb.make_engine, TestDynamodb.make_peer
