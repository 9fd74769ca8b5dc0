"""Memcached's meta protocol: commands as bytes, replies from bytes. Pure.

Replies are read by length: a value may hold `\\r\\n`, `END`, or what looks like another reply.
"""

from __future__ import annotations

from stampede.errors import EngineError

__all__ = ["LOOK", "MONTH", "Reply", "add", "check", "claim", "delete", "look", "parse", "put"]

MONTH = 30 * 86_400
"""The longest relative time: a larger number would be taken for a date."""

VIVID = 3
"""Seconds that a stub stands which a claim has left. At least one less: memcached's clock ticks in seconds."""

CLAIM = b" t c f v N%d\r\n" % VIVID
LOOK = b" t c f v\r\n"


class Reply:
    """One reply. `code`: VA (a value), HD (done), EN or NF (nothing there), EX (another CAS), NS (not stored)."""

    __slots__ = ("cas", "code", "flags", "left", "text", "value", "won")

    def __init__(self, code: bytes) -> None:
        self.code = code
        self.value = b""
        self.left = -1  # seconds that the item has left, -1: no end
        self.cas = b""
        self.flags = b""
        self.won = False
        self.text = b""  # of an error


def claim(name: bytes) -> bytes:
    """What is there; a stub is put where nothing is, and its winner told so."""
    return b"mg " + name + CLAIM


def look(name: bytes) -> bytes:
    """What is there, and nothing changes."""
    return b"mg " + name + LOOK


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


def check(commands: bytes, reply: Reply) -> None:
    """EngineError if that can't be the reply to the first of these commands. (A refusal can, to any.)"""
    answers = _ANSWERS.get(commands[:2])
    if answers is None or reply.text:
        return
    numbered = answers.get(reply.code)
    if numbered is None or (numbered and not reply.cas.isdigit()):
        raise EngineError(f"memcached's reply is out of step: {reply.code!r} to {commands[:2]!r}")


_ANSWERS = {
    b"mg": {b"VA": True, b"EN": False},
    b"ms": {b"HD": True, b"NS": False, b"EX": False, b"NF": False},
    b"md": {b"HD": False, b"NF": False, b"EX": False},
    b"mn": {b"MN": False},
}
"""By command, as they are written above: the codes of its replies, and which of these tell the item's number."""


def parse(buffer: bytes | bytearray, at: int = 0) -> tuple[Reply, int] | None:
    """The reply that begins at `at`, and where the next one does. None: it has not arrived as a whole."""
    end = buffer.find(b"\r\n", at)
    if end < 0:
        if len(buffer) - at > 8192:
            raise EngineError("this is no memcached server: it sends lines without an end")
        return None
    line = buffer[at:end]
    words = (line if type(line) is bytes else bytes(line)).split()
    code = words[0] if words else b""
    reply = Reply(code)
    first = 1
    after = end + 2
    if code == b"VA":
        start, first = after, 2
        after = start + int(words[1]) + 2
        if len(buffer) < after:
            return None
        value = buffer[start : after - 2]
        reply.value = value if type(value) is bytes else bytes(value)
        if not buffer.startswith(b"\r\n", after - 2):
            raise EngineError("memcached's reply is out of step")
    elif code not in _SHORT:
        if code not in _ERRORS:
            raise EngineError(f"this is no memcached server: it says {bytes(buffer[at:end][:80])!r}")
        reply.text = bytes(buffer[at:end])
        return reply, after
    if len(words) == 5 and code == b"VA":  # as a rule: in the order of the question
        _, _, left, cas, flags = words
        if left[0] == _T and cas[0] == _C and flags[0] == _F:
            reply.left, reply.cas, reply.flags = int(left[1:]), cas[1:], flags[1:]
            return reply, after
    for word in words[first:]:
        kind = word[0]
        if kind == _T:
            reply.left = int(word[1:])
        elif kind == _C:
            reply.cas = word[1:]
        elif kind == _F:
            reply.flags = word[1:]
        elif kind == _W:
            reply.won = True
    return reply, after


_T, _C, _F, _W = b"tcfW"
_SHORT = frozenset([b"HD", b"EN", b"NF", b"EX", b"NS", b"MN"])
_ERRORS = frozenset([b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR"])
