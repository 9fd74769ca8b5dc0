"""The decorator: what it stands on is refused, or becomes a plain function or a descriptor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from stampede.api.binding import Home
from stampede.api.cached import Cached
from stampede.api.duplicate_names import DuplicateNames
from stampede.api.many import CachedMany, CachedManyMethod
from stampede.api.method import Method
from stampede.errors import OptionError
from stampede.runtime.definitions import signature_of

__all__ = ["decorate"]


def decorate(
    function: Any,
    find: Callable[[], Home],
    options: Mapping[str, Any],
    duplicate_names: DuplicateNames,
    *,
    many: bool = False,
) -> Any:
    """`@cached`, or `@cached.many`, with or without arguments. `find` is asked for the cache at the first call;
    `namesakes` are the functions that are known to be decorated for it."""
    kind, method = cast("tuple[Any, Any]", (CachedMany, CachedManyMethod) if many else (Cached, Method))
    if function is None:
        kind.check(options)  # a wrong option is an error of this line, not of the next
        return lambda function: decorate(function, find, options, duplicate_names, many=many)

    def made(function: Any, *, bound: bool) -> Any:
        _refuse(function)
        cached = kind(function, find, options, bound=bound)
        cached.join(duplicate_names)
        return cached

    if isinstance(function, staticmethod):
        return staticmethod(made(function.__func__, bound=False).plain())
    if isinstance(function, classmethod):
        return method(made(function.__func__, bound=True), by_class=True)
    # Of many: in a class body a function without self is a staticmethod's.
    cached = made(function, bound=_in_class_body(function) and not (many and _first(function) not in ("self", "cls")))
    return method(cached) if cached.bound else cached.plain()


def _in_class_body(function: Any) -> bool:
    home = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def _first(function: Any) -> str | None:
    return next(iter(signature_of(function).parameters), None)


def _refuse(function: Any) -> None:
    """OptionError, with the remedy, for what is no function."""
    if isinstance(function, (property, functools.cached_property)):
        raise OptionError("@cached stands on a property: put it below, between @property and the def")
    if isinstance(function, functools.partial):
        raise OptionError(f"@cached stands on {function!r}, whose name is another's: write a def that calls it")
    if isinstance(function, type):
        raise OptionError(
            f"@cached stands on the class {function.__qualname__}: all would share one object. Put it on the methods "
            "that are expensive, or on a def that makes one"
        )
    if not callable(function) or not hasattr(function, "__qualname__") or not hasattr(function, "__module__"):
        raise OptionError(f"@cached stands on {function!r}: it goes on a def (its options are named: @cached(ttl=60))")
    if _is_of_one_object(function):
        raise OptionError(
            f"@cached stands on {function.__qualname__} of one {type(function.__self__).__qualname__}, and no key "
            "would tell of which: put it on the method, in its class, or write a def with the object for a parameter"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise OptionError(
            f"{function.__qualname__} is a generator function: what it yields can be had only once. Return a list of it"
        )


def _is_of_one_object(function: Any) -> bool:
    """Whether it is bound to what its name doesn't tell: all objects of a class would share their values."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType) or type(owner).__name__ == "PyCapsule":  # pybind11's for all
        return False
    return not isinstance(owner, type) or f"{owner.__qualname__}.{function.__name__}" != function.__qualname__
