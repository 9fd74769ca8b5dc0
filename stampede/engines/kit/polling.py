"""When to look again, of engines that can't push: whoever waits asks now and then. Pure: the caller brings chance.

Where the cost is known, looks become denser towards the moment at which the computation is likely to end, and rarer
behind it. No pause is longer than a tenth of the time waited so far, or 50 ms if that is more, or than the asker says:
news are never later than that.
"""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

from stampede.model.entry import Entry

__all__ = ["Costs", "pause"]

K = TypeVar("K")

LONGEST, SHARE = 0.05, 0.1
FIRST = 0.008
"""The first pause of one who knows nothing; each next one is longer by an eighth of the time waited."""
NEAR = 0.003
"""The shortest pause: looks around the expected end."""
BEFORE, BEHIND = 0.5, 0.2
"""What part of its distance from the expected end a pause is. Not more before it, since costs vary, and who begins to
wait after the holder has begun to compute takes the end for further off than it is."""


def pause(waited: float, cost: float, chance: float, longest: float = inf) -> float:
    """Seconds until the next look. `cost`: how long it is likely to take in all, 0: unknown; `chance`: 0 to 1.
    `longest`: at most, of those who would rather ask more often than be late."""
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
    """What keys of this process have cost, for those who wait for the next value."""

    def learn(self, name: K, entry: Entry[Any]) -> None:
        if len(self) > 10_000:
            self.clear()
        self[name] = entry.cost
