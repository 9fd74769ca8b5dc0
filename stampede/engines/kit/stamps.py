"""What keeps tickets true where a server tells of changes: a stamp a slot, which every piece of news changes."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any

__all__ = ["Stamps"]

SOON = 1.0
"""Seconds within which connections that end are taken for one loss, also if there are news yet."""


class Stamps(array):  # type: ignore[type-arg]
    """One word a slot; and while the server is lost, what stood there before: so much was true when it went."""

    heard = 0.0  # when there was word of the server last
    _before: Any = None
    _at = 0.0
    _lost = False
    _epochs = itertools.count(1)

    @classmethod
    def of(cls, slots: int) -> Stamps:
        return cls("Q", bytes(8 * slots))

    def void(self, slot: int) -> None:
        """From any thread: two at once may count as one, which is as good for all who had sampled before."""
        self[slot] += 1

    def void_all(self) -> None:
        """No ticket holds any more."""
        epoch = next(self._epochs) << 32  # no slot has had so many news by itself
        self[:] = array("Q", [epoch]) * len(self)

    def remember(self) -> None:
        """A connection has ended. Those of a server that dies or hangs end one by one, each when somebody looks at it:
        the first tells what was true, until the server has been heard of again."""
        if self._before is None or self.heard - self._at > SOON:
            self._before = self[:]
        self._at = time.monotonic()

    def lose(self) -> None:
        """There are no news any more: it is the server that has gone."""
        self.remember()
        self._lost = True

    def find(self) -> None:
        """There are news again: of what was changed meanwhile there were none."""
        self._lost, self.heard = False, time.monotonic()

    def stood(self, slot: int, stamp: int) -> bool:
        """Did a ticket hold until the server was lost?"""
        return self._lost and self._before[slot] == stamp
