"""Memcached's meta protocol: commands as bytes, replies from bytes. Pure. Replies are read by length: a value may
contain `\\r\\n`, `END`, or the text of another reply."""

from __future__ import annotations

from typing import Any

from stampede.engines.kit.replies import MORE, OutOfStep

__all__ = ["MONTH", "OTHER", "MetaParser", "MetaReply", "add", "check", "delete", "look", "put"]

MONTH = 30 * 86_400
"""The longest relative time: memcached takes larger numbers for dates."""


class MetaReply:
    """One reply. `code`: VA (a value), HD (done), EN or NF (no item), EX (another CAS number), NS (not stored)."""

    # Class attributes, since most replies set few of them.
    value = cas = flags = b""
    left = -1  # seconds that the item has left; -1: it does not expire
    text = b""  # the text of an error

    def __init__(self, code: bytes) -> None:
        self.code = code


OTHER = MetaReply(b"EX")


def look(name: bytes) -> bytes:
    """Return the command that reads an item."""
    return b"mg " + name + b" t c f v\r\n"


def put(name: bytes, body: bytes, flags: bytes, ttl: int, cas: bytes | None = None) -> bytes:
    """Return the command that stores an item; with `cas`, only if the present item has this CAS number."""
    condition = b"" if cas is None else b" C" + cas
    return b"ms %b %d T%d F%b c%b\r\n%b\r\n" % (name, len(body), ttl, flags, condition, body)


def add(name: bytes, body: bytes, flags: bytes, ttl: int) -> bytes:
    """Return the command that stores an item if there is none."""
    return b"ms %b %d T%d F%b c ME\r\n%b\r\n" % (name, len(body), ttl, flags, body)


def delete(name: bytes, cas: bytes | None = None) -> bytes:
    """Return the command that removes an item; with `cas`, only if it has this CAS number."""
    return b"md " + name + (b"\r\n" if cas is None else b" C%b\r\n" % cas)


def check(command: bytes, reply: MetaReply) -> None:
    """Raise OutOfStep if this can't be the reply to this command. (Any command may be refused.)"""
    answers = _ANSWERS.get(command[:2])
    if answers is None or reply.text:
        return
    numbered = answers.get(reply.code)
    if numbered is None or (numbered and not reply.cas.isdigit()):
        raise OutOfStep(f"memcached sent a reply of another command: {reply.code!r} to {command[:2]!r}")


_ANSWERS = {
    b"mg": {b"VA": True, b"EN": False},
    b"ms": {b"HD": True, b"NS": False, b"EX": False, b"NF": False},
    b"md": {b"HD": False, b"NF": False, b"EX": False},
    b"mn": {b"MN": False},
}
"""The possible reply codes of each command above, and whether a reply with this code has the item's CAS number."""


class MetaParser:
    """Parses the replies of one connection, for both colours."""

    __slots__ = ("at", "data")

    def __init__(self) -> None:
        self.data: bytes | bytearray = b""
        self.at = 0  # where the next reply begins

    def feed(self, data: bytes | memoryview) -> None:
        if self.at == len(self.data):
            self.data = bytes(data)
        else:
            if isinstance(self.data, bytes):
                self.data = bytearray(self.data)  # to append without copying: a large value comes in many pieces
            del self.data[: self.at]
            self.data += data
        self.at = 0

    def gets(self) -> Any:
        """Return the next reply; MORE if it has not arrived completely. Raise OutOfStep if it is malformed."""
        data, at = self.data, self.at
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > 8192:
                raise OutOfStep("this is no memcached server: it sent 8 kB without a line end")
            return MORE
        words = bytes(data[at:end]).split()
        code = words[0] if words else b""
        reply = MetaReply(code)
        del words[:1]
        after = end + 2
        if code == b"VA":
            start = after
            after = start + int(words.pop(0)) + 2
            if len(data) < after:
                return MORE
            reply.value = bytes(data[start : after - 2])
            if not data.startswith(b"\r\n", after - 2):
                raise OutOfStep("memcached sent a value of another length than it said")
        elif code not in _SHORT:
            after = self._long(reply, data, at, after)
            if not after:
                return MORE
            words = []
        for word in words:
            kind = word[0]
            if kind == _T:
                reply.left = int(word[1:])
            elif kind == _C:
                reply.cas = word[1:]
            elif kind == _F:
                reply.flags = word[1:]
        self.at = after
        return reply

    def _long(self, reply: MetaReply, data: bytes | bytearray, at: int, after: int) -> int:
        """Read a refusal, or a reply in the older protocol, and return its end. 0: it has not arrived completely."""
        if reply.code == b"STAT":  # one reply of many lines
            after = data.find(b"\r\nEND\r\n", at) + 7
            reply.value = bytes(data[at:after])
            return after if after >= 7 else 0
        line = bytes(data[at : after - 2])
        if reply.code == b"VERSION":
            reply.value = line.removeprefix(b"VERSION ")
        elif reply.code in _ERRORS:
            reply.text = line
        else:
            raise OutOfStep(f"this is no memcached server: it sent {line[:80]!r}")
        return after


_T, _C, _F = b"tcf"
_SHORT = frozenset([b"HD", b"EN", b"NF", b"EX", b"NS", b"MN"])
_ERRORS = frozenset([b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR"])
