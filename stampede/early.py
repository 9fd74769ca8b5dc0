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

from stampede.entry import Entry

__all__ = ["draw", "due", "lead", "observe"]

SPREAD = 0.1  # of the cost, for beta 1
STEP = 0.04  # weight of the newest cost: the last 50 or so count
HEIGHT = 3.35  # deviations above the typical cost: the 99.9 % quantile, and the error of knowing 50 costs only
FIRST = 0.5  # the deviation of a key's cost (of its logarithm) before anything is known about it
LEAST = 0.1  # the same, of a key whose cost is always the same: room for the next caller to come by
MOST = 2.0
OUTLIER = 4.0  # a cost further off than so many deviations is taken for one that isn't
HEADROOM = 1.2  # the margin is never less than this many times the newest cost
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

    Costs are taken for log-normal. The typical one and the deviation are moving averages, and the two numbers hold
    both: `margin = cost * exp(HEIGHT * deviation)`.
    """
    cost = max(cost, INSTANT)
    if previous is None or not 0 < previous.cost < previous.margin:
        return cost, cost * exp(HEIGHT * FIRST)
    deviation = min(log(previous.margin / previous.cost) / HEIGHT, MOST)
    off = log(cost / previous.cost)
    reach = OUTLIER * max(deviation, LEAST)
    counted = max(-reach, min(off, reach))
    typical = previous.cost * exp(STEP * off)
    deviation = max(sqrt((1 - STEP) * (deviation**2 + STEP * counted**2)), LEAST)
    return typical, max(typical * exp(HEIGHT * deviation), HEADROOM * cost)
