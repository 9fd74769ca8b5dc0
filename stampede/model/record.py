"""The state of a key, and what each question makes of it: the one place that says what comes before what.

A record is all that an engine knows of one key; its moments are those of the clock that `now` is read from. A
transition gives the record that is there afterwards, the answer, and whose waiters are to be woken. Nothing is read,
kept or sent here: an engine brings the record, and sees to it that nobody else changes it before it puts back the next.
"""

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
"""Seconds for which a verdict is told to those who waited for its lease."""

MOST = 64
"""Verdicts that a key's past holds; the oldest go first."""

FAILED = Verdict("failed")


class Keeps(Protocol):
    """An entry, and the moments at which it is no longer fresh and no longer kept."""

    entry: Entry[Any]
    fresh: float
    keep: float

    @property
    def gone(self) -> float:
        """The moment from which nobody has any use for it."""


# None of these is frozen, which would triple their price, and nobody writes to one.


@dataclass(slots=True)
class Kept:
    """The same, made here. What the entry itself says of these times is of when it was stored."""

    entry: Entry[Any]
    fresh: float
    keep: float
    grace: float = GRACE  # for those who were waiting while it was fresh

    @property
    def gone(self) -> float:
        return max(self.keep, self.fresh + self.grace)


@dataclass(slots=True)
class Lease:
    """A token that stands until `end`."""

    token: bytes
    end: float
    fence: int = 0
    holder: str = ""


@dataclass(slots=True)
class Past:
    """What failed computations have left: their verdicts with the moments until which they are told, and a rest."""

    verdicts: Mapping[bytes, tuple[Verdict, float]] = field(default_factory=dict)
    rest: float = -inf  # nobody is granted the key before
    why: Verdict = FAILED  # it rests

    @property
    def end(self) -> float:
        return max([self.rest, *(end for _, end in self.verdicts.values())])

    def with_failure(self, token: bytes, verdict: Verdict | None, rest: float, now: float) -> Past:
        verdicts = {old: told for old, told in self.verdicts.items() if told[1] > now and old != token}
        if verdict is not None:
            verdicts = dict([*verdicts.items()][1 - MOST :])
            verdicts[token] = verdict, now + VERDICT
        return Past(verdicts, now + rest, verdict or FAILED) if rest > 0 else Past(verdicts, self.rest, self.why)

    def answer(self, awaited: bytes | None, entry: Entry[Any] | None, now: float) -> Failed | None:
        """To one who waited for that lease, its verdict; to everybody, while the key rests, why it does."""
        rest = max(self.rest - now, 0.0)
        verdict, end = self.verdicts.get(awaited or b"", (self.why, self.rest))
        if end <= now:
            verdict, end = self.why, self.rest
        return Failed(verdict, entry, rest) if end > now else None


@dataclass(slots=True)
class Record:
    """All that is known of one key."""

    kept: Keeps | None = None
    lease: Lease | None = None
    past: Past | None = None

    @property
    def end(self) -> float:
        """The moment from which it is as good as nothing."""
        return max(
            -inf if self.kept is None else self.kept.gone,
            -inf if self.lease is None else self.lease.end,
            -inf if self.past is None else self.past.end,
        )


NOTHING = Record()


Change: TypeAlias = tuple[Record, T, bytes | None]
"""What a question has made of a record: the next one (the very one that was given, where nothing is to be written), the
answer, and the lease whose waiters are to be woken, since it has fallen."""


# -- what can be read off -----------------------------------------------------------------------------------------


def left(kept: Keeps, now: float) -> Entry[Any]:
    """The entry with what is left of its times."""
    entry = kept.entry
    return Entry(
        entry.value, entry.id, entry.cost, entry.margin, entry.ttl, kept.fresh - now, kept.keep - now, entry.raised
    )  # fmt: skip


def hit(kept: Keeps, ask: Ask, now: float) -> Found | None:
    """What is good for this caller, who need look no further. Who has waited takes what was fresh while he did."""
    if ask.force or kept.entry.id == ask.seen:
        return None
    if kept.fresh <= now and (kept.fresh - now <= -ask.since or kept.gone <= now):
        return None
    entry = left(kept, now)
    return Found(entry) if ask.draw is None or not early.due(entry, ask.draw) else None


