"""Generated code for hits: it reads the function's own table and the clock, and calls nothing else. A key of that table
is exact only for arguments of a few classes (`FAST_TYPES`); other values are never put into the table. Names in the
generated code can't clash with those of parameters."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

from stampede.keys import FAST_IDS, GENERATED, Parameters
from stampede.local_tier.residents import Resident
from stampede.runtime.definitions import signature_of

__all__ = ["FastHit"]

_CALL = """\
{colour}def {name}({declaration}):
    {bind}
    return {wait}slow_({passing})
"""

_HIT = """\
{colour}def {name}({declaration}):
    {bind}
    try:
        {own}
        e_ = fast_[{key}]
        if e_.end > (n_ := now_()) and (
            e_.stamp is None or (e_.pulse.until > n_ and e_.stamps[e_.slot] == e_.stamp)
        ):
            e_.hits += 1
            return e_.value
    except fail_:
        pass
    return {wait}slow_({passing})
"""

_KEY = """\
def {name}({parameters}):
    {own}
    return {key}
"""


class FastHit:
    """One function's table of hits, and the generated code that reads it."""

    def __init__(
        self, function: Callable[..., Any], parameters: Parameters, *, suspending: bool, bound: bool, pure: bool
    ) -> None:
        """`bound`: the first parameter is self or cls. `pure`: equal arguments always have equal keys."""
        self.fast: dict[Any, Resident] = {}
        self._function = function
        self._parameters = parameters
        self._suspending = suspending
        self._first, self._rest = _split(function, parameters) if bound else (None, parameters)
        self._of_method = bound
        self.enabled = pure and parameters.plain  # else the table is never read
        self._key_of = self._compiled(_KEY, lambda: None) if self.enabled else None

    def call(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """Return the generated function, which calls `slow` unless it hits. For a method, it is the `__call__` of the
        bound object, whose `__self__` is the first argument."""
        if self._of_method and self._first is None:
            return lambda bound, /, *args, **kwargs: slow(bound.__self__, *args, **kwargs)
        return self._compiled(_HIT if self.enabled else _CALL, slow)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return the key under which a hit looks for these arguments. None: other arguments might have an equal key."""
        if self._key_of is None:
            return None
        try:
            key: tuple[Any, ...] = self._key_of(*args, **kwargs)
        except Exception:
            return None  # an object without __stampede_key__, or with one that fails
        pairs = key[1:] if self._of_method else key
        # Compare by identity: a metaclass may make its classes equal to others.
        return key if FAST_IDS.issuperset(map(id, pairs[::2])) else None

    def _compiled(self, template: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        first, rest, new = self._first, self._rest, self._parameters.fresh_name
        declaration, passing, pairs = rest.declaration(), rest.passing(), rest.pairs(new("type_"))
        bind = own = "pass"
        if first is not None:
            declaration, passing = rest.declaration(new("bound_")), f"{first}, {passing}"
            bind = f"{first} = {new('bound_')}.__self__"
            pairs = f"({new('type_')}({first}), {pairs[1:]}"
            if first not in self._parameters.ignored:
                own = f"{new('own_')} = {first}.__stampede_key__()"
                pairs = pairs.replace(", ", f", {new('type_')}({new('own_')}), {new('own_')}, ", 1)
        for name in ("slow_", "e_", "fast_", "now_", "n_", "fail_"):
            template = template.replace(name, new(name))
        name = self._function.__name__
        source = template.format(
            colour="async " if self._suspending and template[0] == "{" else "",
            wait="await " if self._suspending else "",
            name=name if name.isidentifier() and not iskeyword(name) else "cached",
            declaration=declaration,
            parameters=self._parameters.declaration(),
            passing=passing,
            bind=bind,
            own=own,
            key=pairs,
        )
        names = {
            new("slow_"): slow,
            new("fast_"): self.fast,
            new("now_"): time.monotonic,
            new("type_"): type,
            new("fail_"): Exception,  # whatever an argument's own __hash__ raises, the slow way reports it
            **self._parameters.defaults,
            **rest.defaults,
        }
        made: dict[str, Any] = {}
        exec(_factory(source, names), {}, made)
        function: Callable[..., Any] = made["factory"](*names.values())
        return function


def _factory(source: str, names: dict[str, Any]) -> Any:
    """Return code that defines the function inside another one: its closure is faster than globals, and hidden."""
    lines = [f"def factory({', '.join(names)}):", *(f"    {line}" for line in source.splitlines())]
    name = source.partition("def ")[2].partition("(")[0]
    return compile("\n".join([*lines, f"    return {name}"]), f"{GENERATED}{name}>", "exec")


def _split(function: Callable[..., Any], parameters: Parameters) -> tuple[str | None, Parameters]:
    """Return the first parameter's name and the other parameters. None: there is no first one, or it takes many."""
    if not parameters.all or parameters.all[0].kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ):
        return None, parameters
    first = parameters.all[0].name
    signature = signature_of(function)

    def rest() -> None: ...

    rest.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    rest.__qualname__ = function.__qualname__
    return first, Parameters(rest, parameters.ignored - {first})
