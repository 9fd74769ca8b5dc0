"""The envelope around a value on the wire: a fixed header, a seal over everything, perhaps compression.

    offset  size
       0     2   magic, b"SG"
       2     1   version of this layout: 1, or 2 if signed; with notes 3, or 4 if signed
       3     1   codec: 1 sealed, 2 msgpack, 3 json, 4 pickle, 5 a user's own
       4     1   flags: 1 the value is a raised exception, 2 the body is compressed, 4 signed
       5     3   zero
       8     8   entry id
      16     8   cost     seconds, big-endian IEEE doubles; infinity means for ever
      24     8   margin
      32     8   ttl
      40     8   fresh
      48     8   keep
      56     8   fingerprint of the return type; 0: unknown
      64     4   CRC-32 of key, header and body
      68         body

and if it is signed

      64     8   when it was signed, by the writer's wall clock: seconds since 1970
      72    32   HMAC-SHA-256 of key, header, this time, and body
     104         body

With notes, the body begins with 11 bytes, and then has the etag, the tags, and the value's own body:

       0     8   modified: seconds since 1970; NaN: none
       8     2   bytes of the etag; 65535: none
      10     1   number of tags, of 24 bytes each

The key is part of the seal, so an entry is valid only for its own key, and in its own generation. What the engine adds
to an entry is not signed: it can make an entry end sooner, but never later (see `algorithm/encoded.py`)."""

from __future__ import annotations

import hmac
import time
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isnan, nan
from struct import Struct
from typing import Any, Protocol
from zlib import crc32

from stampede.errors import CodecError, TooLarge
from stampede.model.entry import Entry
from stampede.model.tags import SIZE

HEADER = Struct(">2sBBB3x8sdddddQ")
MAGIC, VERSION, SIGNED_VERSION = b"SG", 1, 2
NOTED = 2  # added to the version of an entry with notes, which older releases must not read as its value
RAISED, COMPRESSED, SIGNED = 1, 2, 4
INFLATED = 1 << 28  # the most bytes of an inflated body, if there is no max_bytes

COPIED = 4096  # up to so many bytes, a copy costs less than a view

SKEW = 10.0
"""Seconds by which the wall clocks of two machines that sign may differ. Wall clocks do not measure the time that an
entry has left. They only limit how long an old entry is accepted that an attacker has put back."""

_clock = time.time

_CRC, _WRITTEN, _NOTES = Struct(">I"), Struct(">d"), Struct(">dHB")
_NO_ETAG = 0xFFFF
_SIZE = HEADER.size
_SEALED = Struct(HEADER.format + "I").unpack_from  # with the checksum, where that is the seal
_LEAST = HEADER.size + _CRC.size


class AnotherVersion(CodecError):
    """An intact entry of this key, written for another return type, or by another codec: mostly during a deploy."""

    def __init__(self, message: str, ttl: float) -> None:
        super().__init__(message)
        self.ttl = ttl


class Body(Protocol):
    """Turns a value into bytes and back. It may raise any exception: the envelope makes it a CodecError."""

    number: int  # on the wire
    fingerprint: int

    def dump(self, value: Any, raised: bool) -> bytes: ...

    def load(self, body: bytes | memoryview, raised: bool) -> Any: ...


