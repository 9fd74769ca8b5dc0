"""Metrics for Prometheus. This needs the extra `prometheus`."""

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
"""Seconds after which a process writes its metrics again (multiprocess mode)."""


class PrometheusObserver(Collector):
    """A collector of all caches, locks and limits of this process, in prometheus_client's default registry or another.
    It reads the statistics when Prometheus scrapes, so that a hit costs no more. With `$PROMETHEUS_MULTIPROC_DIR` it
    also writes the metrics of this process to that directory, every five seconds and at the end of the process."""

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
            if namespace in namespaces:  # settings may be read twice, but a registry refuses a name the second time
                return
            registry.register(self)
            namespaces.add(namespace)
        if registry is REGISTRY and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _files.append(_Files(namespace))

    def describe(self) -> Iterator[MetricFamily]:
        """Return the metrics without values. A registry reads their names."""
        return self._families({})

    def collect(self) -> Iterator[MetricFamily]:
        """Return the metrics with their values. A registry calls this at each scrape."""
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


# -- multiprocess mode: a scrape reads the files of all processes, and calls no collector --------------------------


class _Files:
    """The files of this process, which a thread updates."""

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
        """Stop writing during a fork. Otherwise locks of prometheus_client might stay locked in the child for ever."""
        self._lock.acquire()

    def _go_on(self) -> None:
        self._lock.release()

    def _begin_in_child(self) -> None:
        self._written = reading()  # the parent writes what was counted before the fork
        self._begin()

    def _write_for_ever(self) -> None:
        while True:
            time.sleep(PERIOD)
            self.write()

    def write(self) -> None:
        """Write the current values to the files."""
        with self._lock:
            for cell, value in reading().items():
                in_file = self._values.get(cell) or self._values.setdefault(cell, self._value(*cell))
                if cell[0].kind == "gauge":
                    in_file.set(value)
                elif value != self._written.get(cell):
                    in_file.inc(value - self._written.get(cell, 0.0))
                self._written[cell] = value

    def _value(self, metric: Metric, labels: tuple[str, ...], bound: float | None) -> Any:
        """Return a value in a file. The public classes of prometheus_client can't set the count of a bucket."""
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
