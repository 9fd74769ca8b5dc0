"""Values as exact texts: values that differ in type, structure or content have different texts. A text looks like
Python where that is exact. Strings are quoted and escaped, so that their content can't forge a delimiter. Users'
classes are written as `module:Qualname(...)`, well-known classes by their bare names."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import EllipsisType, MappingProxyType, NoneType
from typing import Any, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

from stampede.errors import KeyingError
from stampede.keys.models import added_attributes, attributes, is_row, private_attributes
from stampede.keys.names import DATA, found_by_name, name_of, root_of

__all__ = ["REMEDIES", "canonical", "name_of", "remedies", "word"]

OTHERS = "leave its parameter out with `ignore=`, or pass a `key=`"
REMEDIES = f"give its class a `__stampede_key__` method, {OTHERS}"
OF_A_ROW = "pass its primary key instead, or give its class a `__stampede_key__` method"  # `ignore=` would mix rows up

Writer: TypeAlias = Callable[[Any], str]


def canonical(value: object) -> str:
    """Return the exact text of a value. If it has none, KeyingError names the type and the remedies."""
    try:
        return _write(value)
    except RecursionError as error:
        raise KeyingError(f"{name_of(type(value))} is nested too deeply, or contains itself: {REMEDIES}") from error


def word(name: str) -> str:
    """Return a name unchanged if it is an ASCII identifier, else quoted. Only ASCII, because Python versions differ in
    which other characters are letters."""
    return name if name.isascii() and name.isidentifier() else _str(name)


def remedies(cls: type) -> str:
    """Return what a user can do about a value without an identity, which may be of a class of another package."""
    if root_of(cls) in DATA:
        return f"pass what it is made from (a path, a query, a date) and make it inside the function, {OTHERS}"
    return REMEDIES


def _write(value: Any) -> str:
    cls = type(value)
    kind, writer = _EXACT.get(cls, _NONE)
    return writer(value) if kind is cls else _instance(value)  # `is`: a metaclass may define equality


# -- instances of other classes -------------------------------------------------------------------------------


def _instance(value: Any) -> str:
    cls = type(value)
    if hasattr(cls, "__stampede_key__"):
        return f"{name_of(cls)}({_write(value.__stampede_key__())})"
    if issubclass(cls, type):  # not isinstance: an object may lie about its class
        return f"<{_class(value)}>"
    if issubclass(cls, Enum):
        return _enum(value)
    package = root_of(cls)
    text = _numpy(value) if package == "numpy" else _pandas(value) if package == "pandas" else None
    if text is not None:
        return text
    for base in cls.__mro__[1:]:
        if _EXACT.get(base, _NONE)[0] is base:
            return _subclass(value, base)
        if base is tzinfo:
            return _reduced(value, name_of(cls), base)  # the classes that pytz makes can't be found by name
    parts = attributes(value)
    if parts is None:
        raise KeyingError(f"{name_of(cls)} has no stable identity: {OF_A_ROW if is_row(cls) else remedies(cls)}")
    private = private_attributes(value)
    after = f"{',' if parts else ''}**{_dict(private)}" if private else ""
    return f"{_class(cls)}({_named(parts)}{after})"


def _class(cls: type) -> str:
    """Return the name of a class. Raise KeyingError if another class may have the same name."""
    if not found_by_name(cls):
        raise KeyingError(
            f"{name_of(cls)} can't be found under this name in its module, so another class may have the same name (it "
            f"was made in a function, under another name, or a second time): define it at module level, or {REMEDIES}"
        )
    return name_of(cls)


def _enum(value: Enum) -> str:
    """Return a member's text by its name; a flag's by its number, as Python versions name combinations differently."""
    cls = _class(type(value))
    if issubclass(type(value), Flag):
        return f"{cls}({_write(value._value_)})"
    name = word(value._name_)
    return f"{cls}[{name}]" if name.startswith("'") else f"{cls}.{name}"


def _subclass(value: Any, base: type) -> str:
    if base in _MOMENTS:
        return _reduced(value, _class(type(value)), base)
    return f"{_class(type(value))}({_EXACT[base][1](value)}{_added(value, base)})"


def _reduced(value: Any, name: str, base: type) -> str:
    """Return the text of what the value is pickled as: pandas' datetimes have nanoseconds, unlike their base class."""
    cls = type(value)
    reduced = value.__reduce_ex__(4)
    text = _write(reduced if isinstance(reduced, str) else reduced[1:])
    # What datetime's own `__reduce__` returns leaves out the attributes that a subclass adds.
    forgetful = base in _MOMENTS and cls.__reduce_ex__ is base.__reduce_ex__ and cls.__reduce__ is base.__reduce__
    return f"{name}({text}{_added(value, base) if forgetful else ''})"


def _added(value: Any, base: type) -> str:
    state = added_attributes(value, base)
    return f",{_named(state)}" if state else ""


def _named(parts: Mapping[str, object]) -> str:
    return ",".join([f"{word(name)}={_write(part)}" for name, part in parts.items()])


# -- scalars of numpy and pandas, distinct from Python's: a function may behave differently for each type ------


def _numpy(value: Any) -> str | None:
    """Return the text of a dtype, or of a scalar that is exact in a few digits; None for all other values. Among these
    are scalars that are subclasses of a builtin: they are written like any other subclass."""
    numpy = sys.modules.get("numpy")
    cls = type(value)
    if numpy is not None and issubclass(cls, numpy.dtype):
        return None if _is_more(value) else f"numpy:dtype({value.str!r},{value.char!r})"
    if numpy is None or not issubclass(cls, numpy.generic):
        return None
    kind = value.dtype.kind
    if kind == "b":
        return f"numpy:bool({bool(value)})"  # numpy 1 calls it bool_
    if kind in "iu":
        return f"numpy:{cls.__name__}({int(value)})"
    if kind in "fc" and value.dtype.itemsize <= 8 * (1 + (kind == "c")) and cls is value.dtype.type:
        return f"numpy:{cls.__name__}({(float if kind == 'f' else complex).__repr__(value.item())})"
    if kind == "f" and cls is numpy.longdouble:
        return f"numpy:longdouble({value!s})"
    if kind in "Mm":
        unit, count = numpy.datetime_data(value.dtype)
        return f"numpy:{cls.__name__}({int(value.view('i8'))},{unit!r},{count})"
    return None


