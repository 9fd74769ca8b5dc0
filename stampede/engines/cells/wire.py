"""The bytes of a cell: one record, whose times are counted from the moment of its writing. Pure functions.

offset  size
   0     2   magic, b"SC"
   2     1   version of this layout
   3     1   zero
   4     8   random bytes, so that the same bytes are never written twice
  12     8   when it was written, by its writer's wall clock: for readers that know nothing better
  20     4   CRC-32 of name, header and body
  24         body

of a record
   0     1   flags: 1 there is a lease, 2 a past, 4 an entry, 8 the entry is a raised exception
   1    18   lease: seconds left, fence, lengths of token and holder; both follow
         4   past: length of its JSON, which follows
        48   entry: id, seconds fresh and kept (infinity: for ever), cost, margin, ttl; its bytes follow"""

from __future__ import annotations

import os
from math import inf
from struct import Struct, error
from zlib import crc32

from stampede.engines.kit.failures import decode_past, encode_past
from stampede.model.entry import UNREADABLE, Entry
from stampede.model.record import Kept, Lease, Record

__all__ = ["ROOM", "body_of", "leased", "opened", "record_of", "sealed"]

MAGIC, VERSION = b"SC", 1
_HEAD, _CRC = Struct(">2sBx8sd"), Struct(">I")
_START = _HEAD.size + _CRC.size

_FLAGS, _LEASE, _PAST, _ENTRY = Struct(">B"), Struct(">dQBB"), Struct(">I"), Struct(">8sddddd")
_LEASED, _FAILED, _KEPT, _RAISED = 1, 2, 4, 8
_LONG = 255  # the most bytes of a token, and of a holder

ROOM = 1024
"""Bytes of a cell that are reserved for everything but the value."""

_FOREVER = 1e9
"""The longest lease, and the longest rest of a key, in seconds."""

_MESSAGE, _VERDICTS = 1000, 64
"""The longest message of a verdict, and the most verdicts. If they do not fit into the cell, failures are left out."""


# -- the header ----------------------------------------------------------------------------------------------------


def sealed(name: str, body: bytes, wall: float) -> bytes:
    """Return the bytes for a cell: header and body. The checksum contains the name: they are valid for it only."""
    head = _HEAD.pack(MAGIC, VERSION, os.urandom(8), wall)
    return head + _CRC.pack(_checksum(name, head, body)) + body


def opened(name: str, data: object) -> tuple[memoryview, float] | None:
    """Return the body, and when it was written by its writer's wall clock. None: another program has written this, and
    it need not even be bytes, since some columns take any type."""
    if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) < _START:
        return None
    magic, version, _, wall = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or not -inf < wall < inf:
        return None
    body = memoryview(data)[_START:]
    if _checksum(name, data[: _HEAD.size], body) != _CRC.unpack_from(data, _HEAD.size)[0]:
        return None
    return body, wall


def _checksum(name: str, head: bytes | bytearray | memoryview, body: bytes | memoryview) -> int:
    return crc32(body, crc32(head, crc32(name.encode("ascii"))))


# -- writing -------------------------------------------------------------------------------------------------------


def body_of(record: Record, now: float, longest: float = inf) -> bytes:
    """Return the bytes of a record. Parts that have expired are left out, and failures if they do not fit."""
    kept, lease = record.kept, record.lease
    flags, head, tail = 0, b"", b""
    if lease is not None and (lease.end > now or not lease.token):  # no token: a free lock, whose fence is stored
        token, holder = lease.token[:_LONG], lease.holder.encode("utf-8", "replace")[:_LONG]
        flags |= _LEASED
        head = _LEASE.pack(min(lease.end - now, _FOREVER), lease.fence, len(token), len(holder)) + token + holder
    if kept is not None and kept.gone > now:
        entry = kept.entry
        flags |= _KEPT | (_RAISED if entry.raised else 0)
        times = kept.fresh - now, kept.keep - now
        tail = _ENTRY.pack(entry.id, *times, entry.cost, entry.margin, entry.ttl) + entry.value
    if record.past is not None and record.past.end > now:
        room = longest - _START - _FLAGS.size - len(head) - _PAST.size - len(tail)
        failures = encode_past(record.past, now, now, _MESSAGE, _VERDICTS)
        if len(failures) <= room:
            flags |= _FAILED
            head += _PAST.pack(len(failures)) + failures
    return _FLAGS.pack(flags) + head + tail


# -- reading -------------------------------------------------------------------------------------------------------


def record_of(body: memoryview, written: float, latest: float) -> Record:
    """Return the record in these bytes. If they are damaged, the record contains an entry that can't be read.

    `written` is the best estimate of when they were written: the entry ages from then. They were certainly written by
    `latest`: a lease lasts from then."""
    try:
        return _record_of(body, written, latest)
    except (error, ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return Record(Kept(UNREADABLE, latest + UNREADABLE.fresh, latest + UNREADABLE.keep, 0.0))


def leased(body: bytes | memoryview) -> bool:
    """Return whether the record contains a lease."""
    return bool(body and body[0] & _LEASED)


def _record_of(body: memoryview, written: float, latest: float) -> Record:
    (flags,), at = _FLAGS.unpack_from(body), _FLAGS.size
    lease = past = kept = None
    if flags & _LEASED:
        left, fence, size, more = _LEASE.unpack_from(body, at)
        at += _LEASE.size + size + more
        token, holder = bytes(body[at - size - more : at - more]), bytes(body[at - more : at])
        lease = Lease(token, latest + _bounded(left), fence, holder.decode("utf-8", "replace"))
    if flags & _FAILED:
        (size,) = _PAST.unpack_from(body, at)
        at += _PAST.size + size
        past = decode_past(bytes(body[at - size : at]), written)
    if flags & _KEPT:
        id, fresh, keep, cost, margin, ttl = _ENTRY.unpack_from(body, at)
        if not (-inf < cost < inf and margin >= 0 and ttl >= 0 and -inf < fresh <= keep):
            raise ValueError("no entry")
        value = bytes(body[at + _ENTRY.size :])
        entry = Entry(value, id, cost, margin, ttl, fresh, keep, flags & _RAISED != 0)
        kept = Kept(entry, written + fresh, written + keep)
    return Record(kept, lease, past)


def _bounded(seconds: float) -> float:
    if not seconds <= _FOREVER:
        raise ValueError("for ever")
    return float(seconds)
