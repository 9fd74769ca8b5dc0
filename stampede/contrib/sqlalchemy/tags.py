"""The tags of statements' results. A result carries the tags of all tables that its statement reads, or those of its
rows.

A flush invalidates the tags of the tables and of the rows that it writes. A statement that changes many rows does not
tell which. So it also invalidates the tag "some rows" of its table, which results by row carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from sqlalchemy import Table, inspect
from sqlalchemy.orm import Mapper, RelationshipDirection
from sqlalchemy.sql import visitors

from stampede.codecs.sqlalchemy import several
from stampede.keys import canonical

__all__ = ["of_rows", "row", "some_rows", "table", "tables_in", "tables_of"]


def table(name: str) -> str:
    """Return the tag of all results that depend on a whole table."""
    return f"table:{name}"


def some_rows(name: str) -> str:
    """Return the tag of all results that depend on single rows of a table."""
    return f"rows:{name}"


def row(mapper: Mapper[Any], identity: Iterable[Any]) -> str:
    """Return the tag of the results that depend on one row."""
    base: Any = mapper.base_mapper.local_table
    text = f"row:{getattr(base, 'fullname', base.name)}:{canonical(tuple(identity))}"
    return (
        text
        if len(text) <= 128
        else f"row:{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
    )


MOST = 100
"""The most tags of single rows in a result. One that has more carries those of its tables."""


def tables_in(element: Any) -> Iterator[Table]:
    """Return the tables in a FROM clause. Statements of the ORM have copies of them, with annotations."""
    return (each.metadata.tables.get(each.key, each) for each in visitors.iterate(element) if isinstance(each, Table))


@lru_cache(1024)
def tables_of(mapper: Mapper[Any]) -> frozenset[Table]:
    """Return the tables of a mapped class, with those of its base classes."""
    return frozenset(each for one in mapper.iterate_to_root() for table in one.tables for each in tables_in(table))


def of_rows(rows: Any, *, by_primary_key: bool) -> set[str]:
    """Return the tags of a result: those of its rows, or else those of the tables that were read."""
    _, found, tables = rows
    if by_primary_key and found:
        some = _of_objects([each for one in found for each in one])
        if some is not None and len(some) <= MOST:
            return some
    return set(map(table, tables))


def _of_objects(values: list[Any]) -> set[str] | None:
    """Return the tags of the rows that these detached objects, and what they relate to, were made of. None: something
    was not found, and a new row would change the result."""
    tags: set[str] = set()
    seen: set[int] = set()
    while values:
        each = values.pop()
        if each is None:
            return None
        state: Any = inspect(each, raiseerr=False)
        if id(each) in seen or getattr(state, "mapper", None) is None:
            continue
        seen.add(id(each))
        tags.add(row(state.mapper, state.identity))
        tags |= {some_rows(one.fullname) for one in tables_of(state.mapper)}
        for relationship in state.mapper.relationships:
            if relationship.key not in state.unloaded:
                found = several(vars(each)[relationship.key])
                values += found if isinstance(found, list) else [found] if found is not None else []
                if relationship.direction is not RelationshipDirection.MANYTOONE:  # a new row may join the others
                    tags |= {table(one.fullname) for one in tables_of(relationship.mapper)}
                    if relationship.secondary is not None:
                        tags |= {table(one.fullname) for one in tables_in(relationship.secondary)}
    return tags
