"""Values that msgspec is known to return unchanged, so that they need not be read back when they are stored. These are
builtins as annotated, and dataclasses of them. The values of one field, in all objects of a type, are checked together,
in C. All other values are read back and compared (`alike`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from itertools import chain
from math import isfinite
from operator import itemgetter
from types import NoneType
from typing import Any, TypeAlias
from uuid import UUID

from msgspec import inspect

__all__ = ["Certain", "certain_of"]

Certain: TypeAlias = Callable[[Sequence[Any]], bool]
"""A function that returns whether each of these values is certain to come back equal, and of the same types."""

Kinds: TypeAlias = dict[type, Certain | None]
"""The types that values may have, each with a further check of its values, or None."""

_flat = chain.from_iterable


def certain_of(annotation: Any, *, json: bool) -> Certain:
    """Return the check of values with this annotation. Nothing is certain if an annotation demands more, such as
    lengths or bounds, or if a type contains itself."""
    return _of_kinds(_kinds(inspect.type_info(annotation), json, ()))


def _kinds(info: inspect.Type, json: bool, above: tuple[type, ...]) -> Kinds:
    def inside(inner: inspect.Type, *more: type) -> Certain:
        return _of_kinds(_kinds(inner, json, (*above, *more)))

    match info:
        case inspect.AnyType():
            return _any(json)
        case inspect.FloatType() if json and info == inspect.FloatType():
            return {float: _are_finite}
        case inspect.UnionType(types=types):
            return {kind: certain for inner in types for kind, certain in _kinds(inner, json, above).items()}
        case inspect.ListType(item_type=item) if info == inspect.ListType(item):
            return {list: _items(inside(item))}
        case inspect.DictType(value_type=each) if info == inspect.DictType(inspect.StrType(), each):
            return {dict: _entries(inside(each))}
        case inspect.DataclassType(cls=type() as kind) if kind not in above and _is_simple(info):
            return {kind: _fields({field.name: inside(field.type, kind) for field in info.fields})}
    return next((kinds for leaf, kinds in _LEAVES if info == leaf), {})


def _any(json: bool) -> Kinds:
    """Return the types that have a form of their own in msgpack or JSON."""
    kinds: Kinds = {NoneType: None, bool: None, int: None, str: None}
    kinds |= {float: _are_finite} if json else {float: None, bytes: None}
    certain = _of_kinds(kinds)  # it checks by the dict that grows in the next line
    kinds |= {list: _items(certain), dict: _entries(certain)}
    return kinds


def _is_simple(info: inspect.DataclassType) -> bool:
    """Return whether objects are just fields in a `__dict__`, and no code of the class interferes with them."""
    if not dataclasses.is_dataclass(info.cls):  # for msgspec, attrs classes are dataclasses, too
        return False
    bases = [vars(base) for base in info.cls.__mro__ if base is not object]
    names = [field.name for field in dataclasses.fields(info.cls) if field.init]
    return (
        [(field.name, field.encode_name) for field in info.fields] == [(name, name) for name in names]
        and _MEDDLING.isdisjoint(_flat(bases))
        and not any(hasattr(base.get(name), "__set__") for base in bases for name in names)
    )


_MEDDLING = frozenset({"__slots__", "__new__", "__getattribute__", "__getattr__", "__setattr__", "__post_init__"})


def _of_kinds(kinds: Kinds) -> Certain:
    def certain(values: Sequence[Any]) -> bool:
        found = {*map(type, values)}
        if not kinds.keys() >= found:
            return False
        for kind in found:
            more = kinds[kind]
            if more is not None and not more([v for v in values if type(v) is kind] if len(found) > 1 else values):
                return False
        return True

    return certain


def _items(certain: Certain) -> Certain:
    return lambda values: certain([*_flat(values)])


def _entries(certain: Certain) -> Certain:
    return lambda values: {str}.issuperset(map(type, _flat(values))) and certain([*_flat(map(dict.values, values))])


def _fields(fields: dict[str, Certain]) -> Certain:
    have_no_other = frozenset({tuple(fields)}).issuperset
    columns = [(itemgetter(name), certain) for name, certain in fields.items()]

    def certain(values: Sequence[Any]) -> bool:
        held = [*map(vars, values)]
        return have_no_other(map(tuple, held)) and all(certain([*map(take, held)]) for take, certain in columns)

    return certain


def _are_finite(values: Sequence[Any]) -> bool:
    return all(map(isfinite, values))


def _are_zoneless(values: Sequence[Any]) -> bool:
    return all((each.tzinfo is None or each.tzinfo is UTC) and not each.fold for each in values)


_LEAVES: list[tuple[inspect.Type, Kinds]] = [
    (inspect.NoneType(), {NoneType: None}),
    (inspect.BoolType(), {bool: None}),
    (inspect.IntType(), {int: None}),
    (inspect.FloatType(), {float: None}),
    (inspect.StrType(), {str: None}),
    (inspect.BytesType(), {bytes: None}),
    (inspect.DateType(), {date: None}),
    (inspect.DateTimeType(), {datetime: _are_zoneless}),
    (inspect.UUIDType(), {UUID: None}),
]
