"""Observers: who hears of events, and what is made of them."""

from stampede.metrics.counters import Counters, Stats
from stampede.metrics.log import log_events
from stampede.metrics.observers import Observers
from stampede.metrics.opentelemetry import OpenTelemetryObserver
from stampede.metrics.prometheus import PrometheusObserver
from stampede.metrics.table import watch

__all__ = ["Counters", "Observers", "OpenTelemetryObserver", "PrometheusObserver", "Stats", "log_events", "watch"]
