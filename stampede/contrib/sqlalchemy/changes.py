"""What the transaction of a session has changed, and which tags end with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Delete, Table, inspect
from sqlalchemy.orm import Mapper, RelationshipDirection, Session
from sqlalchemy.sql import visitors
from sqlalchemy.sql.dml import UpdateBase

from stampede.contrib.sqlalchemy import tags

__all__ = ["Changes"]

MOST_ROWS = 100
"""The most rows of a table whose tags are ended one by one. If more are changed, the results of all its rows end."""

_EACH_SELECT_IS_NEW = ("READ COMMITTED", "READ UNCOMMITTED", "AUTOCOMMIT")


class Changes:
    """What the current transaction of a session has changed, until it ends."""

    def __init__(self) -> None:
        self.committing = False
        self.suspending = False  # the database's driver is asyncio's
        self._snapshot = False  # the transaction sees the database as it was when it began
        self._snapshot_by_writing = False  # ... when it first wrote something
        self._tables: set[Table] = set()
        self._in_bulk: set[Table] = set()
        self._rows: dict[Mapper[Any], set[str]] = {}

    def begun(self, connection: Connection) -> None:
        """Take note that the session has begun a transaction on a connection."""
        self.suspending = connection.dialect.is_async
        level = connection.get_execution_options().get("isolation_level") or connection.default_isolation_level
        if level in _EACH_SELECT_IS_NEW:
            return
        if connection.dialect.name == "sqlite" and not getattr(
            connection.connection.driver_connection, "in_transaction", True
        ):
            self._snapshot_by_writing = True  # by default, Python's drivers send BEGIN before the first write
        else:
            self._snapshot = True

    @property
    def sees_the_past(self) -> bool:
        """Whether a SELECT of this transaction may not see what other transactions have committed meanwhile."""
        return self._snapshot or (self._snapshot_by_writing and bool(self._tables))

    def flushed(self, session: Session) -> None:
        """Take note of the objects that a flush has written."""
        for each, whole in _in_flush(session):
            state: Any = inspect(each)
            mapper: Mapper[Any] = state.mapper
            self._tables |= _tables_of(each, session, whole=whole)
            rows = self._rows.setdefault(mapper.base_mapper, set())
            if whole and len(rows) <= MOST_ROWS:
                now = None if state.expired else mapper.primary_key_from_instance(each)
                rows |= {tags.row(mapper, identity) for identity in (now, state.identity) if identity is not None}
            if each in session.deleted:
                self._deleted(tags.tables_of(mapper))

    def written(self, statement: Any, mapper: Mapper[Any] | None) -> None:
        """Take note of a statement that inserts, updates or deletes."""
        for each in visitors.iterate(statement):
            if isinstance(each, UpdateBase):
                found = {*tags.tables_in(each.table)} | (tags.tables_of(mapper) if mapper is not None else set())
                self._tables |= found
                self._in_bulk |= found
                if isinstance(each, Delete):
                    self._deleted(found)

    def _deleted(self, tables: Iterable[Table]) -> None:
        for each in tables:
            by_database = _changed_with(each)
            self._tables |= by_database
            self._in_bulk |= by_database

    def names(self, session: Session) -> set[str]:
        """Return the names of the tables that are changed in this transaction, or will be by the next flush."""
        changed = set(self._tables)
        for each, whole in _in_flush(session):
            changed |= _tables_of(each, session, whole=whole)
        return {each.fullname for each in changed}

    def tags(self) -> set[str]:
        """Return the tags that end when the transaction is committed."""
        in_bulk, ended = set(self._in_bulk), set()
        for mapper, rows in self._rows.items():
            if len(rows) > MOST_ROWS:
                in_bulk |= {each for one in mapper.self_and_descendants for each in tags.tables_of(one)}
            else:
                ended |= rows
        ended |= {tags.table(each.fullname) for each in self._tables}
        return ended | {tags.some_rows(each.fullname) for each in in_bulk}


def _in_flush(session: Session) -> Iterator[tuple[Any, bool]]:
    """Iterate over the objects that a flush writes, and whether it writes their own rows. An object that is removed
    from a collection is written, too: its foreign key is cleared, or it is deleted as an orphan."""
    for group, new in ((session.new, True), (session.dirty, False), (session.deleted, True)):
        for each in group:
            yield each, new or session.is_modified(each, include_collections=False)
            state: Any = inspect(each)
            for relationship in state.mapper.relationships:
                if relationship.direction is RelationshipDirection.ONETOMANY and not relationship.viewonly:
                    history = state.attrs[relationship.key].history
                    for other in (*(history.added or ()), *(history.deleted or ())):
                        if other is not None:
                            yield other, True


def _tables_of(instance: Any, session: Session, *, whole: bool) -> set[Table]:
    """Return the tables that flushing an object changes: its own, those that link it with others, and those of others
    that the session or the database changes if it is deleted."""
    state: Any = inspect(instance)
    own = tags.tables_of(state.mapper)
    found = {*own} if whole else set()
    deleted = instance in session.deleted
    if deleted:
        found.update(*map(_changed_with, own))
    for relationship in state.mapper.relationships:
        if relationship.viewonly:
            continue
        if relationship.secondary is not None:
            if deleted or state.attrs[relationship.key].history.has_changes():
                found.update(tags.tables_in(relationship.secondary))
        elif deleted and relationship.direction is RelationshipDirection.ONETOMANY:
            found |= tags.tables_of(relationship.mapper)
    return found


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
