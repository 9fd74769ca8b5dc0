"""Counts of what happened in this process, by scope."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stampede import decisions, events

__all__ = ["Counters", "Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """What happened in this process since the cache was made. `hits` come from the local tier, all else from events."""

    hits: int = 0  # from the local tier
    found: int = 0  # from the engine
    waits: int = 0  # were given what somebody else computed
    waited_seconds: float = 0.0
    served: Mapping[str, int] = field(default_factory=dict)  # stale or due, by why: computing, failed, resting
    computed: Mapping[str, int] = field(default_factory=dict)  # by why: missing, early, stale, refresh, alone
    failed: int = 0  # computations that raised
    cost_total: float = 0.0  # seconds spent on computations, the failed ones too
    cost_max: float = 0.0
    lease_lost: int = 0
    unkept: int = 0
    bad_bytes: int = 0
    invalidated: int = 0  # calls of invalidate, expire, set, invalidate_all, clear
    engine_downs: int = 0  # of the cache's engine, also in what a function tells
    untold: int = 0  # servers that don't tell of changes as they should

    @property
    def computations(self) -> int:
        """Computations that this process ended, whatever for, the failed ones too."""
        return sum(self.computed.values()) + self.failed

    @property
    def ratio(self) -> float:
        """The part of all answers that was there already, 0 to 1; what was waited for was not. 0 before any call."""
        there = self.hits + self.found + sum(self.served.values())
        return there / answers if (answers := there + self.waits + self.computations) else 0.0


_Tally: TypeAlias = "defaultdict[Any, Any]"  # a field's name, or (name, why), to its count so far


class Counters:
    """An observer that counts: `counters.of("shop.report")`, `counters.total()`."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def __call__(self, event: events.Event) -> None:
        kind = type(event)
        self.count(kind, event.scope, *(getattr(event, name) for name in kind.__slots__))

    def count(self, kind: type[events.Event], scope: str, *what: Any) -> None:
        """The same of an event that hasn't been made."""
        add = _ADD.get(kind)
        if add is None:
            return
        with decisions.lock:
            tally = self._tallies.get(scope)
            if tally is None:
                tally = self._tallies[scope] = defaultdict(int)
            if isinstance(add, str):
                tally[add] += 1
            else:
                add(tally, *what)

    def of(self, scope: str) -> Stats:
        """The counts of one scope; of one that nothing happened in, zeros."""
        with decisions.lock:
            return _stats([self._tallies.get(scope, defaultdict(int))])

    def total(self) -> Stats:
        """The counts of all scopes together."""
        with decisions.lock:
            return _stats(self._tallies.values())

    def scopes(self) -> list[str]:
        """Where anything happened."""
        with decisions.lock:
            return sorted(self._tallies)


def _waited(tally: _Tally, seconds: float) -> None:
    tally["waits"] += 1
    tally["waited_seconds"] += seconds


def _served(tally: _Tally, why: str) -> None:
    tally["served", why] += 1


def _computed(tally: _Tally, why: str, cost: float, stored: bool) -> None:
    tally["computed", why] += 1
    _spend(tally, cost)


def _failed(tally: _Tally, why: str, cost: float, error: BaseException) -> None:
    tally["failed"] += 1
    _spend(tally, cost)


def _spend(tally: _Tally, cost: float) -> None:
    tally["cost_total"] += cost
    tally["cost_max"] = max(tally["cost_max"], cost)


_ADD: dict[type[events.Event], str | Callable[..., None]] = {
    events.Found: "found",
    events.Waited: _waited,
    events.Served: _served,
    events.Computed: _computed,
    events.Failed: _failed,
    events.LeaseLost: "lease_lost",
    events.Unkept: "unkept",
    events.BadBytes: "bad_bytes",
    events.Invalidated: "invalidated",
    events.EngineDown: "engine_downs",
    events.Untold: "untold",
}
"""What each adds: one to the field of that name, or what is worked out."""


def _stats(tallies: Iterable[_Tally]) -> Stats:
    plain: dict[str, Any] = {}
    by_why: dict[str, Any] = {}
    for tally in tallies:
        for name, count in tally.items():
            if isinstance(name, tuple):
                whys = by_why.setdefault(name[0], {})
                whys[name[1]] = whys.get(name[1], 0) + count
            elif name == "cost_max":
                plain[name] = max(plain.get(name, 0.0), count)
            else:
                plain[name] = plain.get(name, 0) + count
    return Stats(**plain, **by_why)
