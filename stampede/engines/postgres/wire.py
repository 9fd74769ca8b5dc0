"""Arguments and rows: the names of keys, entries as columns, and the values that notifications carry. Pure."""

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

SMALL = 4096  # bytes of a value that a notification carries, at most
SLACK = 1.0  # an entry with so many seconds more than its ttl means that the server's clock was set back

_LONGEST = 512 << 20
_MESSAGE = 4000
_ALONG = Struct(">8sdddddB")  # id, fresh, keep, cost, margin, ttl, raised


class PostgresNames(NamedTuple):
    """The names of one key."""

    id: bytes
    lock: int  # the advisory lock that each change of the key takes
    raw: bytes
    channel: bytes
    slot: int  # the place of its stamp, which a local tier compares


@lru_cache(1024)
def names(key: str, kind: bytes = b"key") -> PostgresNames:
    """Return the names of a key. The id is a hash, since keys have any length and any characters."""
    raw = key.encode("utf-8", "surrogatepass")
    id = blake2b(raw, digest_size=16, person=kind).digest()
    return PostgresNames(id, int.from_bytes(id[:8], signed=True), raw, id.hex().encode(), id[0] << 8 | id[1])


def key_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


# -- entries ------------------------------------------------------------------------------------------------------


def row_of(ids: PostgresNames, entry: Entry[Any]) -> tuple[Any, ...]:
    """Return the columns of an entry in the order of its table, without `stored`. Raise TooLarge if it is too long."""
    if len(entry.value) > _LONGEST:
        raise TooLarge(f"{len(entry.value)} bytes are too many for one value in Postgres: at most 512 MiB are stored")
    keep = max(entry.keep, entry.fresh)
    gone = max(keep, entry.fresh + GRACE)
    ends = entry.fresh, keep, gone
    return ids.id, ids.raw, entry.id, *ends, entry.cost, entry.margin, entry.ttl, entry.raised, entry.value


def entry_of(row: Row) -> Entry[Any]:
    """Return the entry of a row with the columns id, fresh, keep, cost, margin, ttl, raised and value."""
    id, fresh, keep, cost, margin, ttl, raised, value = row
    return Entry(value, id, cost, margin, ttl, fresh, keep, raised)


def fresh_of(row: Row) -> Entry[Any] | None:
    """Return the entry that a look has read, if it is fresh. Also None if only a claim can judge it: an entry with more
    time left than it was given, because the server's clock was set back."""
    entry = entry_of(row)
    return entry if 0 < entry.fresh <= entry.ttl + SLACK else None


# -- claims -------------------------------------------------------------------------------------------------------


def is_whole(row: Row) -> bool:
    """Return whether a row of `claim` contains the value of its entry. A large value must be read separately."""
    return row[1] is None or row[8] is not None


def reply_of(row: Row, ticket: Ticket | None) -> Reply:
    """Return the reply in a row of `claim`."""
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
    """Return a verdict as a string."""
    return json.dumps([verdict.kind, verdict.type_name[:_MESSAGE], verdict.message[:_MESSAGE]])


def _verdict_of(string: str) -> Verdict:
    try:
        kind, type_name, message = json.loads(string)
    except (TypeError, ValueError, RecursionError):
        return Verdict("failed")
    return Verdict(str(kind), str(type_name), str(message))


# -- notifications ------------------------------------------------------------------------------------------------


def message_of(entry: Entry[Any] | None) -> bytes:
    """Return the message for waiters of a fill: the entry if it is small, otherwise nothing."""
    if entry is None or len(entry.value) > SMALL:
        return b""
    small = entry
    head = _ALONG.pack(
        small.id, small.fresh, max(small.keep, small.fresh), small.cost, small.margin, small.ttl, small.raised
    )
    return head + bytes(small.value)


def news_of(message: bytes, token: bytes) -> Entry[Any] | None:
    """Return the entry in a message of `message_of`, if it was computed under the lease with this token, else None. A
    message of an older lease may be late, and any client can send one. So the id of the entry must be the token: the id
    is part of what the codec signs."""
    try:
        id, fresh, keep, cost, margin, ttl, raised = _ALONG.unpack_from(message)
    except error:
        return None
    if id != token or not (fresh == fresh and 0 <= keep <= inf):
        return None
    return Entry(message[_ALONG.size :], id, cost, margin, ttl, fresh, keep, bool(raised))
