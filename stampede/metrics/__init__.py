"""Observers of events: statistics, log lines, Prometheus and OpenTelemetry.

Here is the code that receives events and counts. The events themselves are in `events.py`, and the code where something
happens sends them. Begin with `table.py`, which has every metric."""

from stampede.metrics.counters import Counters, Stats
from stampede.metrics.log import log_events
from stampede.metrics.observers import Observers
from stampede.metrics.opentelemetry import OpenTelemetryObserver
from stampede.metrics.prometheus import PrometheusObserver
from stampede.metrics.table import watch

__all__ = ["Counters", "Observers", "OpenTelemetryObserver", "PrometheusObserver", "Stats", "log_events", "watch"]
