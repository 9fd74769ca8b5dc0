"""One text for one value: no two values that differ in type, structure or content share it.

It looks like Python wherever that is exact. Strings are quoted and escaped, so that no content can forge a delimiter;
user's classes are written `module:Qualname(...)`, the well-known ones by their bare names.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import EllipsisType, MappingProxyType, NoneType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

from stampede.errors import KeyingError
from stampede.keys.models import attributes, beside, generic, hidden, is_row
from stampede.keys.names import DATA, found_by_name, name_of, root_of
from stampede.keys.numbers import numpys, pandas_own

__all__ = ["REMEDIES", "canonical", "name_of", "remedies", "word"]

DEPTH = 100
OTHERS = "leave its parameter out with `ignore=`, or pass a `key=`"
REMEDIES = f"give its class a `__stampede_key__` method, {OTHERS}"
OF_A_ROW = "pass its primary key instead, or give its class a `__stampede_key__` method"  # to ignore it would be unsafe

Moment = TypeVar("Moment", datetime, time)
Writer: TypeAlias = Callable[[Any, int], str]


def canonical(value: object) -> str:
    """The exact text of a value; KeyingError, which names the type and the remedies, where it has none."""
    try:
        return _write(value, DEPTH)
    except RecursionError as error:
        raise _too_deep(value) from error


def word(name: str) -> str:
    """A name as it is where it is one, else quoted. Only ASCII: Python versions differ in what else is a letter."""
    return name if name.isascii() and name.isidentifier() else _str(name, 0)


def remedies(cls: type) -> str:
    """What helps against a value of a class without an identity, which may be nobody's to change."""
    if root_of(cls) in DATA:
        return f"pass what it was made of (a path, a query, a date) and make it inside, {OTHERS}"
    return REMEDIES


def _write(value: Any, left: int) -> str:
    if left < 0:
        raise _too_deep(value)
    cls = type(value)
    kind, writer = _EXACT.get(cls, _NONE)
    return writer(value, left) if kind is cls else _instance(value, left)  # a metaclass may say that all are equal


def _too_deep(value: object) -> KeyingError:
    return KeyingError(f"{name_of(type(value))} is nested more than {DEPTH} deep, or holds itself: {REMEDIES}")


# -- instances of other classes -------------------------------------------------------------------------------


def _instance(value: Any, left: int) -> str:
    cls = type(value)
    if hasattr(cls, "__stampede_key__"):
        return f"{name_of(cls)}({_write(value.__stampede_key__(), left - 1)})"
    if issubclass(cls, type):  # and not isinstance, to which an object may lie
        return f"<{_class(value)}>"
    if issubclass(cls, Enum):
        return _enum(value, left)
    package = root_of(cls)
    if package == "numpy" and (text := numpys(value)) is not None:
        return text
    if package == "pandas" and (own := pandas_own(value)) is not None:
        return f"{own[0]}({','.join(_texts(own[1], left))})"
    for base in cls.__mro__[1:]:
        if _EXACT.get(base, _NONE)[0] is base:
            return _subclass(value, base, left)
        if base is tzinfo:
            return _reduced(value, name_of(cls), base, left)  # pytz makes classes of which nobody can find one
    parts = attributes(value)
    if parts is None:
        raise KeyingError(f"{name_of(cls)} has no stable identity: {OF_A_ROW if is_row(cls) else remedies(cls)}")
    private = hidden(value)
    beside = f"{',' if parts else ''}**{_dict(private, left - 1)}" if private else ""
    return f"{_class(cls)}({_named(parts, left)}{beside})"


def _class(cls: type) -> str:
    """The name of a class, if there can't be two of that name."""
    origin, arguments = generic(cls)
    if origin is not None:
        return f"{_class(origin)}[{','.join(map(_argument, arguments))}]"
    if not found_by_name(cls):
        raise KeyingError(
            f"{name_of(cls)} is not what its module has under that name, so that others may be called the same (it was "
            f"made in a function, under another name, or anew): define it in a module, or {REMEDIES}"
        )
    return name_of(cls)


def _argument(kind: Any) -> str:
    if isinstance(kind, type) and not get_args(kind):
        return _class(kind)
    inner = ",".join(map(_argument, get_args(kind)))
    return f"{get_origin(kind)!r}[{inner}]" if inner else repr(kind)


def _enum(value: Enum, left: int) -> str:
    """A member by its name; a flag by its number, because versions of Python name combinations differently."""
    cls = _class(type(value))
    if issubclass(type(value), Flag):
        return f"{cls}({_write(value._value_, left - 1)})"
    name = word(value._name_)
    return f"{cls}[{name}]" if name.startswith("'") else f"{cls}.{name}"


def _subclass(value: Any, base: type, left: int) -> str:
    if base in _MOMENTS:
        return _reduced(value, _class(type(value)), base, left)
    return f"{_class(type(value))}({_EXACT[base][1](value, left)}{_beside(value, base, left)})"


def _reduced(value: Any, name: str, base: type, left: int) -> str:
    """By what it would be pickled as: pandas' datetimes have nanoseconds, of which the base class knows nothing."""
    cls = type(value)
    reduced = value.__reduce_ex__(4)
    text = _write(reduced if isinstance(reduced, str) else reduced[1:], left - 1)
    forgetful = base in _MOMENTS and cls.__reduce_ex__ is base.__reduce_ex__ and cls.__reduce__ is base.__reduce__
    return f"{name}({text}{_beside(value, base, left) if forgetful else ''})"


