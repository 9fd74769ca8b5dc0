"""OpenTelemetry: the extra `opentelemetry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stampede.errors import MissingExtra
from stampede.events import Event
from stampede.metrics.families import FAMILIES, Family

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

__all__ = ["OpenTelemetryObserver"]


class OpenTelemetryObserver:
    """An observer that feeds `stampede.computed`, `stampede.computation_seconds` and the like of a meter.

    Without a meter, the global provider's. Local hits are no events: see `stats()`.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        try:
            from opentelemetry.metrics import get_meter
        except ImportError as exc:
            raise MissingExtra(
                "OpenTelemetryObserver needs opentelemetry-api: pip install 'stampede-guard[opentelemetry]'"
            ) from exc
        meter = get_meter("stampede") if meter is None else meter
        families = {family.name: family for each in FAMILIES.values() for family in each}
        self._feeds = {name: _feed(meter, family) for name, family in families.items()}

    def __call__(self, event: Event) -> None:
        for family in FAMILIES.get(type(event), ()):
            labels = {f"stampede.{label}": getattr(event, label) for label in family.labels}
            self._feeds[family.name](family.amount(event), labels)


def _feed(meter: Meter, family: Family) -> Callable[[float, dict[str, Any]], None]:
    name, unit = f"stampede.{family.name}", "s" if family.kind == "histogram" else "1"
    match family.kind:
        case "counter":
            return meter.create_counter(name, unit, family.help).add
        case "histogram":
            return meter.create_histogram(name, unit, family.help).record
        case _:
            return meter.create_gauge(name, unit, family.help).set
