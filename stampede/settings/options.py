"""The options of a computation, as one frozen `Policy`. Decorators, methods and settings use the same names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from math import inf, isnan
from typing import Any, Protocol, TypeAlias

from stampede.errors import OptionError

__all__ = [
    "DEFAULT", "LONGEST", "MOST_TAGS", "NUMBER", "OPTIONS", "UNITS", "Policy", "Seconds", "TimeToLive", "checked_tags",
    "duration", "nearest", "seconds",
]  # fmt: skip

Seconds: TypeAlias = float | str | timedelta | None


class TtlOf(Protocol):
    """A function that returns the ttl of a value. For a decorated function, it may also take arguments of the call."""

    def __call__(self, value: Any, /, *args: Any, **kwargs: Any) -> Seconds: ...


TimeToLive: TypeAlias = Seconds | TtlOf

LONGEST = 100 * 365.25 * 24 * 3600
"""The longest duration in seconds, except for ever. The time-outs of the operating system have a maximum, too."""


MOST_TAGS, LONGEST_TAG = 128, 256
"""The most tags of an entry, and the most characters of a tag."""


NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"\s*".join(f"(?:{NUMBER}{unit}(?![a-z]))?" for unit in UNITS))


def duration(name: str, value: Any) -> Any:
    """Return the seconds of a text such as "500ms", "10m", "1h30m" or "90", and inf for "forever". A value that is not
    a text is returned unchanged. Raise OptionError with this name if the text is no duration."""
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
    """Return the seconds of a number, a text or a timedelta; None is for ever. Raise OptionError with this name if the
    value is negative, longer than a hundred years, or no duration."""
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
    """Return a hint for a misspelt name: the name that is most like it, or else all names."""
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
        raise OptionError(f"{name} is {value!r}: give a fraction of ttl, at least 0 and less than 1")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}: give True or False")
    return value


def _name(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionError(f"{name} is {value!r}: give the name of an origin in the settings, or None")
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


def checked_tags(name: str, tags: Any, *, of_entry: bool = True) -> tuple[str, ...]:
    """Return the tags without repetitions. Raise OptionError, with this name of the option, if one of them is none."""
    if isinstance(tags, (str, bytes, Iterator)) or not isinstance(tags, Iterable):
        raise OptionError(f"{name} is {tags!r}: give a list of strings")
    given = list(tags)
    for tag in given:
        if not isinstance(tag, str) or not 0 < len(tag) <= LONGEST_TAG:
            raise OptionError(f"{name} has {tag!r:.300}: a tag is a string of 1 to {LONGEST_TAG} characters")
    found = tuple(dict.fromkeys(given))
    if of_entry and len(found) > MOST_TAGS:
        raise OptionError(f"{name} has {len(found)} tags: an entry has at most {MOST_TAGS}")
    return found


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return a field for an option. `check(name, value)` returns the value to store, or raises OptionError."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True)
class Policy:
    """The options of one function or call. Only `with_options` checks them, so it is the way to make a policy."""

    ttl: float | Callable[[Any], Any] = _option(300.0, _ttl)  # noqa: RUF009  # it returns a field
    stale: float = _option(0.0, seconds)
    early: float = _option(1.0, _finite)
    background: bool = _option(False, _flag)
    lease: float = _option(10.0, _positive)
    max_hold: float | None = _option(None, _hold)  # None: 60 s, or 10 x the key's known cost if that is more
    wait: float | None = _option(None, _optional)
    patience: float | None = _option(None, _bounded)
    deadline: float | None = _option(None, _optional)
    retry_after: float = _option(0.0, _finite)
    jitter: float = _option(0.0, _fraction)
    cache_if: Callable[[Any], object] | None = _option(None, _predicate)  # noqa: RUF009  # likewise
    raises: tuple[type[BaseException], ...] = _option((), _exceptions)
    strict: bool = _option(False, _flag)
    origin: str | None = _option(None, _name)
    tags: tuple[str, ...] = _option((), checked_tags)
    refresh_by: Callable[[], object] | None = None  # of one call: asks a worker to refresh the value
    refuses_stale: bool = False  # the user set stale=0: even an entry that is stored longer is not served stale
    # Derived from the options above.
    limit: float | None = field(init=False)  # seconds that a caller waits for others: the shorter of wait and deadline
    beside: bool = field(init=False)  # a computation may continue without its caller

    def __post_init__(self) -> None:
        limit, deadline = self.wait, self.deadline
        if deadline is not None and (limit is None or deadline < limit):
            limit = deadline
        object.__setattr__(self, "limit", limit)
        beside = self.background or self.patience is not None or deadline is not None
        object.__setattr__(self, "beside", beside)

    def with_options(self, **options: Any) -> Policy:
        """Return a copy with some options changed. Raise OptionError for an option that is unknown or invalid."""
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
        """Return a copy for the next step of a call that takes several steps, such as several waits. `waited` is the
        time that the caller has waited for others, and is subtracted from `wait`. `gone` is all the time since the call
        began, and is subtracted from `patience` and `deadline`."""
        spent = {"wait": waited, "patience": gone, "deadline": gone}
        given = {name: getattr(self, name) for name in spent}
        return self.with_options(
            **{name: max(seconds - spent[name], 0.0) for name, seconds in given.items() if seconds is not None}
        )

    def ttl_of(self, value: Any) -> float:
        """Return the seconds for which this value is fresh, before jitter."""
        return seconds("ttl (as the function returned it)", self.ttl(value)) if callable(self.ttl) else self.ttl

    def hold_of(self, cost: float) -> float:
        """Return the seconds for which a lease is renewed in total, given the key's known cost."""
        return max(60.0, 10.0 * cost) if self.max_hold is None else self.max_hold


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    each.name: each.metadata["check"] for each in fields(Policy) if each.metadata
}
OPTIONS = tuple(_CHECKS)

DEFAULT = Policy()
