"""The rows of a statement's result: read with a session of their own, stored, and brought into the caller's session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

from sqlalchemy import event, inspect
from sqlalchemy.engine import IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.orm.attributes import set_committed_value

from stampede.codecs.sqlalchemy import facts_of
from stampede.contrib.sqlalchemy.detached import detach

__all__ = ["APART", "Rows", "bring", "read"]

APART = "stampede: reads for a cache"
"""What `Session.info` has if the session reads for a cache. Its own statements don't come from it."""


Rows: TypeAlias = tuple[tuple[Any, ...], list[tuple[Any, ...]], tuple[str, ...]]
"""A result as it is stored: the names of its columns (None: without one), its rows, and the tables that were read."""


def read(state: ORMExecuteState, tables_in: Callable[[ORMExecuteState], frozenset[str]]) -> Rows:
    """Run the statement, and return its rows. It runs on the session's connection, but with objects of its own: those
    of the session may have been loaded earlier, so that they are older than the rows."""
    tables: set[str] = set()
    connection = state.session.connection(bind_arguments=dict(state.bind_arguments))
    with Session(connection, autoflush=False, join_transaction_mode="rollback_only", info={APART: True}) as apart:
        event.listen(apart, "do_orm_execute", lambda each: tables.update(tables_in(each)))
        result = apart.execute(state.statement, state.parameters, execution_options=state.local_execution_options)
        # `result.keys()` leaves out columns without a name, such as a class that is aliased without one.
        keys: tuple[Any, ...] = tuple(None if each is None else str(each) for each in result._metadata._keys)
        rows = detach([tuple(row) for row in result.freeze()()])
    return keys, rows, tuple(sorted(tables))


def bring(state: ORMExecuteState, stored: Rows) -> Result[Any]:
    """Return a stored result for the session. Objects that the session has already are not changed, as by any query."""
    keys, rows, _ = stored
    into = _Bringing(state)
    columns = getattr(state.statement, "column_descriptions", ())
    extra = [(each["expr"],) for each in columns] if len(columns) == len(keys) else None
    filters = [_told_apart] * len(keys)
    unique: dict[str, Any] = (
        {"_create_unique_filters": lambda _: filters}  # since SQLAlchemy 2.1
        if "_create_unique_filters" in SimpleResultMetaData.__slots__
        else {"_unique_filters": filters}
    )
    metadata = SimpleResultMetaData(keys, extra, **unique)
    entities = [each.get("entity") for each in columns] if len(columns) == len(keys) else [None] * len(keys)
    return IteratorResult(metadata, iter([tuple(map(into.root, row, entities)) for row in rows]))


def _told_apart(value: Any) -> Any:
    """Return what `Result.unique()` compares: objects of mapped classes, such as dataclasses, need not be hashable."""
    return value if getattr(inspect(value, raiseerr=False), "key", None) is None else id(value)


class _Bringing:
    def __init__(self, state: ORMExecuteState) -> None:
        self._session = state.session
        self._brought: dict[int, Any] = {}
        # What an object loads later obeys the options of the statement that has loaded the object. Without them, a
        # lazy load would ignore the `with_loader_criteria` that select the rows of a tenant.
        statement: Any = state.statement
        self._options = tuple(each for each in statement._with_options if each.propagate_to_loaders)
        self._path: Any = state.loader_strategy_path  # from the object whose relationship is loaded

    def root(self, value: Any, entity: Any) -> Any:
        """Return the session's value for one in a row, which was selected by this mapped class or alias."""
        if not self._options or getattr(inspect(value, raiseerr=False), "key", None) is None:
            return self.value(value, None)
        found: Any = inspect(type(value) if entity is None else entity)
        path = found._path_registry
        return self.value(value, self._path + path if self._path is not None and self._path.path else path)

    def value(self, value: Any, path: Any) -> Any:
        """Return the session's object for a detached one, and a copy of another value that could be changed."""
        if isinstance(value, (list, set, dict)):
            return copy.deepcopy(value)
        state: Any = inspect(value, raiseerr=False)
        return value if getattr(state, "key", None) is None else self._object(value, state, path)

    def _object(self, value: Any, state: Any, path: Any) -> Any:
        if id(value) in self._brought:
            return self._brought[id(value)]
        kind: Any = type(value)
        facts, held = facts_of(kind), vars(value)
        mine = self._session.identity_map.get(state.key)
        new = mine is None
        missing = facts.columns if mine is None else inspect(mine).unloaded
        if mine is None or (not inspect(mine).modified and not missing.isdisjoint(facts.columns & held.keys())):
            columns = (facts.columns & held.keys()) & (missing | facts.identity)
            plain = facts.make({name: self.value(held[name], None) for name in columns}, {})
            mine = self._session.merge(plain, load=False)
        mine_state: Any = inspect(mine)
        if new and path is not None:
            mine_state.load_options, mine_state.load_path = self._options, path
        self._brought[id(value)] = mine
        for name in (facts.relations & held.keys()) & mine_state.unloaded:
            below = None if path is None else path[facts.mapper.relationships[name]].entity_path
            set_committed_value(mine, name, self._related(held[name], below))
        return mine

    def _related(self, found: Any, path: Any) -> Any:
        if isinstance(found, dict):
            found = found.values()
        elif not isinstance(found, (list, set)):
            return self.value(found, path)
        return [self.value(each, path) for each in found]
