"""Advice about a value that a codec refuses. It names only what works for this value."""

from __future__ import annotations

from typing import Any

from stampede.codecs.annotations import BUILTIN
from stampede.codecs.classes import is_text, model_shape
from stampede.codecs.equality import alike
from stampede.codecs.packages import advice, is_row, package_of, shape_for
from stampede.errors import CodecError

__all__ = ["ANNOTATION", "foreign", "not_alike", "where"]

ANNOTATION = "the return annotation of the @cached function"
_ONCE = ("__next__", "__anext__", "cr_await")  # methods of iterators, async iterators, coroutines
_PLAIN: tuple[type, ...] = (int, float, bytes, list, dict, tuple, set)


def foreign(value: Any, codec: str) -> str:
    """Return why a codec refuses a value of a type that it does not know, and what to do."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    instead = advice(kind)
    if instead is None and any(hasattr(kind, name) for name in _ONCE):
        instead = "its first reader would use it up: return a list"
    return f"a {name} can't be stored by codec={codec!r}: {instead or _remedy(value, kind, codec)}"


def _remedy(value: Any, kind: type, codec: str) -> str:
    sealed, named = codec == "sealed", f"trust=[{kind.__qualname__}]"
    if hasattr(kind, "__struct_fields__"):
        return f"it is a msgspec.Struct: use codec='msgpack', and name it in {ANNOTATION}"
    if not sealed and (shape_for(kind) is not None or (kind in BUILTIN and kind is not object)):
        return "use codec='sealed', which can store it"
    if model_shape(kind, "") is not None:
        if (refusal := _refusal(value, kind)) is not None:
            return refusal
        if sealed:
            return f"name it in {named}, or in {ANNOTATION}"
        if is_row(kind) or is_text(kind):
            return f"use codec='sealed', and name it in {named}, or in {ANNOTATION}"
        return f"name it in {ANNOTATION}, or use codec='sealed' with {named}"
    base = next((base for base in _PLAIN if issubclass(kind, base)), None)
    plain = "return plain values, or a dataclass" if base is None else f"return {base.__name__}(it)"
    return f"{plain}, or use codec='pickle' with a signing_key"


def _refusal(value: Any, kind: Any) -> str | None:
    """Return why the sealed codec refuses an object of a model even if its type is named; None if it does not."""
    shape = model_shape(kind, f"{kind.__module__}:{kind.__qualname__}")
    try:
        if shape is not None:
            shape.lower(value)
    except CodecError as error:
        return str(error)
    return None


def not_alike(value: Any, read: Any, codec: str) -> str:
    """Return why a codec refuses a value that would come back changed, and what to do."""
    value, read, place = where(value, read)
    kind, other = type(value), type(read)
    what = f"its {place}, of type {_named(kind)}," if place else f"a value of type {_named(kind)}"
    if kind is not other:
        return f"{what} would come back from {codec} as {_named(other)}: {_annotation(value, kind, codec)}"
    remedy = _refusal(value, kind) or "use codec='sealed', which stores all of it"
    return f"{what} would come back from {codec} incomplete or changed: {remedy}"


def _named(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def where(value: Any, read: Any, place: str = "") -> tuple[Any, Any, str]:
    """Return the first part of the value that differs from what was read, the part that was read, and its place."""
    if type(value) is not type(read):
        return value, read, place
    mine, theirs, form = value, read, "[{!r}]"
    if type(value) in (list, tuple) and len(value) == len(read):
        mine, theirs = dict(enumerate(value)), dict(enumerate(read))
    elif type(value) is not dict and hasattr(value, "__dict__"):
        mine, theirs, form = vars(value), vars(read), ".{}"
    if type(mine) is dict and len(mine) == len(theirs):
        for key in mine:
            if key not in theirs:
                return key, next(iter(theirs)), f"{place}'s key" if place else "key"
            if not alike(mine[key], theirs[key]):
                return where(mine[key], theirs[key], place + form.format(key))
    return value, read, place


def _annotation(value: Any, kind: type, codec: str) -> str:
    if package_of(kind) == "numpy":
        return f"return its .item(), or name {_named(kind)} in the return annotation, or use codec='sealed'"
    if codec == "json" and kind is float:
        return "JSON can't represent it: use codec='msgpack' or 'sealed'"
    if kind in (tuple, set, frozenset):
        return f"write {kind.__name__}[...] in {ANNOTATION}, or use codec='sealed'"
    return f"name its type in {ANNOTATION}, or use codec='sealed'" if kind in BUILTIN else _remedy(value, kind, codec)
