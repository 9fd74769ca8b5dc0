"""Prometheus: the extra `prometheus`."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stampede.errors import MissingExtra
from stampede.metrics.observers import Collector
from stampede.metrics.table import BOUNDS, METRICS, UP, Cell, Metric, reading
from stampede.runtime import forks
from stampede.runtime.threads import begun

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily

__all__ = ["PrometheusObserver"]

PERIOD = 5.0
"""Seconds between two moments at which a process writes its metrics for others (multiprocess mode)."""


class PrometheusObserver(Collector):
    """Registers a collector of all caches, locks and limits of this process, with prometheus_client's default registry.

    It reads the statistics when Prometheus scrapes, so that a hit costs nothing more. With `$PROMETHEUS_MULTIPROC_DIR`
    it also writes the metrics of this process to that directory, every five seconds and at the end of the process.
    """

    def __init__(self, registry: CollectorRegistry | None = None, namespace: str = "stampede") -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError as exc:
            raise MissingExtra(
                "PrometheusObserver needs prometheus-client: pip install 'stampede-guard[prometheus]'"
            ) from exc
        self._namespace = namespace
        registry = REGISTRY if registry is None else registry
        with _registering:
            namespaces = _registered.setdefault(registry, set())
            if namespace in namespaces:  # settings may be read twice, and a registry takes a metric's name once
                return
            registry.register(self)
            namespaces.add(namespace)
        if registry is REGISTRY and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _files.append(_Files(namespace))

    def describe(self) -> Iterator[MetricFamily]:
        """The metrics without their values, of which a registry asks for the names."""
        return self._families({})

    def collect(self) -> Iterator[MetricFamily]:
        """The metrics with their values, as a registry asks for them at each scrape."""
        return self._families(reading())

    def _families(self, values: dict[Cell, float]) -> Iterator[MetricFamily]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families: dict[str, Any] = {
            "counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily
        }  # fmt: skip
        by_metric: defaultdict[Metric, dict[tuple[str, ...], float]] = defaultdict(dict)
        for (metric, labels, bound), value in values.items():
            if bound is None:
                by_metric[metric][labels] = value
        for metric in METRICS:
            family = families[metric.kind](f"{self._namespace}_{metric.name}", metric.help, labels=metric.labels)
            for labels, value in by_metric[metric].items():
                if metric.kind == "histogram":
                    counts = accumulate(values[metric, labels, bound] for bound in BOUNDS)
                    buckets = zip(map(_le, BOUNDS), counts, strict=True)
                    family.add_metric(labels, list(buckets), value)
                else:
                    family.add_metric(labels, value)
            yield family


_registered: WeakKeyDictionary[CollectorRegistry, set[str]] = WeakKeyDictionary()
_registering = threading.Lock()


def _le(bound: float) -> str:
    return "+Inf" if bound == inf else str(bound)


# -- multiprocess mode: a scrape reads the files of all processes, and asks no collector ---------------------------


class _Files:
    """The files of this process, which a thread keeps up to date."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._values: dict[Cell, Any] = {}
        self._written: dict[Cell, float] = {}
        self._begin()
        forks.on_fork(self._pause)
        forks.in_parent(self._go_on)
        forks.in_child(self._begin_in_child)
        atexit.register(self.write)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        begun("stampede-metrics", self._write_for_ever)

    def _pause(self) -> None:
        """A fork while the thread is inside prometheus_client would leave that locked in the child, for ever."""
        self._lock.acquire()

    def _go_on(self) -> None:
        self._lock.release()

    def _begin_in_child(self) -> None:
        self._written = reading()  # what the parent counted is for the parent to write
        self._begin()

    def _write_for_ever(self) -> None:
        while True:
            time.sleep(PERIOD)
            self.write()

    def write(self) -> None:
        """Bring the files up to date."""
        with self._lock:
            for cell, value in reading().items():
                kept = self._values.get(cell) or self._values.setdefault(cell, self._value(*cell))
                if cell[0].kind == "gauge":
                    kept.set(value)
                elif value != self._written.get(cell):
                    kept.inc(value - self._written.get(cell, 0.0))
                self._written[cell] = value

    def _value(self, metric: Metric, labels: tuple[str, ...], bound: float | None) -> Any:
        """A value in a file. The public classes have none that takes the count of a bucket."""
        from prometheus_client import values

        make: Any = values.ValueClass
        name, family = (f"{self._namespace}_{each}" for each in (metric.name, metric.family))
        if bound is not None:
            name, names, labels = f"{name}_bucket", (*metric.labels, "le"), (*labels, _le(bound))
        else:
            name, names = f"{name}_sum" if metric.kind == "histogram" else name, metric.labels
        how = {"multiprocess_mode": "livemin" if metric is UP else "livesum"} if metric.kind == "gauge" else {}
        return make(metric.kind, family, name, names, labels, metric.help, **how)


_files: list[_Files] = []
