"""When waiters look again, on engines that cannot push. Pure: the caller supplies the chance.

If the cost is known, looks become denser towards the moment at which the computation is likely to end, and rarer after
it. No pause is longer than a tenth of the time waited so far (or 50 ms if that is more), nor than the caller allows. So
a waiter learns of the end at most that much later."""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

from stampede.model.entry import Entry

__all__ = ["Costs", "pause"]

K = TypeVar("K")

LONGEST, SHARE = 0.05, 0.1
FIRST = 0.008
"""The first pause if the cost is unknown. Each next pause is longer by an eighth of the time waited."""
NEAR = 0.003
"""The shortest pause, for looks around the expected end."""
BEFORE, BEHIND = 0.5, 0.2
"""The pause, as a part of the distance from the expected end. Before it not more than this, since costs vary, and since
a waiter that arrives after the computation began expects the end too late."""


def pause(waited: float, cost: float, chance: float, longest: float = inf) -> float:
    """Return the seconds until the next look. `cost` is how long the computation is likely to take in all (0 if
    unknown), `chance` is from 0 to 1. `longest` bounds the pause, for callers that prefer to ask more often."""
    cap = min(max(LONGEST, SHARE * waited), longest)
    left = cost - waited
    if left > 0:
        wanted = max(BEFORE * left, NEAR) + NEAR * chance
    elif cost > 0:
        wanted = NEAR * (1 + chance) - BEHIND * left
    else:
        wanted = FIRST + waited / 8
    return min(wanted, cap) * (1 - 0.2 * chance) if wanted > cap or cost <= 0 else wanted


class Costs(dict[K, float]):
    """What the keys of this process have cost to compute, for waiters of their next value."""

    def learn(self, name: K, entry: Entry[Any]) -> None:
        if len(self) > 10_000:
            self.clear()
        self[name] = entry.cost
