"""The identity of a function: what distinguishes it from every other function, in every process.

A `def` of an importable module, or of a class there, is identified by its name, so its values outlive a new version of
its code. Where a name is not enough (a lambda, a function in a function, a script, a notebook, `exec`), a function is
identified by a fingerprint of its code, and by what its closure had captured when it was decorated."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from copyreg import dispatch_table
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from stampede.errors import KeyingError
from stampede.keys.canonical import canonical
from stampede.keys.names import DATA, GENERATED, MAIN, found_by_name, inmost_of, module_of, name_of, root_of

__all__ = ["Identity", "code_text", "identity_of"]


@dataclass(frozen=True)
class Identity:
    module: str
    qualname: str
    named: bool  # its name alone identifies it
    code: str  # a fingerprint of its code, and of what its closure captured
    captured: tuple[tuple[str, Any], ...]  # names and objects that are not data: they may change, or have no text
    complete: bool  # each captured variable had a value already
    untold: tuple[str, ...] = ()  # the names in `captured` whose objects have no text

    @property
    def name(self) -> str:
        return f"{self.module}:{self.qualname}"


def identity_of(function: Callable[..., Any], ignored: Collection[str] = (), *, objects: bool = True) -> Identity:
    """Return the identity of a decorated function. The defaults of `ignored` parameters are not part of it. Without
    `objects`, captured objects are left out, because the user's `version` says which functions are alike. Captured data
    is never left out."""
    inmost = inmost_of(function)
    writer = _FunctionWriter({ignored} if isinstance(ignored, str) else ignored, objects=objects)
    text = writer.function(function)
    return Identity(
        module=module_of(function),
        qualname=function.__qualname__,
        named=_is_named(function, inmost),
        code=blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
        captured=tuple(writer.captured),
        untold=tuple(writer.without_text),
        complete=not writer.unassigned,
    )


def _is_named(function: Any, inmost: Any) -> bool:
    """Return whether the name means this function, and no other, in all processes that import its module."""
    if "<" in function.__qualname__:
        return False
    if isinstance(inmost, MethodType) and not isinstance(inmost.__self__, type):
        return False  # the method of one object is decorated; other objects' methods have the same name
    module = str(getattr(function, "__module__", None) or "builtins")
    if module in MAIN:  # a script, unless it was run by its module's name (`python -m`)
        spec = getattr(sys.modules.get(module), "__spec__", None)
        if spec is None or spec.name in MAIN:
            return False
    home = sys.modules.get(module)
    variables = getattr(inmost, "__globals__", None)
    return home is not None and (variables is None or variables is vars(home))  # else it was made by `exec`


class _FunctionWriter:
    """Writes what functions are made of as text, and notes what has no lasting text."""

    def __init__(self, ignored: Collection[str], *, objects: bool) -> None:
        self._ignored = ignored
        self._objects = objects
        self.captured: list[tuple[str, Any]] = []
        self.without_text: list[str] = []
        self.unassigned = False
        self._inside: list[Any] = []
        self._variable: tuple[str, Contents] | None = None  # the captured one that is being written, with its parts

    def function(self, function: Any) -> str:
        """Return the text of a function's code and closure, and of the functions that it wraps."""
        if any(function is each for each in self._inside):
            return "<itself>"
        self._inside.append(function)
        try:
            return "".join(self._layers(function))
        finally:
            self._inside.pop()

    def _layers(self, function: Any) -> Iterator[str]:
        layer, known = function, []
        while True:
            if isinstance(layer, partial):
                yield f"partial({self._captured_text('args', (layer.args, layer.keywords))})"
                layer = layer.func
                continue
            code = getattr(layer, "__code__", None)
            if code is not None and code.co_filename.startswith(GENERATED):
                pass  # our generated code around the function
            elif code is None:
                yield (
                    f"<{name_of(layer)}>" if hasattr(layer, "__qualname__") else self._captured_text("function", layer)
                )
            else:
                yield code_text(code)
                yield from self._closure(code, getattr(layer, "__closure__", None) or ())
                yield from self._defaults(code, layer)
            known.append(layer)
            layer = getattr(layer, "__wrapped__", None)
            if layer is None or any(layer is each for each in known):  # decorators may wrap in a circle
                return

    def _closure(self, code: CodeType, cells: tuple[Any, ...]) -> Iterator[str]:
        for name, cell in zip(code.co_freevars, cells, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet: mostly the function itself
                self.unassigned = True
                continue
            if name != "__class__":  # the method's class, for `super`: its object is in the key
                yield f",{name}={self._captured_text(name, value)}"

    def _defaults(self, code: CodeType, function: Any) -> Iterator[str]:
        """Yield the texts of the defaults. The key holds those that are not passed, but not those without a text."""
        given = getattr(function, "__defaults__", None) or ()
        named = code.co_varnames[: code.co_argcount][-len(given) :] if given else ()
        for name, value in [
            *zip(named, given, strict=True),
            *(getattr(function, "__kwdefaults__", None) or {}).items(),
        ]:
            if name not in self._ignored:
                yield f",{name}={self._captured_text(name, value)}"

    def _captured_text(self, name: str, value: Any) -> str:
        """Return the text of something captured; its class's name if it has none, or if objects are left out."""
        outer = self._variable
        contents, has_text = Contents(self._named, outer and outer[1]), True
        name, _ = self._variable = outer or (name, contents)
        try:
            text = contents.text(value)
        except KeyingError:
            has_text = False
        finally:
            self._variable = outer
        if has_text and contents.is_data:
            return text
        if self._objects:
            self.captured.append((name, value))
            if has_text:
                return text
            self.without_text.append(name)
        return f"<a {name_of(type(value))}>"

    def _named(self, value: Any) -> str | None:
        """Return the text of what is identified by its name or its code; None for anything else."""
        if isinstance(value, FunctionType):
            inmost = inmost_of(value)
            if not isinstance(inmost, FunctionType):
                return f"<{name_of(inmost)}>" if hasattr(inmost, "__qualname__") else None
            return f"<{name_of(value)}>" if _is_named(value, inmost) else self.function(value)
        if isinstance(value, ModuleType):
            return f"<{value.__name__}>"
        if isinstance(value, BuiltinFunctionType) and (
            value.__self__ is None or isinstance(value.__self__, ModuleType)
        ):
            return f"<{value.__module__}:{value.__qualname__}>"
        if isinstance(value, (MethodType, BuiltinFunctionType)):
            return f"{self._captured_text(value.__name__, value.__self__)}.{value.__name__}"
        if isinstance(value, type):
            if not found_by_name(value):
                raise KeyingError(f"another class may have the name of {value.__qualname__}")
            return f"<{name_of(value)}>"
        return None


def code_text(code: CodeType) -> str:
    """Return what a code object does as text, equal in all processes of one Python version, without line numbers."""
    parts = (
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_code, code.co_names,
        code.co_varnames, code.co_freevars, code.co_cellvars, code.co_exceptiontable,
    )  # fmt: skip
    return f"<{parts!r}{','.join(map(_constant_text, code.co_consts))}>"


def _constant_text(value: Any) -> str:
    if isinstance(value, CodeType):
        return code_text(value)
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_constant_text, value))})"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant_text, value))},)"
    return f"{type(value).__name__} {value!r}"


