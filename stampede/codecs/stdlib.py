"""The standard library's value types, each stored under a tag of ours as a few plain arguments. Pickle's own names for
them differ between Python versions; a tag never changes its meaning."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from itertools import chain
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import NoneType
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

from stampede.errors import CodecError
from stampede.runtime.definitions import slots_of

Lower: TypeAlias = Callable[[Any], tuple[Any, ...]]
Rebuild: TypeAlias = Callable[..., Any]


class Shape(NamedTuple):
    """How values of one type are stored: as a tag and arguments, and back."""

    tag: str
    type: type
    lower: Lower  # value → (tag, *arguments)
    rebuild: Rebuild  # *arguments → value; if it raises anything, the bytes are not believed


FACTORIES = {kind.__name__: kind for kind in (int, float, complex, str, bytes, bool, list, tuple, dict, set, frozenset)}

_ZONES = (NoneType, timezone, ZoneInfo)


def expect(args: tuple[Any, ...], *kinds: type | tuple[type, ...]) -> None:
    """Raise CodecError unless the arguments are of exactly these types; `object` stands for any. Constructors get
    exactly the types that they expect, so that none asks a value of the bytes to convert itself."""
    if len(args) != len(kinds):
        raise CodecError("the entry holds a value with too many or too few arguments")
    for arg, kind in zip(args, kinds, strict=True):
        if type(arg) is not kind and kind is not object and (type(kind) is not tuple or type(arg) not in kind):
            raise CodecError(f"the entry holds a value with an argument of type {type(arg).__name__}")


def tagged(tag: str, type_: type, lower: Lower, rebuild: Rebuild) -> Shape:
    """Return a shape whose `lower` returns the arguments only: the tag is added."""
    return Shape(tag, type_, lambda value: (tag, *lower(value)), rebuild)


def plain(tag: str, type_: type, lower: Lower, *kinds: type | tuple[type, ...], make: Rebuild | None = None) -> Shape:
    """Return a shape whose arguments must be of exactly these types. `make`, by default the type, takes them."""
    make = make or type_

    def rebuild(*args: Any) -> Any:
        expect(args, *kinds)
        return make(*args)

    return tagged(tag, type_, lower, rebuild)


def lost(name: str, attributes: Iterable[str], remedy: str = "") -> CodecError:
    """Return the error that says which attribute of a value would not come back."""
    return CodecError(f"a {name} has an attribute {min(attributes)!r} of its own, which would be lost{remedy}")


def _text(tag: str, type_: Any) -> Shape:
    """Return the shape of a type whose text makes an equal value."""
    return plain(tag, type_, lambda value: (str(value),), str)


def text_shape(kind: Any, tag: str) -> Shape:
    """Return the shape of a subclass of str, made without its `__new__`. Objects with attributes are refused."""
    slots = slots_of(kind)

    def lower(value: Any) -> tuple[Any, ...]:
        if more := {*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))}:
            raise lost(kind.__name__, more, ": return str.__str__(it)")
        return (str.__str__(value),)

    return plain(tag, kind, lower, str, make=partial(str.__new__, kind))


def _moment(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _datetime(value: datetime) -> tuple[Any, ...]:
    return (value.year, value.month, value.day, *_moment(value))


def _timezone(value: timezone) -> tuple[Any, ...]:
    offset, name = value.utcoffset(None), value.tzname(None)
    return offset, None if name == timezone(offset).tzname(None) else name


def _make_timezone(offset: timedelta, name: str | None) -> timezone:
    return timezone(offset) if name is None else timezone(offset, name)


def _zone(value: ZoneInfo) -> tuple[Any, ...]:
    if value.key is None:
        raise CodecError("a ZoneInfo made from a file can't be stored by a name: use ZoneInfo(key)")
    value.__reduce__()  # raises for a zone that was made from a file and given a name
    return (value.key,)


def _pairs(items: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(items))


def _fill(into: Any, flat: tuple[Any, ...]) -> Any:
    if len(flat) % 2:
        raise CodecError("the entry holds a mapping with a key and no value")
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        into[key] = value
    return into


def _defaultdict(value: defaultdict[Any, Any]) -> tuple[Any, ...]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise CodecError(
            "a defaultdict can be stored only if its factory is a builtin type: return dict(value) instead"
        )
    return (name, *_pairs(value.items()))


STANDARD: tuple[Shape, ...] = (
    plain("complex", complex, lambda v: (v.real, v.imag), float, float),
    plain("range", range, lambda v: (int(v.start), int(v.stop), int(v.step)), int, int, int),
    plain("date", date, lambda v: (v.year, v.month, v.day), int, int, int),
    plain("time", time, _moment, int, int, int, int, _ZONES, int, make=lambda *v: time(*v[:-1], fold=v[-1])),
    plain("datetime", datetime, _datetime, *[int] * 7, _ZONES, int, make=lambda *v: datetime(*v[:-1], fold=v[-1])),
    plain("timedelta", timedelta, lambda v: (v.days, v.seconds, v.microseconds), int, int, int),
    plain("timezone", timezone, _timezone, timedelta, (str, NoneType), make=_make_timezone),
    plain("zone", ZoneInfo, _zone, str),
    _text("decimal", Decimal),
    plain("fraction", Fraction, lambda v: (v.numerator, v.denominator), int, int),
    plain("uuid", UUID, lambda v: (v.bytes,), bytes, make=lambda raw: UUID(bytes=raw)),
    _text("posixpath", PosixPath),
    _text("windowspath", WindowsPath),
    _text("pureposixpath", PurePosixPath),
    _text("purewindowspath", PureWindowsPath),
    _text("ipv4", IPv4Address),
    _text("ipv6", IPv6Address),
    _text("ipv4net", IPv4Network),
    _text("ipv6net", IPv6Network),
    _text("ipv4if", IPv4Interface),
    _text("ipv6if", IPv6Interface),
    tagged("ordered", OrderedDict, lambda v: _pairs(v.items()), lambda *f: _fill(OrderedDict(), f)),
    tagged("counter", Counter, lambda v: _pairs(v.items()), lambda *f: _fill(Counter(), f)),
    tagged("defaultdict", defaultdict, _defaultdict, lambda name, *f: _fill(defaultdict(name and FACTORIES[name]), f)),
    tagged("deque", deque, lambda v: (v.maxlen, *v), lambda maxlen, *items: deque(items, maxlen)),
)
LOWER = {shape.type: shape.lower for shape in STANDARD}
REBUILD = {shape.tag: shape.rebuild for shape in STANDARD}
