"""The SQL engine: cells are rows of a table, in whatever database SQLAlchemy reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from math import ceil, isinf
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import LONGBLOB, VARCHAR
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.schema import CreateIndex, CreateTable

from stampede.engines.cells import Cell, Faster, Seen, Version
from stampede.engines.url import Kind, flag, number, safe_url, text
from stampede.errors import EngineError, MissingExtra, OptionError

__all__ = ["SqlCell", "check_url", "from_url", "of_client", "schema"]

T = TypeVar("T")

TABLE = "stampede"
OURS: dict[str, Kind] = {"table": text, "create": flag, "timeout": number}

MOMENT = "CAST(EXTRACT(EPOCH FROM CURRENT_TIMESTAMP) * 1000000 AS BIGINT)"
MOMENTS = {
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
"""Microseconds since 1970, by the clock of the database."""

LIMITS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("pymysql", "mysqldb", "mariadbconnector"), ("connect_timeout", "read_timeout", "write_timeout")),
    "psycopg": ("connect_timeout",),
    "psycopg2": ("connect_timeout",),
    "pysqlite": ("timeout",),
}
"""By which names drivers are told how long a question may take."""

SWEEP = 128  # writes of a process between two sweeps, and rows that are swept at once
GRAVE = (
    3600.0  # seconds for which a removed row leaves its version to the next one of its name, whatever the clock does
)


def schema(dialect: str, table: str = TABLE) -> str:
    """The statements that make the table, for who migrates by hand: `schema("mysql")`."""
    made, kind = _table(table), sa.make_url(f"{dialect}://").get_dialect()()
    statements: list[Any] = [CreateTable(made), *map(CreateIndex, made.indexes)]
    return "".join(f"{str(statement.compile(dialect=kind)).strip()};\n" for statement in statements)


def _table(name: str) -> sa.Table:
    exact = sa.String(250)  # by its bytes: `a` is not `A`
    exact = exact.with_variant(VARCHAR(250, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("name", exact, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")),
        sa.Column("written", sa.BigInteger, nullable=False),
        sa.Column("ends", sa.BigInteger, index=True),
    )


class SqlCell(Cell):
    """Rows of one table. `database` is a URL of SQLAlchemy's, or an engine of its: connections are made as its own are.

    A question takes `timeout` seconds at most, with drivers that can be told. Other options go to `create_engine`.
    """

    ends = grows = ages = True
    at_once = 500

    def __init__(
        self,
        database: str | sa.URL | sa.Engine,
        table: str = TABLE,
        create: bool = True,
        timeout: float = 3.0,
        **options: Any,
    ) -> None:
        self._engine = _engine(database, timeout, options)
        self._dialect = self._engine.dialect.name.replace("mariadb", "mysql")
        self._now = sa.literal_column(MOMENTS.get(self._dialect, MOMENT), sa.BigInteger)
        self._table, self._create, self._ready = _table(table), create, False
        self._row, self._writes, self.silence = self._table.c, count(1), timeout

    def read(self, names: Sequence[str]) -> list[Seen]:
        row = self._row
        query = sa.select(row.name, row.data, row.version, self._now - row.written).where(row.name.in_(names))
        seen = {name: Seen(data, version, age / 1e6) for name, data, version, age in self._all(query)}
        return [seen.get(name, Seen(None)) for name in names]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        if version is None and data is None:
            return None
        left = ttl if data is not None else GRAVE
        ends = None if isinf(left) else self._now + ceil(left * 1e6)
        values = {"data": data, "written": self._now, "ends": ends}
        new = self._first(name, values) if version is None else self._next(name, version, values)
        if next(self._writes) % SWEEP == 0:
            with suppress(DBAPIError):  # what was asked for is done
                self._sweep()
        return new

    def _first(self, name: str, values: dict[str, Any]) -> Version | Faster:
        """The clock makes its version: beyond those that rows of this name have had and taken with them."""
        mysql = self._dialect == "mysql"  # which can't return what it inserts
        version = sa.func.last_insert_id(self._now) if mysql else self._now
        row = sa.insert(self._table).values(name=name, version=version, **values)
        try:
            if mysql:
                return self._ask(lambda line: line.execute(row).lastrowid)
            return self._ask(lambda line: line.execute(row.returning(self._row.version)).scalar_one())
        except IntegrityError:
            self._ready = True
            return Faster()

    def _next(self, name: str, version: int, values: dict[str, Any]) -> Version | Faster:
        row = sa.update(self._table).where(self._row.name == name, self._row.version == version)
        row = row.values(version=version + 1, **values)
        return version + 1 if self._ask(lambda line: line.execute(row).rowcount) else Faster()

    def _sweep(self) -> None:
        row = self._row
        over = [name for (name,) in self._all(sa.select(row.name).where(row.ends < self._now).limit(SWEEP))]
        # By their names: by the index of `ends`, it would wait for a swap that waits for it.
        gone = sa.delete(self._table).where(row.name.in_(over), row.ends + 0 < self._now)
        if over:
            self._ask(lambda line: line.execute(gone))

    def _all(self, query: sa.Select[Any]) -> Sequence[Any]:
        begun = time.monotonic()
        try:
            return self._ask(lambda line: line.execute(query).all())
        except DBAPIError as trouble:  # has the server only ended a connection that nobody used for long?
            if not trouble.connection_invalidated or time.monotonic() - begun > self.silence / 2:
                raise
            return self._ask(lambda line: line.execute(query).all())

    def _ask(self, act: Callable[[sa.Connection], T]) -> T:
        try:
            with self._engine.connect() as line:
                if not self._ready:
                    self._prepare(line)
                return act(line)
        except DBAPIError:
            self._ready = False  # perhaps its table is gone
            raise

    def _prepare(self, line: sa.Connection) -> None:
        if self._dialect == "sqlite":
            line.exec_driver_sql("PRAGMA journal_mode=WAL")
        if self._dialect == "mysql":  # it hangs up on who says more, and drivers may say a byte as two
            self.longest = int(line.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()) // 2 - 4096
        name, there = self._table.name, line.dialect.has_table
        with suppress(DBAPIError):  # somebody else makes it, or we may not
            if self._create and not there(line, name):
                self._table.create(line)
        if not there(line, name):
            raise EngineError(f"there is no table {name!r}; make it by: {schema(self._dialect, name)}")
        self._ready = True

    def close(self) -> None:
        self._engine.dispose()

    def start_again(self) -> None:
        self._engine.dispose(close=False)


def _engine(database: str | sa.URL | sa.Engine, timeout: float, options: dict[str, Any]) -> sa.Engine:
    if isinstance(database, sa.Engine):
        options["pool"] = database.pool.recreate()
        database = database.url
    if not isinstance(database, str | sa.URL) or (url := sa.make_url(database)).get_dialect().is_async:
        raise OptionError(f"a cache can't be on {database!r}: give a URL, or an Engine, of a driver that blocks")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise OptionError("a database in the memory of one connection is nobody else's: give a file, or take memory://")
    if "pool" not in options:
        limits = {name: ceil(timeout) for name in LIMITS.get(url.get_driver_name(), ()) if name not in url.query}
        pool = {"pool_size": 16, "max_overflow": 16, "pool_timeout": timeout, "pool_recycle": 240}
        options = {**pool, **options, "connect_args": {**limits, **options.get("connect_args", {})}}
    try:  # a question is one statement, and nothing else is sent
        return sa.create_engine(url, isolation_level="AUTOCOMMIT", skip_autocommit_rollback=True, **options)
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"{url.drivername} needs the driver {missing.name!r}, which is not installed") from missing


def from_url(url: str, **options: Any) -> SqlCell:
    """Behind `sql+`, a URL of SQLAlchemy's. Its query may have `table`, `create` and `timeout`, too."""
    database, ours = _parsed(url)
    return SqlCell(database, **{**ours, **options})


def check_url(url: str) -> None:
    _parsed(url)


of_client = SqlCell


def _parsed(url: str) -> tuple[sa.URL, dict[str, Any]]:
    try:
        database = sa.make_url(url.partition("+")[2])
        database.get_dialect()
    except ArgumentError as wrong:
        hint = "give a URL of SQLAlchemy's behind `sql+`, as sql+mysql+pymysql://user@host/name"
        raise OptionError(f"{safe_url(url)!r}: {hint}") from wrong
    ours = {name: OURS[name](name, database.query[name]) for name in OURS if name in database.query}
    return database.difference_update_query(list(ours)), ours