# -- captured objects: their contents as text, equal in every process --------------------------------------------------

MOST = 100_000
"""The most parts of one object. An object with more parts has no text."""

_LONG = 200


class Contents:
    """Writes one object's contents as text. `named` gives the texts of functions, classes and modules."""

    def __init__(self, named: Callable[[Any], str | None], around: Contents | None = None) -> None:
        """Count the parts together with those of `around`, which contains this object: else a walk may take hours."""
        self._named = named
        self._above: list[Any] = []
        self._parts: Iterator[int] = itertools.count() if around is None else around._parts
        self.is_data = True  # no part of it can change its state unnoticed

    def text(self, value: Any) -> str:
        """Return the text of an object. Raise KeyingError if it has none."""
        for distance, each in enumerate(reversed(self._above)):
            if each is value:
                return f"<{distance} above>"
        if next(self._parts) >= MOST:
            raise KeyingError(f"it has more than {MOST} parts")
        self._above.append(value)
        try:
            return self._text_of(value)
        except RecursionError:
            raise KeyingError("its parts are nested too deeply") from None
        finally:
            self._above.pop()

    def _text_of(self, value: Any) -> str:
        named = self._named(value)
        if named is not None:
            return named
        kind = type(value)
        if kind in (bytes, bytearray) and len(value) > _LONG:
            return f"{kind.__name__} {blake2b(value).hexdigest()}"
        try:
            return canonical(value)
        except KeyingError:
            pass
        if kind in (list, tuple):
            return f"{kind.__name__}({','.join(map(self.text, value))})"
        if kind in (set, frozenset):
            return f"{kind.__name__}({','.join(sorted(map(self.text, value)))})"
        if kind is dict:
            return f"dict({','.join(f'{self.text(key)}:{self.text(each)}' for key, each in value.items())})"
        return self._rebuilt_text(value)

    def _rebuilt_text(self, value: Any) -> str:
        """Return the text of what rebuilds an object, which its class tells `copy` and pickle."""
        if not any(_is_data(each) for each in self._above):
            self.is_data = False
        try:
            registered = dispatch_table.get(type(value))
            recipe = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception as error:  # locks, sockets, and objects that hold them
            raise KeyingError(f"a {name_of(type(value))} has no text") from error
        if isinstance(recipe, str):
            return f"<{type(value).__module__}:{recipe}>"
        parts = ([*part] if isinstance(part, Iterator) else part for part in recipe)
        return f"made({','.join(map(self.text, parts))})"


def _is_data(value: Any) -> bool:
    kind = type(value)
    return kind is slice or root_of(kind) in DATA or root_of(kind) == "re"
