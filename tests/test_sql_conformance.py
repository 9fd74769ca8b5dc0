"""The SQL engine does what every engine has to do, on MariaDB, PostgreSQL and SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("pymysql")
pytest.importorskip("psycopg")

from mariadb_server import shared_mariadb
from postgres_server import shared_postgres

from stampede.engines import open_engine
from stampede.engines.cells import Cell
from stampede.engines.sql import from_url
from stampede.ports import Engine
from stampede.testing.conformance import CellSuite, ClaimsSuite, HistoriesSuite, LocksSuite, StoreSuite


class TestMariadbCell(CellSuite):
    def make_cell(self) -> Cell:
        server = shared_mariadb()
        server.empty()
        return from_url(server.url)

    def make_peer(self, cell: Cell) -> Cell:
        return from_url(shared_mariadb().url)


class TestPostgresCell(CellSuite):
    def make_cell(self) -> Cell:
        server = shared_postgres()
        server.empty()
        return from_url(server.url)

    def make_peer(self, cell: Cell) -> Cell:
        return from_url(shared_postgres().url)


class TestSqliteCell(CellSuite):
    @pytest.fixture(autouse=True)
    def _file(self, memory_path: Path) -> None:
        self.url = f"sql+sqlite:///{memory_path}/cache.db"

    def make_cell(self) -> Cell:
        return from_url(self.url)

    def make_peer(self, cell: Cell) -> Cell:
        return from_url(self.url)


class TestMariadb(ClaimsSuite, StoreSuite, LocksSuite):
    short = slack = 0.1  # ages are as exact as the way there and back is short

    def make_engine(self) -> Engine:
        server = shared_mariadb()
        server.empty()
        return open_engine(server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(shared_mariadb().url)


class TestMariadbAsync(ClaimsSuite):  # as a store and for locks, SQLite stands for all in this colour
    suspending, short, slack = True, TestMariadb.short, TestMariadb.slack

    make_engine, make_peer = TestMariadb.make_engine, TestMariadb.make_peer


class TestPostgres(ClaimsSuite, StoreSuite, LocksSuite):
    short = slack = 0.1

    def make_engine(self) -> Engine:
        server = shared_postgres()
        server.empty()
        return open_engine(server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(shared_postgres().url)


class TestPostgresAsync(ClaimsSuite):
    suspending, short, slack = True, TestPostgres.short, TestPostgres.slack

    make_engine, make_peer = TestPostgres.make_engine, TestPostgres.make_peer


class TestSqlite(ClaimsSuite, StoreSuite, LocksSuite, HistoriesSuite):
    short = slack = 0.1

    @pytest.fixture(autouse=True)
    def _file(self, memory_path: Path) -> None:
        self.url = f"sql+sqlite:///{memory_path}/cache.db"

    def make_engine(self) -> Engine:
        return open_engine(self.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(self.url)


class TestSqliteAsync(TestSqlite):
    suspending = True
