"""The DynamoDB engine does what every engine has to do, on moto's server; and its plain verbs on dynalite."""

from __future__ import annotations

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

from dynamodb_server import shared_moto

from stampede.engines import open_engine
from stampede.ports import Engine
from stampede.testing.conformance import ClaimsSuite, HistoriesSuite, LocksSuite, StoreSuite


class TestDynamodb(ClaimsSuite, StoreSuite, LocksSuite, HistoriesSuite):
    largest = 390_000

    def make_engine(self) -> Engine:
        server = shared_moto()
        server.empty()
        return open_engine(server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(shared_moto().url)


class TestDynamodbAsync(TestDynamodb):
    suspending = True
