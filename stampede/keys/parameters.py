"""A function's signature, in the form that code generation needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from string import Formatter
from types import BuiltinFunctionType, NoneType
from typing import Any

from stampede.errors import OptionError
from stampede.runtime.definitions import signature_of
from stampede.settings.options import nearest

Kind = inspect.Parameter
"""The class whose attributes are the kinds of parameters."""

FAST_TYPES = frozenset({int, str, bytes, bool, NoneType})
"""Types whose values compare as exactly as their keys do, if the class is compared as well."""

FAST_IDS = frozenset(map(id, FAST_TYPES))

_ANYTHING = inspect.Signature(
    [inspect.Parameter("args", Kind.VAR_POSITIONAL), inspect.Parameter("kwargs", Kind.VAR_KEYWORD)]
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function. `default_name` is the name of its default in generated code."""

    name: str
    kind: Any  # one of `Kind`
    default: Any
    default_name: str
    ignored: bool

    @property
    def has_default(self) -> bool:
        return self.default is not inspect.Parameter.empty

    @property
    def declared(self) -> str:
        """The parameter's source text in a list of parameters."""
        return f"{_STARS.get(self.kind, '')}{self.name}{f'={self.default_name}' if self.has_default else ''}"

    @property
    def passed(self) -> str:
        """The parameter's source text in a call."""
        return f"{self.name}={self.name}" if self.kind is Kind.KEYWORD_ONLY else _STARS.get(self.kind, "") + self.name


_STARS: dict[Any, str] = {Kind.VAR_POSITIONAL: "*", Kind.VAR_KEYWORD: "**"}


class Parameters:
    """The parameters of a function, in order, and the source text that declares and passes them."""

    def __init__(self, fn: Callable[..., object], ignore: Collection[str] = ()) -> None:
        signature = _signature(fn)
        self.qualname: str = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.names = list(signature.parameters)
        self._suffix = _unused_suffix(self.names)
        self.ignored = frozenset([ignore] if isinstance(ignore, str) else ignore)
        self.all = tuple(
            Parameter(p.name, p.kind, p.default, self.fresh_name(f"_d{number}"), p.name in self.ignored)
            for number, p in enumerate(signature.parameters.values())
        )
        # With **kwargs a call may pass any name, and `ignore` may name it.
        self.open = any(parameter.kind is Kind.VAR_KEYWORD for parameter in self.all)
        self.plain = all(parameter.kind not in _STARS for parameter in self.all)
        for name in () if self.open else self.ignored.difference(self.names):
            hint = nearest(name, self.names) if self.names else "it has no parameters"
            raise OptionError(f"ignore names {name!r}, which is not a parameter of {self.qualname}: {hint}")

    @property
    def keyed(self) -> tuple[Parameter, ...]:
        """The parameters that are part of the key."""
        return tuple(parameter for parameter in self.all if not parameter.ignored)

    def absent(self, key: Any = None) -> frozenset[str]:
        """Return the names of the parameters that are not part of the key; none if `key` is a function."""
        if key is None:
            return self.ignored.intersection(self.names)
        return frozenset(self.names) - names_in(key) if isinstance(key, str) else frozenset()

    @property
    def defaults(self) -> dict[str, Any]:
        """The default objects by their names in `declaration`, for the namespace of the generated code."""
        return {p.default_name: p.default for p in self.all if p.has_default}

    def declaration(self, first: str = "") -> str:
        """Return the source text of the parameters: `customer, /, b=_d1, *, year=_d2`. `first` is put before them."""
        parts = [first] if first else []
        before: Any = Kind.POSITIONAL_ONLY if first else None
        for parameter in self.all:
            if before is Kind.POSITIONAL_ONLY and parameter.kind is not before:
                parts.append("/")
            if parameter.kind is Kind.KEYWORD_ONLY and before not in (Kind.KEYWORD_ONLY, Kind.VAR_POSITIONAL):
                parts.append("*")
            parts.append(parameter.declared)
            before = parameter.kind
        return ", ".join([*parts, "/"] if before is Kind.POSITIONAL_ONLY else parts)

    def passing(self) -> str:
        """Return the source text that passes the parameters on: `customer, b, year=year`."""
        return ", ".join([parameter.passed for parameter in self.all])

    def pairs(self, type_name: str) -> str:
        """Return the source text of a tuple of the keyed parameters: class, value, class, value ... The tuple is as
        exact as the canonical key if every class is in FAST_TYPES. For `plain` signatures only."""
        return f"({''.join(f'{type_name}({p.name}), {p.name}, ' for p in self.keyed)})"

    def fresh_name(self, base: str) -> str:
        """Return a name that no parameter has: `base`, and a suffix with which no parameter's name ends."""
        return base + self._suffix


def names_in(template: str, option: str = "key") -> frozenset[str]:
    fields = fields_in(template, option)
    return frozenset([field.partition(".")[0].partition("[")[0] for field in fields])


def fields_in(template: str, option: str = "key") -> set[str]:
    """Return the fields of a format string, also those nested in format specs."""
    try:
        parsed = [(field, spec or "") for _, field, spec, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise OptionError(f"{option} is {template!r}, which is not a valid format string: {error}") from error
    return {field for field, _ in parsed}.union(*[fields_in(spec, option) for _, spec in parsed])


def _unused_suffix(names: list[str]) -> str:
    suffix = "_"
    while any(name.endswith(suffix) for name in names):
        suffix += "_"
    return suffix


def _signature(fn: Callable[..., object]) -> inspect.Signature:
    try:
        signature = signature_of(fn)
    except ValueError:  # a builtin without a signature
        return _ANYTHING
    inmost = inspect.unwrap(fn)
    of_c = isinstance(inmost, BuiltinFunctionType) or type(inmost).__name__ == "ufunc"
    if of_c and any(p.default is not p.empty for p in signature.parameters.values()):
        return _ANYTHING  # to pass such a default may mean something else than to leave it out
    return signature
