"""The SQL engine does what every engine has to do, on MariaDB and on SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("pymysql")

from mariadb_server import shared_mariadb

from stampede.engines import open_engine
from stampede.ports import Engine
from stampede.testing.conformance import ClaimsSuite, HistoriesSuite, LocksSuite, StoreSuite


class TestMariadb(ClaimsSuite, StoreSuite, LocksSuite, HistoriesSuite):
    def make_engine(self) -> Engine:
        server = shared_mariadb()
        server.empty()
        return open_engine(server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(shared_mariadb().url)


class TestMariadbAsync(TestMariadb):
    suspending = True


class TestSqlite(ClaimsSuite, StoreSuite, LocksSuite, HistoriesSuite):
    @pytest.fixture(autouse=True)
    def _file(self, memory_path: Path) -> None:
        self.url = f"sql+sqlite:///{memory_path}/cache.db"

    def make_engine(self) -> Engine:
        return open_engine(self.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(self.url)


class TestSqliteAsync(TestSqlite):
    suspending = True