def served(kept: Keeps | None, now: float) -> Entry[Any] | None:
    """What may be served, stale too; not what is there for those who were waiting only."""
    return left(kept, now) if kept is not None and kept.keep > now else None


def standing(lease: Lease | None, token: bytes, now: float) -> bool:
    """Whether the lease stands, and is of this token."""
    return lease is not None and lease.token == token and lease.end > now


# -- a computation: claim, renew, fill or abandon -----------------------------------------------------------------


def claim(record: Record, token: bytes, ask: Ask, now: float, *, fence: int = 0, holder: str = "") -> Change[Reply]:
    """The value, or the right to compute it. `fence` and `holder` are of a lease that is new."""
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
    if lease is not None and standing(lease, token, now):  # its reply was lost
        fence, holder = lease.fence, lease.holder
    granted = Lease(token, now + ask.lease, fence, holder)
    fallen = lease.token if lease is not None and lease.token != token else None
    return Record(kept, granted, past), Granted(entry, fence), fallen


def renew(record: Record, token: bytes, seconds: float, now: float) -> Change[bool]:
    """Let the lease stand for so long from now. False: it is lost."""
    lease = record.lease
    if lease is None or not standing(lease, token, now):
        return record, False, None
    return Record(record.kept, Lease(token, now + seconds, lease.fence, lease.holder), record.past), True, None


def fill(record: Record, token: bytes, entry: Entry[Any], now: float) -> Change[bool]:
    """Store if the lease stands. One that has ended is lost, also where nobody has taken it."""
    lease = record.lease
    if lease is not None and lease.token == token and lease.end > now:  # as `standing`, and a call less
        return _holding(entry, now), True, token
    kept = record.kept
    return record, kept is not None and kept.entry.id == entry.id and kept.gone > now, None  # it was sent again


def abandon(record: Record, token: bytes, verdict: Verdict | None, rest: float, now: float) -> Change[bool]:
    """Drop the lease if it stands; leave a verdict and a rest."""
    kept, lease, past = record.kept, record.lease, record.past
    if not standing(lease, token, now):
        return record, False, None
    if verdict is not None or rest > 0:
        past = (past or Past()).with_failure(token, verdict, rest, now)
    return Record(kept, None, past), True, token


# -- what is no computation: it ends the one under way ------------------------------------------------------------


def set(record: Record, entry: Entry[Any], now: float) -> Change[None]:
    """Store, and forget what was going on."""
    return _holding(entry, now), None, _token(record.lease)


def replace(record: Record, seen: bytes | None, entry: Entry[Any], now: float) -> Change[bool]:
    """Store if what is kept has the id that was seen (None: nothing is kept)."""
    kept = record.kept
    there = kept.entry.id if kept is not None and kept.keep > now else None
    if (there or None) != (seen or None):  # bytes that can't be read have no id, and are nothing to their reader
        return record, there == entry.id, None  # it was sent again
    return _holding(entry, now), True, _token(record.lease)


def expire(record: Record, now: float) -> Change[bool]:
    """Stale from now on, and kept as long as it would have been. True: there was something fresh."""
    kept, lease, past = record.kept, record.lease, record.past
    fresh = kept is not None and kept.fresh > now
    if kept is not None and fresh:
        kept = Kept(kept.entry, now, kept.keep)
    if not fresh and lease is None:
        return record, False, None
    return Record(kept, None, past), fresh, _token(lease)


def invalidate(record: Record, now: float) -> Change[bool]:
    """Nothing. True: there was a value."""
    return NOTHING, record.kept is not None and record.kept.keep > now, _token(record.lease)


def _holding(entry: Entry[Any], now: float) -> Record:
    fresh, keep = now + entry.fresh, now + entry.keep
    return Record(Kept(entry, fresh, keep if keep > fresh else fresh))


def _token(lease: Lease | None) -> bytes | None:
    return lease.token if lease is not None else None
