"""A database as SQLAlchemy reaches it: each question is one statement, and nothing else is sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from math import ceil
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, DisconnectionError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from stampede.engines.kit.overdue import Overdue
from stampede.errors import EngineError, MissingExtra, OptionError

__all__ = ["Database", "Where", "is_overtaken"]

Where: TypeAlias = str | sa.URL | sa.Engine

_ALL = dict.fromkeys(("pymysql", "mysqldb", "mariadbconnector"), "connect_timeout read_timeout write_timeout")
LIMITS = _ALL | {"psycopg": "connect_timeout", "psycopg2": "connect_timeout", "pysqlite": "timeout"}
"""By which names drivers are told how long a question may take."""

OVERTAKEN = {"40001", "40P01", "1213"}
"""How PostgreSQL and MySQL call what found no place in a serial order, or was chosen to end a deadlock."""


class Database:
    """`where` is a URL of SQLAlchemy's, or an engine of its: connections are made as its own are.

    A question takes `timeout` seconds at most, also with drivers that can't be told, if they show a file descriptor.
    `prepare` is called before the first one, and before the next one after trouble.
    """

    def __init__(
        self, where: Where, timeout: float, options: dict[str, Any], prepare: Callable[[sa.Connection], object]
    ) -> None:
        self.engine = _engine(where, timeout, options)
        self._timeout, self._overdue = timeout, Overdue(timeout)
        self._prepare, self._ready = prepare, False
        self._having: set[object] = set()  # a connection
        if self.engine.dialect.name == "sqlite":
            sa.event.listen(self.engine, "connect", lambda _, its: its.info.update(file=self._file()))
            sa.event.listen(self.engine, "checkout", self._same_file)

    def all(self, query: sa.Select[Any], **values: Any) -> Any:
        begun = time.monotonic()
        try:
            return self.ask(lambda found: found.all(), query, values)
        except DBAPIError as trouble:  # has the server only ended a connection that nobody used for long?
            again = trouble.connection_invalidated or is_overtaken(trouble)
            if not again or time.monotonic() - begun > self._timeout / 2:
                raise
            return self.ask(lambda found: found.all(), query, values)

    def ask(self, take: Callable[[Any], Any], statement: sa.Executable, values: dict[str, Any]) -> Any:
        """What is taken of its result."""
        question = object()
        try:
            with self.engine.connect() as line, self._overdue.asking(line.connection.driver_connection):
                self._having.add(question)
                try:
                    if not self._ready:
                        self._prepare(line)
                        self._ready = True
                    return take(line.execute(statement, values))
                except (DBAPIError, EngineError):
                    raise
                except BaseException:  # a signal's, perhaps: the answer would be taken for that to the next question
                    line.invalidate()
                    raise
        except DBAPIError as trouble:
            self._ready = self._ready and is_overtaken(trouble)  # or its table may be gone
            raise
        except PoolTimeout:
            pool: Any = self.engine.pool
            if pool.checkedout() > len(self._having):  # somebody was interrupted as he gave back his connection
                self.engine.dispose(close=False)
            raise
        finally:
            self._having.discard(question)

    def _file(self) -> tuple[int, int] | None:
        try:
            found = os.stat(str(self.engine.url.database))
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _same_file(self, _: Any, its: Any, __: Any) -> None:
        """A connection leads to the file that was there, which may have been removed, or replaced, since."""
        if its.info["file"] != self._file():
            self._ready = False
            raise DisconnectionError

    def close(self) -> None:
        self.engine.dispose()

    def start_again(self) -> None:
        """In a forked child: connections are the parent's."""
        self._having = set()
        self.engine.dispose(close=False)


def is_overtaken(trouble: DBAPIError) -> bool:
    """Whether nothing was done, since somebody else did something there."""
    told: Any = trouble.orig
    codes = {getattr(told, "sqlstate", None), getattr(told, "pgcode", None), *map(str, told.args[:1])}
    return isinstance(trouble, IntegrityError) or not OVERTAKEN.isdisjoint(codes)


def _engine(where: Where, timeout: float, options: dict[str, Any]) -> sa.Engine:
    if isinstance(where, sa.Engine):
        options["pool"] = where.pool.recreate()
        where = where.url
    if not isinstance(where, str | sa.URL) or (url := sa.make_url(where)).get_dialect().is_async:
        raise OptionError(f"a cache can't be on {where!r}: give a URL, or an Engine, of a driver that blocks")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise OptionError("a database in the memory of one connection is nobody else's: give a file, or take memory://")
    if "pool" not in options:
        limits = dict.fromkeys({*LIMITS.get(url.get_driver_name(), "").split()} - url.query.keys(), ceil(timeout))
        pool = {"pool_size": 16, "max_overflow": 16, "pool_timeout": timeout, "pool_recycle": 240}
        options = {**pool, **options, "connect_args": {**limits, **options.get("connect_args", {})}}
    own: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "skip_autocommit_rollback": True}
    try:  # what is kept is nothing for logs
        return sa.create_engine(url, **{"hide_parameters": True, **options, **own})
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"{url.drivername} needs the driver {missing.name!r}, which is not installed") from missing
