"""What an engine holds: a value, and what is known about its computation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

GRACE = 1.0
"""Seconds that an engine keeps an entry beyond its end, for callers who were waiting while it was fresh."""


def new_id() -> bytes:
    """8 random bytes: ids and tokens are compared for equality, never for order."""
    return os.urandom(8)


# Not frozen, which would triple the price of a hit on a shared engine; nobody writes to one.
@dataclass(slots=True)
class Entry(Generic[T]):
    """A value with an id, its cost, how long it is fresh and how long it is kept.

    `fresh` and `keep` are seconds from the moment the entry was stored (towards an engine) or from the
    moment just before the engine was asked (from an engine). Between a codec and an engine `value` is bytes.

    >>> cache.set("k", 1, ttl=60, stale=30)
    >>> entry = cache.peek("k")
    >>> entry.value, entry.ttl, round(entry.fresh), round(entry.keep)
    (1, 60.0, 60, 90)
    """

    value: T
    id: bytes
    cost: float = 0.0  # seconds the computation took
    margin: float = 0.0  # a remembered high quantile of the key's cost
    ttl: float = inf  # seconds of freshness it was stored with
    fresh: float = inf  # seconds of freshness left; zero or less: stale
    keep: float = inf  # seconds until it is gone; never less than `fresh`
    raised: bool = False  # the value is an exception of `raises`: its class's name, its arguments, what else it holds

    def holding(self, value: S) -> Entry[S]:
        """The same entry around another form of its value.

        >>> cache.set("k", 1, ttl=60)
        >>> cache.peek("k").holding("one").value
        'one'
        """
        return Entry(value, self.id, self.cost, self.margin, self.ttl, self.fresh, self.keep, self.raised)


UNREADABLE = Entry(b"", b"", fresh=-86400.0, keep=1.0)
"""What an engine hands to the codec in the place of bytes that are no entry of ours: the codec refuses it, so that the
damage is told of there, and only there."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an abandoned lease leaves for those who waited for it."""

    kind: str  # "failed": the computation raised; "unkept": its value can't or mustn't be stored; "absent"; "full"
    type_name: str = ""
    message: str = ""
