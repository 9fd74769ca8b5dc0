"""What the transaction of a session has changed, and which tags its commit invalidates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Delete, Table, TextClause, event
from sqlalchemy.orm import FromStatement, Mapper, Session
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.selectable import TextualSelect

from stampede.contrib.sqlalchemy import tags

__all__ = ["Changes"]

MOST_ROWS = 100
"""The most rows of a table whose tags are invalidated one by one. If more rows are changed, the results of all rows of
the table are invalidated."""

_EACH_SELECT_IS_NEW = ("READ COMMITTED", "READ UNCOMMITTED", "AUTOCOMMIT")
_TEXTS = (TextClause, TextualSelect)


class Changes:
    """What the current transaction of a session has changed, until it ends."""

    def __init__(self) -> None:
        self.committing = False
        self.suspending = False  # the database's driver is asynchronous
        self.unknown = False  # SQL has run of which nothing is known
        self.flushing = False
        self.connections: list[Connection] = []
        self._snapshot = False  # the transaction sees the database as it was when it began
        self._snapshot_by_writing = False  # ... when it first wrote something
        self._tables: set[Table] = set()
        self._in_flush: set[Table] = set()
        self._in_bulk: set[Table] = set()
        self._rows: dict[Mapper[Any], set[str]] = {}

    def begun(self, connection: Connection) -> None:
        """Take note that the session has begun a transaction on a connection."""
        self.suspending = connection.dialect.is_async
        if connection not in self.connections:  # a savepoint begins on the same connection again
            self.connections.append(connection)
            event.listen(connection, "before_cursor_execute", self._executed)
        level = _isolation_level(connection)
        if level == "AUTOCOMMIT":  # what is flushed is committed, whatever the session does next
            self.committing = True
        if level in _EACH_SELECT_IS_NEW:
            return
        if connection.dialect.name == "sqlite" and not getattr(
            connection.connection.driver_connection, "in_transaction", True
        ):
            self._snapshot_by_writing = True  # by default, Python's drivers send BEGIN before the first write
        else:
            self._snapshot = True

    def ended(self) -> None:
        """Take note that the session has left its connections: they may be those of its caller."""
        for each in self.connections:
            event.remove(each, "before_cursor_execute", self._executed)

    @property
    def sees_the_past(self) -> bool:
        """Whether a SELECT of this transaction may not see what other transactions have committed meanwhile."""
        return self._snapshot or (self._snapshot_by_writing and bool(self._tables))

    def flushed(self, session: Session, flush: Any) -> None:
        """Take note of the rows that a flush has written."""
        self.flushing = False
        tables: set[Table] = set()
        for state, (deleted, only_listed) in flush.states.items():
            each = state.obj()
            if only_listed or each is None:
                continue
            if deleted or each in session.new or session.is_modified(each, include_collections=False):
                mapper: Mapper[Any] = state.mapper
                tables |= tags.tables_of(mapper)
                rows = self._rows.setdefault(mapper.base_mapper, set())
                if len(rows) <= MOST_ROWS:
                    now = None if state.expired else mapper.primary_key_from_instance(each)
                    rows |= {tags.row(mapper, identity) for identity in (now, state.identity) if identity is not None}
        self._in_bulk |= self._in_flush - tables  # a mapper's hook has changed rows of another table
        self._in_flush.clear()

    def _executed(self, connection: Any, cursor: Any, sql: str, parameters: Any, context: Any, many: Any) -> None:
        """Take note of a statement that inserts, updates or deletes, whoever has sent it: a flush, the session, or
        code that uses its connection."""
        compiled = context.compiled
        statement = getattr(compiled, "statement", None)
        if isinstance(statement, FromStatement):
            statement = statement.element
        if statement is None or isinstance(statement, _TEXTS):
            self.unknown |= not sql.lstrip().upper().startswith("SELECT")
            return
        for each in (statement, *(cte.element for cte in getattr(compiled, "ctes", None) or ())):
            if isinstance(each, UpdateBase):
                found = {*tags.tables_in(each.table)}
                self._tables |= found
                (self._in_flush if self.flushing else self._in_bulk).update(found)
                if isinstance(each, Delete):
                    self._deleted(found)

    def in_bulk(self, mapper: Mapper[Any]) -> None:
        """Take note of a statement of the ORM that changes rows of a class, and does not tell which."""
        self._in_bulk |= tags.tables_of(mapper)

    def _deleted(self, tables: Iterable[Table]) -> None:
        for each in tables:
            by_database = _changed_with(each)
            self._tables |= by_database
            self._in_bulk |= by_database

    def names(self) -> set[str]:
        """Return the names of the tables that are changed in this transaction."""
        return {each.fullname for each in self._tables}

    def tags(self) -> set[str]:
        """Return the tags to invalidate when the transaction is committed."""
        in_bulk, ended = set(self._in_bulk), set()
        for mapper, rows in self._rows.items():
            if len(rows) > MOST_ROWS:
                in_bulk |= {each for one in mapper.self_and_descendants for each in tags.tables_of(one)}
            else:
                ended |= rows
        ended |= {tags.table(each.fullname) for each in self._tables}
        return ended | {tags.some_rows(each.fullname) for each in in_bulk}


def _isolation_level(connection: Connection) -> str | None:
    found = connection.get_execution_options().get("isolation_level")
    if found is None and getattr(connection.dialect, "_on_connect_isolation_level", None) == "AUTOCOMMIT":
        return "AUTOCOMMIT"  # of `create_engine`. The database itself knows no such level
    return found or connection.default_isolation_level


@lru_cache(1024)
def _changed_with(table: Table) -> frozenset[Table]:
    """Return the tables of which the database itself changes rows if rows of this table are deleted."""
    found, todo = set(), [table]
    while todo:
        one = todo.pop()
        for each in table.metadata.tables.values():
            keys = [key for key in each.foreign_keys if key.ondelete and key.column.table is one]
            if keys and each not in found:
                found.add(each)
                todo.append(each)
    return frozenset(found)
