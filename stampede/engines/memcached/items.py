"""The record of a key as an item of the server. Pure.

The client flags tell two kinds apart: an entry (`PLAIN`), and a lease or a past, perhaps with an entry (`STATE`). An
item stores all times relative to its own end, which the server counts in whole seconds: 2.4 s end with the third tick
of its clock. In a record that was read here, times are seconds from now, so that now is 0."""

from __future__ import annotations

from math import ceil, inf, isfinite
from struct import Struct, error
from typing import NamedTuple

from stampede.engines.kit.failures import decode_past, encode_past
from stampede.engines.kit.naming import name_of
from stampede.engines.kit.whereabouts import here
from stampede.engines.memcached.meta import MONTH, MetaReply
from stampede.model import record
from stampede.model.entry import GRACE, UNREADABLE, Entry
from stampede.model.ports import Ask, Busy, Failed, Found
from stampede.model.record import NOTHING, Kept, Lease, Past, Record

__all__ = [
    "PLAIN",
    "STATE",
    "ItemBody",
    "answer",
    "bare",
    "leased",
    "left_of",
    "name_of",
    "plain",
    "read",
    "read_plain",
    "whole_seconds",
    "write",
]  # fmt: skip

PLAIN, STATE = b"1470758913", b"1470758914"
"""The client flags of our items. Other programs see them, too: see the engine's docstring."""

_ENTRY = Struct(">BB8sddddd")
"""Version, flags, id, seconds from the end of fresh and of keep to the item's end, cost, margin, ttl."""
_LEASE = Struct(">BdI")
"""Length of the holder's token (and name), seconds from the lease's end to the item's end, length of the past."""

_VERSION = 1
_TOKEN = 8  # bytes of a token that is followed by the holder's name
_RAISED, _ALWAYS_FRESH, _ALWAYS_KEPT = 1, 2, 4
_ROOMY, _CRAMPED = (2000, 16), (50, 4)  # characters of a verdict's message, and number of verdicts, at most
_LARGE = 100_000


class ItemBody(NamedTuple):
    """The contents of an item as it is stored."""

    data: bytes
    flags: bytes
    ttl: int  # 0: no end


def bare(it: Record) -> bool:
    """Return whether the record has neither an entry nor a past, at most a lease."""
    return it.kept is None and (it.past is None or it.past.end <= 0)


# -- writing ------------------------------------------------------------------------------------------------------


def plain(entry: Entry[bytes]) -> ItemBody:
    """Return the item of an entry without a lease or a past."""
    if entry.fresh == inf:
        ttl = 0
    else:
        ttl = min(ceil(max(entry.keep, entry.fresh + GRACE + 1)), MONTH) if entry.keep < inf else MONTH
        ttl = max(ttl, 1)
    return ItemBody(_packed(entry, ttl), PLAIN, ttl)


def whole_seconds(lease: float) -> int:
    """Return the seconds to ask for, so that a lease is valid for at least `lease` seconds."""
    return min(max(ceil(lease), 1) + 1, MONTH)


def leased(token: bytes, seconds: int) -> ItemBody:
    """Return the item of a lease of this process, without an entry."""
    holder = _holder_bytes(token, here())
    return ItemBody(_LEASE.pack(len(holder), 0.0, 0) + holder, STATE, seconds)


def write(it: Record) -> ItemBody:
    """Return the item of a record. It is plain if there is neither a lease nor a past."""
    entry = None if it.kept is None else record.left(it.kept, 0.0)
    past, lease = it.past or Past(), it.lease or Lease(b"", 0.0)
    if lease.end <= 0 and past.end <= 0 and entry is not None:
        return plain(entry)
    ends = [lease.end, past.end]
    if entry is not None:
        ends.append(max(entry.keep, entry.fresh + GRACE + 1))
    ttl = max(min(ceil(min(max(ends), MONTH)), MONTH), 1)
    cramped = entry is not None and len(entry.value) > _LARGE
    failures = encode_past(past, 0.0, ttl, *(_CRAMPED if cramped else _ROOMY)) if past.end > 0 else b""
    holder = _holder_bytes(lease.token, lease.holder)
    head = _LEASE.pack(len(holder), ttl - lease.end, len(failures))
    rest = b"" if entry is None else _packed(entry, ttl)
    return ItemBody(head + holder + failures + rest, STATE, ttl)


