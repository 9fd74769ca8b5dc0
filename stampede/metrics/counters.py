"""Counters of the events in this process, by scope."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import DEBUG
from typing import Any, TypeAlias

from stampede import events
from stampede.metrics.log import DAILY, log
from stampede.metrics.table import BOUNDS, COST, WAIT, Metric, listeners
from stampede.runtime import process_lock

__all__ = ["Counters", "Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """The counts of one cache or function in this process, since the cache was made."""

    hits: int = 0  # values from the local tier
    found: int = 0  # values from the engine
    waits: int = 0  # values that another caller computed meanwhile
    waited_seconds: float = 0.0
    served: Mapping[str, int] = field(default_factory=dict)  # by reason: computing, failed, resting, full, outage
    computed: Mapping[str, int] = field(default_factory=dict)  # by reason: missing, early, stale, refresh, alone
    failed: int = 0  # computations that raised
    cost_total: float = 0.0  # seconds spent on computations, including those that failed
    cost_max: float = 0.0
    lease_lost: int = 0
    unkept: int = 0  # values that could not be stored
    bad_bytes: int = 0  # entries that the codec refused to read
    invalidated: int = 0  # calls of invalidate, expire, set, invalidate_all, clear
    engine_downs: int = 0  # outages of the cache's engine, also in the counts of a function
    untold: int = 0  # servers that do not announce changes as they should
    postponed: int = 0  # invalidations that the engine could not make at first
    waited_within: Mapping[float, int] = field(default_factory=dict)  # waits, by the upper end of the bucket in seconds
    cost_within: Mapping[float, int] = field(default_factory=dict)  # computations, by the upper end of the bucket
    engine_down_seconds: float = 0.0  # for which the engine was down, including the current outage
    saved_seconds: float = 0.0  # the known costs of the values that hits and waits did not compute

    @property
    def computations(self) -> int:
        """The number of computations that ended in this process, also by an error. `unkept` ones are not among them."""
        return sum(self.computed.values()) + self.failed

    @property
    def ratio(self) -> float:
        """The part of all answers that were there at once, without a wait, from 0 to 1. 0 before the first call."""
        there = self.hits + self.found + sum(self.served.values())
        return there / answers if (answers := there + self.waits + self.computations) else 0.0


_Tally: TypeAlias = "defaultdict[Any, Any]"  # counts, by a field's name, or by (name, reason)


class Counters:
    """An observer that counts: `counters.of("shop.report")`, `counters.total()`. `label` names its cache in metrics."""

    def __init__(self, label: str | None = None) -> None:
        self._label = label
        self.all_are_heard = False  # True if there are observers besides the log, so that every event is needed
        self._tallies: dict[str, _Tally] = {}

    def __call__(self, event: events.Event) -> None:
        kind = type(event)
        self.count(kind, event.scope, *(getattr(event, name) for name in kind.__slots__))

    def note(
        self, emit: Callable[[events.Event], object], kind: type[events.Event], scope: str, key: str, *what: Any
    ) -> None:
        """Report what happened to all observers, including this one. An event that no other observer needs is only
        counted, and not made."""
        if self.all_are_heard or kind not in DAILY or log.isEnabledFor(DEBUG):
            emit(kind(scope, key, *what))
        else:
            self.count(kind, scope, *what)

    def count(self, kind: type[events.Event], scope: str, *what: Any) -> None:
        """Count what happened, without an event object. `what` are the fields after `key`."""
        add = _ADD.get(kind)
        if add is None:
            return
        with process_lock.lock:
            tally = self._tallies.get(scope)
            if tally is None:
                tally = self._tallies[scope] = defaultdict(int)
            if isinstance(add, str):
                tally[add] += 1
            else:
                add(tally, *what)
        if listeners and kind in _SECONDS and self._label is not None:
            metric, number = _SECONDS[kind]
            for listener in listeners:
                listener(metric, what[number], (self._label, scope))

    def of(self, scope: str) -> Stats:
        """Return the counts of one scope. All are 0 if nothing happened there."""
        with process_lock.lock:
            return _stats([self._tallies.get(scope, defaultdict(int))])

    def total(self) -> Stats:
        """Return the counts of all scopes together."""
        with process_lock.lock:
            return _stats(self._tallies.values())

    def scopes(self) -> list[str]:
        """Return the scopes in which something happened."""
        with process_lock.lock:
            return sorted(self._tallies)


def _found(tally: _Tally, cost: float) -> None:
    tally["found"] += 1
    tally["saved_seconds"] += cost


def _waited(tally: _Tally, seconds: float, cost: float) -> None:
    tally["waits"] += 1
    tally["waited_seconds"] += seconds
    tally["waited_within", BOUNDS[bisect_left(BOUNDS, seconds)]] += 1
    tally["saved_seconds"] += cost


def _served(tally: _Tally, why: str) -> None:
    tally["served", why] += 1


def _computed(tally: _Tally, why: str, cost: float, stored: bool) -> None:
    tally["computed", why] += 1
    _spend(tally, cost)


def _failed(tally: _Tally, why: str, cost: float, error: BaseException) -> None:
    tally["failed"] += 1
    _spend(tally, cost)


def _up(tally: _Tally, engine: str, seconds: float) -> None:
    tally["engine_down_seconds"] += seconds


def _spend(tally: _Tally, cost: float) -> None:
    tally["cost_total"] += cost
    tally["cost_within", BOUNDS[bisect_left(BOUNDS, cost)]] += 1
    tally["cost_max"] = max(tally["cost_max"], cost)


_ADD: dict[type[events.Event], str | Callable[..., None]] = {
    events.Found: _found,
    events.Waited: _waited,
    events.Served: _served,
    events.Computed: _computed,
    events.Failed: _failed,
    events.LeaseLost: "lease_lost",
    events.Unkept: "unkept",
    events.BadBytes: "bad_bytes",
    events.Invalidated: "invalidated",
    events.EngineDown: "engine_downs",
    events.EngineUp: _up,
    events.Untold: "untold",
    events.Postponed: "postponed",
}
"""How each event is counted: 1 is added to the field of that name, or the function is called."""

_SECONDS: dict[type[events.Event], tuple[Metric, int]] = {
    events.Waited: (WAIT, 0),
    events.Computed: (COST, 1),
    events.Failed: (COST, 1),
}
"""The histogram of an event, and the position of the duration in its fields after `key`."""


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
