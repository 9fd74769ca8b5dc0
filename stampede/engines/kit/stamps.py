"""Stamps, which keep tickets valid where a server reports changes: one stamp for each slot, which every change
alters."""

from __future__ import annotations

import itertools
import time
from array import array
from math import inf
from typing import Any

from stampede.runtime import process_lock

__all__ = ["NewsStamps"]

SOON = 1.0
"""Seconds within which ended connections count as one loss, even if news come in between."""


class NewsStamps(array):  # type: ignore[type-arg]
    """One number for each slot. While the server is lost, also a copy from the moment of the loss, when it was still
    valid."""

    heard = 0.0  # when the server was last heard of
    _before: Any = None
    _at = 0.0
    _lost = False
    _epochs = itertools.count(1)

    @classmethod
    def of(cls, slots: int) -> NewsStamps:
        return cls("Q", bytes(8 * slots))

    def void(self, slot: int, step: int = 2) -> None:
        """End the slot's tickets, because one of its keys has changed. The server's news take a step of 1. A change by
        this process takes a step of 2, which also passes by a ticket that begins with the next news."""
        with process_lock.lock:
            self[slot] += step
            if self._before is not None:
                self._before[slot] += step

    def void_all(self) -> None:
        """End all tickets."""
        epoch = next(self._epochs) << 32  # no slot reaches this by single changes
        with process_lock.lock:
            self[:] = array("Q", [epoch]) * len(self)

    def lose(self) -> None:
        """Note that a connection has ended. If a server dies or hangs, its connections end one by one, each when it is
        used. The stamps at the first end count as valid, until the server has been heard of again."""
        if self._before is None or self.heard - self._at > SOON:
            self._before = self[:]
        self._at = time.monotonic()
        self._lost = True

    def forget(self) -> None:
        """Note that this process has closed a connection. If the server is lost now, nothing read over it counts as
        valid."""
        self._at = -inf

    def find(self) -> None:
        """Note that news arrive again. Changes made meanwhile were not reported."""
        self._lost, self.heard = False, time.monotonic()

    def stood(self, slot: int, stamp: int) -> bool:
        """Return whether a ticket was valid until the server was lost. False if the server was heard of again: then
        only one connection was lost."""
        return self._lost and self.heard - self._at <= SOON and self._before[slot] == stamp
