"""Early refresh: how long before its end a fresh value is computed anew. Pure: numbers in, numbers out.

The lease already makes the computation a single one, so the draw need not do that (in XFetch it must). It is left
with spreading the claims of many processes, for which a tenth of the cost is enough; what makes the new value come
in time is the margin, a high quantile of the key's cost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, log, sqrt
from typing import Any

from stampede.model.entry import Entry

__all__ = ["draw", "due", "lead", "observe"]

SPREAD = 0.1  # of the cost, for beta 1
HEIGHT = 3.5  # deviations from the typical cost up to the margin: the 99.9 % quantile is 3.1, the rest is our own error
FIRST = 0.5  # the deviation of a key's cost (of its logarithm) before anything is known about it
LEAST = 0.1  # the same, of a key whose cost is always the same: room for the next caller to come by
MOST = 2.0
TYPICAL_STEP = 0.08  # weight of the newest cost: the last 25 make the typical one
DEVIATION_STEP = 0.02  # and the last 100 its deviation
ABOVE, BELOW = 4.0, 1.5  # what is further off counts as so many deviations: one slow day, or a cheap case now and then
UNIT = 0.25  # at least, in that count: a key that was steady and has become slower is soon believed
HEADROOM = 1.2  # so many times the newest cost are in the margin at least
INSTANT = 1e-6  # a computation is never cheaper than this


def draw(beta: float, random: Callable[[], float] = random.random) -> float:
    """How much of a cost to add to this process's lead for one value; most draws are small, none is negative."""
    return -beta * SPREAD * log(1.0 - random())


def lead(entry: Entry[Any], draw: float) -> float:
    """Seconds before the end of fresh at which the refresh is due."""
    # The clamp is for fleets: the first of n processes draws ln n times the mean, at every expiry.
    return min(entry.margin + draw * entry.cost, entry.ttl / 2)


def due(entry: Entry[Any], draw: float) -> bool:
    """It is time to refresh it."""
    return entry.fresh <= lead(entry, draw)


def observe(previous: Entry[Any] | None, cost: float) -> tuple[float, float]:
    """The (cost, margin) to store with a value that took `cost` seconds and replaces `previous`.

    Costs are taken for log-normal. Moving averages of the typical one and of the deviation are all there is to
    remember, and the two numbers hold both: `margin = cost * exp(HEIGHT * deviation)`.
    """
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
