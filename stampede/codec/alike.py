"""Whether what came back is what went in: equal, of the same types, with the same attributes, all the way down.

A level at a time, and on each level all values of one type together: what C compares is compared there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain
from operator import is_
from types import MemberDescriptorType
from typing import Any
from uuid import UUID

from stampede.codec.packages import package_of

__all__ = ["alike", "lazy", "slots_of"]

_ATOMS = frozenset({type(None), bool, int, str, bytes, bytearray})


def alike(value: Any, other: Any) -> bool:
    """Equal, and of equal types down to the leaves. What a cached property left on an instance doesn't count."""
    return _alike([value], [other])


def _alike(values: Iterable[Any], others: Iterable[Any]) -> bool:
    mine, theirs = [*values], [*others]
    kinds = [*map(type, mine)]
    if kinds != [*map(type, theirs)]:
        return False
    distinct = {*kinds}
    if _ATOMS.issuperset(distinct):
        return mine == theirs
    if len(distinct) == 1:
        return _of_one_kind(kinds[0], mine, theirs)
    pairs: dict[type, tuple[list[Any], list[Any]]] = {kind: ([], []) for kind in distinct}
    for kind, value, other in zip(kinds, mine, theirs, strict=True):
        of_kind = pairs[kind]
        of_kind[0].append(value)
        of_kind[1].append(other)
    return all(_of_one_kind(kind, *of_kind) for kind, of_kind in pairs.items())


def _of_one_kind(kind: type, mine: list[Any], theirs: list[Any]) -> bool:
    if kind in _ATOMS:
        return mine == theirs
    if kind is float:
        return array("d", mine).tobytes() == array("d", theirs).tobytes()  # -0.0, and NaN
    if kind is list or kind is tuple:
        return _inside_alike(mine, theirs)
    if kind is dict or kind is OrderedDict:
        return _inside_alike(mine, theirs) and _alike(_flat(map(dict.values, mine)), _flat(map(dict.values, theirs)))
    if kind is set or kind is frozenset:
        if {*map(type, _flat(mine)), *map(type, _flat(theirs))} <= {str}:
            return mine == theirs
        return all(map(_sets_alike, mine, theirs))
    if issubclass(kind, Enum):
        return all(map(is_, mine, theirs))
    facts = _FACTS.get(kind)
    if facts is not None:
        return [*map(facts, mine)] == [*map(facts, theirs)]
    if package_of(kind) is not None:
        from stampede.codec.trees import tree_of  # of what is below it, this is

        return _alike(map(tree_of, mine), map(tree_of, theirs))
    return _objects_alike(kind, mine, theirs)


_flat = chain.from_iterable


def _inside_alike(mine: list[Any], theirs: list[Any]) -> bool:
    return [*map(len, mine)] == [*map(len, theirs)] and _alike(_flat(mine), _flat(theirs))


def _sets_alike(value: Any, other: Any) -> bool:
    there = {each: each for each in other}
    return len(value) == len(other) and all(each in there and alike(each, there[each]) for each in value)


def _objects_alike(kind: type, mine: list[Any], theirs: list[Any]) -> bool:
    if issubclass(kind, tuple) and not _inside_alike(mine, theirs):
        return False
    names = slots_of(kind)
    if kind.__dictoffset__ != 0:
        held, other = [*map(vars, mine)], [*map(vars, theirs)]
        if [*map(list, held)] == [*map(list, other)] and lazy(kind).isdisjoint(_flat(held)):
            if not _alike(_flat(each.values() for each in held), _flat(each.values() for each in other)):
                return False
        else:
            names = names.union(*held, *other)
    for name in names - lazy(kind):  # by getattr: what an instance doesn't have, its class may have
        if not _alike([getattr(each, name, _UNSET) for each in mine], [getattr(each, name, _UNSET) for each in theirs]):
            return False
    return bool(names) or kind.__dictoffset__ != 0 or mine == theirs


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
    return frozenset({*names, "__orig_class__"})


@lru_cache(1024)
def slots_of(kind: type) -> frozenset[str]:
    """The attributes that have a place of their own in each instance."""
    return frozenset(
        name for base in kind.__mro__ for name, each in vars(base).items() if isinstance(each, MemberDescriptorType)
    )
