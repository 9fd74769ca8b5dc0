"""Users' types on the wire: dataclasses, attrs classes, pydantic models, enums, NamedTuples and rows of an ORM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from enum import Enum, Flag
from importlib import import_module
from operator import attrgetter
from types import NoneType
from typing import Any

from stampede.codecs.annotations import BUILTIN, fields_of, is_namedtuple, reach
from stampede.codecs.equality import lazy
from stampede.codecs.packages import package_of, row_shape
from stampede.codecs.pydantic import plain_shape
from stampede.codecs.stdlib import Lower, Shape, expect, lost, plain, text_shape
from stampede.errors import CodecError, OptionError
from stampede.keys.models import is_pydantic
from stampede.keys.names import is_static
from stampede.runtime.definitions import slots_of

__all__ = ["is_text", "model_shape", "shapes_of", "trusted"]


def shapes_of(returns: Any, trust: Iterable[type] = ()) -> list[Shape]:
    """Return how the user's types are stored: those that the annotation reaches, and those that are trusted."""
    shapes: dict[type, Shape] = {}
    taken: dict[str, int] = {}
    kinds: tuple[Any, ...] = tuple(trust)
    for kind in kinds:
        if not isinstance(kind, type) or kind.__module__ == "builtins" or kind in BUILTIN:
            raise OptionError(f"trust contains {kind!r}: name only classes and modules of yours")
        if model_shape(kind, "") is None and _plain(kind, "") is None:
            raise OptionError(
                f"trust contains {kind!r}, whose objects can't be stored by their attributes, because it defines how "
                "they are made or pickled: make it a dataclass, or use codec='pickle' with a signing_key"
            )
    for part in (*reach(returns), *(part for kind in kinds for part in reach(kind))):
        if isinstance(part, type) and part not in shapes and part not in BUILTIN:
            tag = f"{part.__module__}:{part.__qualname__}"
            taken[tag] = taken.get(tag, 0) + 1
            tag = tag if taken[tag] == 1 else f"{tag}#{taken[tag]}"  # two local classes with one name
            shape = model_shape(part, tag) or (_plain(part, tag) if part in kinds else None)
            if shape is not None:
                shapes[part] = shape
    return list(shapes.values())


def trusted(modules: Sequence[str]) -> Callable[[Any], Shape | None]:
    """Return a function that takes a class or a tag, and returns its shape if it is of these modules, or below one."""

    def found(asked: Any) -> Shape | None:
        tag = f"{asked.__module__}:{asked.__qualname__}" if isinstance(asked, type) else asked
        kind = _class_in(tag, modules)
        if kind is None or not (kind is asked or tag is asked):
            return None
        return model_shape(kind, tag) or _plain(kind, tag)

    return found


