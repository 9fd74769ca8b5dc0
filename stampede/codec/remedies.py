"""What to do about a value that a codec refuses: only what works for that very value."""

from __future__ import annotations

import sys
from datetime import tzinfo
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

from stampede.codec.alike import alike
from stampede.codec.annotations import BUILTIN
from stampede.codec.data import advice, package_of, shape_for
from stampede.codec.models import why_not
from stampede.codec.rows import advice as rows_advice
from stampede.codec.rows import is_row
from stampede.codec.shapes import is_model, is_text

__all__ = ["ANNOTATION", "foreign", "left_out", "not_alike", "where"]

ANNOTATION = "the return annotation of the @cached function"
_ONCE = (GeneratorType, AsyncGeneratorType, CoroutineType, map, filter, zip)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def foreign(value: Any, codec: str) -> str:
    """Why a value of a type that is not known to this codec is refused, and what to do."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    instead = rows_advice(kind)
    if instead is not None:
        return f"a {name} can't be stored: {instead}"
    if isinstance(value, _ONCE) or (hasattr(kind, "__next__") and hasattr(kind, "__iter__")):
        return f"a {name} can't be stored: its first reader would use it up. Return a list instead"
    if isinstance(value, _CODE):
        return f"a {kind.__name__} ({getattr(value, '__name__', '?')}) can't be stored: it is code, not a value"
    return f"a {name} can't be stored by codec={codec!r}: {_remedy(value, kind, codec)}"


def _remedy(value: Any, kind: type, codec: str) -> str:
    instead = advice(kind)
    if instead is not None:
        return instead
    if hasattr(kind, "__struct_fields__"):
        return f"it is a msgspec.Struct: use codec='msgpack', and name it in {ANNOTATION}"
    if issubclass(kind, tzinfo):
        return "use a zoneinfo.ZoneInfo, or a datetime.timezone"
    sealed = codec == "sealed"
    if not sealed and kind in BUILTIN and kind is not object:
        return "use codec='sealed', which holds it"
    named = f"trust=[{kind.__qualname__}]"
    if is_model(kind) and (refused := _refused(value, kind)) is not None:
        return refused
    if is_text(kind) and shape_for(kind) is not None and not sealed:
        return "use codec='sealed', which holds it"
    if (is_row(kind) or is_text(kind)) and not sealed:
        return f"use codec='sealed', and name it in {named}, or in {ANNOTATION}"
    if is_model(kind):
        naming = f"name it in {named}, or in {ANNOTATION}"
        return naming if sealed else f"name it in {ANNOTATION}, or use codec='sealed' with {named}"
    plain = f"return {_plain(value, kind)}"
    if kind is memoryview:
        return "return bytes(it)"
    if not _reduces(value):
        return f"it can't be made again out of bytes, by no codec: {plain}"
    if kind.__module__ == "builtins":
        return f"{plain}, or use codec='pickle' with a signing_key"
    trust = f"{'give' if sealed else 'use codec=' + repr('sealed') + ' with'} {named}, which has its __reduce__ called"
    return f"{plain}; or {trust}, and what that says run by who reads it; or use codec='pickle' with a signing_key"


def _plain(value: Any, kind: type) -> str:
    """How to make a builtin of it, if that works for this value."""
    builtins: tuple[Any, ...] = (str, int, float, bytes, list, dict, tuple, set)
    for base in builtins:
        try:
            if issubclass(kind, base) and type(base(value)) is base:
                return f"{base.__name__}(it)"
        except Exception:  # the value's own code
            pass
    return "plain values, or a dataclass"


def _reduces(value: Any) -> bool:
    """Whether it can be made again: not a lock, a socket or a session, nor what holds one."""
    try:
        held = vars(value).values() if hasattr(value, "__dict__") else ()
        return all(isinstance(each.__reduce_ex__(4), tuple) for each in (value, *held) if type(each) not in BUILTIN)
    except Exception:  # the value's own code
        return False


def not_alike(value: Any, read: Any, codec: str) -> str:
    """Why a value is refused that would come back from this codec as another one."""
    value, read, place = where(value, read)
    if (left := left_out(value, read)) is not None:
        return left
    kind, other = type(value), type(read)
    what = f"{f'its {place} is ' if place else ''}{_a(kind)}"
    if kind is not other:
        return f"{what}, which would come back from {codec} as {_a(other)}: {_annotation(value, kind, codec)}"
    return f"{what} that would come back from {codec} without something, or as another: {_sealed(value, kind)}"


def left_out(value: Any, read: Any = None) -> str | None:
    """Why it is refused, if that is for a pydantic model in it, of which pydantic itself makes another one."""
    found = why_not(value, read)
    return None if found is None else f"{found[1]}: {_sealed(found[0], type(found[0]))}"


def _a(kind: type) -> str:
    name = _named(kind)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _named(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def where(value: Any, read: Any, place: str = "") -> tuple[Any, Any, str]:
    """The first part of both that differs."""
    if type(value) is type(read) and type(value) in (list, tuple, dict) and len(value) == len(read):
        keys = range(len(value)) if type(value) is not dict else list(value)
        for key in keys:
            if type(read) is not dict or key in read:
                if not alike(value[key], read[key]):
                    return where(value[key], read[key], f"{place}[{key!r}]")
            else:
                return key, next(iter(read)), f"{place}'s key" if place else "key"
    return value, read, place


def _annotation(value: Any, kind: type, codec: str) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return f"return its .item(), or name {_named(kind)} in the return annotation, or use codec='sealed'"
    if codec == "json" and kind is float:
        return "JSON has no word for it: use codec='msgpack' or 'sealed'"
    if kind in (tuple, set, frozenset):
        return f"say {kind.__name__}[...] in {ANNOTATION}, or use codec='sealed'"
    if package_of(kind) is not None or (is_model(kind) and not is_text(kind)):
        return f"name {_named(kind)} in {ANNOTATION}, or use codec='sealed'" + (
            "" if package_of(kind) else f" with trust=[{kind.__qualname__}]"
        )
    if kind in BUILTIN:
        return f"say what it is in {ANNOTATION}, or use codec='sealed'"
    return _remedy(value, kind, codec)


def _sealed(value: Any, kind: Any) -> str:
    return _refused(value, kind) or "use codec='sealed', which keeps all of it"


def _refused(value: Any, kind: Any) -> str | None:
    """Why the sealed codec refuses it although its type is named; None: it does not, which was tried."""
    from stampede.codec.sealed import Sealed  # which asks here
    from stampede.codec.shapes import shapes_of

    try:
        Sealed(shapes_of(kind)).dump(value, False)
    except Exception as error:  # also of the value's own code
        return str(error)
    return None
