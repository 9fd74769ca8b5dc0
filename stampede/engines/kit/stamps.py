"""What keeps tickets true where a server tells of changes: a stamp a slot, which every piece of news changes."""

from __future__ import annotations

import itertools
import time
from array import array
from math import inf
from typing import Any

from stampede.runtime import process_lock

__all__ = ["NewsStamps"]

SOON = 1.0
"""Seconds within which connections that end are taken for one loss, also if there are news yet."""


class NewsStamps(array):  # type: ignore[type-arg]
    """One word a slot; and while the server is lost, what stood there before: so much was true when it went."""

    heard = 0.0  # when there was word of the server last
    _before: Any = None
    _at = 0.0
    _lost = False
    _epochs = itertools.count(1)

    @classmethod
    def of(cls, slots: int) -> NewsStamps:
        return cls("Q", bytes(8 * slots))

    def void(self, slot: int, step: int = 2) -> None:
        """A key of the slot has changed: the slot's tickets end. The server's news take a step of 1. A change by this
        process takes a step of 2, which also passes by a ticket that begins with the next news."""
        with process_lock.lock:
            self[slot] += step
            if self._before is not None:
                self._before[slot] += step

    def void_all(self) -> None:
        """No ticket holds any more."""
        epoch = next(self._epochs) << 32  # no slot has had so many news by itself
        with process_lock.lock:
            self[:] = array("Q", [epoch]) * len(self)

    def lose(self) -> None:
        """A connection has ended. Those of a server that dies or hangs end one by one, each when somebody looks at it:
        the first tells what was true, until the server has been heard of again."""
        if self._before is None or self.heard - self._at > SOON:
            self._before = self[:]
        self._at = time.monotonic()
        self._lost = True

    def forget(self) -> None:
        """We have closed a connection: when the server is lost, nothing that it has read is known to be true."""
        self._at = -inf

    def find(self) -> None:
        """There are news again: of what was changed meanwhile there were none."""
        self._lost, self.heard = False, time.monotonic()

    def stood(self, slot: int, stamp: int) -> bool:
        """Return whether a ticket held until the server was lost. If it is heard of again, a single connection was."""
        return self._lost and self.heard - self._at <= SOON and self._before[slot] == stamp
