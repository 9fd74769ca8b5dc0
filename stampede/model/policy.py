"""The options of a computation, the same names everywhere: one frozen `Policy`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from math import inf, isnan
from typing import Any, Protocol, TypeAlias

from stampede.errors import OptionError

__all__ = [
    "DEFAULT", "LONGEST", "NUMBER", "OPTIONS", "UNITS", "Policy", "Seconds", "TimeToLive", "duration", "nearest",
    "seconds",
]  # fmt: skip

Seconds: TypeAlias = float | str | timedelta | None


class TtlOf(Protocol):
    """A function of the value; a decorated function's may name arguments of the call besides."""

    def __call__(self, value: Any, /, *args: Any, **kwargs: Any) -> Seconds: ...


TimeToLive: TypeAlias = Seconds | TtlOf

LONGEST = 100 * 365.25 * 24 * 3600
"""No duration is longer, unless it is for ever: what waits for it asks the system for a time-out, which has an end."""


NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"\s*".join(f"(?:{NUMBER}{unit}(?![a-z]))?" for unit in UNITS))


def duration(name: str, value: Any) -> Any:
    """Seconds out of a text such as "500ms", "10m", "1h30m" or "90"; inf out of "forever"; all else as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text == "forever":
        return inf
    if re.fullmatch(NUMBER, text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise OptionError(f"{name} is {value!r}: give seconds, or a text such as '500ms', '10m', '1h30m', 'forever'")
    return sum(float(number) * unit for number, unit in zip(match.groups(), UNITS.values(), strict=True) if number)


def seconds(name: str, value: object) -> float:
    """A number of seconds out of a number, a text or a timedelta, of a hundred years at most; None is for ever."""
    value = duration(name, value)
    if value is None:
        return inf
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name} is {value!r}: give seconds, a text such as '10m', a timedelta, or None for ever")
    try:
        number = float(value)
    except OverflowError:
        number = 2 * LONGEST
    if LONGEST < number < inf:
        raise OptionError(f"{name} is more than a hundred years: give {LONGEST:.0f} seconds at most")
    if isnan(number) or number < 0:
        raise OptionError(f"{name} is {value!r}: it must be at least 0")
    return number


def nearest(name: str, names: Collection[str]) -> str:
    """A hint for a misspelt name: what it may have been, else what there is."""
    close = get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(set(names)))}"


def _ttl(name: str, value: Any) -> Any:
    return value if callable(value) else seconds(name, value)


def _finite(name: str, value: Any) -> float:
    number = seconds(name, value)
    if number == inf:
        raise OptionError(f"{name} is {value!r}: it must be a finite number of seconds")
    return number


def _positive(name: str, value: Any) -> float:
    number = _finite(name, value)
    if number <= 0:
        raise OptionError(f"{name} is {value!r}: it must be more than 0")
    return number


def _optional(name: str, value: Any) -> float | None:
    return None if value is None or value == "forever" else _finite(name, value)


def _bounded(name: str, value: Any) -> float | None:
    return None if value is None else _finite(name, value)


def _hold(name: str, value: Any) -> float | None:
    return None if value is None else _positive(name, value)


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise OptionError(f"{name} is {value!r}: give a fraction of ttl, from 0 up to, but without, 1")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}: give True or False")
    return value


def _name(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionError(f"{name} is {value!r}: give a name, as the settings have it, or None")
    return value


def _predicate(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise OptionError(f"{name} is {value!r}: give a function of the value, or None")
    return value


def _exceptions(name: str, value: Any) -> tuple[type[BaseException], ...]:
    kinds = value if isinstance(value, tuple) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise OptionError(f"{name} holds {kind!r}: give an exception class, or a tuple of them")
    return kinds


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """An option, and what makes of a value for it what is kept, or an error that names it."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class Policy:
    """How one function's values are computed, kept and served. Made by `with_options`, which checks each."""

    ttl: float | Callable[[Any], Any] = _option(300.0, _ttl)  # noqa: RUF009  # it is a field
    stale: float = _option(0.0, seconds)
    early: float = _option(1.0, _finite)
    background: bool = _option(False, _flag)
    lease: float = _option(10.0, _positive)
    max_hold: float | None = _option(None, _hold)  # None: 60 s, or 10 x the key's known cost where that is more
    wait: float | None = _option(None, _optional)
    patience: float | None = _option(None, _bounded)
    deadline: float | None = _option(None, _optional)
    retry_after: float = _option(0.0, _finite)
    jitter: float = _option(0.0, _fraction)
    cache_if: Callable[[Any], object] | None = _option(None, _predicate)  # noqa: RUF009  # likewise
    raises: tuple[type[BaseException], ...] = _option((), _exceptions)
    strict: bool = _option(False, _flag)
    origin: str | None = _option(None, _name)
    refuses_stale: bool = False  # stale=0 was said, and isn't just the default: what is kept is not served, either
    # What follows from these.
    limit: float | None = field(init=False)  # seconds that a caller waits for others: the shorter of wait and deadline
    beside: bool = field(init=False)  # what is computed may go on without its caller

    def __post_init__(self) -> None:
        limit, deadline = self.wait, self.deadline
        if deadline is not None and (limit is None or deadline < limit):
            limit = deadline
        object.__setattr__(self, "limit", limit)
        beside = self.background or self.patience is not None or deadline is not None
        object.__setattr__(self, "beside", beside)

    def with_options(self, **options: Any) -> Policy:
        """The same policy with some options changed, each checked; OptionError names the wrong one."""
        if not options:
            return self
        for name in options:
            if name not in _CHECKS:
                raise OptionError(f"there is no option {name!r}: {nearest(name, list(_CHECKS))}")
        checked = {name: _CHECKS[name](name, value) for name, value in options.items()}
        if "stale" in checked:
            checked["refuses_stale"] = checked["stale"] == 0
        return replace(self, **checked)

    def after(self, waited: float, gone: float) -> Policy:
        """One `wait` is for all that a caller waits for, one after the other; and of the others, all its time is a
        part."""
        spent = {"wait": waited, "patience": gone, "deadline": gone}
        given = {name: getattr(self, name) for name in spent}
        return self.with_options(
            **{name: max(seconds - spent[name], 0.0) for name, seconds in given.items() if seconds is not None}
        )

    def ttl_of(self, value: Any) -> float:
        """Seconds of freshness for this value, before jitter."""
        return seconds("ttl (as the function gave it)", self.ttl(value)) if callable(self.ttl) else self.ttl

    def hold_of(self, cost: float) -> float:
        """Seconds for which a lease is renewed in all, given the key's known cost."""
        return max(60.0, 10.0 * cost) if self.max_hold is None else self.max_hold


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    each.name: each.metadata["check"] for each in fields(Policy) if each.metadata
}
OPTIONS = tuple(_CHECKS)

DEFAULT = Policy()
