"""The DynamoDB cell passes the conformance suite of cells on moto's server."""

from __future__ import annotations

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

from dynamodb_server import shared_moto

from stampede.engines.cells import Cell
from stampede.engines.dynamodb import from_url
from stampede.testing.conformance import CellSuite


class TestDynamodbCell(CellSuite):
    slack = 1.5  # its clock is known from dates in whole seconds

    def make_cell(self) -> Cell:
        server = shared_moto()
        server.empty()
        return self.make_peer()

    def make_peer(self, cell: Cell | None = None) -> Cell:
        return from_url(f"{shared_moto().url}&timeout=20")  # on a busy machine, moto needs seconds for a hundred keys