def _holder_bytes(token: bytes, holder: str) -> bytes:
    return token + b"@" + holder.encode("utf-8", "replace") if holder and len(token) == _TOKEN else token


def _packed(entry: Entry[bytes], ttl: int) -> bytes:
    flags, freshlag, keeplag = _RAISED if entry.raised else 0, 0.0, 0.0
    if entry.fresh == inf:
        flags |= _ALWAYS_FRESH
    else:
        freshlag = ttl - float(ceil(entry.fresh))
    if entry.keep == inf:
        flags |= _ALWAYS_KEPT
    else:
        keeplag = ttl - float(ceil(entry.keep))
    head = _ENTRY.pack(_VERSION, flags, entry.id, freshlag, keeplag, entry.cost, entry.margin, entry.ttl)
    return head + entry.value


# -- reading ------------------------------------------------------------------------------------------------------


_DAMAGED = Kept(UNREADABLE, UNREADABLE.fresh, UNREADABLE.keep, 0.0)


def read_plain(reply: MetaReply) -> Kept:
    """Return the entry of a plain item."""
    return _unpacked(reply.value, 0, reply.left)


def read(reply: MetaReply) -> Record:
    """Return the record in an item. Bytes of another program are a damaged entry."""
    if reply.flags == PLAIN:
        return Record(read_plain(reply))
    if reply.flags != STATE:
        return Record(_DAMAGED) if reply.value else NOTHING
    left = float(reply.left)
    try:
        size, leaselag, length = _LEASE.unpack_from(reply.value)
        at = _LEASE.size + size
        token, who, failures = reply.value[_LEASE.size : at], b"", reply.value[at : at + length]
        if token[_TOKEN : _TOKEN + 1] == b"@":
            token, who = token[:_TOKEN], token[_TOKEN + 1 :]
        at += length
        kept = _unpacked(reply.value, at, reply.left) if len(reply.value) > at else None
        past = decode_past(failures, left) if failures else None
    except (error, ValueError, TypeError, OverflowError, RecursionError):
        return Record(_DAMAGED)
    end = left - leaselag if isfinite(leaselag) else 0.0
    return Record(kept, Lease(token, end, holder=who.decode("utf-8", "replace")) if end > 0 else None, past)


def _unpacked(value: bytes, at: int, left: int) -> Kept:
    try:
        version, flags, id, freshlag, keeplag, cost, margin, ttl = _ENTRY.unpack_from(value, at)
    except error:
        return _DAMAGED
    if version != _VERSION or not (-inf < freshlag + keeplag < inf and -inf < cost < inf and margin >= 0 and ttl >= 0):
        return _DAMAGED
    fresh = inf if flags & _ALWAYS_FRESH else left - freshlag
    keep = inf if flags & _ALWAYS_KEPT else left - keeplag
    entry = Entry(value[at + _ENTRY.size :], id, cost, margin, ttl, fresh, keep, flags & _RAISED != 0)
    return Kept(entry, fresh, keep, GRACE + 1)


# -- deciding -----------------------------------------------------------------------------------------------------


def answer(it: Record, token: bytes, ask: Ask) -> Found | Busy | Failed | None:
    """Return the answer to a claim. None: the lease may be granted."""
    _, reply, _ = record.claim(it, token, ask, 0.0)
    match reply:
        case Busy():
            reply.lease = left_of(reply.lease)
        case Failed():
            reply.rest = left_of(reply.rest) if reply.rest > 0 else 0.0
        case Found():
            pass
        case _:
            return None
    return reply


def left_of(seconds: float) -> float:
    """Return the seconds that a lease or a rest has left at least: part of the server's current second has passed."""
    return max(seconds - 1, 0.05)
