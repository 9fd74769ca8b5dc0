"""Options that are functions of a call: they are given those of its arguments that they name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from inspect import _ParameterKind as Kind
from typing import Any

from stampede.definitions import signature_of
from stampede.errors import KeyingError, OptionError
from stampede.keys.compose import quoted
from stampede.keys.maker import Code, KeyMaker
from stampede.keys.parameters import Parameters
from stampede.policy import nearest

__all__ = ["arguments_named", "in_namespace_of", "ttl_of_call"]


def arguments_named(option: str, function: Callable[..., Any], parameters: Parameters, *, after: int = 0) -> list[str]:
    """The arguments that it asks for, behind so many of its parameters; OptionError if a call has no such argument."""
    if inspect.iscoroutinefunction(function):
        raise OptionError(f"{option} is {function!r}: give a plain function")
    try:
        asked = list(signature_of(function).parameters.values())[after:]
    except (TypeError, ValueError):
        return []  # a builtin that doesn't tell
    names = []
    for each in asked:
        if each.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD):
            continue
        if each.name in parameters.names and each.kind is not Kind.POSITIONAL_ONLY:
            names.append(each.name)
        elif each.default is inspect.Parameter.empty:
            hint = nearest(each.name, parameters.names) if parameters.names else "it has none"
            raise OptionError(
                f"{option} asks for {each.name!r}, which is no parameter of {parameters.qualname}: {hint}"
            )
    return names


def ttl_of_call(ttl: Any, parameters: Parameters) -> tuple[Callable[..., Callable[[Any], Any]] | None, frozenset[str]]:
    """From a call's arguments to a function of the value, and which of them it asks for; None if of the value only."""
    names = arguments_named("ttl", ttl, parameters, after=1) if callable(ttl) else []
    if not names:
        return None, frozenset()
    code = Code(parameters)
    source = f"    return {code.name(partial, '_partial')}({code.name(ttl, '_ttl')}, {_passed(names)})"
    return code.function([source]), frozenset(names)


def in_namespace_of(namespace: Callable[..., Any], parameters: Parameters, prefix: str, make: KeyMaker) -> KeyMaker:
    """The same keys, in the namespace that the function gives for these arguments."""
    names, code = arguments_named("namespace", namespace, parameters), Code(parameters)
    text, rest = code.name(partial(_text, parameters.qualname)), code.name(make, "_rest")
    own = f"{code.name(namespace, '_namespace')}({_passed(names)})"
    start = code.name(prefix, "_prefix")
    return code.function([f"    return f'{{{start}}}{{{text}({own})}}/{{{rest}({parameters.passing()})}}'"])


def _passed(names: list[str]) -> str:
    return ", ".join(f"{name}={name}" for name in names)


def _text(qualname: str, namespace: object) -> str:
    if not isinstance(namespace, (str, int)):
        raise KeyingError(f"{qualname}: namespace gave {namespace!r}: it must be a string or a number")
    return quoted(str(namespace))
