"""The definition of every metric, for Prometheus and OpenTelemetry, and the reading of their values.

The counts of a cache are read from its statistics when metrics are collected, so that a hit does no extra work. Waits
and costs are counted in buckets when they happen. No label is a key, or the name of a lock or a limit, because the
number of those is not bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakSet, ref

from stampede.runtime import process_lock

__all__ = ["BOUNDS", "METRICS", "Cell", "add", "gauges", "histogram", "listeners", "reading", "watch"]

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, inf)
"""The upper ends of a histogram's buckets, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. `name` is its name in Prometheus without the namespace; its end determines the kind."""

    name: str
    help: str
    labels: tuple[str, ...]

    @property
    def kind(self) -> str:
        if self.name.endswith("_total"):
            return "counter"
        return "histogram" if self.name.endswith("_seconds") else "gauge"

    @property
    def family(self) -> str:
        """The name without `_total`, which Prometheus requires at the end of a counter's name."""
        return self.name.removesuffix("_total")


METRICS: list[Metric] = []


def _metric(name: str, help: str, *labels: str) -> Metric:
    METRICS.append(Metric(name, help, labels))
    return METRICS[-1]


_F, _E = ("cache", "function"), ("cache", "engine")

REQUESTS = _metric("requests_total", "Answers to calls, by the tier that the value came from.", *_F, "tier", "outcome")
SAVED = _metric("origin_saved_seconds_total", "Known costs of the values that hits and waits did not compute.", *_F)
COMPUTATIONS = _metric("computations_total", "Computations that returned, by the reason why they began.", *_F, "why")
COST = _metric("computation_seconds", "Durations of computations, also of those that failed.", *_F)
WAIT = _metric("wait_seconds", "Durations of waits for a computation of another caller.", *_F)
STALE = _metric("stale_served_total", "Values that were served stale or due, by reason.", *_F, "why")
INVALIDATED = _metric("invalidations_total", "Calls in this process that invalidate, expire or set.", *_F)
POSTPONED = _metric("invalidations_postponed_total", "Invalidations that the engine could not make at first.", *_F)
LOST = _metric("leases_lost_total", "Leases that ended before their computations.", *_F)
UNKEPT = _metric("unkept_values_total", "Values that could not be stored.", *_F)
BAD = _metric("bad_entries_total", "Entries that the codec refused to read.", *_F)
UP = _metric("engine_up", "1 if the engine answers and accepts values, otherwise 0.", *_E)
OUTAGES = _metric("engine_outages_total", "Outages of the engine.", *_E)
DOWN = _metric("engine_down_seconds_total", "Seconds for which the engine was down.", *_E)
WAITING = _metric("invalidations_waiting", "Postponed invalidations that the engine has not made yet.", *_E)
UNTOLD = _metric("engine_untold_total", "Servers that do not announce changes to this process.", *_E)
LOCK = _metric("lock_wait_seconds", "Durations of waits for a lock.", "engine", "outcome")
LOCKS_HELD = _metric("locks_held", "Locks, and places in bulkheads, that this process holds.", "engine")
LOCKS_LOST = _metric("locks_lost_total", "Locks that ended before their release.", "engine")
LIMIT = _metric("limit_wait_seconds", "Durations of waits for a limit.", "engine", "outcome")
ORIGIN = _metric("origin_wait_seconds", "Durations of waits for a place at an origin.", "origin", "outcome")
PLACES = _metric("origin_places_used", "Places at an origin that this process holds.", "origin")

Cell: TypeAlias = tuple[Metric, tuple[str, ...], float | None]
"""The address of one value: a metric, its labels, and for a histogram the upper end of a bucket, or None for the sum.
Buckets are not cumulative."""


def _values(cache: Any) -> Iterator[tuple[Metric, tuple[str, ...], float | dict[float | None, float]]]:
    for function, stats in cache.stats_by_function().items():
        name = (cache.label, function)
        own = stats.served.get("outage", 0)
        yield REQUESTS, (*name, "local", "hit"), stats.hits + own
        yield REQUESTS, (*name, "engine", "hit"), stats.found
        yield REQUESTS, (*name, "engine", "stale"), sum(stats.served.values()) - own
        yield REQUESTS, (*name, "origin", "waited"), stats.waits
        yield REQUESTS, (*name, "origin", "computed"), sum(stats.computed.values())
        yield REQUESTS, (*name, "origin", "failed"), stats.failed
        yield SAVED, name, stats.saved_seconds
        yield INVALIDATED, name, stats.invalidated
        yield POSTPONED, name, stats.postponed
        yield LOST, name, stats.lease_lost
        yield UNKEPT, name, stats.unkept
        yield BAD, name, stats.bad_bytes
        if stats.waits:
            yield WAIT, name, {None: stats.waited_seconds, **stats.waited_within}
        if stats.computations:
            yield COST, name, {None: stats.cost_total, **stats.cost_within}
        for metric, counts in ((COMPUTATIONS, stats.computed), (STALE, stats.served)):
            yield from ((metric, (*name, why), count) for why, count in counts.items())
        if not function:  # the cache's own keys, which always have statistics, and all that belongs to no function
            engine = (cache.label, cache.name)
            yield UP, engine, 0.0 if cache.down else 1.0
            yield OUTAGES, engine, stats.engine_downs
            yield DOWN, engine, stats.engine_down_seconds
            yield UNTOLD, engine, stats.untold
            yield WAITING, engine, cache.postponed


