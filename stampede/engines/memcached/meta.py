"""Memcached's meta protocol: commands as bytes, replies from bytes. Pure.

Replies are read by length: a value may hold `\\r\\n`, `END`, or what looks like another reply.
"""

from __future__ import annotations

from typing import Any

from stampede.engines.kit.replies import MORE, OutOfStep

__all__ = ["MONTH", "OTHER", "MetaParser", "MetaReply", "add", "check", "delete", "look", "put"]

MONTH = 30 * 86_400
"""The longest relative time: a larger number would be taken for a date."""


class MetaReply:
    """One reply. `code`: VA (a value), HD (done), EN or NF (nothing there), EX (another CAS), NS (not stored)."""

    # Of the class until they are set: most replies have few of these.
    value = cas = flags = b""
    left = -1  # seconds that the item has left, -1: no end
    text = b""  # of an error

    def __init__(self, code: bytes) -> None:
        self.code = code


OTHER = MetaReply(b"EX")


def look(name: bytes) -> bytes:
    """What is there; nothing is changed."""
    return b"mg " + name + b" t c f v\r\n"


def put(name: bytes, body: bytes, flags: bytes, ttl: int, cas: bytes | None = None) -> bytes:
    """Store; with `cas` only over just that."""
    condition = b"" if cas is None else b" C" + cas
    return b"ms %b %d T%d F%b c%b\r\n%b\r\n" % (name, len(body), ttl, flags, condition, body)


def add(name: bytes, body: bytes, flags: bytes, ttl: int) -> bytes:
    """Store where nothing is."""
    return b"ms %b %d T%d F%b c ME\r\n%b\r\n" % (name, len(body), ttl, flags, body)


def delete(name: bytes, cas: bytes | None = None) -> bytes:
    """Remove; with `cas` only just that."""
    return b"md " + name + (b"\r\n" if cas is None else b" C%b\r\n" % cas)


def check(command: bytes, reply: MetaReply) -> None:
    """Raise OutOfStep if that can't be the reply to this command. (A refusal can, to any.)"""
    answers = _ANSWERS.get(command[:2])
    if answers is None or reply.text:
        return
    numbered = answers.get(reply.code)
    if numbered is None or (numbered and not reply.cas.isdigit()):
        raise OutOfStep(f"memcached's reply is out of step: {reply.code!r} to {command[:2]!r}")


_ANSWERS = {
    b"mg": {b"VA": True, b"EN": False},
    b"ms": {b"HD": True, b"NS": False, b"EX": False, b"NF": False},
    b"md": {b"HD": False, b"NF": False, b"EX": False},
    b"mn": {b"MN": False},
}
"""By command, as they are written above: the codes of its replies, and which of these tell the item's number."""


class MetaParser:
    """The replies of one connection, for both colours."""

    __slots__ = ("at", "data")

    def __init__(self) -> None:
        self.data: bytes | bytearray = b""
        self.at = 0  # where the next reply begins

    def feed(self, data: bytes | memoryview) -> None:
        if self.at == len(self.data):
            self.data = bytes(data)
        else:
            if isinstance(self.data, bytes):
                self.data = bytearray(self.data)  # or each piece of a large value would copy all that came before
            del self.data[: self.at]
            self.data += data
        self.at = 0

    def gets(self) -> Any:
        """The next reply; MORE if it has not arrived as a whole."""
        data, at = self.data, self.at
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > 8192:
                raise OutOfStep("this is no memcached server: it sends lines without an end")
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
                raise OutOfStep("memcached's reply is out of step")
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
        """A refusal, or what is said in the older protocol. Return its end; 0: it has not come yet."""
        if reply.code == b"STAT":  # many lines, for one question
            after = data.find(b"\r\nEND\r\n", at) + 7
            reply.value = bytes(data[at:after])
            return after if after >= 7 else 0
        line = bytes(data[at : after - 2])
        if reply.code == b"VERSION":
            reply.value = line.removeprefix(b"VERSION ")
        elif reply.code in _ERRORS:
            reply.text = line
        else:
            raise OutOfStep(f"this is no memcached server: it says {line[:80]!r}")
        return after


_T, _C, _F = b"tcf"
_SHORT = frozenset([b"HD", b"EN", b"NF", b"EX", b"NS", b"MN"])
_ERRORS = frozenset([b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR"])
