"""What is measured of each event: one list for Prometheus and OpenTelemetry. No label is a key, which has no bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stampede import events


def _one(event: events.Event) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: `kind` is counter, histogram or gauge; `amount` is what an event adds, or sets."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]  # fields of the event
    amount: Callable[[Any], float] = _one


_SCOPE = ("scope",)
_COST = Family(
    "computation_seconds", "histogram", "Seconds that computations took.", _SCOPE, lambda event: float(event.cost)
)
_UP = "Whether the engine answers: 1 or 0; there from its first outage on."

FAMILIES: Mapping[type[events.Event], tuple[Family, ...]] = {
    events.Found: (Family("found", "counter", "Values found in the engine.", _SCOPE),),
    events.Waited: (
        Family("waited_seconds", "histogram", "Seconds waited for others.", _SCOPE, lambda event: float(event.seconds)),
    ),
    events.Served: (Family("served", "counter", "Values served stale or due.", ("scope", "why")),),
    events.Computed: (Family("computed", "counter", "Computations, by reason.", ("scope", "why")), _COST),
    events.Failed: (Family("failed", "counter", "Computations that raised.", ("scope", "why")), _COST),
    events.LeaseLost: (Family("leases_lost", "counter", "Leases that ended before their computation.", _SCOPE),),
    events.Unkept: (Family("unkept", "counter", "Values that were not kept.", _SCOPE),),
    events.BadBytes: (Family("bad_bytes", "counter", "Entries that the codec did not believe.", _SCOPE),),
    events.Invalidated: (Family("invalidated", "counter", "Calls that invalidate.", ("scope", "verb")),),
    events.EngineDown: (
        Family("engine_outages", "counter", "Times the engine went down.", ("engine",)),
        Family("engine_up", "gauge", _UP, ("engine",), lambda event: 0.0),
    ),
    events.EngineUp: (Family("engine_up", "gauge", _UP, ("engine",), lambda event: 1.0),),
    events.Untold: (Family("untold", "counter", "Servers that refuse to tell of changes.", ("engine",)),),
}