def _class_in(tag: Any, modules: Sequence[str]) -> type | None:
    """Return the class that a tag names; None if it was not made in one of these modules, or below one."""
    module, colon, qualname = tag.partition(":") if isinstance(tag, str) else ("", "", "")
    if not colon or not any(module == each or module.startswith(f"{each}.") for each in modules):
        return None
    found: Any = sys.modules.get(module) or import_module(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
    return found if isinstance(found, type) and found.__module__ == module else None


def is_text(kind: type) -> bool:
    """Return whether a class is a subclass of str, such as one that marks safe HTML, but not an enum or numpy's."""
    return issubclass(kind, str) and not issubclass(kind, Enum) and package_of(kind) is None


def model_shape(kind: Any, tag: str) -> Shape | None:
    """Return how a class's objects are stored by their fields; None: it is not enough to name the class."""
    row = row_shape(kind, tag)  # first, because it may be a dataclass or a pydantic model, too
    if row is not None:
        return row
    if issubclass(kind, Enum):
        return _enum(kind, tag)
    if is_pydantic(kind):
        return _model(kind, tag)
    if is_text(kind):
        return text_shape(kind, tag)
    if (shape := plain_shape(kind, tag)) is not None:
        return shape
    if is_namedtuple(kind):
        return _namedtuple(kind, tag)
    # `object.__new__` has to make the value, and can't if a dataclass is also a dict or an exception.
    makes = all(base.__new__ is object.__new__ or not is_static(base) for base in kind.__mro__)
    return _record(kind, tag) if makes and (is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")) else None


def _enum(kind: type[Enum], tag: str) -> Shape:
    members = kind.__members__
    if issubclass(kind, Flag):
        return plain(tag, kind, lambda value: (int(value.value),), int)
    return Shape(tag, kind, lambda value: (tag, value._name_), lambda name: members[name])


def _namedtuple(kind: Any, tag: str) -> Shape:
    count = len(kind._fields)
    open_ended = kind.__dictoffset__ != 0

    def rebuild(*args: Any) -> Any:
        if len(args) != count:
            raise CodecError(f"the entry has {len(args)} fields for {tag}, which has {count}")
        return tuple.__new__(kind, args)

    def lower(value: Any) -> tuple[Any, ...]:
        if open_ended and value.__dict__:
            raise lost(tag, value.__dict__, _NO_FIELD)
        return (tag, *value)

    return Shape(tag, kind, lower, rebuild)


_NO_FIELD = ": declare it as a field, or make it a cached_property"


def _record(kind: Any, tag: str) -> Shape:
    """Return the shape of a dataclass or attrs class: its fields, set without its `__init__` or `__setattr__`."""
    names = tuple(fields_of(kind))
    inside = frozenset(names) - slots_of(kind)
    other_slots = sorted(slots_of(kind) - {*names})
    open_ended = kind.__dictoffset__ != 0
    may_have = {*names, *lazy(kind)}
    get = _getter(names)

    def lower(value: Any) -> tuple[Any, ...]:
        if open_ended and value.__dict__.keys() != inside and (extra := value.__dict__.keys() - may_have):
            raise lost(tag, extra, _NO_FIELD)
        if other_slots and (extra := {name for name in other_slots if hasattr(value, name)}):
            raise lost(tag, extra, _NO_FIELD)
        return (tag, *get(value))

    return Shape(tag, kind, lower, _rebuilder(kind, names))


_MAKING = frozenset({
    "__new__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__setstate__",
})  # fmt: skip
"""Methods by which a class defines how its objects are made or pickled."""


def _plain(kind: Any, tag: str) -> Shape | None:
    """Return the shape of an ordinary class: its objects' attributes, set without its code. None for other classes."""
    own = [base for base in kind.__mro__ if base is not object]
    if any(is_static(base) or not vars(base).keys().isdisjoint(_MAKING) for base in own):
        return None
    slots = slots_of(kind)

    def lower(value: Any) -> tuple[Any, ...]:
        placed = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        return tag, getattr(value, "__dict__", {}), placed

    def rebuild(open_ended: dict[str, Any], placed: dict[str, Any]) -> Any:
        expect((open_ended, placed), dict, dict)
        made = object.__new__(kind)
        if not (slots.issuperset(placed) and all(type(name) is str for name in open_ended)):
            raise CodecError(f"the entry has attributes that a {tag} can't have")
        for name, value in placed.items():
            object.__setattr__(made, name, value)
        if open_ended:
            vars(made).update(open_ended)
        return made

    return Shape(tag, kind, lower, rebuild)


def _rebuilder(kind: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that takes these fields in order, generated: a loop over them takes four times as long."""
    args = [f"_{n}" for n in range(len(names))]
    if kind.__setattr__ is object.__setattr__:
        lines = [f"made.{name} = {arg}" for name, arg in zip(names, args, strict=True)]
    else:  # frozen, or with its own `__setattr__`
        lines = [f"put(made, {name!r}, {arg})" for name, arg in zip(names, args, strict=True)]
    body = "\n    ".join(["made = new(kind)", *lines, "return made"])
    known: dict[str, Any] = {"new": object.__new__, "put": object.__setattr__, "kind": kind}
    exec(f"def rebuild({', '.join(args)}):\n    {body}", known)
    made: Callable[..., Any] = known["rebuild"]
    return made


def _getter(names: tuple[str, ...]) -> Lower:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _model(kind: Any, tag: str) -> Shape:
    """Return the shape of a pydantic model, unvalidated: fields, which of them were set, extras, private attributes."""
    names = tuple(kind.__pydantic_fields__)
    may_have = {*names, *lazy(kind)}
    put = object.__setattr__

    def lower(value: Any) -> tuple[Any, ...]:
        held = value.__pydantic_private__
        if held is not None:
            undefined = sys.modules["pydantic_core"].PydanticUndefined
            held = {name: item for name, item in held.items() if item is not undefined}
        if extra := value.__dict__.keys() - may_have:
            raise lost(tag, extra, _NO_FIELD)
        given = tuple(sorted(value.__pydantic_fields_set__))
        return tag, given, value.__pydantic_extra__, held, *(value.__dict__[name] for name in names)

    def rebuild(given: Any, extra: Any, held: Any, *args: Any) -> Any:
        expect((given, extra, held), tuple, (dict, NoneType), (dict, NoneType))
        made: Any = object.__new__(kind)
        states = dict(zip(names, args, strict=True)), {*given}, extra, held
        for slot, state in zip(_MODEL_SLOTS, states, strict=True):
            put(made, slot, state)
        return made

    return Shape(tag, kind, lower, rebuild)


_MODEL_SLOTS = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
