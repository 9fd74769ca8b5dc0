"""Return annotations: the types that they reach, their fields, and a fingerprint of their structure."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from inspect import getclosurevars
from types import NoneType, SimpleNamespace
from typing import Any, ForwardRef, TypeVar, get_args, get_origin

from stampede.codecs.packages import is_row, package_of, related
from stampede.codecs.stdlib import LOWER
from stampede.keys.models import field_names, is_pydantic
from stampede.keys.names import inmost_of
from stampede.runtime.definitions import annotations_of

__all__ = [
    "BUILTIN",
    "fields_of",
    "fingerprint_of",
    "is_namedtuple",
    "reach",
    "returns_of",
    "unresolved",
    "values_of",
]

_UNIONS = (typing.Union, types.UnionType)
_PLAIN_ORIGINS = (*_UNIONS, list, dict, tuple, set, frozenset)
_TEXT = (str, ForwardRef)
BUILTIN = {NoneType, bool, int, float, str, bytes, bytearray, tuple, list, dict, set, frozenset, object}
BUILTIN |= LOWER.keys()


def returns_of(function: Callable[..., Any]) -> Any:
    """Return a function's return annotation, resolved; None if it has none, or one that can't be resolved."""
    function = getattr(function, "__func__", function)
    annotation = annotations_of(function).get("return")
    if not unresolved(annotation):
        return annotation
    function = inmost_of(function)  # the annotation was written there; a decorator's wrapper has other globals
    try:
        around = getclosurevars(function).nonlocals  # such as a class that the enclosing function defines
    except (TypeError, ValueError):
        around = {}
    return _resolve(annotation, getattr(function, "__globals__", {}), dict(around))


def values_of(annotation: Any) -> Any:
    """Return the type of a mapping's values; None if the annotation does not say it."""
    bare = _bare(annotation)
    origin, args = get_origin(bare), get_args(bare)
    return args[1] if isinstance(origin, type) and issubclass(origin, Mapping) and len(args) == 2 else None


def unresolved(annotation: Any) -> bool:
    bare = _bare(annotation)
    if get_origin(bare) is typing.Literal:
        return False
    return isinstance(bare, _TEXT) or any(map(unresolved, _flat(get_args(bare))))


def _resolve(annotation: Any, globalns: dict[str, Any], localns: dict[str, Any]) -> Any:
    """Return the annotation without strings in it; None if a name in it is unknown."""
    holder: Any = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns, localns, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError, ValueError, LookupError):
        return None


def _bare(annotation: Any) -> Any:
    """Return the annotation without Annotated, NewType, Final, Required and `type X = ...` around it."""
    while True:
        if get_origin(annotation) in (typing.Annotated, typing.Final, typing.Required, typing.NotRequired):
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # Python 3.12's; typing_extensions has one, too
            annotation = annotation.__value__
        else:
            return annotation


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the names of a type's fields, with their annotations: resolved where that is possible, else as written."""
    if kind in BUILTIN or is_row(kind) or hasattr(kind, "__struct_fields__"):
        return {}
    names: Iterable[str] | None = field_names(kind)
    if names is not None and is_pydantic(kind) and not hasattr(kind, "__dataclass_fields__"):
        return {name: field.annotation for name, field in kind.__pydantic_fields__.items()}
    if is_namedtuple(kind):
        names = kind._fields
    elif typing.is_typeddict(kind):
        names = annotations_of(kind)
    if not names:
        return {}
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__ if not typing.is_typeddict(kind) else (kind,)):
        globalns = vars(sys.modules.get(base.__module__, typing))
        localns = {**vars(base), base.__name__: base}
        for name, annotation in annotations_of(base).items():
            resolved = _resolve(annotation, globalns, localns)
            hints[name] = annotation if resolved is None else resolved
    return {name: hints.get(name, Any) for name in names}


def is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def reach(annotation: Any) -> Iterator[Any]:
    """Yield each part of an annotation, and of the fields of the types in it, once: classes and special forms."""
    seen: set[int] = set()
    todo = [annotation]
    alive = []  # ids are compared, since not every annotation can be hashed: no part may be freed meanwhile
    while todo:
        part = _bare(todo.pop())
        alive.append(part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        origin = get_origin(part)
        if origin is typing.Literal:
            todo += [type(value) for value in get_args(part)]
        elif origin is not None:
            if origin not in _PLAIN_ORIGINS:
                todo.append(origin)
            if package_of(origin) is None:  # the type of an array's elements does not matter
                todo += _flat(get_args(part))
        elif isinstance(part, TypeVar):
            todo += [part.__bound__, *part.__constraints__]
            yield part
        else:
            if isinstance(part, type):
                todo += (*fields_of(part).values(), *related(part))
            yield part


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]


def fingerprint_of(*annotations: Any) -> int:
    """Return a number for the structure of these types, equal in every process and Python version; 0 for no types."""
    if not annotations:
        return 0
    seen: set[type] = set()
    text = ";".join(_describe(annotation, seen) for annotation in annotations)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") or 1


def _describe(annotation: Any, seen: set[type]) -> str:
    part = _bare(annotation)
    if isinstance(part, str):
        return part
    if isinstance(part, ForwardRef):
        return part.__forward_arg__
    if part is None:
        return "NoneType"
    origin, args = get_origin(part), _flat(get_args(part))
    if origin is typing.Literal:
        return f"Literal[{','.join(arg.name if isinstance(arg, Enum) else repr(arg) for arg in args)}]"
    if origin is not None:
        inner = [_describe(arg, seen) for arg in args]
        return "|".join(inner) if origin in _UNIONS else f"{_describe(origin, seen)}[{','.join(inner)}]"
    if part is ...:
        return "..."
    name: str = getattr(part, "__qualname__", None) or getattr(part, "__name__", None) or str(part)
    if not isinstance(part, type) or part in seen:
        return name
    seen.add(part)
    if issubclass(part, Enum):
        return f"{name}<{','.join(part.__members__)}>"
    inside = ",".join(f"{field}:{_describe(kind, seen)}" for field, kind in fields_of(part).items())
    return f"{name}{{{inside}}}" if inside else name
