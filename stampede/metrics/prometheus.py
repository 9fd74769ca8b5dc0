"""Prometheus: the extra `prometheus`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from stampede.errors import MissingExtra
from stampede.events import Event
from stampede.metrics.families import FAMILIES, Family

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    Made = dict[str, Counter | Gauge | Histogram]

__all__ = ["PrometheusObserver"]


class PrometheusObserver:
    """An observer that feeds `stampede_computed_total{scope, why}`, `stampede_computation_seconds` and the like.

    Observers with the same registry and namespace share their metrics. Local hits are no events: see `stats()`.
    """

    def __init__(self, registry: CollectorRegistry | None = None, namespace: str = "stampede") -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError as exc:
            raise MissingExtra(
                "PrometheusObserver needs prometheus-client: pip install 'stampede-guard[prometheus]'"
            ) from exc
        self._metrics = _metrics(REGISTRY if registry is None else registry, namespace)

    def __call__(self, event: Event) -> None:
        for family in FAMILIES.get(type(event), ()):
            metric = self._metrics[family.name].labels(*[getattr(event, label) for label in family.labels])
            _feed(metric, family.amount(event))


def _feed(metric: Counter | Gauge | Histogram, amount: float) -> None:
    from prometheus_client import Counter, Histogram

    if isinstance(metric, Counter):
        metric.inc(amount)
    elif isinstance(metric, Histogram):
        metric.observe(amount)
    else:
        metric.set(amount)


# A registry refuses a second metric of a name, and `configure` may be called twice.
_made: WeakKeyDictionary[CollectorRegistry, dict[str, Made]] = WeakKeyDictionary()
_making = threading.Lock()


def _metrics(registry: CollectorRegistry, namespace: str) -> Made:
    with _making:
        spaces = _made.setdefault(registry, {})
        if namespace not in spaces:
            families = {family.name: family for each in FAMILIES.values() for family in each}
            spaces[namespace] = {name: _make(family, registry, namespace) for name, family in families.items()}
        return spaces[namespace]


def _make(family: Family, registry: CollectorRegistry, namespace: str) -> Counter | Gauge | Histogram:
    from prometheus_client import Counter, Gauge, Histogram

    kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
    return kinds[family.kind](family.name, family.help, family.labels, namespace=namespace, registry=registry)
