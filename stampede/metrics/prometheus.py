"""Prometheus: the extra `prometheus`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from stampede.errors import MissingExtra
from stampede.events import Event
from stampede.metrics.families import FAMILIES, Family

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Feed: TypeAlias = Callable[[list[str], float], None]  # the labels' values, the amount

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
        self._feeds = _feeds(REGISTRY if registry is None else registry, namespace)

    def __call__(self, event: Event) -> None:
        for family in FAMILIES.get(type(event), ()):
            self._feeds[family.name]([getattr(event, label) for label in family.labels], family.amount(event))


# A registry refuses a second metric of a name, and `configure` may be called twice.
_made: WeakKeyDictionary[CollectorRegistry, dict[str, dict[str, Feed]]] = WeakKeyDictionary()
_making = threading.Lock()


def _feeds(registry: CollectorRegistry, namespace: str) -> dict[str, Feed]:
    with _making:
        spaces = _made.setdefault(registry, {})
        if namespace not in spaces:
            families = {family.name: family for each in FAMILIES.values() for family in each}
            spaces[namespace] = {name: _feed(family, registry, namespace) for name, family in families.items()}
        return spaces[namespace]


def _feed(family: Family, registry: CollectorRegistry, namespace: str) -> Feed:
    from prometheus_client import Counter, Gauge, Histogram

    name, text, labels = family.name, family.help, family.labels
    match family.kind:
        case "counter":
            counter = Counter(name, text, labels, namespace=namespace, registry=registry)
            return lambda values, amount: counter.labels(*values).inc(amount)
        case "histogram":
            histogram = Histogram(name, text, labels, namespace=namespace, registry=registry)
            return lambda values, amount: histogram.labels(*values).observe(amount)
        case _:
            gauge = Gauge(name, text, labels, namespace=namespace, registry=registry)
            return lambda values, amount: gauge.labels(*values).set(amount)
