"""The decorator: it makes a plain function or a descriptor, and refuses what it can't decorate."""

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
    """Decorate as `@cached` or `@cached.many` does, with or without arguments. `find` returns the cache, at the first
    call. `duplicate_names` are the functions already decorated for it."""
    kind, method = cast("tuple[Any, Any]", (CachedMany, CachedManyMethod) if many else (Cached, Method))
    if function is None:
        kind.check(options)  # raise for a wrong option now, not when the function is decorated
        return lambda function: decorate(function, find, options, duplicate_names, many=many)

    def build(function: Any, *, bound: bool) -> Any:
        _refuse(function)
        cached = kind(function, find, options, bound=bound)
        cached.check_duplicates(duplicate_names)
        return cached

    if isinstance(function, staticmethod):
        return staticmethod(build(function.__func__, bound=False).plain())
    if isinstance(function, classmethod):
        return method(build(function.__func__, bound=True), by_class=True)
    # With `many`, a function in a class body that has no self or cls belongs to a staticmethod.
    cached = build(function, bound=_in_class_body(function) and not (many and _first(function) not in ("self", "cls")))
    return method(cached) if cached.bound else cached.plain()


def _in_class_body(function: Any) -> bool:
    home = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def _first(function: Any) -> str | None:
    return next(iter(signature_of(function).parameters), None)


def _refuse(function: Any) -> None:
    """Raise OptionError, with the remedy, for anything that is not a function."""
    if isinstance(function, (property, functools.cached_property)):
        raise OptionError("@cached was applied to a property: put it below @property, between @property and the def")
    if isinstance(function, functools.partial):
        raise OptionError(f"@cached was applied to {function!r}, which has no own name: write a def that calls it")
    if isinstance(function, type):
        raise OptionError(
            f"@cached was applied to the class {function.__qualname__}: all callers would share one object. Put it "
            "on the expensive methods, or on a def that makes an object"
        )
    if not callable(function) or not hasattr(function, "__qualname__") or not hasattr(function, "__module__"):
        raise OptionError(f"@cached was applied to {function!r}: put it on a def (options are named: @cached(ttl=60))")
    if _is_of_one_object(function):
        raise OptionError(
            f"@cached was applied to {function.__qualname__} of one {type(function.__self__).__qualname__}, and no key "
            "would show which one: decorate the method in its class, or write a def with the object as a parameter"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise OptionError(
            f"{function.__qualname__} is a generator function: its values can be read only once. Return a list instead"
        )


def _is_of_one_object(function: Any) -> bool:
    """Return whether its name lacks the object that it is bound to, so that all objects would share values."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType) or type(owner).__name__ == "PyCapsule":  # of pybind11
        return False
    return not isinstance(owner, type) or f"{owner.__qualname__}.{function.__name__}" != function.__qualname__