# -- metrics that belong to no cache, counted when something happens ----------------------------------------------

_counted: defaultdict[Cell, float] = defaultdict(float)

listeners: list[Callable[[Metric, float, tuple[str, ...]], object]] = []
"""Functions that are called with each duration, because OpenTelemetry has no histogram that reads its values."""


def add(metric: Metric, *labels: str, amount: float = 1.0) -> None:
    """Add to a counter that belongs to no cache."""
    with process_lock.lock:
        _counted[metric, labels, None] += amount


class Histogram:
    """Durations that belong to no cache. As for hits, no lock is needed: a count makes no call between its steps."""

    __slots__ = ("_counts", "_sum", "labels", "metric")

    def __init__(self, metric: Metric, labels: tuple[str, ...]) -> None:
        self.metric, self.labels = metric, labels
        self._counts, self._sum = [0.0] * len(BOUNDS), 0.0

    def observe(self, seconds: float) -> None:
        number = bisect_left(BOUNDS, seconds)
        self._counts[number] += 1.0
        self._sum += seconds
        for listener in listeners:
            listener(self.metric, seconds, self.labels)

    def cells(self) -> dict[Cell, float]:
        parts = zip((None, *BOUNDS), (self._sum, *self._counts), strict=True)
        return {(self.metric, self.labels, bound): value for bound, value in parts}


_histograms: dict[tuple[Metric, tuple[str, ...]], Histogram] = {}


def histogram(metric: Metric, *labels: str) -> Histogram:
    """Return the histogram with these labels."""
    found = _histograms.get((metric, labels))
    return found if found is not None else _histograms.setdefault((metric, labels), Histogram(metric, labels))


gauges: list[Callable[[], Iterable[tuple[Metric, str]]]] = []
"""Functions that count things at the moment: each yields a gauge and its label once for each thing."""


# -- reading ------------------------------------------------------------------------------------------------------

_caches: WeakSet[Any] = WeakSet()
_last: dict[ReferenceType[Any], dict[Cell, float]] = {}  # the values that were last read of each cache


def watch(cache: Any) -> None:
    """Include the metrics of this cache in `reading`, for as long as the cache lives."""
    with process_lock.lock:
        _caches.add(cache)


def reading() -> dict[Cell, float]:
    """Return the values of all metrics of this process. No counter ever falls: the last values of a cache remain when
    the cache is gone."""
    with process_lock.lock:
        caches = list(_caches)
    for cache in caches:  # outside the lock, as a local tier may be large
        _last[ref(cache)] = {
            (metric, labels, bound): float(each)
            for metric, labels, value in _values(cache)
            for bound, each in (value if isinstance(value, dict) else {None: value}).items()
        }
    with process_lock.lock:
        for refer in [each for each in _last if each() is None]:
            for cell, value in _last.pop(refer).items():
                _counted[cell] += value if cell[0].kind != "gauge" else 0.0
        whole = dict(_counted)
        for each in list(_histograms.values()):
            whole |= each.cells()
        for cell, value in (each for cells in _last.values() for each in cells.items()):
            whole[cell] = min(whole.get(cell, 1.0), value) if cell[0] is UP else whole.get(cell, 0.0) + value
    whole |= {(LOCKS_HELD, labels[:1], None): 0.0 for metric, labels, _ in whole if metric is LOCK}
    for metric, label in (one for gauge in gauges for one in gauge()):
        whole[metric, (label,), None] = whole.get((metric, (label,), None), 0.0) + 1.0
    for metric, labels, bound in list(whole):
        if metric.kind == "histogram" and bound is None:  # quantiles need all buckets, including empty ones
            whole |= {(metric, labels, each): whole.get((metric, labels, each), 0.0) for each in BOUNDS}
    return whole
