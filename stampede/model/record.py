"""The state of a key, and how each question changes it: the only place that defines which part takes precedence.

A record is all that an engine knows of one key. Its moments are those of the clock from which `now` is read. A
transition returns the next record, the answer, and the lease whose waiters the engine wakes. Nothing is read, stored or
sent here: an engine reads the record, and prevents other changes of it until the next record is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, TypeAlias, TypeVar

from stampede.model import early
from stampede.model.entry import GRACE, Entry, Verdict
from stampede.model.ports import Ask, Busy, Failed, Found, Granted, Reply

__all__ = [
    "NOTHING",
    "VERDICT",
    "Change",
    "Keeps",
    "Kept",
    "Lease",
    "Past",
    "Record",
    "abandon",
    "claim",
    "expire",
    "fill",
    "hit",
    "invalidate",
    "left",
    "renew",
    "replace",
    "served",
    "set",
    "standing",
]  # fmt: skip

T = TypeVar("T")

VERDICT = 5.0
"""Seconds for which a verdict remains available to callers that waited for its lease."""

MOST = 64
"""The most verdicts that are stored for a key. The oldest are dropped first."""

FAILED = Verdict("failed")


class Keeps(Protocol):
    """A stored entry, the moment at which it becomes stale, and the moment from which it is not served any more."""

    entry: Entry[Any]
    fresh: float
    keep: float

    @property
    def gone(self) -> float:
        """The moment from which the entry is useless, also to callers that have waited for it."""


# None of these classes is frozen: that would triple the time to make one. Still, no code writes to an instance.


@dataclass(slots=True)
class Kept:
    """A stored entry that this module has made. The entry's own `fresh` and `keep` count from when it was stored."""

    entry: Entry[Any]
    fresh: float
    keep: float
    grace: float = GRACE  # seconds for callers that were waiting while it was fresh

    @property
    def gone(self) -> float:
        return max(self.keep, self.fresh + self.grace)


@dataclass(slots=True)
class Lease:
    """The right to compute: a token that is valid until `end`."""

    token: bytes
    end: float
    fence: int = 0
    holder: str = ""


@dataclass(slots=True)
class Past:
    """The traces of failed computations: verdicts, each with the moment until which it is given, and a rest."""

    verdicts: Mapping[bytes, tuple[Verdict, float]] = field(default_factory=dict)  # by the token of the lease
    rest: float = -inf  # the key is not granted before this moment
    why: Verdict = FAILED  # the reason for the rest

    @property
    def end(self) -> float:
        return max([self.rest, *(end for _, end in self.verdicts.values())])

    def with_failure(self, token: bytes, verdict: Verdict | None, rest: float, now: float) -> Past:
        verdicts = {old: given for old, given in self.verdicts.items() if given[1] > now and old != token}
        if verdict is not None:
            verdicts = dict([*verdicts.items()][1 - MOST :])
            verdicts[token] = verdict, now + VERDICT
        return Past(verdicts, now + rest, verdict or FAILED) if rest > 0 else Past(verdicts, self.rest, self.why)

    def answer(self, awaited: bytes | None, entry: Entry[Any] | None, now: float) -> Failed | None:
        """Return the verdict of the awaited lease, or, while the key rests, the reason for the rest; otherwise None."""
        rest = max(self.rest - now, 0.0)
        verdict, end = self.verdicts.get(awaited or b"", (self.why, self.rest))
        if end <= now:
            verdict, end = self.why, self.rest
        return Failed(verdict, entry, rest) if end > now else None


@dataclass(slots=True)
class Record:
    """All that an engine knows of one key."""

    kept: Keeps | None = None
    lease: Lease | None = None
    past: Past | None = None

    @property
    def end(self) -> float:
        """The moment from which the record says as much as no record."""
        return max(
            -inf if self.kept is None else self.kept.gone,
            -inf if self.lease is None else self.lease.end,
            -inf if self.past is None else self.past.end,
        )


NOTHING = Record()


Change: TypeAlias = tuple[Record, T, bytes | None]
"""The outcome of a transition: the next record (the same object if nothing has to be written), the answer, and the
token of a lease that ended, whose waiters have to be woken."""


# -- reading ------------------------------------------------------------------------------------------------------


def left(kept: Keeps, now: float) -> Entry[Any]:
    """Return the entry with the seconds that it is still fresh and still stored."""
    entry = kept.entry
    return Entry(
        entry.value, entry.id, entry.cost, entry.margin, entry.ttl, kept.fresh - now, kept.keep - now, entry.raised,
        entry.etag, entry.modified, entry.tags,
    )  # fmt: skip


