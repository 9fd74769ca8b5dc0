"""The protocol between a client and a broker: messages, and the records in them. A message is one frame: the version of
the protocol, then records. A record has a length, a kind, and a number. An answer has the number of its question."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b

__all__ = [
    "BOOKED", "GRANTED", "LARGEST", "NAME", "TOKEN", "VERSION", "WELCOME", "Malformed", "Word",
    "messages", "name_of", "pack_busy", "pack_hello", "pack_limit", "pack_lock", "pack_page", "record", "records",
    "unpack_busy", "unpack_hello", "unpack_limit", "unpack_lock", "unpack_page",
]  # fmt: skip

VERSION = b"\x01"

LARGEST = 1 << 16
"""Longest message to a broker, in bytes."""

NAME, TOKEN, HOLDERS = 401, 64, 128
"""Longest name, longest token, and longest text by which a client introduces itself, in bytes."""


class Word:
    """The kinds of records, as numbers."""

    # From a client. The payload of a PING is ignored.
    HELLO, BEAT, PING = 1, 2, 4
    ACQUIRE, RENEW, RELEASE, WATCH = 5, 6, 7, 8
    HELD, HOLDER, STATS = 9, 10, 11
    TAKE, GIVE_BACK, PENALIZE, USED, LIMITS, NOTE = 12, 13, 14, 15, 16, 17
    HAND_OVER = 18

    # From a broker. TURN and FREED are notices, not answers. WHO asks a client that it doesn't know for a HELLO.
    WELCOME, WHO, TROUBLE = 65, 66, 67
    GRANTED, BUSY, YES, NO, ROWS = 68, 69, 70, 71, 72
    TURN, FREED, BOOKED = 73, 74, 75


_HEAD = struct.Struct(">IBQ")  # the length of the payload, the kind, and the number
_LOCK = struct.Struct(">ddQBB")  # lease, room, fence, waits, length of the token; then token and name

_HELLO = struct.Struct(">Q")  # the highest fence that the client was granted; then its host:pid
WELCOME = struct.Struct(">?")  # whether the broker knows this client
GRANTED = struct.Struct(">Q")  # the fence
_BUSY = struct.Struct(">d")  # seconds left on a holder's lease; then its token

_LIMIT = struct.Struct(">QdQdq")  # most, per, cost, seconds, moment; then the name
BOOKED = struct.Struct(">d?q")  # the fields of ports.Booked

_PAGE = struct.Struct(">Q")  # how many names come before the page; then the prefix of names

_SHORTENED = NAME - 32
_HIGHEST = (1 << 64) - 1


class Malformed(Exception):
    """Bytes that are not of this protocol."""


def name_of(name: str) -> bytes:
    """Return a name as bytes. A long one becomes its beginning and its hash: NAME bytes, longer than all others."""
    raw = name.encode("utf-8", "surrogatepass")
    return raw if len(raw) < NAME else raw[:_SHORTENED] + blake2b(raw, digest_size=32).digest()


def record(kind: int, number: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload), kind, number) + payload


def pack_lock(
    name: bytes, token: bytes, lease: float = 0.0, room: float = 1.0, fence: int = 0, waits: bool = False
) -> bytes:
    """Return the payload of a question about a lock."""
    return _LOCK.pack(lease, room, fence, waits, len(token)) + token + name


def unpack_lock(payload: bytes) -> tuple[float, float, int, bool, bytes, bytes]:
    """Return lease, room, fence, whether the caller waits, its token and the name of the lock."""
    try:
        lease, room, fence, waits, length = _LOCK.unpack_from(payload)
    except struct.error as error:
        raise Malformed(str(error)) from error
    middle = _LOCK.size + length
    token, name = payload[_LOCK.size : middle], payload[middle:]
    if len(token) != length or length > TOKEN or len(name) > NAME:
        raise Malformed("the length of a token or a name is wrong")
    return lease, room, fence, bool(waits), token, name


def pack_hello(fence: int, holder: str) -> bytes:
    return _HELLO.pack(fence) + holder.encode("utf-8", "replace")[:HOLDERS]


def unpack_hello(payload: bytes) -> tuple[int, str]:
    if not _HELLO.size <= len(payload) <= _HELLO.size + HOLDERS:
        raise Malformed("the length of a greeting is wrong")
    return _HELLO.unpack_from(payload)[0], payload[_HELLO.size :].decode("utf-8", "replace")


def pack_busy(left: float, token: bytes) -> bytes:
    return _BUSY.pack(left) + token


def unpack_busy(payload: bytes) -> tuple[float, bytes]:
    return _BUSY.unpack_from(payload)[0], payload[_BUSY.size :]


def pack_page(at: int, prefix: bytes) -> bytes:
    """Return the payload of a question for one page of a list, of the names with this prefix."""
    return _PAGE.pack(at) + prefix


def unpack_page(payload: bytes) -> tuple[int, bytes]:
    if not _PAGE.size <= len(payload) <= _PAGE.size + NAME:
        raise Malformed("the length of a question for a page is wrong")
    return _PAGE.unpack_from(payload)[0], payload[_PAGE.size :]


def pack_limit(name: bytes, most: int, per: float, cost: int, seconds: float, at: int) -> bytes:
    return _LIMIT.pack(min(most, _HIGHEST), per, min(cost, _HIGHEST), seconds, at) + name


def unpack_limit(payload: bytes) -> tuple[int, float, int, float, int, bytes]:
    """Return `most`, `per`, the cost of a start, seconds (ahead, or of a penalty), its moment, and the limit's name."""
    if not _LIMIT.size <= len(payload) <= _LIMIT.size + NAME:
        raise Malformed("the length of a question about a limit is wrong")
    most, per, cost, seconds, at = _LIMIT.unpack_from(payload)
    return most, per, cost, seconds, at, payload[_LIMIT.size :]


def records(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Return the kind, the number and the payload of each record of a message. Raise Malformed if it is not ours."""
    if message[:1] != VERSION:
        raise Malformed("not a message of this version of the protocol")
    at, end = 1, len(message)
    while at < end:
        if end - at < _HEAD.size:
            raise Malformed("the message ends within the head of a record")
        length, kind, number = _HEAD.unpack_from(message, at)
        at += _HEAD.size + length
        if at > end:
            raise Malformed("the message ends within a record")
        yield kind, number, message[at - length : at]


def messages(some: Iterable[bytes]) -> Iterator[bytes]:
    """Return messages that hold these records, each as long as LARGEST allows."""
    message = bytearray(VERSION)
    for each in some:
        if len(message) > 1 and len(message) + len(each) > LARGEST:
            yield bytes(message)
            message = bytearray(VERSION)
        message += each
    yield bytes(message)
