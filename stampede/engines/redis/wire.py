"""Arguments and replies: names of keys, entries as strings, durations as milliseconds. Pure."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from hashlib import blake2b
from math import ceil, inf
from struct import Struct, error
from typing import Any, NamedTuple

from stampede.engines.kit.replies import ODD
from stampede.engines.kit.whereabouts import here
from stampede.errors import EngineError, TooLarge
from stampede.model.entry import GRACE, UNREADABLE, Entry, Verdict
from stampede.model.ports import Ask, Busy, Failed, Found, Granted, Reply, Shown, Ticket

__all__ = [
    "HEAD",
    "RedisNames",
    "claim_args",
    "entry_of",
    "expiry",
    "fresh_of",
    "kept",
    "key_of",
    "ms",
    "names",
    "news_of",
    "pack",
    "pattern",
    "reply_of",
    "shown",
    "token_of",
    "verdict_string",
]

FOREVER = 1000 * 365 * 86_400_000
"""A thousand years in ms, for keys that must have an end because something is counted from it."""

_HEAD = Struct(">BB8sddddd")
"""Version, flags, id, lag and keep-lag in ms behind the end of the key, cost, margin, ttl. (`entry.lua` reads it.)"""

HEAD = _HEAD.size
_VERSION = _RAISED = 1
SLACK = 1.0  # in seconds, as in `entry.lua`
_LONGEST = 512 * 1024 * 1024  # the protocol's limit for a string
_MESSAGE = 4000

_FOUND, _GRANTED, _BUSY, _FAILED, _REFUSED = range(5)  # as in `claim.lua`
_DAMAGED = -3  # in place of the ms left: see `entry.lua`


class RedisNames(NamedTuple):
    """The keys of one entry, all in one slot of a cluster, whatever the user's key contains."""

    entry: bytes
    lease: bytes
    past: bytes  # verdicts by token
    rest: bytes
    channel: bytes
    slot: int  # the slot of the stamp that a local tier compares


@lru_cache(1024)
def names(key: str) -> RedisNames:
    """Return the keys of an entry. Their tag is a hash, since users' keys may contain braces; the user's key follows
    it, for people who look."""
    raw = key.encode("utf-8", "surrogatepass")
    digest = blake2b(raw, digest_size=12).digest()
    tag = b"{%s}" % digest.hex().encode()
    return RedisNames(tag + b":" + raw, tag + b"l", tag + b"v", tag + b"r", tag + b"c", digest[0] << 8 | digest[1])


def key_of(entry: bytes) -> str:
    """Return the user's key of an entry's name."""
    return entry[27:].decode("utf-8", "surrogatepass")


def pattern(prefix: str) -> bytes:
    """Return a pattern that matches the entries' names whose keys begin with this prefix."""
    return b"{%b}:%b*" % (24 * b"?", _SPECIAL.sub(rb"\\\g<0>", prefix.encode("utf-8", "surrogatepass")))


_SPECIAL = re.compile(rb"[*?\[\]\\]")


# -- entries ------------------------------------------------------------------------------------------------------


def _whole_ms(seconds: float) -> int:
    """Return whole milliseconds, at least one: Redis refuses zero."""
    return max(min(ceil(seconds * 1000), FOREVER), 1)


@lru_cache(1024)
def ms(seconds: float) -> bytes:
    """Return whole milliseconds, at least one, as they are sent."""
    return b"%d" % _whole_ms(seconds)


def expiry(entry: Entry[Any]) -> int | None:
    """Return the ms until the entry's key ends: `keep`, and at least a moment after `fresh` for waiters. None:
    never."""
    if entry.fresh == inf:
        return None
    if entry.keep == inf:
        return _whole_ms(entry.fresh) + FOREVER
    return _whole_ms(max(entry.keep, entry.fresh + GRACE))


def pack(entry: Entry[Any], end: int | None) -> bytes:
    """Return the entry as a string. Raise TooLarge if Redis cannot store it."""
    value: bytes = entry.value
    if len(value) > _LONGEST - _HEAD.size:
        raise TooLarge(f"{len(value)} bytes are more than Redis can store in one string")
    lag, keeplag = (0.0, 0.0) if end is None else (end - 1000 * entry.fresh, end - 1000 * entry.keep)
    flags = _RAISED if entry.raised else 0
    return _HEAD.pack(_VERSION, flags, entry.id, lag, keeplag, entry.cost, entry.margin, entry.ttl) + value


def entry_of(string: bytes, left: float) -> Entry[Any]:
    """Return the entry in a string whose key has `left` ms to go (negative: it has no end)."""
    _, flags, id, lag, keeplag, cost, margin, ttl = _HEAD.unpack_from(string)
    if left < 0:
        left = inf
    return Entry(string[HEAD:], id, cost, margin, ttl, (left - lag) / 1000, (left - keeplag) / 1000, flags == _RAISED)


def kept(answer: Any) -> Entry[Any] | None:
    """Return the entry in an answer of `get.lua`."""
    if answer is None:
        return None
    return UNREADABLE if answer[0] == _DAMAGED else entry_of(answer[1], answer[0])


