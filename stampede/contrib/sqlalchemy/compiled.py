"""The tables that a statement reads. SQLAlchemy's compiler notes them while it writes the SQL."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import Dialect
from sqlalchemy.orm import ORMExecuteState

from stampede.contrib.sqlalchemy.tags import tables_of

__all__ = ["Reads", "reads_of"]


class Reads(NamedTuple):
    """What is known about a statement before it runs."""

    tables: frozenset[str]
    locks: bool  # FOR UPDATE


def reads_of(state: ORMExecuteState, dialect: Dialect) -> Reads:
    """Compile a statement, and return what it reads: also the tables of its mapped classes, if its SQL is a `text()`.
    What relationships load in statements of their own is not known here."""
    compiler: Any = dialect.statement_compiler
    made = _noting(compiler)(dialect, state.statement)
    mapped = {str(table.fullname) for mapper in state.all_mappers for table in tables_of(mapper)}
    return Reads(frozenset(made.tables | mapped), made.locks)


@lru_cache(64)
def _noting(compiler: Any) -> Any:
    """Return a subclass of a dialect's compiler that notes the tables of FROM clauses."""

    class Noting(compiler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.tables: set[str] = set()  # before the base class compiles
            self.locks = False
            super().__init__(*args, **kwargs)

        def visit_table(self, table: Any, *args: Any, **kwargs: Any) -> Any:
            self.tables.add(str(table.fullname))  # without the class that says whether to quote it
            return super().visit_table(table, *args, **kwargs)

        def for_update_clause(self, *args: Any, **kwargs: Any) -> Any:
            self.locks = True
            return super().for_update_clause(*args, **kwargs)

    return Noting
