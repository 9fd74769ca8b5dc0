"""Objects of Django's models: their loaded fields, annotations, and selected or prefetched objects. They come back as
saved objects of their database, with the same fields deferred. No code of the class is run: no `__init__`, no
`from_db`, no signal. The exception is the manager's `get_queryset`, for prefetched objects."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from copy import copy
from typing import Any
from zlib import crc32

from django.db import connections
from django.db.models.base import ModelState
from django.db.models.fields.files import FieldFile
from django.utils import functional

from stampede.codecs.stdlib import Shape, expect, lost
from stampede.errors import CodecError

__all__ = ["related", "row_shape"]

_LAZY = (functools.cached_property, functional.cached_property)


def related(kind: Any) -> Iterator[Any]:
    for field in kind._meta.get_fields():
        if isinstance(field.related_model, type):
            yield field.related_model


class _Facts:
    """What Django knows about a model."""

    def __init__(self, kind: Any) -> None:
        self.fields = {field.attname: field for field in kind._meta.concrete_fields}
        # Changes with the model's fields: an entry that was stored before has no value for a new field.
        self.layout = crc32(",".join(sorted(self.fields)).encode())
        self.managers: dict[str, str] = {}  # by the names under which prefetched objects are cached
        for field in kind._meta.get_fields():
            if field.one_to_many or field.many_to_many:
                reverse = field.auto_created and not field.concrete
                name = field.get_accessor_name() if reverse else field.name
                self.managers[field.name] = self.managers[name] = name


@functools.lru_cache(1024)
def facts_of(kind: Any) -> _Facts:
    """Return what is known about a model. Call it only once an object of the model exists: models are ready late."""
    return _Facts(kind)


def _may_be_added(kind: Any, name: str) -> bool:
    """Return whether an object may have such an attribute in addition to its fields, as `annotate` makes them."""
    return not name.startswith("_") and not hasattr(kind, name)


def row_shape(kind: Any, tag: str) -> Shape:
    def lower(value: Any) -> tuple[Any, ...]:
        facts, state, held = facts_of(kind), value._state, vars(value)
        if state.adding:
            raise CodecError(f"a {kind.__qualname__} that is not in the database yet can't be stored: save it first")
        fields, added = {}, {}
        for name, each in held.items():
            if name in facts.fields:
                fields[name] = _field(each)
            elif _may_be_added(kind, name):
                added[name] = _one_way(each, value)
            elif not name.startswith("_") and not isinstance(getattr(kind, name), _LAZY):
                raise lost(kind.__qualname__, [name])
        selected = {name: _one_way(each, value) for name, each in state.fields_cache.items()}
        prefetched = {
            name: _one_way([*each], value) for name, each in held.get("_prefetched_objects_cache", {}).items()
        }
        return tag, facts.layout, state.db, fields, added, selected, prefetched

    def rebuild(layout: Any, db: Any, fields: Any, added: Any, selected: Any, prefetched: Any) -> Any:
        expect((fields, added, selected, prefetched), dict, dict, dict, dict)
        facts = facts_of(kind)
        if layout != facts.layout or not fields.keys() <= facts.fields.keys():
            raise CodecError(f"the entry was stored for other fields of {tag}")
        if not all(type(name) is str and _may_be_added(kind, name) for name in added) or db not in connections:
            raise CodecError(f"the entry has an attribute, or a database, that a {tag} can't have")
        made = kind.__new__(kind)
        vars(made).update(fields)
        made._state = ModelState()
        made._state.db, made._state.adding = db, False
        vars(made).update({name: _both_ways(each, made) for name, each in added.items()})
        made._state.fields_cache.update({name: _both_ways(each, made) for name, each in selected.items()})
        if prefetched:
            expect(tuple(prefetched.values()), *[list] * len(prefetched))
            made._prefetched_objects_cache = {
                name: _queried(made, facts.managers[name], _both_ways(each, made)) for name, each in prefetched.items()
            }
        return made

    return Shape(tag, kind, lower, rebuild)


def _field(value: Any) -> Any:
    if not isinstance(value, FieldFile):
        return value
    if not getattr(value, "_committed", True):
        raise CodecError(f"the file {value.name!r} is not saved yet: save it first")
    return value.name


# Objects that Django selects or prefetches refer back to the object for which they were loaded. This reference is not
# stored, but made again. In its place is a tuple: the object without the reference, and the names of the reference.


def _one_way(there: Any, value: Any) -> Any:
    if type(there) is list:
        return [_one_way(each, value) for each in there]
    state = getattr(there, "_state", None)
    if not isinstance(state, ModelState):
        return there
    back = [name for name, each in state.fields_cache.items() if each is value]
    return (_without(there, back), *back) if back else there


def _without(there: Any, back: list[str]) -> Any:
    twin = copy(there)
    for name in back:
        del twin._state.fields_cache[name]
    return twin


def _both_ways(there: Any, made: Any) -> Any:
    if type(there) is list:
        return [_both_ways(each, made) for each in there]
    if type(there) is not tuple:
        return there
    one, *back = there
    one._state.fields_cache.update(dict.fromkeys(back, made))
    return one


def _queried(made: Any, accessor: str, found: list[Any]) -> Any:
    query = getattr(made, accessor).get_queryset()
    query._result_cache, query._prefetch_done = found, True
    return query