class Codec:
    """Turns entries into bytes and back. It has no state between calls, and threads share it."""

    def __init__(
        self, body: Body, *, keys: Sequence[bytes] = (), compress: int | None = None, max_bytes: int | None = None
    ) -> None:
        self._body = body
        self._keys = tuple(keys)  # the first one signs, and all verify: so keys can be replaced
        self._compress = compress
        self._max_bytes = max_bytes
        self._signed = SIGNED if keys else 0
        self._version = SIGNED_VERSION if keys else VERSION
        self._head = HEADER.size + (_WRITTEN.size if keys else 0)  # the size of everything before the seal
        self._start = self._head + (32 if keys else _CRC.size)  # where the body starts
        self._expected = MAGIC, self._version, body.number, self._signed, body.fingerprint

    @property
    def signed(self) -> bool:
        return bool(self._signed)

    def encode(self, key: str, entry: Entry[Any]) -> bytes:
        """Return the entry's bytes, valid for this key. CodecError: it can't be stored. TooLarge: it is too large."""
        try:
            return self._encode(key, entry)
        except CodecError:
            raise
        except RecursionError as error:
            raise CodecError("the value is nested too deeply, or contains itself") from error
        except Exception as error:  # of the value's own __reduce_ex__ or __str__, or of the user's codec
            raise CodecError(f"the value can't be stored: {type(error).__name__}: {error}") from error

    def decode(self, key: str, blob: bytes) -> Entry[Any]:
        """Return the entry that `encode` was given. Raise CodecError for any other bytes, whatever they hold."""
        try:  # without helper functions: this is most of a hit
            size = len(blob)
            if size < _LEAST:
                raise CodecError("the entry is cut short, or its first bytes are damaged")
            magic, version, codec, flags, id, cost, margin, ttl, fresh, keep, fingerprint, crc = _SEALED(blob)
            # One test of all durations: a sum with a NaN in it is a NaN.
            noted = version > SIGNED_VERSION
            if (magic, version - NOTED * noted, codec, flags & SIGNED, fingerprint) != self._expected or isnan(
                cost + margin + ttl + fresh + keep
            ):
                self._complain(key, blob)
            start = self._start
            body: bytes | memoryview = blob[start:] if size < COPIED else memoryview(blob)[start:]
            if self._max_bytes is not None and size - start > self._max_bytes:
                raise CodecError(f"the entry has {size - start} bytes: more than max_bytes, {self._max_bytes}")
            head = blob[: self._head]
            if self._keys:
                whole = self._is_signed(key, head, body, blob[self._head : start])
            else:
                whole = _checksum(key, head, body) == crc
            if not whole:
                raise CodecError("the seal is broken: the bytes were changed, or are of another key or signing_key")
            if self._keys and (spent := _clock() - _WRITTEN.unpack_from(blob, _SIZE)[0] - SKEW) > 0:
                fresh, keep = min(fresh, fresh - spent), min(keep, keep - spent)
                if keep <= 0:
                    raise CodecError("the entry has expired: it was put back, or the machines' clocks differ")
            etag, modified, tags = None, None, b""
            if noted:
                etag, modified, tags, body = _without_notes(body)
            if flags & COMPRESSED:
                body = self._inflate(body)
            raised = flags & RAISED != 0
            value = self._body.load(body, raised)
            if raised:
                _check_raised(value)
            return Entry(value, id, cost, margin, ttl, fresh, keep, raised, etag, modified, tags)
        except CodecError:
            raise
        except Exception as error:  # also RecursionError and MemoryError: hostile bytes ask for both
            # Only the error's name: its text may hold values, which don't belong in a log, or raise when it is made.
            raise CodecError(f"the entry can't be read: {type(error).__name__}") from error

    def tags(self, key: str, blob: bytes) -> bytes:
        """Return the tags that an entry carries. Its value may be of any type, and by any codec: it is not read. Raise
        CodecError if the bytes are not an entry of this key, or are damaged."""
        version, flags = blob[2:3], blob[4:5]
        if blob[:2] != MAGIC or not version or not flags or flags[0] & SIGNED != self._signed:
            raise CodecError("the bytes are not an entry of stampede, or one is signed and the other is not")
        if version[0] - self._version not in (0, NOTED) or not self._is_whole(key, blob):
            raise CodecError("the entry has another layout, or its seal is broken")
        try:
            return _without_notes(blob[self._start :])[2] if version[0] != self._version else b""
        except CodecError:
            raise
        except Exception as error:  # a checksum can be forged
            raise CodecError(f"the entry's notes can't be read: {type(error).__name__}") from error

    def _encode(self, key: str, entry: Entry[Any]) -> bytes:
        body = self._body.dump(entry.value, entry.raised)
        flags = self._signed | (RAISED if entry.raised else 0)
        if self._max_bytes is not None and len(body) > self._max_bytes:
            raise TooLarge(f"the value takes {len(body)} bytes: more than max_bytes, {self._max_bytes}")
        # What is larger than INFLATED would not be read again.
        if self._compress is not None and self._compress <= len(body) <= INFLATED:
            body = zlib.compress(body, 1)
            flags |= COMPRESSED
        version = self._version
        if entry.tags or entry.etag is not None or entry.modified is not None:
            version += NOTED
            body = _notes_of(entry) + body
        head = HEADER.pack(
            MAGIC, version, self._body.number, flags,
            entry.id, entry.cost, entry.margin, entry.ttl, entry.fresh, entry.keep, self._body.fingerprint,
        )  # fmt: skip
        if not self._keys:
            return head + _CRC.pack(_checksum(key, head, body)) + body
        head += _WRITTEN.pack(_clock())
        return head + _signature(self._keys[0], key, head, body) + body

    def _complain(self, key: str, blob: bytes) -> None:
        """Raise a CodecError that says what is wrong with the header."""
        magic, version, codec, flags, *_, ttl, _, _, fingerprint = HEADER.unpack_from(blob)
        if magic != MAGIC or not VERSION <= version <= SIGNED_VERSION + NOTED:
            raise CodecError("the bytes are not an entry of stampede, or of a version that is unknown here")
        if flags & SIGNED != self._signed:
            raise CodecError(
                "the entry is not signed" if self._signed else "the entry is signed, but there is no signing_key here"
            )
        why = ""
        if codec != self._body.number:
            why = "the entry was written by another codec"
        elif fingerprint != self._body.fingerprint:
            why = "the entry was written for another return type"
        if why and self._is_whole(key, blob):
            raise AnotherVersion(why, ttl)
        raise CodecError(why or "the entry has another layout, or a duration is not a number")

    def _is_whole(self, key: str, blob: bytes) -> bool:
        head, seal, body = blob[: self._head], blob[self._head : self._start], blob[self._start :]
        return self._is_signed(key, head, body, seal) or seal == _CRC.pack(_checksum(key, head, body))

    def _is_signed(self, key: str, head: bytes, body: bytes | memoryview, seal: bytes) -> bool:
        return any(hmac.compare_digest(_signature(secret, key, head, body), seal) for secret in self._keys)

    def _inflate(self, body: bytes | memoryview) -> memoryview:
        limit = INFLATED if self._max_bytes is None else self._max_bytes
        inflater = zlib.decompressobj()
        inflated = inflater.decompress(body, limit + 1)
        if len(inflated) > limit:
            raise CodecError(f"the entry inflates to more than {limit} bytes")
        if not inflater.eof or inflater.unused_data:
            raise CodecError("the compressed body is cut short, or followed by other bytes")
        return memoryview(inflated)


