"""What an item of the server holds: an entry, and who is computing it, and how that went before. Pure.

Three kinds, told apart by the client flags: a bare stub that a claim's vivify has left (no flags, no bytes), an entry
(`PLAIN`), and an entry or nothing with a lease or a past (`STATE`). All times are told from the item's own end, which
the server counts in whole seconds: what is 2.4 s long ends with the third tick of its clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, inf, isfinite
from struct import Struct, error
from typing import NamedTuple

from stampede import early
from stampede.engines.leases import Past
from stampede.engines.memcached.meta import MONTH, Reply
from stampede.entry import GRACE, Entry, Verdict
from stampede.ports import Ask, Busy, Failed, Found

__all__ = [
    "PLAIN",
    "STATE",
    "Body",
    "Item",
    "answer",
    "good",
    "kept",
    "left_of",
    "name_of",
    "plain",
    "read",
    "read_plain",
    "standing",
    "write",
]  # fmt: skip

PLAIN, STATE = b"1470758913", b"1470758914"
"""The client flags of our items. A foreign reader's `get` meets them too: see the engine's docstring."""

_ENTRY = Struct(">BB8sddddd")
"""Version, flags, id, seconds from the end of fresh and of keep to the item's end, cost, margin, ttl."""
_LEASE = Struct(">BdI")
"""Length of the holder's token (and of whose it is), seconds from the lease's end to the item's, length of the past."""

_VERSION = 1
_TOKEN = 8  # bytes of a token that something stands behind
_RAISED, _ALWAYS_FRESH, _ALWAYS_KEPT = 1, 2, 4
_MESSAGE, _CRAMPED = 2000, 50
_LARGE = 100_000


class Body(NamedTuple):
    """An item as it is stored."""

    data: bytes
    flags: bytes
    ttl: int  # 0: no end


@dataclass(slots=True)
class Item:
    """An item as it was read: times are seconds from now."""

    entry: Entry[bytes] | None = None
    holder: bytes = b""
    lease: float = 0.0
    past: Past = field(default_factory=Past)
    who: bytes = b""  # whose the token is

    @property
    def bare(self) -> bool:
        """Nothing but a lease."""
        return self.entry is None and self.past.end <= 0


def name_of(key: str, kind: bytes = b"s") -> bytes:
    """The server's name of a key. Long ones, and those with blanks or control bytes in them, are hashed."""
    if len(key) <= 200 and key.isascii() and key.isprintable() and " " not in key:
        return kind + b":" + key.encode()
    return kind + b"#" + blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest().encode()


# -- writing ------------------------------------------------------------------------------------------------------


def plain(entry: Entry[bytes]) -> Body:
    """An entry that nobody computes."""
    if entry.fresh == inf:
        ttl = 0
    else:
        ttl = min(ceil(max(entry.keep, entry.fresh + GRACE + 1)), MONTH) if entry.keep < inf else MONTH
        ttl = max(ttl, 1)
    return Body(_packed(entry, ttl), PLAIN, ttl)


def standing(lease: float) -> int:
    """Seconds to ask for, so that a lease stands for so long at least."""
    return min(max(ceil(lease), 1) + 1, MONTH)


def write(item: Item) -> Body:
    """An item with a lease or a past; without both it is plain."""
    entry, past = item.entry, item.past
    if item.lease <= 0 and past.end <= 0 and entry is not None:
        return plain(entry)
    ends = [item.lease, past.end]
    if entry is not None:
        ends.append(max(entry.keep, entry.fresh + GRACE + 1))
    ttl = max(min(ceil(min(max(ends), MONTH)), MONTH), 1)
    story = _told(past, ttl, cramped=entry is not None and len(entry.value) > _LARGE)
    holder = item.holder + b"@" + item.who if item.who and len(item.holder) == _TOKEN else item.holder
    head = _LEASE.pack(len(holder), ttl - item.lease, len(story))
    rest = b"" if entry is None else _packed(entry, ttl)
    return Body(head + holder + story + rest, STATE, ttl)


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