def hit(kept: Keeps, ask: Ask, now: float) -> Found | None:
    """Return the entry if this caller accepts it. A caller that has waited accepts what was fresh in that time."""
    if ask.force or kept.entry.id == ask.seen:
        return None
    if kept.fresh <= now and (kept.fresh - now <= -ask.since or kept.gone <= now):
        return None
    entry = left(kept, now)
    return Found(entry) if ask.draw is None or not early.due(entry, ask.draw) else None


def served(kept: Keeps | None, now: float) -> Entry[Any] | None:
    """Return the entry if it may be served, also stale. One in its grace is only for callers that were waiting."""
    return left(kept, now) if kept is not None and kept.keep > now else None


def standing(lease: Lease | None, token: bytes, now: float) -> bool:
    """Return whether there is a lease of this token that has not ended."""
    return lease is not None and lease.token == token and lease.end > now


# -- a computation: claim, renew, fill or abandon -----------------------------------------------------------------


def claim(record: Record, token: bytes, ask: Ask, now: float, *, fence: int = 0, holder: str = "") -> Change[Reply]:
    """Return the value, or the right to compute it. `fence` and `holder` are used if a new lease is granted."""
    kept, lease, past = record.kept, record.lease, record.past
    found = hit(kept, ask, now) if kept is not None else None
    if found is not None:
        return record, found, None
    entry = served(kept, now) if kept is not None else None
    if not ask.force:
        failed = past.answer(ask.awaited, entry, now) if past is not None else None
        if failed is not None:
            return record, failed, None
        if lease is not None and lease.end > now and lease.token != token:
            return record, Busy(lease.token, lease.end - now, entry), None
    if lease is not None and standing(lease, token, now):  # claimed before, and the reply was lost
        fence, holder = lease.fence, lease.holder
    granted = Lease(token, now + ask.lease, fence, holder)
    fallen = lease.token if lease is not None and lease.token != token else None
    return Record(kept, granted, past), Granted(entry, fence), fallen


def renew(record: Record, token: bytes, seconds: float, now: float) -> Change[bool]:
    """Extend the lease to so many seconds from now. The answer is False if it is lost."""
    lease = record.lease
    if lease is None or not standing(lease, token, now):
        return record, False, None
    return Record(record.kept, Lease(token, now + seconds, lease.fence, lease.holder), record.past), True, None


def fill(record: Record, token: bytes, entry: Entry[Any], now: float) -> Change[bool]:
    """Store the entry if the lease is valid. A lease that has ended is lost, even if no other was granted since."""
    lease = record.lease
    if lease is not None and lease.token == token and lease.end > now:  # `standing`, without the call
        return _holding(entry, now), True, token
    kept = record.kept
    return record, kept is not None and kept.entry.id == entry.id and kept.gone > now, None  # True: it was sent twice


def abandon(record: Record, token: bytes, verdict: Verdict | None, rest: float, now: float) -> Change[bool]:
    """End the lease if it is valid, and store a verdict and a rest."""
    kept, lease, past = record.kept, record.lease, record.past
    if not standing(lease, token, now):
        return record, False, None
    if verdict is not None or rest > 0:
        past = (past or Past()).with_failure(token, verdict, rest, now)
    return Record(kept, None, past), True, token


# -- changes from outside a computation, which cancel the one under way -------------------------------------------


def set(record: Record, entry: Entry[Any], now: float) -> Change[None]:
    """Store the entry. A lease, verdicts and a rest are dropped."""
    return _holding(entry, now), None, _token(record.lease)


def replace(record: Record, seen: bytes | None, entry: Entry[Any], now: float) -> Change[bool]:
    """Store the entry if the stored one has the id `seen` (None: nothing is stored)."""
    kept = record.kept
    there = kept.entry.id if kept is not None and kept.keep > now else None
    if (there or None) != (seen or None):  # unreadable bytes have an empty id, and count as nothing
        return record, there == entry.id, None  # True: it was sent twice
    return _holding(entry, now), True, _token(record.lease)


def expire(record: Record, now: float) -> Change[bool]:
    """Make the entry stale, but store it as long as before. The answer is True if it was fresh."""
    kept, lease, past = record.kept, record.lease, record.past
    fresh = kept is not None and kept.fresh > now
    if kept is not None and fresh:
        kept = Kept(kept.entry, now, kept.keep)
    if not fresh and lease is None:
        return record, False, None
    return Record(kept, None, past), fresh, _token(lease)


def invalidate(record: Record, now: float) -> Change[bool]:
    """Remove everything. The answer is True if there was a value."""
    return NOTHING, record.kept is not None and record.kept.keep > now, _token(record.lease)


def _holding(entry: Entry[Any], now: float) -> Record:
    fresh, keep = now + entry.fresh, now + entry.keep
    return Record(Kept(entry, fresh, keep if keep > fresh else fresh))


def _token(lease: Lease | None) -> bytes | None:
    return lease.token if lease is not None else None