def _notes_of(entry: Entry[Any]) -> bytes:
    etag = None if entry.etag is None else entry.etag.encode("utf-8", "surrogatepass")
    modified = nan if entry.modified is None else entry.modified.timestamp()
    head = _NOTES.pack(modified, _NO_ETAG if etag is None else len(etag), len(entry.tags) // SIZE)
    return b"".join((head, etag or b"", entry.tags))


def _without_notes(body: bytes | memoryview) -> tuple[str | None, datetime | None, bytes, bytes | memoryview]:
    """Return the etag, the moment of the last change, the tags, and the rest of the body."""
    since, size, count = _NOTES.unpack_from(body)
    end = _NOTES.size + (0 if size == _NO_ETAG else size)
    etag = None if size == _NO_ETAG else bytes(body[_NOTES.size : end]).decode("utf-8", "surrogatepass")
    modified, rest = None if isnan(since) else datetime.fromtimestamp(since, UTC), end + SIZE * count
    if len(body) < rest:
        raise CodecError("the entry's notes are cut short")
    return etag, modified, bytes(body[end:rest]), body[rest:]


def _check_raised(value: Any) -> None:
    """Raise CodecError unless a value is an exception: its class's name, arguments, and perhaps named attributes."""
    name, arguments, facts = (*value, {}) if type(value) is tuple and len(value) == 2 else value
    state = facts.get("state", {}) if type(facts) is dict and facts.keys() <= {"state"} else None
    if type(name) is not str or type(arguments) is not tuple or type(state) is not dict:
        raise CodecError("the entry should be an exception, and is none")
    if not all(type(each) is str for each in state):
        raise CodecError("the entry is an exception with attributes that have no names")


def _checksum(key: str, head: bytes, body: bytes | memoryview) -> int:
    return crc32(body, crc32(head, crc32(key.encode("utf-8", "surrogatepass"))))


def _signature(secret: bytes, key: str, head: bytes, body: bytes | memoryview) -> bytes:
    name = key.encode("utf-8", "surrogatepass")
    return hmac.digest(secret, b"".join((head, len(name).to_bytes(8, "big"), name, body)), "sha256")
