"""The SQL engine: cells are rows of a table, in any database that SQLAlchemy supports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from math import ceil
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.mysql import LONGBLOB, VARCHAR
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from stampede.engines.cells import Cell, Faster, Seen, Version
from stampede.engines.kit.hang_up import HangUp
from stampede.engines.kit.url import Kind, flag, integer, number, safe_url, text
from stampede.errors import EngineError, MissingExtra, OptionError

__all__ = ["SqlCell", "check_url", "from_url", "of_client", "schema"]

TABLE = "stampede"
POOL: dict[str, Kind] = {"pool_size": integer, "max_overflow": integer, "pool_recycle": integer, "pool_pre_ping": flag}
OURS: dict[str, Kind] = {"table": text, "create": flag, "timeout": number, **POOL}
"""Options of the engine in the query of a URL. All others are the driver's."""

MOMENT = "CAST(EXTRACT(EPOCH FROM CURRENT_TIMESTAMP) * 1000000 AS BIGINT)"
MOMENTS = {
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}
"""Microseconds since 1970, by the clock of the database."""

SWEEP = 128  # writes of a process between two sweeps, and rows that one sweep deletes
TOMBSTONE = 3600.0  # seconds for which the version of a removed row remains, so that the next one has a higher one
EVER = 1e9  # a row that would end later than after so many seconds does not end


Where: TypeAlias = str | sa.URL | sa.Engine

_ALL = dict.fromkeys(("pymysql", "mysqldb", "mariadbconnector"), "connect_timeout read_timeout write_timeout")
LIMITS = _ALL | {"psycopg": "connect_timeout", "psycopg2": "connect_timeout", "pysqlite": "timeout"}
"""The options of each driver that limit how long a question may take."""

OVERTAKEN = {"40001", "40P01", "1213"}
"""Codes of PostgreSQL and MySQL for a serialization failure, or a deadlock: nothing was done."""


def schema(dialect: str, table: str = TABLE) -> str:
    """Return the statements that create the table, for a migration by hand: `schema("mysql")`."""
    made, kind = _table(table), sa.make_url(f"{dialect}://").get_dialect()()
    statements: list[Any] = [CreateTable(made), *map(CreateIndex, made.indexes)]
    return "".join(f"{str(each.compile(dialect=kind)).strip()};\n" for each in statements)


def _table(name: str) -> sa.Table:
    exact = sa.String(250)  # compared by bytes: `a` is not `A`
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
    """Rows of one table. `database` is a URL of SQLAlchemy, or an `Engine`, whose way of connecting is used. A question
    takes at most `timeout` seconds, if the driver has such an option. Other options go to `create_engine`."""

    ends = grows = ages = True
    at_once = 500

    def __init__(
        self, database: Where, table: str = TABLE, create: bool = True, timeout: float = 3.0, **options: Any
    ) -> None:
        self._database = SqlDatabase(database, timeout, options, self._prepare)
        self._engine = self._database.engine
        dialect = self._engine.dialect.name.replace("mariadb", "mysql")
        self._table, self._create = _table(table), create
        self._writes, self._mysql = count(1), dialect == "mysql"
        now, row = sa.literal_column(MOMENTS.get(dialect, MOMENT), sa.BigInteger), self._table.c
        names = row.name.in_(sa.bindparam("names", expanding=True))
        values = {"data": sa.bindparam("d"), "written": now, "ends": now + sa.bindparam("left", type_=sa.BigInteger)}
        self._select = sa.select(row.name, row.data, row.version, now - row.written).where(names)
        # The first version is the clock's, and so higher than the versions of earlier rows of this name.
        first = sa.func.last_insert_id(now) if self._mysql else now  # MySQL can't return what it inserts
        insert = postgresql.insert if dialect == "postgresql" else sa.insert
        new: Any = insert(self._table).values(name=sa.bindparam("n"), version=first, **values)
        if dialect == "postgresql":  # otherwise its log would have an error for each insert that came too late
            new = new.on_conflict_do_nothing()
        self._insert = new if self._mysql else new.returning(row.version)
        seen = row.name == sa.bindparam("n"), row.version == sa.bindparam("v")
        self._update = sa.update(self._table).where(*seen).values(version=sa.bindparam("new"), **values)
        self._expired = sa.select(row.name).where(row.ends < now).limit(SWEEP)
        # By names: a delete over the index of `ends` could deadlock with a swap.
        self._delete = sa.delete(self._table).where(names, row.ends + 0 < now)

    def read(self, names: Sequence[str]) -> list[Seen]:
        rows = self._database.all(self._select, names=names)
        seen = {name: Seen(data, version, age / 1e6) for name, data, version, age in rows}
        return [seen.get(name, Seen(None)) for name in names]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        if version is None and data is None:
            return None
        left = ttl if data is not None else TOMBSTONE
        values = {"n": name, "d": data, "left": ceil(left * 1e6) if left < EVER else None}
        try:
            new = self._first(values) if version is None else self._next(version, values)
        except DBAPIError as trouble:
            if not is_overtaken(trouble):
                raise
            return Faster()
        if next(self._writes) % SWEEP == 0:
            with suppress(SQLAlchemyError, EngineError):  # the swap has succeeded
                self._sweep()
        return new

    def _first(self, values: dict[str, Any]) -> Version | Faster:
        def taken(done: Any) -> Version | Faster:
            return done.lastrowid if self._mysql else done.scalars().one_or_none() or Faster()

        return self._database.ask(taken, self._insert, values)

    def _next(self, seen: Version, values: dict[str, Any]) -> Version | Faster:
        # Other programs may have written any version.
        new = seen + 1 if type(seen) is int and 0 < seen < 1 << 62 else time.time_ns() // 1000
        values = {**values, "v": seen, "new": new}
        return new if self._database.ask(lambda done: done.rowcount, self._update, values) else Faster()

    def _sweep(self) -> None:
        if over := self._database.all(self._expired):
            self._database.ask(lambda done: done.rowcount, self._delete, {"names": [name for (name,) in over]})

    def _prepare(self, line: sa.Connection) -> None:
        if line.dialect.name == "sqlite":
            with suppress(DBAPIError):  # another process sets it now: SQLite raises instead of waiting
                line.exec_driver_sql("PRAGMA journal_mode=WAL")
        if self._mysql:  # it disconnects a client that sends more, and drivers may escape a byte as two
            self.longest = int(line.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()) // 2 - 4096
        name, there = self._table.name, line.dialect.has_table
        with suppress(DBAPIError):  # another process creates it, or this role may not
            if self._create and not there(line, name):
                self._table.create(line)
        if not there(line, name):
            raise EngineError(f"there is no table {name!r}; create it by: {schema(line.dialect.name, name)}")

    def close(self) -> None:
        self._database.close()

    def start_again(self) -> None:
        self._database.start_again()


