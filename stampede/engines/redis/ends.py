"""When entries end, as this process was told: of one that still stands as it did, a look needn't ask again."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from stampede.engines.redis.wire import HEAD
from stampede.entry import Entry

__all__ = ["Ends", "Known"]

MOST = 4096
"""Entries of which that is known, at most."""


class Known(NamedTuple):
    """One entry's. Two that look alike up to here are one: their ids are."""

    head: bytes  # its string begins so
    end: float  # of its key, on our own clock
    until: float  # after this somebody may have refreshed it


class Ends:
    """Of the entries that were looked at lately."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}

    def of(self, name: bytes, now: float) -> Known | None:
        known = self._known.get(name)
        return known if known is not None and now < known.until else None

    def learn(self, name: bytes, string: bytes, left: float, entry: Entry[Any], at: float) -> None:
        """What was said of it; `at`: when it was asked for."""
        until = at + entry.fresh - min(2 * entry.margin, entry.ttl / 2)
        if len(self._known) >= MOST:
            with suppress(RuntimeError, StopIteration):  # another thread makes room, too
                self.forget(next(iter(self._known)))
        self._known[name] = Known(string[:HEAD], inf if left < 0 else at + left / 1000, until)

    def forget(self, name: bytes) -> None:
        self._known.pop(name, None)
