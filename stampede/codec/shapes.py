"""What a return annotation says: which types of the user may travel, and a fingerprint of their structure."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from functools import cached_property
from hashlib import blake2b
from inspect import get_annotations, getclosurevars
from operator import attrgetter
from types import MemberDescriptorType, NoneType, SimpleNamespace
from typing import Any, ForwardRef, TypeVar, get_args, get_origin

from stampede.codec.values import STANDARD, Lower, Shape
from stampede.errors import CodecError, OptionError

__all__ = ["fingerprint_of", "reach", "returns_of", "shapes_of"]

_UNIONS = (typing.Union, types.UnionType)
_PLAIN_ORIGINS = (*_UNIONS, list, dict, tuple, set, frozenset)
_TEXT = (str, ForwardRef)
_BUILTIN = {NoneType, bool, int, float, str, bytes, bytearray, tuple, list, dict, set, frozenset, object}
_BUILTIN |= {shape.type for shape in STANDARD}


# -- annotations ------------------------------------------------------------------------------------------------


def returns_of(function: Callable[..., Any]) -> Any:
    """A function's return annotation, resolved; None if it has none, or one that can't be resolved."""
    function = getattr(function, "__func__", function)
    annotation = getattr(function, "__annotations__", {}).get("return")
    if not unresolved(annotation):
        return annotation
    try:
        around = getclosurevars(function).nonlocals  # a class of the enclosing function
    except (TypeError, ValueError):
        around = {}
    return _resolve(annotation, getattr(function, "__globals__", {}), dict(around))


def unresolved(annotation: Any) -> bool:
    """Whether there are names in it that nobody has looked up."""
    bare = _bare(annotation)
    if get_origin(bare) is typing.Literal:
        return False
    return isinstance(bare, _TEXT) or any(map(unresolved, _flat(get_args(bare))))


def _resolve(annotation: Any, globalns: dict[str, Any], localns: dict[str, Any]) -> Any:
    """The annotation without strings in it; None if a name in it is unknown."""
    holder: Any = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, globalns, localns, include_extras=True)["it"]
    except Exception:  # an annotation is any code: it must not break a decoration
        return None


def _bare(annotation: Any) -> Any:
    """The annotation without Annotated, NewType, Final, Required and `type X = ...` around it."""
    while True:
        if get_origin(annotation) in (typing.Annotated, typing.Final, typing.Required, typing.NotRequired):
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # Python 3.12's; typing_extensions has one, too
            annotation = annotation.__value__
        else:
            return annotation


def fields_of(kind: type) -> dict[str, Any]:
    """The names of a type's fields, with their annotations: resolved where that is possible, else as written."""
    if kind in _BUILTIN:
        return {}
    if is_dataclass(kind):
        names: Iterable[str] = (field.name for field in fields(kind))
    elif hasattr(kind, "__attrs_attrs__"):
        names = (a.name for a in kind.__attrs_attrs__)
    elif is_pydantic(kind):
        return {name: field.annotation for name, field in kind.__pydantic_fields__.items()}  # type: ignore[attr-defined]
    elif _is_namedtuple(kind):
        names = kind._fields  # type: ignore[attr-defined]
    elif typing.is_typeddict(kind):
        names = kind.__annotations__
    else:
        return {}
    hints = _hints(kind)
    return {name: hints.get(name, Any) for name in names}


def _hints(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__ if not typing.is_typeddict(kind) else (kind,)):
        globalns = vars(sys.modules.get(base.__module__, typing))
        localns = {**vars(base), base.__name__: base}
        for name, annotation in get_annotations(base).items():
            resolved = _resolve(annotation, globalns, localns)
            found[name] = annotation if resolved is None else resolved
    return found


