"""What is known to come back from msgspec as it is, so that nobody has to read it back to see it.

Builtins, as they are or as they are annotated, and dataclasses of these. A column at a time: the values that stand in
one place of all objects of a type are looked at together, so that C does it. Other things may come back just as well:
that is found out by reading them (`alike`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from itertools import chain
from math import isfinite
from operator import itemgetter
from types import NoneType
from typing import Any, TypeAlias
from uuid import UUID, SafeUUID

from msgspec import inspect

__all__ = ["Certain", "certain_of"]

Certain: TypeAlias = Callable[[Sequence[Any]], bool]
"""Will each of these values come back, equal and of its own types?"""

DEEPEST = 64
"""Levels of what no annotation describes. To read more of them may want more stack than there is."""

_flat = chain.from_iterable


def certain_of(annotation: Any, *, json: bool) -> Certain:
    """Return the look at values that are annotated so.

    Where an annotation asks for more, such as lengths or bounds, nothing is certain, nor of a type that holds itself.
    """
    return _certain(inspect.type_info(annotation), json, ())


def _certain(info: inspect.Type, json: bool, above: tuple[type, ...]) -> Certain:
    match info:
        case inspect.AnyType():
            return _plain(json)
        case inspect.FloatType() if json and info == inspect.FloatType():
            return _finite
        case inspect.UnionType(types=(inner, inspect.NoneType())):
            certain = _certain(inner, json, above)
            return lambda values: certain([each for each in values if each is not None])
        case inspect.ListType(item_type=item) if info == inspect.ListType(item):
            return _lists(_certain(item, json, above))
        case inspect.DictType(value_type=each) if info == inspect.DictType(inspect.StrType(), each):
            return _dicts(_certain(each, json, above))
        case inspect.DataclassType(cls=type() as kind) if kind not in above and _is_simple(info):
            return _objects(kind, {field.name: _certain(field.type, json, (*above, kind)) for field in info.fields})
    return next((certain for leaf, certain in _LEAVES if info == leaf), lambda values: False)


def _is_simple(info: inspect.DataclassType) -> bool:
    """Its objects are their fields, in a `__dict__` and nowhere else, and nothing meddles with them."""
    if not dataclasses.is_dataclass(info.cls):  # attrs has such, too
        return False
    bases = [vars(base) for base in info.cls.__mro__ if base is not object]
    names = [field.name for field in dataclasses.fields(info.cls) if field.init]
    return (
        [(field.name, field.encode_name) for field in info.fields] == [(name, name) for name in names]
        and _MEDDLING.isdisjoint(_flat(bases))
        and not any(hasattr(base.get(name), "__set__") for base in bases for name in names)
    )


_MEDDLING = frozenset({"__slots__", "__new__", "__getattribute__", "__getattr__", "__setattr__", "__post_init__"})


def _only(*kinds: type) -> Callable[[Iterable[Any]], bool]:
    allows = frozenset(kinds).issuperset
    return lambda values: allows(map(type, values))


def _finite(values: Sequence[Any]) -> bool:
    return _are_floats(values) and all(map(isfinite, values))


def _zoneless(values: Sequence[Any]) -> bool:
    return _are_moments(values) and all(
        (each.tzinfo is None or each.tzinfo is UTC) and not each.fold for each in values
    )


def _plain_uuids(values: Sequence[Any]) -> bool:
    return _are_uuids(values) and all(each.is_safe is SafeUUID.unknown for each in values)


_are_floats, _are_moments, _are_uuids, _are_strs, _are_lists, _are_dicts = map(
    _only, (float, datetime, UUID, str, list, dict)
)

_LEAVES: list[tuple[inspect.Type, Certain]] = [
    (inspect.NoneType(), _only(NoneType)),
    (inspect.BoolType(), _only(bool)),
    (inspect.IntType(), _only(int)),
    (inspect.FloatType(), _are_floats),
    (inspect.StrType(), _are_strs),
    (inspect.BytesType(), _only(bytes)),
    (inspect.DateType(), _only(date)),
    (inspect.DateTimeType(), _zoneless),
    (inspect.UUIDType(), _plain_uuids),
]


def _lists(items: Certain) -> Certain:
    return lambda values: _are_lists(values) and items([*_flat(values)])


def _dicts(items: Certain) -> Certain:
    return lambda values: _are_dicts(values) and _are_strs(_flat(values)) and items([*_flat(map(dict.values, values))])


def _objects(kind: type, fields: dict[str, Certain]) -> Certain:
    are_of_kind, have_no_other = _only(kind), frozenset({tuple(fields)}).issuperset
    columns = [(itemgetter(name), certain) for name, certain in fields.items()]

    def certain(values: Sequence[Any]) -> bool:
        if not are_of_kind(values):
            return False
        held = [*map(vars, values)]
        return have_no_other(map(tuple, held)) and all(certain([*map(take, held)]) for take, certain in columns)

    return certain


def _plain(json: bool) -> Certain:
    """Of what is annotated as nothing in particular: what its form has a word for."""
    atoms = frozenset({NoneType, bool, int, str, *([] if json else [float, bytes])})
    known = atoms | {float, list, dict}

    def certain(values: Sequence[Any]) -> bool:
        for _ in range(DEEPEST):
            kinds = {*map(type, values)}
            if kinds <= atoms:
                return True
            if not kinds <= known or (json and not all(map(isfinite, _among(float, values)))):
                return False
            lists, dicts = _among(list, values), _among(dict, values)
            if not _are_strs(_flat(dicts)):
                return False
            values = [*_flat(lists), *_flat(map(dict.values, dicts))]
        return False

    return certain


def _among(kind: type, values: Sequence[Any]) -> list[Any]:
    return [each for each in values if type(each) is kind]
