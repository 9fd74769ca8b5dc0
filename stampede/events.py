"""Events for observers, as frozen dataclasses. A local hit builds none, and none holds a cached value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "BadBytes", "Computed", "EngineDown", "EngineUp", "Event", "Failed", "Found", "Invalidated", "LeaseLost",
    "Note", "Observer", "Postponed", "Served", "Unkept", "Untold", "Waited",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """The base of all events. `scope` is the function, or "" for a cache's own verbs; `key` is the whole key."""

    scope: str
    key: str


@dataclass(frozen=True, slots=True)
class Found(Event):
    """A value found in a shared engine: a hit beyond the local tier. `cost`: the seconds that computing it took."""

    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Waited(Event):
    """A value that another caller computed, for which this caller waited `seconds`. `cost` is the seconds that
    computing it took, if known."""

    seconds: float
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Served(Event):
    """A stale or due value that was served during a computation or after a failure; or, while the engine is down, a
    value that this process kept."""

    why: str  # "computing" | "failed" | "resting" | "full" (the origin) | "outage" (of the engine)


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """A value that this process computed. `why` is missing, early, stale, refresh, or alone (for one caller and not
    stored, as waiting for another computation might be a deadlock)."""

    why: str
    cost: float
    stored: bool


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A computation of this process that raised."""

    why: str
    cost: float
    error: BaseException


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """A lease that ended before the fill: its caller got the value, which was not stored. `max_hold` is the limit in
    seconds that the computation exceeded; None if the lease was lost otherwise. `invalidated`: the key was invalidated
    or set, here or by another process, so nothing is wrong."""

    max_hold: float | None = None
    invalidated: bool = False


@dataclass(frozen=True, slots=True)
class Unkept(Event):
    """A value that isn't stored. `why` is the reason (too large, cache_if, no codec for it). Callers got the value; if
    `strict`, they got an error instead. `wanted`: the function or its options asked for this."""

    why: str
    strict: bool = False
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class BadBytes(Event):
    """Bytes of the engine that the codec refused, which counts as a miss."""

    why: str


@dataclass(frozen=True, slots=True)
class Invalidated(Event):
    """A call of `invalidate`, `expire`, `set`, `invalidate_tags`, `expire_tags`, `invalidate_all`, `expire_all` or
    `clear` in this process. For tags, `key` has their names, with commas between them."""

    verb: str


@dataclass(frozen=True, slots=True)
class Postponed(Event):
    """An invalidation that the engine could not make, and that this process repeats (`on_error="later"`)."""

    verb: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class EngineDown(Event):
    """An engine that can't be used. Calls go on without it; if `strict` (`on_engine_error="raise"`), they raise."""

    engine: str
    error: BaseException
    strict: bool = False


@dataclass(frozen=True, slots=True)
class EngineUp(Event):
    """An engine that answers again, after an outage of `seconds`."""

    engine: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Untold(Event):
    """An engine that does not notify this process of changes. `how` is its answer, and what is done instead."""

    engine: str
    how: str


Observer: TypeAlias = Callable[[Event], object]

Note: TypeAlias = Callable[..., object]
"""Takes an event's class and fields, so that an event without observers is never built."""
