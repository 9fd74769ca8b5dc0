"""Signatures and docstrings for `help()` and notebooks: options by name and type, and the awaitable verbs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

from stampede.errors import OptionError
from stampede.runtime.definitions import signature_of

__all__ = ["is_async", "showing", "with_twins"]

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def showing(options: type) -> Callable[[F], F]:
    """Return a decorator that shows each option of a TypedDict in the signature, instead of `**options`."""

    def shown(function: F) -> F:
        signature = signature_of(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=kind.__forward_arg__)
            for name, kind in options.__annotations__.items()
            if name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return shown


def with_twins(kind: C) -> C:
    """Give each awaitable verb of a class, such as `arelease`, a docstring that names its blocking twin."""
    for name, verb in vars(kind).items():
        if name[:1] == "a" and hasattr(kind, name[1:]) and not verb.__doc__:
            verb.__doc__ = f"Like `{name[1:]}`, but awaited."
    return kind


def is_async(function: Any, decorator: str) -> bool:
    """Return whether a decorated function is a coroutine function. Raise OptionError if it can't be decorated."""
    if not callable(function) or isinstance(function, (type, staticmethod, classmethod)):
        raise OptionError(
            f"{decorator} is applied to {function!r}: put it on a function, below @staticmethod or @classmethod"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__qualname__", function)
        raise OptionError(f"{decorator} is applied to {name}, which is a generator function: use `with` inside it")
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