def fresh_of(left: float, string: bytes | None) -> Entry[Any] | None:
    """Return the entry that a plain read has found, if it is fresh. Return None also for what only `entry.lua` can
    judge: damaged bytes, and a key with more time left than it was given, for example because the server's clock was
    set back. The time left was asked for before the entry. If another process stores an entry in between, the older one
    does not get the new one's time."""
    if string is None or left == -2 or len(string) < HEAD or string[0] != _VERSION:
        return None
    _, flags, id, lag, keeplag, cost, margin, ttl = _HEAD.unpack_from(string)
    if left < 0:
        left = inf
    fresh, keep = (left - lag) / 1000, (left - keeplag) / 1000
    # Comparisons with NaN are false.
    if 0 < fresh <= ttl + SLACK and keep == keep and cost - cost == 0 and margin >= 0:
        return Entry(string[HEAD:], id, cost, margin, ttl, fresh, keep, flags == _RAISED)
    return None


# -- claims -------------------------------------------------------------------------------------------------------


def claim_args(token: bytes, ask: Ask, channel: bytes) -> tuple[bytes, ...]:
    """Return the arguments of `claim.lua`."""
    lease, draw = ms(ask.lease), b"" if ask.draw is None else b"%r" % ask.draw
    if not (ask.since or ask.seen or ask.awaited or ask.force):
        return token, lease, draw, _whose(token)
    force = b"1" if ask.force else b""
    since = b"%r" % (1000.0 * ask.since)
    return token, lease, draw, _whose(token), since, ask.seen or b"", ask.awaited or b"", force, channel


def reply_of(answer: Any, ticket: Ticket | None = None) -> Reply:
    """Return the answer of `claim.lua` as a reply. Raise a partial EngineError if the server may not write."""
    try:
        what, left, string, *more = answer
        if string is None:
            entry = UNREADABLE if left == _DAMAGED else None
        else:
            entry = entry_of(string, left)
        if what == _FOUND and entry is not None:
            return Found(entry, ticket)
        if what == _GRANTED:
            return Granted(entry)
        if what == _BUSY:
            return Busy(more[0], more[1] / 1000, entry)
        if what == _FAILED:
            return Failed(_verdict_of(more[0]), entry, more[1] / 1000)
        if what == _REFUSED:
            raise _refusal(more[0])
    except ODD as odd:
        raise EngineError(f"Redis answered a claim with {str(answer)[:80]}: {odd}") from odd
    raise EngineError(f"Redis answered a claim with {what!r}")


def _refusal(why: bytes) -> EngineError:
    """Return the error for a server that reads but does not write (full, or unable to persist). Its entries remain
    valid."""
    full = " (raise it, or set maxmemory-policy volatile-lru)" if why.startswith(b"OOM") else ""
    refusal = EngineError(f"Redis refuses to grant a lease: {why.decode('utf-8', 'replace')}{full}")
    refusal.partial = refusal.refused = True
    return refusal


def verdict_string(verdict: Verdict) -> bytes:
    """Return a verdict as a string."""
    return json.dumps([verdict.kind, verdict.type_name[:_MESSAGE], verdict.message[:_MESSAGE]]).encode()


def token_of(string: bytes | None) -> bytes | None:
    """Return the token in the value of a lease's key. Behind it are the holder and the duration that was given.
    (`lease.lua` reads and writes this.)"""
    if string is None or len(string) <= _PX.size:
        return string
    named = string[: -_PX.size]
    return named[:8] if named[8:9] == b"@" else named


def shown(answer: Any, lease: bytes | None, left: int) -> Shown:
    """Return what people are shown, from an answer of `get.lua`, the value of the lease's key, and the lease's ms
    left."""
    entry = kept(answer)
    if lease is None or left <= 0:
        return Shown(entry, b"")
    holder = lease[9 : -_PX.size].decode("utf-8", "replace") if lease[8:9] == b"@" else ""
    return Shown(entry, token_of(lease), left / 1000, holder)


def _whose(token: bytes) -> bytes:
    """Return the holder as it is written behind the token. (Only tokens of 8 bytes have one.)"""
    return b"@" + here().encode("utf-8", "replace") if len(token) == 8 else b""


def _verdict_of(string: bytes) -> Verdict:
    try:
        kind, type_name, message = json.loads(string)
    except (TypeError, ValueError, RecursionError):
        return Verdict("failed")
    return Verdict(str(kind), str(type_name), str(message))


# -- news ---------------------------------------------------------------------------------------------------------


def news_of(message: bytes, token: bytes) -> Entry[Any] | None:
    """Return the entry that a fill has sent along, if it was computed under the lease of this token. An older lease's
    message may arrive late, and any client can publish one. So the entry's own id, which its codec signs, must be that
    token."""
    if message[:8] != token or len(message) < 16 + _HEAD.size:
        return None
    try:
        entry = entry_of(message[16:], _PX.unpack_from(message, 8)[0])
    except error:
        return None
    return entry if entry.id == token else None


_PX = Struct(">d")
