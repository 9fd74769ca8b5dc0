"""What a client and a broker say to each other: frames, and what is in them.

A message is one frame: the number of this protocol, then records. A record says how long it is, what it is, and the
number of its question, which its answer has too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b

__all__ = [
    "BOOKED", "GRANTED", "LARGEST", "NAME", "TOKEN", "VERSION", "WELCOME", "Malformed", "Word",
    "asked", "asking", "busy", "counted", "counting", "heard_busy", "heard_hello", "heard_page",
    "hello", "messages", "name_of", "page", "record", "records",
]  # fmt: skip

VERSION = b"\x01"

LARGEST = 1 << 16
"""Bytes of a message to a broker, at most."""

NAME, TOKEN, HOLDERS = 401, 64, 128
"""Bytes of a name, of a token, and of who one is, at most."""


class Word:
    """What a record says, as its number."""

    # What a client asks. Behind PING stands anything, and it comes back.
    HELLO, BEAT, PING = 1, 2, 4
    ACQUIRE, RENEW, RELEASE, WATCH = 5, 6, 7, 8
    HELD, HOLDER, STATS = 9, 10, 11
    TAKE, GIVE_BACK, PENALIZE, USED, LIMITS, NOTE = 12, 13, 14, 15, 16, 17
    HAND_OVER = 18

    # What a broker says. TURN and FREED answer nothing, WHO nobody: it doesn't know who asks.
    WELCOME, WHO, TROUBLE = 65, 66, 67
    GRANTED, BUSY, YES, NO, ROWS = 68, 69, 70, 71, 72
    TURN, FREED, BOOKED = 73, 74, 75


_HEAD = struct.Struct(">IBQ")  # the length of what follows it, what it is, and its number
_ASKED = struct.Struct(">ddQBB")  # lease, room, fence, whether it waits, and the length of the token; then the name

_HELLO = struct.Struct(">Q")  # the highest fence that it has been given; then who it is
WELCOME = struct.Struct(">?")  # whether the broker knows this client
GRANTED = struct.Struct(">Q")  # the fence
_BUSY = struct.Struct(">d")  # seconds that one inside has left; then its token

_COUNTED = struct.Struct(">QdQdq")  # a limit, how much a start counts, seconds ahead or of rest, and when it is; a name
BOOKED = struct.Struct(">d?q")  # as ports.Booked

_PAGE = struct.Struct(">Q")  # how many names come before it; then what names begin with

_SHORTENED = NAME - 32
_HIGHEST = (1 << 64) - 1


class Malformed(Exception):
    """None of ours has said this."""


def name_of(name: str) -> bytes:
    """As the wire has it. What is too long is as long as no other is: its beginning, and its hash."""
    raw = name.encode("utf-8", "surrogatepass")
    return raw if len(raw) < NAME else raw[:_SHORTENED] + blake2b(raw, digest_size=32).digest()


def record(kind: int, number: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload), kind, number) + payload


def asking(
    name: bytes, token: bytes, lease: float = 0.0, room: float = 1.0, fence: int = 0, waits: bool = False
) -> bytes:
    """The payload of a question about a lock."""
    return _ASKED.pack(lease, room, fence, waits, len(token)) + token + name


def asked(payload: bytes) -> tuple[float, float, int, bool, bytes, bytes]:
    """Its lease, room, fence, whether it waits, its token and the name of the lock."""
    try:
        lease, room, fence, waits, length = _ASKED.unpack_from(payload)
    except struct.error as error:
        raise Malformed(str(error)) from error
    middle = _ASKED.size + length
    token, name = payload[_ASKED.size : middle], payload[middle:]
    if len(token) != length or length > TOKEN or len(name) > NAME:
        raise Malformed("a token or a name of no such length")
    return lease, room, fence, bool(waits), token, name


def hello(fence: int, holder: str) -> bytes:
    return _HELLO.pack(fence) + holder.encode("utf-8", "replace")[:HOLDERS]


def heard_hello(payload: bytes) -> tuple[int, str]:
    if not _HELLO.size <= len(payload) <= _HELLO.size + HOLDERS:
        raise Malformed("a greeting of no such length")
    return _HELLO.unpack_from(payload)[0], payload[_HELLO.size :].decode("utf-8", "replace")


def busy(left: float, token: bytes) -> bytes:
    return _BUSY.pack(left) + token


def heard_busy(payload: bytes) -> tuple[float, bytes]:
    return _BUSY.unpack_from(payload)[0], payload[_BUSY.size :]


def page(at: int, prefix: bytes) -> bytes:
    """The payload of a question for a page of a list."""
    return _PAGE.pack(at) + prefix


def heard_page(payload: bytes) -> tuple[int, bytes]:
    if not _PAGE.size <= len(payload) <= _PAGE.size + NAME:
        raise Malformed("a page of no such length")
    return _PAGE.unpack_from(payload)[0], payload[_PAGE.size :]


def counting(name: bytes, most: int, per: float, cost: int, seconds: float, at: int) -> bytes:
    return _COUNTED.pack(min(most, _HIGHEST), per, min(cost, _HIGHEST), seconds, at) + name


def counted(payload: bytes) -> tuple[int, float, int, float, int, bytes]:
    """A limit as `most` and `per`, the cost of a start, seconds ahead, when it is, and the name of the limit."""
    if not _COUNTED.size <= len(payload) <= _COUNTED.size + NAME:
        raise Malformed("a question of no such length")
    most, per, cost, seconds, at = _COUNTED.unpack_from(payload)
    return most, per, cost, seconds, at, payload[_COUNTED.size :]


def records(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """What each record is, its number, and its payload."""
    if message[:1] != VERSION:
        raise Malformed("another protocol, or none")
    at, end = 1, len(message)
    while at < end:
        if end - at < _HEAD.size:
            raise Malformed("less than a record")
        length, kind, number = _HEAD.unpack_from(message, at)
        at += _HEAD.size + length
        if at > end:
            raise Malformed("less than it says")
        yield kind, number, message[at - length : at]


def messages(some: Iterable[bytes]) -> Iterator[bytes]:
    """Messages of these records."""
    message = bytearray(VERSION)
    for each in some:
        if len(message) > 1 and len(message) + len(each) > LARGEST:
            yield bytes(message)
            message = bytearray(VERSION)
        message += each
    yield bytes(message)
