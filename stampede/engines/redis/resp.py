"""Commands as bytes, and replies as they come in pieces: by hiredis where it is installed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stampede.engines.kit import replies
from stampede.engines.kit.replies import MORE, OutOfStep

__all__ = ["MORE", "Parser", "packer", "parser"]


class Parser(replies.Parser, Protocol):
    def has_data(self) -> bool: ...


def parser(refused: Callable[[str], Exception]) -> Parser:
    """A parser of RESP2 and of RESP3's pushes. What the server refuses is returned as an exception, not raised."""
    try:
        from hiredis import Reader
    except ImportError:
        return _Parser(refused)
    made: Any = Reader(protocolError=OutOfStep, replyError=refused, notEnoughData=MORE)
    return made  # type: ignore[no-any-return]


def packer() -> Callable[[tuple[bytes, ...]], bytes]:
    """What makes of a command what is sent."""
    try:
        from hiredis import pack_command
    except ImportError:
        return _packed
    made: Any = pack_command
    return made  # type: ignore[no-any-return]


def _packed(command: tuple[bytes, ...]) -> bytes:
    return b"*%d\r\n%b" % (len(command), b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in command]))


class _Parser:
    def __init__(self, refused: Callable[[str], Exception]) -> None:
        self._refused = refused
        self._data = bytearray()
        self._at = 0

    def feed(self, data: bytes | memoryview) -> None:
        del self._data[: self._at]
        self._at = 0
        self._data += data

    def gets(self) -> Any:
        start = self._at
        try:
            return self._reply()
        except _Short:
            self._at = start
            return MORE

    def has_data(self) -> bool:
        return self._at < len(self._data)

    def _reply(self) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._bulk(int(rest))
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._refused(rest.decode("utf-8", "replace"))
        if kind == b"_":
            return None
        if kind in b"*>":
            return None if rest == b"-1" else [self._reply() for _ in range(int(rest))]
        raise OutOfStep(f"this is no reply of Redis: {line[:40]!r}")

    def _line(self) -> bytes:
        end = self._data.find(b"\r\n", self._at)
        if end < 0:
            raise _Short
        line = bytes(self._data[self._at : end])
        self._at = end + 2
        return line

    def _bulk(self, length: int) -> bytes | None:
        if length < 0:
            return None
        start = self._at
        end = start + length
        if len(self._data) < end + 2:
            raise _Short
        self._at = end + 2
        return bytes(self._data[start:end])


class _Short(Exception):
    """The rest of it is still to come."""
