"""What `help()` and notebooks show: options by name and type, not `**options`; whose twin a verb is."""

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
    """Let a function that takes these options, a TypedDict, as keywords show each of them: by name and type."""

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
    """The class, whose awaitable verbs tell of which they are twins."""
    for name, verb in vars(kind).items():
        if name[:1] == "a" and hasattr(kind, name[1:]) and not verb.__doc__:
            verb.__doc__ = f"`{name[1:]}`, awaited."
    return kind


def is_async(function: Any, decorator: str) -> bool:
    """Is a coroutine function decorated so, or one that is called plainly? OptionError: it is neither."""
    if not callable(function) or isinstance(function, (type, staticmethod, classmethod)):
        raise OptionError(
            f"{decorator} stands on {function!r}: put it on a function, below @staticmethod or @classmethod"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__qualname__", function)
        raise OptionError(f"{decorator} stands on {name}, which is a generator function: say `with` inside of it")
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
