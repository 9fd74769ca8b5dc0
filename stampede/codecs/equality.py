"""The check that a value came back unchanged: equal, of the same types, with the same attributes, on every level."""

from __future__ import annotations

from collections import deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache
from pickle import PickleBuffer
from types import NoneType
from typing import Any
from uuid import UUID

from stampede.codecs.packages import package_of, shape_for
from stampede.runtime.definitions import slots_of

__all__ = ["alike", "lazy"]

_ATOMS = frozenset({NoneType, bool, int, str, bytes, bytearray})
_SCALARS = (int, float, complex, str, bytes, bytearray)
_CONTAINERS = (list, tuple, deque, dict)


def alike(value: Any, other: Any) -> bool:
    """Return whether two values are equal, and of equal types down to the leaves. The values of cached properties do
    not count."""
    kind = type(value)
    if kind is not type(other):
        return False
    if kind in _ATOMS:
        return bool(value == other)
    if (facts := _FACTS.get(kind)) is not None:
        return bool(facts(value) == facts(other))
    if issubclass(kind, Enum):
        return value is other
    if package_of(kind) is not None:
        shape = shape_for(kind)
        return shape is not None and alike(shape.lower(value), shape.lower(other))
    if issubclass(kind, (set, frozenset)):
        there = {each: each for each in other}  # equal members may be of different types, as 1 and True are
        return len(value) == len(other) and all(each in there and alike(each, there[each]) for each in value)
    if issubclass(kind, _CONTAINERS) and not _all_alike(value, other):
        return False
    if issubclass(kind, dict) and not _all_alike(value.values(), other.values()):
        return False
    if issubclass(kind, _SCALARS) and value != other:
        return False
    return _attributes_alike(kind, value, other)


def _all_alike(values: Any, others: Any) -> bool:
    return len(values) == len(others) and all(map(alike, values, others))


def _attributes_alike(kind: type, value: Any, other: Any) -> bool:
    names = slots_of(kind).union(getattr(value, "__dict__", ()), getattr(other, "__dict__", ())) - lazy(kind)
    if not names and kind.__dictoffset__ == 0:
        return issubclass(kind, _CONTAINERS) or bool(value == other)
    # By getattr: an attribute that the instance does not have may be its class's.
    return all(alike(getattr(value, name, _UNSET), getattr(other, name, _UNSET)) for name in names)


_UNSET = "there is no such attribute"


def _clock(value: datetime | time) -> Any:
    return repr(value.replace(tzinfo=None)), type(value.tzinfo), str(value.tzinfo)


_FACTS: dict[type, Any] = {
    float: repr,  # -0.0 differs from 0.0, and NaN is equal to NaN
    datetime: _clock,
    time: _clock,
    date: repr,
    timedelta: repr,
    Decimal: str,
    UUID: str,
    PickleBuffer: bytes,
}


@lru_cache(1024)
def lazy(kind: type) -> frozenset[str]:
    """Return the attributes that an instance may lose: its class computes them again, or nothing reads them."""
    names = (name for base in kind.__mro__ for name, each in vars(base).items() if isinstance(each, cached_property))
    return frozenset({*names, "__orig_class__", "__pydantic_fields_set__"})
