"""Types that are trusted as they are: what their `__reduce__` says, as plain arguments.

Who trusts a type has its `__new__`, its `__setstate__` and its own functions run with arguments out of the bytes; who
trusts a module, whatever is in it. Bytes can name nothing else.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from stampede.codec.values import Shape, expect
from stampede.errors import CodecError

__all__ = ["class_in", "reduced_shape", "within"]


def within(module: object, trusted: Sequence[str]) -> bool:
    """Whether a module is one of these, or below one."""
    return isinstance(module, str) and any(module == each or module.startswith(f"{each}.") for each in trusted)


def class_in(tag: Any, trusted: Sequence[str]) -> type | None:
    """The class that a tag names, if it is made in a trusted module."""
    module, colon, qualname = tag.partition(":") if isinstance(tag, str) else ("", "", "")
    if not colon or not within(module, trusted):
        return None
    found = _found(module, qualname)
    return found if isinstance(found, type) and found.__module__ == module else None


def _found(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module) or import_module(module)
    for part in qualname.split("."):
        found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
    return getattr(found, "__func__", found) if isinstance(found, staticmethod) else found


def reduced_shape(kind: type, tag: str, trusted: Sequence[str]) -> Shape:
    def lower(value: Any) -> tuple[Any, ...]:
        reduced = value.__reduce_ex__(4)
        if not isinstance(reduced, tuple) or len(reduced) > 5:
            raise CodecError(f"the __reduce__ of a {tag} gives what only pickle understands: use codec='pickle'")
        call, args, state, items, pairs = (*reduced, None, None, None)[:5]
        how, args = _named(call, args)
        parts = how, tuple(args), state, None if items is None else [*items], None if pairs is None else [*pairs]
        try:  # or who reads it finds out, after each time it has been computed
            rebuild(*parts)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CodecError(
                f"a {tag} can't be made again of what its __reduce__ says ({why}): return plain values, or a dataclass"
            ) from error
        return tag, *parts

    def _named(call: Any, args: Any) -> tuple[str, Any]:
        if call is copyreg.__newobj__ and args[0] is kind:  # type: ignore[attr-defined]
            return "new", args[1:]
        if call is copyreg.__newobj_ex__ and args[0] is kind:  # type: ignore[attr-defined]
            return "new with", (tuple(args[1]), args[2])
        if call is kind:
            return "call", args
        owner, name = getattr(call, "__self__", None), getattr(call, "__name__", "")
        if owner is kind and isinstance(vars(kind).get(name), classmethod):
            return f".{name}", args
        module = getattr(call, "__module__", None)
        if isinstance(module, str) and within(module, trusted) and _found(module, call.__qualname__) is call:
            return f"{module}:{call.__qualname__}", args
        raise CodecError(
            f"the __reduce__ of a {tag} calls {module}.{getattr(call, '__qualname__', call)}: trust its module, too "
            f"(trust=[{kind.__qualname__}, {module}]), or use codec='pickle' with a signing_key"
        )

    def caller(how: str) -> Any:
        if how == "call":
            return kind
        if how.startswith(".") and isinstance(vars(kind).get(how[1:]), classmethod):
            return getattr(kind, how[1:])
        module, _, qualname = how.partition(":")
        made = _found(module, qualname) if qualname and within(module, trusted) else None
        if getattr(made, "__module__", None) != module:  # nor what the module has only imported
            raise CodecError(f"bytes that call what {tag} doesn't")
        return made

    def rebuild(how: Any, args: Any, state: Any, items: Any, pairs: Any) -> Any:
        optional = (list, type(None))
        expect((how, args, items, pairs), str, tuple, optional, optional)
        if how == "new with":
            expect(args, tuple, dict)
            made: Any = kind.__new__(kind, *args[0], **args[1])
        else:
            made = kind.__new__(kind, *args) if how == "new" else caller(how)(*args)
        if type(made) is not kind:
            raise CodecError(f"bytes that make a {type(made).__name__} in place of a {tag}")
        _restore(made, state, items or (), pairs or ())
        return made

    return Shape(tag, kind, lower, rebuild)


def _restore(made: Any, state: Any, items: Sequence[Any], pairs: Sequence[Any]) -> None:
    """As pickle does."""
    for item in items:
        made.append(item)
    for key, value in pairs:
        made[key] = value
    if state is None:
        return
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        vars(made).update(state)
    for name, value in (slots or {}).items():
        setattr(made, name, value)
