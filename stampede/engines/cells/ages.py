"""How old what a cell has is, where its store can't say: by what this process has seen of it itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

from stampede.engines.cells.protocol import Version
from stampede.runtime import process_lock

__all__ = ["Age", "Ages", "KnownAge", "age_of"]

MOST = 10_000
"""Names of which it is remembered; those that were first met longest ago are forgotten first."""


@dataclass(slots=True)
class KnownAge:
    """What a name has, as it was read or written. Moments are of our own monotonic clock."""

    version: Version
    body: memoryview | None  # None: nothing is there; empty: nothing of ours
    written: float  # then, as far as we know: what it holds gets older from there
    stood: float  # for sure not before: a lease in it lasts from there


class Age(NamedTuple):
    """What this process knows of one writing, by its own clock."""

    version: Version
    first: float  # by then it stood there
    since: float  # it didn't yet: something else was there; -inf: that was never seen
    last: float  # it stood there still


class Ages:
    """Of each name the writing that was seen last. No two machines' clocks are compared in it."""

    def __init__(self) -> None:
        self._table: dict[str, Age] = {}

    def saw(self, name: str, version: Version, sent: float, received: float) -> Age:
        """It was read, or written, by a question that was sent then and answered then."""
        with process_lock.lock:
            old = self._table.get(name)
            if old is None:
                new = Age(version, received, -inf, sent)
                if len(self._table) >= MOST:
                    for each in list(islice(self._table, MOST // 10)):
                        del self._table[each]
            elif old.version == version:
                new = old._replace(first=min(old.first, received), last=max(old.last, sent))
            elif sent < old.first:
                return Age(version, received, -inf, sent)  # asked before the other one was there, perhaps
            else:
                new = Age(version, received, old.last, sent)
            self._table[name] = new
        return new

    def wrote(self, name: str, version: Version, sent: float, received: float) -> None:
        """The same of a writing of our own, which was not there before we asked."""
        with process_lock.lock:
            self._table.pop(name, None)
            self._table[name] = Age(version, received, sent, sent)


def age_of(sighting: Age, told: float, sent: float, received: float) -> float:
    """Seconds since it was written, as a wall clock has told it, where we don't know better. At `sent`."""
    least, most = sent - sighting.first, received - sighting.since
    return min(max(told, least, 0.0), max(most, 0.0))
