"""Arguments and rows: keys as they are named, entries as columns, what is sent along with news. Pure."""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import blake2b
from math import inf
from struct import Struct, error
from typing import Any, NamedTuple

from stampede.engines.postgres.talk import Row
from stampede.errors import EngineError, TooLarge
from stampede.model.entry import GRACE, Entry, Verdict
from stampede.model.ports import Busy, Failed, Found, Granted, Reply, Ticket

__all__ = [
    "SMALL",
    "PostgresNames",
    "entry_of",
    "fresh_of",
    "is_whole",
    "key_of",
    "message_of",
    "names",
    "news_of",
    "reply_of",
    "row_of",
    "verdict_string",
]

SMALL = 4096  # bytes of a value that is sent along with the news of it
SLACK = 1.0  # seconds that an entry may have more than it was given, before its server's clock was set back

_LONGEST = 512 << 20
_MESSAGE = 4000
_ALONG = Struct(">8sdddddB")  # id, fresh, keep, cost, margin, ttl, raised


class PostgresNames(NamedTuple):
    """What a key is called by."""

    id: bytes
    lock: int  # what is taken alone by who changes it
    raw: bytes
    channel: bytes
    slot: int  # of the stamp that a local tier looks at


@lru_cache(1024)
def names(key: str, kind: bytes = b"key") -> PostgresNames:
    """The id is a hash: keys are of any length and of any characters."""
    raw = key.encode("utf-8", "surrogatepass")
    id = blake2b(raw, digest_size=16, person=kind).digest()
    return PostgresNames(id, int.from_bytes(id[:8], signed=True), raw, id.hex().encode(), id[0] << 8 | id[1])


def key_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


# -- entries ------------------------------------------------------------------------------------------------------


def row_of(its: PostgresNames, entry: Entry[Any]) -> tuple[Any, ...]:
    """The entry as it is sent, in the order of its table, but for `stored`; TooLarge if it can't be."""
    if len(entry.value) > _LONGEST:
        raise TooLarge(f"{len(entry.value)} bytes are more than Postgres is given in one value")
    keep = max(entry.keep, entry.fresh)
    gone = max(keep, entry.fresh + GRACE)
    ends = entry.fresh, keep, gone
    return its.id, its.raw, entry.id, *ends, entry.cost, entry.margin, entry.ttl, entry.raised, entry.value


def entry_of(row: Row) -> Entry[Any]:
    """Of id, fresh, keep, cost, margin, ttl, raised and value."""
    id, fresh, keep, cost, margin, ttl, raised, value = row
    return Entry(value, id, cost, margin, ttl, fresh, keep, raised)


def fresh_of(row: Row) -> Entry[Any] | None:
    """The entry that a look has seen, if it is fresh. None, too, of what only a claim can judge: one with more time
    left than it was given, as where the server's clock was set back."""
    entry = entry_of(row)
    return entry if 0 < entry.fresh <= entry.ttl + SLACK else None


# -- claims -------------------------------------------------------------------------------------------------------


def is_whole(row: Row) -> bool:
    """Whether what `claim` answers has the value of its entry: a large one is to be asked for apart."""
    return row[1] is None or row[8] is not None


def reply_of(row: Row, ticket: Ticket | None) -> Reply:
    """What `claim` answers."""
    answer, id, *_ = row
    entry = None if id is None else entry_of(row[1:9])
    token, lease, verdict, rest = row[9:13]
    if answer == 0 and entry is not None:
        return Found(entry, ticket)
    if answer == 1:
        return Granted(entry)
    if answer == 2:
        return Busy(token, lease, entry)
    if answer == 3:
        return Failed(_verdict_of(verdict), entry, rest)
    raise EngineError(f"Postgres answered a claim with {answer!r}")


def verdict_string(verdict: Verdict) -> str:
    """A verdict as a string."""
    return json.dumps([verdict.kind, verdict.type_name[:_MESSAGE], verdict.message[:_MESSAGE]])


def _verdict_of(string: str) -> Verdict:
    try:
        kind, type_name, message = json.loads(string)
    except (TypeError, ValueError, RecursionError):
        return Verdict("failed")
    return Verdict(str(kind), str(type_name), str(message))


# -- news ---------------------------------------------------------------------------------------------------------


def message_of(entry: Entry[Any] | None) -> bytes:
    """What is told to those who wait for a fill: the entry, if it is small."""
    if entry is None or len(entry.value) > SMALL:
        return b""
    its = entry
    head = _ALONG.pack(its.id, its.fresh, max(its.keep, its.fresh), its.cost, its.margin, its.ttl, its.raised)
    return head + bytes(its.value)


def news_of(message: bytes, token: bytes) -> Entry[Any] | None:
    """The entry that a fill has sent along, if it was computed under the lease of this token: an older one's may be
    late, and anybody can send one. So the entry's own id has to be that token, which its codec signs."""
    try:
        id, fresh, keep, cost, margin, ttl, raised = _ALONG.unpack_from(message)
    except error:
        return None
    if id != token or not (fresh == fresh and 0 <= keep <= inf):
        return None
    return Entry(message[_ALONG.size :], id, cost, margin, ttl, fresh, keep, bool(raised))
