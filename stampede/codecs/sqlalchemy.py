"""Objects of SQLAlchemy's mapped classes: their loaded attributes, and those of related objects. They come back
detached: in no session, with their identity, and with the same attributes unloaded. No code of the class is run: no
`__init__`, no validator, no event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, cast
from zlib import crc32

from sqlalchemy import inspect
from sqlalchemy.orm import Mapper, make_transient_to_detached
from sqlalchemy.orm.attributes import set_committed_value

from stampede.codecs.equality import lazy
from stampede.codecs.stdlib import Shape, expect, lost
from stampede.errors import CodecError

__all__ = ["facts_of", "plain", "related", "row_shape", "several"]


class Facts:
    """What SQLAlchemy knows about a mapped class."""

    def __init__(self, kind: Any) -> None:
        self.mapper: Mapper[Any] = inspect(kind)
        self.columns = frozenset(column.key for column in self.mapper.column_attrs)
        self.relations = frozenset(relation.key for relation in self.mapper.relationships)
        self.identity = frozenset(self.mapper.get_property_by_column(each).key for each in self.mapper.primary_key)
        self.known = self.columns | self.relations | lazy(kind) | frozenset(self.mapper.all_orm_descriptors.keys())
        # Changes with the class's columns: an entry that was stored before has no value for a new column.
        self.layout = crc32(",".join(sorted(self.columns)).encode())

    def make(self, columns: dict[str, Any], relations: dict[str, Any]) -> Any:
        """Return a detached object with these attributes, and all others unloaded."""
        made = self.mapper.class_manager.new_instance()
        vars(made).update(columns)
        for name, value in relations.items():
            set_committed_value(made, name, value)
        make_transient_to_detached(made)
        return made


@lru_cache(1024)
def facts_of(kind: Any) -> Facts:
    """Return what is known about a class. Call it only once an object of it exists: mappings are complete late."""
    return Facts(kind)


def related(kind: Any) -> Iterator[Any]:
    mapper = inspect(kind)
    for column in mapper.column_attrs:
        for expression in column.columns:
            try:
                yield expression.type.python_type
            except NotImplementedError:
                pass  # a type that does not say what its values are
    for relation in mapper.relationships:
        yield relation.mapper.class_
    for below in mapper.self_and_descendants:
        yield below.class_


def several(there: Any) -> Any:
    """Return the objects of a collection as a list; a single object, or None, unchanged."""
    if isinstance(there, dict):
        return [*there.values()]
    return [*there] if isinstance(there, (list, set)) else there


def plain(value: Any) -> Any:
    """Return a column's value without the subclass that tracks its changes."""
    base = next((base for base in (dict, list, set) if isinstance(value, base)), None)
    return base(value) if base is not None and type(value) is not base and hasattr(value, "coerce") else value


def row_shape(kind: Any, tag: str) -> Shape:
    def lower(value: Any) -> tuple[Any, ...]:
        facts, state = facts_of(kind), cast(Any, inspect(value))
        held = vars(value)
        _refuse(value, state, facts, held.keys())
        columns = {name: plain(held[name]) for name in facts.columns & held.keys()}
        relations = {name: several(held[name]) for name in facts.relations & held.keys()}
        return tag, facts.layout, columns, relations

    def rebuild(layout: Any, columns: Any, relations: Any) -> Any:
        expect((columns, relations), dict, dict)
        facts = facts_of(kind)
        if layout != facts.layout or not facts.identity <= columns.keys() <= facts.columns:
            raise CodecError(f"the entry was stored for other columns of {tag}")
        return facts.make(columns, relations)

    return Shape(tag, kind, lower, rebuild)


def _refuse(value: Any, state: Any, facts: Facts, held: Iterable[str]) -> None:
    """Raise CodecError for an object that would come back changed: it is in use, or not fully in the database."""
    name = type(value).__qualname__
    if state.key is None:
        raise CodecError(f"a {name} that is not in the database yet can't be stored: commit it first, and refresh it")
    if state.modified:
        raise CodecError(f"a {name} with changes that are not in the database can't be stored: commit them first")
    if not facts.identity <= {*held}:
        raise CodecError(
            f"a {name} of which nothing is loaded (a commit has expired it) can't be stored: refresh it before you "
            "return it, or make its session with expire_on_commit=False"
        )
    if state.session is not None:
        raise CodecError(
            f"a {name} of a session that is still open can't be stored or shared: put @detached (from "
            "stampede.contrib.sqlalchemy) below @cached, or close the session before you return it"
        )
    if more := [each for each in {*held} - facts.known if not each.startswith("_")]:
        raise lost(name, more)
