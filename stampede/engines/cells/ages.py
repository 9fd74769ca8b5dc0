"""The age of a cell's data, in stores that do not tell it: an estimate from what this process has seen itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

from stampede.engines.cells.protocol import Version
from stampede.runtime import process_lock

__all__ = ["Age", "Ages", "KnownAge", "age_of"]

MOST = 10_000
"""The most names that are remembered. The names that were added first are forgotten first."""


@dataclass(slots=True)
class KnownAge:
    """The content of a name, and when it was written, in seconds of this process's monotonic clock."""

    version: Version
    body: memoryview | None  # None: nothing is stored; empty: bytes that another program has written
    written: float  # the best estimate of the write's time: the entry ages from then
    latest: float  # the write was certainly not later than this: a lease lasts from then, and never ends too early


class Age(NamedTuple):
    """What this process knows about the time of one write, by its own clock."""

    version: Version
    first: float  # this version was there at this time
    since: float  # another version was still there at this time; -inf: no other one was seen
    last: float  # the latest time at which this version was still there


class Ages:
    """The write that was last seen of each name. Clocks of two machines are never compared here."""

    def __init__(self) -> None:
        self._table: dict[str, Age] = {}

    def saw(self, name: str, version: Version, sent: float, received: float) -> Age:
        """Note that a request found this version, and return what is known of it. `sent` and `received` are the times
        of the request and of its reply."""
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
                return Age(version, received, -inf, sent)  # this reply may be older than the version that is noted
            else:
                new = Age(version, received, old.last, sent)
            self._table[name] = new
        return new

    def wrote(self, name: str, version: Version, sent: float, received: float) -> None:
        """Note a write of this process: the version did not exist before the request was `sent`."""
        with process_lock.lock:
            self._table.pop(name, None)
            self._table[name] = Age(version, received, sent, sent)


def age_of(sighting: Age, reported: float, sent: float, received: float) -> float:
    """Return the seconds from the write until `sent`: `reported`, corrected by what this process has seen. `reported`
    is the age by the wall clocks of the writer and of this machine, which may differ."""
    least, most = sent - sighting.first, received - sighting.since
    return min(max(reported, least, 0.0), max(most, 0.0))
