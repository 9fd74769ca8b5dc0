"""Whether what came back is what went in: equal, of the same types, with the same attributes, all the way down."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache
from types import MemberDescriptorType
from typing import Any
from uuid import UUID

__all__ = ["alike", "lazy", "slots_of"]

_ATOMS = frozenset({type(None), bool, int, str, bytes, bytearray})


def alike(value: Any, other: Any) -> bool:
    """Equal, and of equal types down to the leaves. What a cached property left on an instance doesn't count."""
    kind = type(value)
    if kind is not type(other):
        return False
    if kind in _ATOMS:
        return bool(value == other)
    if kind is list or kind is tuple:
        return len(value) == len(other) and _all_alike(value, other)
    if kind is dict or kind is OrderedDict:
        return len(value) == len(other) and _all_alike(value, other) and _all_alike(value.values(), other.values())
    if kind is set or kind is frozenset:
        there = {each: each for each in other}
        return len(value) == len(other) and all(each in there and alike(each, there[each]) for each in value)
    if kind is float:
        return repr(value) == repr(other)  # -0.0, and NaN
    if issubclass(kind, Enum):
        return value is other
    facts = _FACTS.get(kind)
    if facts is not None:
        return bool(facts(value) == facts(other))
    return _objects_alike(kind, value, other)


def _all_alike(values: Iterable[Any], others: Iterable[Any]) -> bool:
    kinds = [*map(type, values)]
    if kinds != [*map(type, others)]:
        return False
    if _ATOMS.issuperset(kinds):
        return [*values] == [*others]
    return all(map(alike, values, others))


def _objects_alike(kind: type, value: Any, other: Any) -> bool:
    if issubclass(kind, tuple) and not _all_alike(value, other):
        return False
    names = {*slots_of(kind), *getattr(value, "__dict__", ()), *getattr(other, "__dict__", ())} - lazy(kind)
    for name in names:  # by getattr: what an instance doesn't have, its class may have
        if not alike(getattr(value, name, _UNSET), getattr(other, name, _UNSET)):
            return False
    return bool(names) or bool(value == other)


_UNSET = "there is no such attribute"

_FACTS: dict[type, Any] = {
    datetime: lambda value: (repr(value.replace(tzinfo=None)), _zone(value.tzinfo)),
    time: lambda value: (repr(value.replace(tzinfo=None)), _zone(value.tzinfo)),
    date: repr,
    timedelta: repr,
    Decimal: str,
    UUID: lambda value: (value.int, value.is_safe),
}


def _zone(zone: Any) -> Any:
    return type(zone), str(zone)


@lru_cache(1024)
def lazy(kind: type) -> frozenset[str]:
    """What an instance may lose: its class makes it anew, or nobody asks."""
    names = (name for base in kind.__mro__ for name, each in vars(base).items() if isinstance(each, cached_property))
    return frozenset({*names, "__orig_class__", "__pydantic_fields_set__"})


@lru_cache(1024)
def slots_of(kind: type) -> frozenset[str]:
    """The attributes that have a place of their own in each instance."""
    return frozenset(
        name for base in kind.__mro__ for name, each in vars(base).items() if isinstance(each, MemberDescriptorType)
    )