def _is_more(dtype: Any) -> bool:
    structured = dtype.names is not None or dtype.subdtype is not None
    return structured or bool(dtype.metadata) or dtype.isbuiltin == 2 or dtype.kind not in "biufcSUVMm"


def _pandas(value: Any) -> str | None:
    """Return the text of a pandas scalar that no base class can write; None for all other values."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return None
    if value is pandas.NA:
        return "pandas:NA()"
    if type(value) is pandas.Period:
        return f"pandas:Period({','.join(_texts([value.ordinal, value.freqstr]))})"
    if type(value) is pandas.Interval:
        return f"pandas:Interval({','.join(_texts([value.left, value.right, value.closed]))})"
    return None


# -- well-known classes; a writer must be right for subclasses, too, whatever they override ------------------


def _str(value: str) -> str:
    text = str.__str__(value)
    if text.isascii() and text.isprintable() and "'" not in text and "\\" not in text:
        return f"'{text}'"  # twice as fast as a search for characters to escape
    return f"'{_ODD.sub(_escaped, text)}'"


_ODD = re.compile("[\x00-\x1f\x7f-\x9f'\\\\\ud800-\udfff]")


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\{character}" if character in "'\\" else f"\\u{ord(character):04x}"


def _int(value: int) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # more digits than this process's limit; another process may have another limit
        return str(Decimal(value))


def _texts(values: Iterable[object]) -> list[str]:
    return [_write(value) for value in values]


def _tuple(value: tuple[object, ...]) -> str:
    texts = _texts(tuple.__iter__(value))
    return f"({texts[0]},)" if len(texts) == 1 else f"({','.join(texts)})"


def _set(value: set[object]) -> str:
    return f"{{{','.join(sorted(_texts(set.__iter__(value))))}}}" if set.__len__(value) else "set()"


def _pairs(items: Iterable[tuple[object, object]]) -> list[str]:
    return [f"{_write(key)}:{_write(value)}" for key, value in items]


def _dict(value: dict[object, object]) -> str:
    return f"{{{','.join(sorted(_pairs(dict.items(value))))}}}"


def _clock(kind: type[datetime | time]) -> Writer:
    def write(value: Any) -> str:
        zone = "" if value.tzinfo is None else f",{_write(value.tzinfo)}"
        local = value if value.tzinfo is None else value.replace(tzinfo=None)
        return f"{kind.__name__}({kind.isoformat(local)}{zone}{',fold=1' if value.fold else ''})"

    return write


def _timedelta(value: timedelta) -> str:
    return f"timedelta({value.days},{value.seconds},{value.microseconds})"


def _timezone(value: timezone) -> str:
    if value is UTC:
        return "UTC"
    return f"timezone({_timedelta(value.utcoffset(None))},{_str(value.tzname(None))})"


def _zoneinfo(value: ZoneInfo) -> str:
    if value.key is None:
        raise KeyingError(f"a ZoneInfo that was made from a file, without a key, has no stable identity: {REMEDIES}")
    return f"ZoneInfo({_str(value.key)})"


def _path_of(name: str) -> Writer:
    return lambda value: f"{name}({_str(PurePath.__str__(value))})"


_WRITERS: dict[type, Writer] = {
    str: _str,
    int: _int,
    NoneType: lambda value: "None",
    bool: lambda value: "True" if value else "False",
    float: float.__repr__,
    complex: lambda value: f"complex({value.real!r},{value.imag!r})",
    bytes: bytes.__repr__,
    bytearray: lambda value: f"bytearray({bytes(value)!r})",
    tuple: _tuple,
    list: lambda value: f"[{','.join(_texts(list.__iter__(value)))}]",
    dict: _dict,
    OrderedDict: lambda value: f"OrderedDict({','.join(_pairs(OrderedDict.items(value)))})",
    MappingProxyType: lambda value: f"mappingproxy({_write(value.copy())})",
    set: _set,
    frozenset: lambda value: f"frozenset({','.join(sorted(_texts(frozenset.__iter__(value))))})",
    datetime: _clock(datetime),
    date: lambda value: f"date({date.isoformat(value)})",
    time: _clock(time),
    timedelta: _timedelta,
    timezone: _timezone,
    ZoneInfo: _zoneinfo,
    UUID: lambda value: f"UUID({UUID.__str__(value)})",
    Decimal: lambda value: f"Decimal({Decimal.__str__(value).upper()})",  # the decimal context chooses 1e+3 or 1E+3
    Fraction: lambda value: f"Fraction({_int(value.numerator)},{_int(value.denominator)})",
    range: lambda value: f"range({_int(value.start)},{_int(value.stop)},{_int(value.step)})",
    EllipsisType: lambda value: "...",
    # by our own names: Python 3.13 moved the classes to another module
    PurePosixPath: _path_of("PurePosixPath"),
    PureWindowsPath: _path_of("PureWindowsPath"),
    PosixPath: _path_of("PosixPath"),
    WindowsPath: _path_of("WindowsPath"),
}
_EXACT = {kind: (kind, writer) for kind, writer in _WRITERS.items()}
_NONE: tuple[None, Writer] = (None, _str)
_MOMENTS = frozenset({datetime, date, time, timedelta})
