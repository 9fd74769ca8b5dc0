"""Early refresh: how long before its end a fresh value is computed again. Pure: numbers in, numbers out.

In XFetch, the random draw has to prevent that many processes compute at once. Here the lease does that. So the draw
only spreads the claims of many processes, for which a tenth of the cost is enough. The margin, a high quantile of the
key's cost, makes sure that the new value is ready in time."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt
from typing import Any

from stampede.model.entry import Entry
from stampede.runtime import chance

__all__ = ["draw", "due", "lead", "observe"]

SPREAD = 0.1  # of the cost, for beta 1
HEIGHT = 3.5  # deviations from the typical cost to the margin: 3.1 for the 99.9 % quantile, and the rest for our error
FIRST = 0.5  # the deviation of the logarithm of a key's cost before anything is known about it
LEAST = 0.1  # the least deviation: even if the cost is constant, the next caller needs some time to come
MOST = 2.0  # the largest deviation
TYPICAL_STEP = 0.08  # weight of the newest cost: about the last 25 make the typical one
DEVIATION_STEP = 0.02  # weight of the newest deviation: about the last 100 count
ABOVE, BELOW = 4.0, 1.5  # the most deviations that one cost counts: one slow day or one cheap case changes little
UNIT = 0.25  # the least deviation in that count, so that a steady key that became slower is soon noticed
HEADROOM = 1.2  # the margin is at least so many times the newest cost
INSTANT = 1e-6  # the least cost in seconds


def draw(beta: float, random: Callable[[], float] = chance.random) -> float:
    """Return a random factor of the cost, by which the refresh begins earlier. Most are small, none is negative."""
    return -beta * SPREAD * log(1.0 - random())


def lead(entry: Entry[Any], draw: float) -> float:
    """Return how many seconds before the entry becomes stale its refresh is due."""
    # The maximum is for fleets: the first of n processes draws ln n times the mean, each time.
    return min(entry.margin + draw * entry.cost, entry.ttl / 2)


def due(entry: Entry[Any], draw: float) -> bool:
    """Return whether it is time to refresh the entry."""
    return entry.fresh <= lead(entry, draw)


def observe(previous: Entry[Any] | None, cost: float) -> tuple[float, float]:
    """Return the (cost, margin) to store with a value that took `cost` seconds and replaces `previous`. Costs are
    assumed to be log-normal. The moving averages of the typical cost and of its deviation are remembered; the two
    numbers hold both: `margin = cost * exp(HEIGHT * deviation)`."""
    cost = max(cost, INSTANT)
    if previous is None or not 0 < previous.cost < previous.margin:
        return cost, cost * exp(HEIGHT * FIRST)
    deviation = min(log(previous.margin / previous.cost) / HEIGHT, MOST)
    off = log(cost / previous.cost)
    unit = max(deviation, UNIT)
    counted = max(-BELOW * unit, min(off, ABOVE * unit))
    typical = previous.cost * exp(TYPICAL_STEP * off)
    deviation = max(sqrt((1 - DEVIATION_STEP) * deviation**2 + DEVIATION_STEP * counted**2), LEAST)
    return typical, max(typical * exp(HEIGHT * deviation), HEADROOM * previous.cost * exp(counted))
