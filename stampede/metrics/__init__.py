"""Observers of events: statistics, log lines, Prometheus and OpenTelemetry.

Here is what is made of an event. The events themselves are in `events.py`, and the code that something happens to sends
them. Begin with `table.py`, which has every metric.
"""

from stampede.metrics.counters import Counters, Stats
from stampede.metrics.log import log_events
from stampede.metrics.observers import Observers
from stampede.metrics.opentelemetry import OpenTelemetryObserver
from stampede.metrics.prometheus import PrometheusObserver
from stampede.metrics.table import watch

__all__ = ["Counters", "Observers", "OpenTelemetryObserver", "PrometheusObserver", "Stats", "log_events", "watch"]