def is_pydantic(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel) and kind is not pydantic.BaseModel


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def reach(annotation: Any) -> Iterator[Any]:
    """Every part of an annotation, and of the fields of the types in it, each once: classes and special forms."""
    seen: set[int] = set()
    todo = [annotation]
    kept = []  # ids are compared, since not every annotation can be hashed
    while todo:
        part = _bare(todo.pop())
        kept.append(part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        origin = get_origin(part)
        if origin is typing.Literal:
            todo += [type(value) for value in get_args(part)]
        elif origin is not None:
            if origin not in _PLAIN_ORIGINS:
                todo.append(origin)
            todo += _flat(get_args(part))
        elif isinstance(part, TypeVar):
            todo += [part.__bound__, *part.__constraints__]
            yield part
        else:
            if isinstance(part, type):
                todo += fields_of(part).values()
            yield part


def _flat(args: tuple[Any, ...]) -> list[Any]:
    """Callable's arguments come as a list of their own."""
    return [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]


def fingerprint_of(*annotations: Any) -> int:
    """A number for the structure of these types, the same in every process and Python version; 0 for none."""
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


# -- shapes -----------------------------------------------------------------------------------------------------


def shapes_of(returns: Any, trust: Iterable[type] = ()) -> list[Shape]:
    """How the user's types travel: those that the annotation reaches, and those that are trusted."""
    shapes: dict[type, Shape] = {}
    taken: dict[str, int] = {}
    kinds: tuple[Any, ...] = tuple(trust)
    for kind in kinds:
        if not isinstance(kind, type) or _shape(kind, "") is None:
            raise OptionError(
                f"trust holds {kind!r}: it can hold dataclasses, attrs classes, pydantic models, enums and NamedTuples"
            )
    for part in (*reach(returns), *(part for kind in kinds for part in reach(kind))):
        if isinstance(part, type) and part not in shapes and part not in _BUILTIN:
            tag = f"{part.__module__}:{part.__qualname__}"
            taken[tag] = taken.get(tag, 0) + 1
            shape = _shape(part, tag if taken[tag] == 1 else f"{tag}#{taken[tag]}")  # two local classes of one name
            if shape is not None:
                shapes[part] = shape
    return list(shapes.values())


def _shape(kind: type, tag: str) -> Shape | None:
    if issubclass(kind, Enum):
        return _enum(kind, tag)
    if is_pydantic(kind):
        return _model(kind, tag)
    if _is_namedtuple(kind):
        return _namedtuple(kind, tag)
    if (is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")) and _is_plain_object(kind):
        return _record(kind, tag)
    return None


def _is_plain_object(kind: Any) -> bool:
    """Whether `object.__new__` can make one: not for a dataclass that is also a dict or an exception."""
    return all(base.__new__ is object.__new__ or not _is_c(base) for base in kind.__mro__)


def _is_c(kind: type) -> bool:
    return not kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _enum(kind: type[Enum], tag: str) -> Shape:
    members = kind.__members__

    def lower_flag(value: Any) -> tuple[Any, ...]:
        return tag, int(value.value)

    def rebuild_flag(number: int) -> Any:
        if type(number) is not int:
            raise CodecError(f"a flag of {tag} that is no number")
        return kind(number)

    if issubclass(kind, Flag):
        return Shape(tag, kind, lower_flag, rebuild_flag)
    return Shape(tag, kind, lambda value: (tag, value._name_), lambda name: members[name])


def _namedtuple(kind: Any, tag: str) -> Shape:
    count = len(kind._fields)

    def rebuild(*args: Any) -> Any:
        if len(args) != count:
            raise CodecError(f"{len(args)} fields for {tag}, which has {count}")
        return tuple.__new__(kind, args)

    return Shape(tag, kind, lambda value: (tag, *value), rebuild)


def _record(kind: type, tag: str) -> Shape:
    """A dataclass or attrs class: exactly its fields, set without its `__init__` or `__setattr__`."""
    names = tuple(fields_of(kind))
    inside = sum(not isinstance(getattr(kind, name, None), MemberDescriptorType) for name in names)
    open_ended = getattr(kind, "__dictoffset__", 0) != 0
    lazy = {name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, cached_property)}
    may_have = {*names, *lazy, "__orig_class__"}
    get = _getter(names)

    def lower(value: Any) -> tuple[Any, ...]:
        if open_ended and len(value.__dict__) != inside and (extra := value.__dict__.keys() - may_have):
            raise CodecError(
                f"a {tag} has an attribute {min(extra)!r} that is no field and would be lost: "
                f"declare it as a field, or make it a cached_property"
            )
        return (tag, *get(value))

    return Shape(tag, kind, lower, _rebuilder(kind, names))


def _rebuilder(kind: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function that takes exactly these fields, in order. Generated: a loop over them takes four times as long."""
    args = [f"_{n}" for n in range(len(names))]
    if kind.__setattr__ is object.__setattr__:
        lines = [f"made.{name} = {arg}" for name, arg in zip(names, args, strict=True)]
    else:  # frozen, or with opinions of its own
        lines = [f"put(made, {name!r}, {arg})" for name, arg in zip(names, args, strict=True)]
    body = "\n    ".join(["made = new(kind)", *lines, "return made"])
    known: dict[str, Any] = {"new": object.__new__, "put": object.__setattr__, "kind": kind}
    exec(f"def rebuild({', '.join(args)}):\n    {body}", known)
    made: Callable[..., Any] = known["rebuild"]
    return made


def _getter(names: tuple[str, ...]) -> Lower:
    """All these attributes, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _model(kind: Any, tag: str) -> Shape:
    """A pydantic model, unvalidated: its fields, which of them were set, what is extra and what is private."""
    names = tuple(kind.__pydantic_fields__)
    private = kind.__private_attributes__.keys()
    put = object.__setattr__

    def lower(value: Any) -> tuple[Any, ...]:
        held = value.__pydantic_private__
        if held is not None:
            undefined = sys.modules["pydantic_core"].PydanticUndefined
            held = {name: item for name, item in held.items() if item is not undefined}
        given = tuple(name for name in names if name in value.__pydantic_fields_set__)
        return tag, given, value.__pydantic_extra__, held, *(value.__dict__[name] for name in names)

    def rebuild(given: Any, extra: Any, held: Any, *args: Any) -> Any:
        if len(args) != len(names) or type(given) is not tuple or not set(given) <= {*names}:
            raise CodecError(f"the fields of a {tag} are others")
        if held is not None and not (type(held) is dict and held.keys() <= private):
            raise CodecError(f"a {tag} has no such private attributes")
        if (extra is not None) != (kind.model_config.get("extra") == "allow") or type(extra) not in (NoneType, dict):
            raise CodecError(f"a {tag} with other attributes than its fields")
        made: Any = object.__new__(kind)
        given = {*given, *(extra or ())}
        for slot, state in zip(_MODEL_SLOTS, (dict(zip(names, args, strict=True)), given, extra, held), strict=True):
            put(made, slot, state)
        return made

    return Shape(tag, kind, lower, rebuild)


_MODEL_SLOTS = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
