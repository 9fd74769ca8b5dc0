"""What happens, as frozen values for observers. None is built on a local hit, and none holds a cached value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "BadBytes", "Computed", "EngineDown", "EngineUp", "Event", "Failed", "Found", "Invalidated", "LeaseLost",
    "Note", "Observer", "Served", "Unkept", "Untold", "Waited",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """`scope` is the function (or "" for a cache's own verbs), `key` the whole key."""

    scope: str
    key: str


@dataclass(frozen=True, slots=True)
class Found(Event):
    """A shared engine had the value: a hit beyond the local tier. `cost`: the seconds that computing it took."""

    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Waited(Event):
    """The caller was given what another caller computed, after so many seconds. `cost`: the seconds that computing it
    took, as far as is known."""

    seconds: float
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Served(Event):
    """The caller was given a value that was stale, or due, during a computation or after a failure; or one that this
    process has kept while the engine is down."""

    why: str  # "computing" | "failed" | "resting" | "full" (its origin is) | "outage" (of the engine)


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """This process computed the value. `why`: missing, early, stale, refresh, alone (unstored: outage, deadlock)."""

    why: str
    cost: float
    stored: bool


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """This process's computation raised."""

    why: str
    cost: float
    error: BaseException


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """The lease ended before the fill: the value went to its caller and was not stored. `max_hold` tells for how long
    it would have been renewed, if the computation took longer than that; None, if it was lost otherwise. `invalidated`:
    here or by another process, which is as it should be."""

    max_hold: float | None = None
    invalidated: bool = False


@dataclass(frozen=True, slots=True)
class Unkept(Event):
    """The value can't be stored: `why` tells (too large, cache_if, no codec for it). It went to its callers; with
    `strict`, they were raised an error."""

    why: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class BadBytes(Event):
    """The engine held bytes that the codec doesn't believe: a miss."""

    why: str


@dataclass(frozen=True, slots=True)
class Invalidated(Event):
    """`invalidate`, `expire`, `set`, `invalidate_all`, `expire_all` or `clear` was called here."""

    verb: str


@dataclass(frozen=True, slots=True)
class EngineDown(Event):
    """The engine can't be asked; calls go on without it, unless it is `strict`: `on_engine_error="raise"`."""

    engine: str
    error: BaseException
    strict: bool = False


@dataclass(frozen=True, slots=True)
class EngineUp(Event):
    """The engine answers again, after so many seconds."""

    engine: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Untold(Event):
    """The engine doesn't tell of changes as it should: `how` is what it says, and what is done instead."""

    engine: str
    how: str


Observer: TypeAlias = Callable[[Event], object]

Note: TypeAlias = Callable[..., object]
"""Takes the class of an event and its fields: an event of which nobody wants to hear needn't be made."""
