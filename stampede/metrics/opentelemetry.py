"""Metrics for OpenTelemetry. This needs the extra `opentelemetry`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from stampede.errors import MissingExtra
from stampede.metrics.observers import Collector
from stampede.metrics.table import BOUNDS, METRICS, Cell, Metric, listeners, reading

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

__all__ = ["OpenTelemetryObserver"]


class OpenTelemetryObserver(Collector):
    """Instruments for all caches, locks and limits of this process, made with a meter of the global provider. Counters
    and gauges are observable: they read the statistics when metrics are exported, so that a hit costs no more.
    Histograms record waits and costs when they happen, from now on."""

    def __init__(self, meter: Meter | None = None) -> None:
        try:
            from opentelemetry.metrics import Observation, get_meter
        except ImportError as exc:
            raise MissingExtra(
                "OpenTelemetryObserver needs opentelemetry-api: pip install 'stampede-guard[opentelemetry]'"
            ) from exc
        self._observation = Observation
        self._values: dict[Cell, float] = {}
        self._read: set[Metric] = set(METRICS)  # metrics that have used the values of this reading
        self._histograms: dict[Metric, Any] = {}
        with _making:
            if meter in _meters:  # settings may be read twice
                return
            _meters.append(meter)
        meter = get_meter("stampede") if meter is None else meter
        for metric in METRICS:
            self._make(meter, metric)
        listeners.append(self._record)

    def _make(self, meter: Meter, metric: Metric) -> None:
        """Make the instrument of a metric. An exporter to Prometheus appends the unit and `total`, which gives each
        metric the name that it has there."""
        seconds = metric.family.endswith("_seconds")
        name, unit = f"stampede.{metric.family.removesuffix('_seconds')}", "s" if seconds else ""
        if metric.kind == "histogram":
            bounds = BOUNDS[:-1]
            self._histograms[metric] = meter.create_histogram(
                name, unit, metric.help, explicit_bucket_boundaries_advisory=bounds
            )
        elif metric.kind == "counter":
            meter.create_observable_counter(name, [partial(self._observe, metric)], unit, metric.help)
        else:
            meter.create_observable_gauge(name, [partial(self._observe, metric)], unit, metric.help)

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        if metric in self._read:  # a new collection has begun: read once for all metrics
            self._values, self._read = reading(), set()
        self._read.add(metric)
        return [
            self._observation(value, dict(zip(metric.labels, labels, strict=True)))
            for (which, labels, _), value in self._values.items()
            if which is metric
        ]

    def _record(self, metric: Metric, seconds: float, labels: tuple[str, ...]) -> None:
        self._histograms[metric].record(seconds, dict(zip(metric.labels, labels, strict=True)))


_meters: list[Meter | None] = []
_making = threading.Lock()
