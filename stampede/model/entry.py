"""Entries: a value, and what is known about its computation. Engines store them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

GRACE = 1.0
"""Seconds for which an engine stores an entry beyond its end, for callers that were waiting while it was fresh."""


def new_id() -> bytes:
    """Return 8 random bytes. Ids and tokens are compared for equality, never for order."""
    return os.urandom(8)


# Not frozen: that would triple the time of a hit on a shared engine. Still, no code writes to an instance.
@dataclass(slots=True)
class Entry(Generic[T]):
    """A value with an id, its cost, and how long it is fresh and stored.

    `fresh` and `keep` are seconds. In an entry that is given to an engine they count from the moment it is stored. In
    an entry from an engine they count from the moment before the engine was asked. Between a codec and an engine,
    `value` is bytes.

    >>> cache.set("k", 1, ttl=60, stale=30)
    >>> entry = cache.peek("k")
    >>> entry.value, entry.ttl, round(entry.fresh), round(entry.keep)
    (1, 60.0, 60, 90)
    """

    value: T
    id: bytes
    cost: float = 0.0  # seconds that the computation took
    margin: float = 0.0  # a high quantile of the key's cost so far
    ttl: float = inf  # seconds of freshness with which it was stored
    fresh: float = inf  # seconds of freshness that are left; stale if zero or less
    keep: float = inf  # seconds until it is gone; never less than `fresh`
    raised: bool = False  # `value` stands for an exception of `raises`: the class's name, arguments, attributes
    etag: str | None = None  # the version of the value, as the origin names it (`current().etag`)
    modified: datetime | None = None  # when the origin last changed the value (`current().modified`)
    tags: bytes = field(default=b"", repr=False)  # the tags that it carries (`model/tags.py`)
    # The id of a stored entry with the same bytes: an engine may leave them where they are, and write the rest.
    same_as: bytes | None = field(default=None, repr=False, compare=False)

    def holding(self, value: S) -> Entry[S]:
        """Return a copy of the entry with another value.

        >>> cache.set("k", 1, ttl=60)
        >>> cache.peek("k").holding("one").value
        'one'
        """
        known = self.cost, self.margin, self.ttl, self.fresh, self.keep, self.raised, self.etag, self.modified
        return Entry(value, self.id, *known, self.tags)


UNREADABLE = Entry(b"", b"", fresh=-86400.0, keep=1.0)
"""The entry that an engine gives to the codec in place of damaged bytes. The codec refuses it, so that damage is
reported in one place."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why a lease was abandoned, for callers that waited for it."""

    kind: str  # "failed": the computation raised; "unkept": its value can't or mustn't be stored; "absent"; "full"
    type_name: str = ""
    message: str = ""
