"""A server's replies, which arrive in pieces. Pure."""

from __future__ import annotations

import struct
from typing import Any, Protocol

__all__ = ["MORE", "ODD", "OutOfStep", "Parser", "out_of_step"]

MORE = object()
"""Stands for a reply that is not complete yet."""


class OutOfStep(ConnectionError):
    """What was read is no reply to what was asked. Nothing that this connection returns can be trusted any more."""


ODD = (TypeError, ValueError, LookupError, AttributeError, struct.error)
"""Errors that unexpected bytes cause in a parser, ours or a client library's: parsers expect well-behaved servers."""


def out_of_step(error: Exception) -> OutOfStep:
    """Return what to raise instead of an error of `ODD`."""
    return OutOfStep(f"{type(error).__name__}: {error}")


class Parser(Protocol):
    """A parser without I/O: bytes go in, replies come out."""

    def feed(self, data: bytes | memoryview, /) -> object: ...

    def gets(self) -> Any:
        """Return the next reply, or MORE."""