def _beside(value: Any, base: type, left: int) -> str:
    state = beside(value, base)
    return f",{_named(state, left)}" if state else ""


def _named(parts: Mapping[str, object], left: int) -> str:
    return ",".join([f"{word(name)}={_write(part, left - 1)}" for name, part in parts.items()])


# -- well-known classes; a writer must hold for subclasses too, whatever they override ------------------------


def _str(value: str, left: int) -> str:
    text = str.__str__(value)
    if text.isascii() and text.isprintable() and "'" not in text and "\\" not in text:
        return f"'{text}'"  # two times faster than a look for something to escape
    return f"'{_ODD.sub(_escaped, text)}'"


_ODD = re.compile("[\x00-\x1f\x7f-\x9f'\\\\\ud800-\udfff]")


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\{character}" if character in "'\\" else f"\\u{ord(character):04x}"


def _int(value: int, left: int) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # more digits than this process's limit, which another process may not share
        return str(Decimal(value))


def _texts(values: Iterable[object], left: int) -> list[str]:
    return [_write(value, left - 1) for value in values]


def _tuple(value: tuple[object, ...], left: int) -> str:
    texts = _texts(tuple.__iter__(value), left)
    return f"({texts[0]},)" if len(texts) == 1 else f"({','.join(texts)})"


def _list(value: list[object], left: int) -> str:
    return f"[{','.join(_texts(list.__iter__(value), left))}]"


def _set(value: set[object], left: int) -> str:
    return f"{{{','.join(sorted(_texts(set.__iter__(value), left)))}}}" if set.__len__(value) else "set()"


def _frozenset(value: frozenset[object], left: int) -> str:
    return f"frozenset({','.join(sorted(_texts(frozenset.__iter__(value), left)))})"


def _pairs(items: Iterable[tuple[object, object]], left: int) -> list[str]:
    return [f"{_write(key, left - 1)}:{_write(value, left - 1)}" for key, value in items]


def _dict(value: dict[object, object], left: int) -> str:
    return f"{{{','.join(sorted(_pairs(dict.items(value), left)))}}}"


def _datetime(value: datetime, left: int) -> str:
    return f"datetime({datetime.isoformat(_local(value))}{_zone(value, left)})"


def _time(value: time, left: int) -> str:
    return f"time({time.isoformat(_local(value))}{_zone(value, left)})"


def _local(value: Moment) -> Moment:
    return value if value.tzinfo is None else value.replace(tzinfo=None)


def _zone(value: datetime | time, left: int) -> str:
    zone = "" if value.tzinfo is None else f",{_write(value.tzinfo, left - 1)}"
    return f"{zone},fold=1" if value.fold else zone


def _timedelta(value: timedelta, left: int) -> str:
    return f"timedelta({value.days},{value.seconds},{value.microseconds})"


def _timezone(value: timezone, left: int) -> str:
    if value is UTC:
        return "UTC"
    return f"timezone({_timedelta(value.utcoffset(None), left)},{_str(value.tzname(None), left)})"


def _zoneinfo(value: ZoneInfo, left: int) -> str:
    if value.key is None:
        raise KeyingError(f"a ZoneInfo that was made from a file without a key has no stable identity: {REMEDIES}")
    return f"ZoneInfo({_str(value.key, left)})"


def _fraction(value: Fraction, left: int) -> str:
    return f"Fraction({_int(value.numerator, left)},{_int(value.denominator, left)})"


def _range(value: range, left: int) -> str:
    return f"range({_int(value.start, left)},{_int(value.stop, left)},{_int(value.step, left)})"


def _path(value: PurePath, left: int) -> str:
    return _str(PurePath.__str__(value), left)


def _path_of(name: str) -> Writer:
    return lambda value, left: f"{name}({_path(value, left)})"


_WRITERS: dict[type, Writer] = {
    str: _str,
    int: _int,
    NoneType: lambda value, left: "None",
    bool: lambda value, left: "True" if value else "False",
    float: lambda value, left: float.__repr__(value),
    complex: lambda value, left: f"complex({value.real!r},{value.imag!r})",
    bytes: lambda value, left: bytes.__repr__(value),
    bytearray: lambda value, left: f"bytearray({bytes(value)!r})",
    tuple: _tuple,
    list: _list,
    dict: _dict,
    OrderedDict: lambda value, left: f"OrderedDict({','.join(_pairs(OrderedDict.items(value), left))})",
    MappingProxyType: lambda value, left: f"mappingproxy({_write(value.copy(), left - 1)})",
    set: _set,
    frozenset: _frozenset,
    datetime: _datetime,
    date: lambda value, left: f"date({date.isoformat(value)})",
    time: _time,
    timedelta: _timedelta,
    timezone: _timezone,
    ZoneInfo: _zoneinfo,
    UUID: lambda value, left: f"UUID({UUID.__str__(value)})",
    Decimal: lambda value, left: f"Decimal({Decimal.__str__(value).upper()})",  # the context chooses 1e+3 or 1E+3
    Fraction: _fraction,
    range: _range,
    EllipsisType: lambda value, left: "...",
    # by our own names: Python 3.13 moved the classes to another module
    PurePosixPath: _path_of("PurePosixPath"),
    PureWindowsPath: _path_of("PureWindowsPath"),
    PosixPath: _path_of("PosixPath"),
    WindowsPath: _path_of("WindowsPath"),
}
_EXACT = {kind: (kind, writer) for kind, writer in _WRITERS.items()}
_NONE: tuple[None, Writer] = (None, _str)
_MOMENTS = frozenset({datetime, date, time, timedelta})
