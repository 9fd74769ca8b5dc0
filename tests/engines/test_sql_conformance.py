"""The SQL engine passes the conformance suites on MariaDB, PostgreSQL and SQLite."""

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
from stampede.model.ports import Engine
from stampede.testing.conformance import CellSuite, HistoriesSuite


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


class TestSqlite(HistoriesSuite):
    """Histories over one file: what one process computes and another process changes."""

    @pytest.fixture(autouse=True)
    def _file(self, memory_path: Path) -> None:
        self.url = f"sql+sqlite:///{memory_path}/cache.db"

    def make_engine(self) -> Engine:
        return open_engine(self.url)

    def make_peer(self, engine: Engine) -> Engine:
        return open_engine(self.url)