def _told(past: Past, ttl: int, *, cramped: bool) -> bytes:
    if past.end <= 0:
        return b""
    longest = _CRAMPED if cramped else _MESSAGE
    verdicts = sorted(past.verdicts.items(), key=lambda each: -each[1][1])[: 4 if cramped else 16]
    told = [[token.hex(), ttl - left, *_cut(verdict, longest)] for token, (verdict, left) in verdicts if left > 0]
    return json.dumps([ttl - past.rest if past.rest > 0 else None, _cut(past.why, longest), told]).encode()


def _cut(verdict: Verdict, longest: int) -> list[str]:
    return [verdict.kind, verdict.type_name[:longest], verdict.message[:longest]]


# -- reading ------------------------------------------------------------------------------------------------------


def read_plain(reply: Reply) -> Entry[bytes] | None:
    """The entry of a plain item. None: somebody else's bytes."""
    return _unpacked(reply.value, 0, reply.left)


def read(reply: Reply) -> Item:
    """Whatever is there. What is not ours is like nothing."""
    if reply.flags == PLAIN:
        return Item(read_plain(reply))
    if reply.flags != STATE:
        return Item()
    left = float(reply.left)
    try:
        size, leaselag, length = _LEASE.unpack_from(reply.value)
        at = _LEASE.size + size
        holder, who, story = reply.value[_LEASE.size : at], b"", reply.value[at : at + length]
        if holder[_TOKEN : _TOKEN + 1] == b"@":
            holder, who = holder[:_TOKEN], holder[_TOKEN + 1 :]
        at += length
        entry = _unpacked(reply.value, at, reply.left) if len(reply.value) > at else None
        past = _heard(story, left) if story else Past()
    except (error, ValueError, TypeError, OverflowError, RecursionError):
        return Item()
    lease = left - leaselag if isfinite(leaselag) else 0.0
    holder, who = (holder, who) if lease > 0 else (b"", b"")
    return Item(entry, holder, max(lease, 0.0), past, who)


def _unpacked(value: bytes, at: int, left: int) -> Entry[bytes] | None:
    try:
        version, flags, id, freshlag, keeplag, cost, margin, ttl = _ENTRY.unpack_from(value, at)
    except error:
        return None
    if version != _VERSION or not (-inf < freshlag + keeplag < inf and -inf < cost < inf and margin >= 0 and ttl >= 0):
        return None
    fresh = inf if flags & _ALWAYS_FRESH else left - freshlag
    keep = inf if flags & _ALWAYS_KEPT else left - keeplag
    return Entry(value[at + _ENTRY.size :], id, cost, margin, ttl, fresh, keep, flags & _RAISED != 0)


def _heard(story: bytes, left: float) -> Past:
    past = Past()
    restlag, why, verdicts = json.loads(story)
    if restlag is not None:
        past.rest = left - restlag
    past.why = Verdict(*map(str, why))
    past.verdicts = {bytes.fromhex(token): (Verdict(*map(str, rest)), left - lag) for token, lag, *rest in verdicts}
    past.end = max([past.rest, *(end for _, end in past.verdicts.values())])
    if not past.end < inf:
        raise ValueError(story)
    return past


# -- deciding -----------------------------------------------------------------------------------------------------


def kept(entry: Entry[bytes] | None) -> Entry[bytes] | None:
    """What may be served while it is stale; not what is there for waiters only."""
    return entry if entry is not None and entry.keep > 0 else None


def good(entry: Entry[bytes], ask: Ask) -> bool:
    """Whether this caller need look no further."""
    if entry.fresh <= -ask.since or ask.force or entry.id == ask.seen or max(entry.keep, entry.fresh + GRACE + 1) <= 0:
        return False
    return ask.draw is None or not early.due(entry, ask.draw)


def answer(item: Item, token: bytes, ask: Ask) -> Found | Busy | Failed | None:
    """One claim's answer. None: the lease may be had."""
    if item.entry is not None and good(item.entry, ask):
        return Found(item.entry)
    if ask.force:
        return None
    entry = kept(item.entry)
    failed = item.past.answer(ask.awaited, entry, 0.0) if item.past.end > 0 else None
    if failed is not None:
        failed.rest = max(failed.rest - 1, 0.05) if failed.rest > 0 else 0.0
        return failed
    if item.lease > 0 and item.holder != token:
        return Busy(item.holder, left_of(item.lease), entry)
    return None


def left_of(lease: float) -> float:
    """Seconds for which a lease stands at least: what the server says has begun already."""
    return max(lease - 1, 0.05)