class SqlDatabase:
    """A database, reached through SQLAlchemy. `where` is a URL, or an `Engine`, whose way of connecting is used. A
    question takes at most `timeout` seconds, even if the driver has no such option, provided that its connections have
    a file descriptor. `prepare` is called before the first question, and before the next one after an error."""

    def __init__(
        self, where: Where, timeout: float, options: dict[str, Any], prepare: Callable[[sa.Connection], object]
    ) -> None:
        self.engine = _engine(where, timeout, options)
        self._timeout, self._hang_up = timeout, HangUp(timeout)
        self._prepare, self._ready = prepare, False

    def all(self, query: sa.Select[Any], **values: Any) -> Any:
        begun = time.monotonic()
        try:
            return self.ask(lambda found: found.all(), query, values)
        except DBAPIError as trouble:  # once more, if the server has only closed an idle connection
            again = trouble.connection_invalidated or is_overtaken(trouble)
            if not again or time.monotonic() - begun > self._timeout / 2:
                raise
            return self.ask(lambda found: found.all(), query, values)

    def ask(self, take: Callable[[Any], Any], statement: sa.Executable, values: dict[str, Any]) -> Any:
        """Execute a statement and return `take(result)`."""
        try:
            with self.engine.connect() as line, self._hang_up.asking(line.connection.driver_connection):
                try:
                    if not self._ready:
                        self._prepare(line)
                        self._ready = True
                    return take(line.execute(statement, values))
                except (DBAPIError, EngineError):
                    raise
                except BaseException:  # perhaps of a signal handler: the next question would read this one's answer
                    line.invalidate()
                    raise
        except DBAPIError as trouble:
            self._ready = self._ready and is_overtaken(trouble)  # after another error, the table may be gone
            raise

    def close(self) -> None:
        self.engine.dispose()

    def start_again(self) -> None:
        """Drop the connections in a forked child without closing them: they are the parent's."""
        self.engine.dispose(close=False)


def is_overtaken(trouble: DBAPIError) -> bool:
    """Return whether nothing was done, because another transaction was faster."""
    cause: Any = trouble.orig
    codes = {getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None), *map(str, cause.args[:1])}
    return isinstance(trouble, IntegrityError) or not OVERTAKEN.isdisjoint(codes)


def _engine(where: Where, timeout: float, options: dict[str, Any]) -> sa.Engine:
    if isinstance(where, sa.Engine):
        options["pool"] = where.pool.recreate()
        where = where.url
    if not isinstance(where, str | sa.URL) or (url := sa.make_url(where)).get_dialect().is_async:
        raise OptionError(f"a cache can't be on {where!r}: give a URL or an Engine of a driver that blocks")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise OptionError("a SQLite database in memory belongs to one connection alone: give a file, or use memory://")
    if "pool" not in options:
        limits = dict.fromkeys({*LIMITS.get(url.get_driver_name(), "").split()} - url.query.keys(), ceil(timeout))
        pool = {"pool_size": 16, "max_overflow": 16, "pool_timeout": timeout, "pool_recycle": 240}
        options = {**pool, **options, "connect_args": {**limits, **options.get("connect_args", {})}}
    own: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "skip_autocommit_rollback": True}
    try:  # values must not appear in logs
        return sa.create_engine(url, **{"hide_parameters": True, **options, **own})
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"{url.drivername} needs the driver {missing.name!r}, which is not installed") from missing


def from_url(url: str, **options: Any) -> SqlCell:
    """Return a cell for `sql+` and a URL of SQLAlchemy. The query of the URL may also contain the options of `OURS`."""
    database, ours = _parsed(url)
    return SqlCell(database, **ours | options)


def _parsed(url: str) -> tuple[sa.URL, dict[str, Any]]:
    try:
        database = sa.make_url(url.partition("+")[2])
        database.get_dialect()
    except ArgumentError as wrong:
        hint = "give `sql+` and a URL of SQLAlchemy, such as sql+mysql+pymysql://user@host/name"
        raise OptionError(f"{safe_url(url)!r}: {hint}") from wrong
    ours = {name: OURS[name](name, database.query[name]) for name in OURS if name in database.query}
    return database.difference_update_query(list(ours)), ours


check_url, of_client = _parsed, SqlCell
