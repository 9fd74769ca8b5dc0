"""What a server says, as it comes in pieces. Pure."""

from __future__ import annotations

import struct
from typing import Any, Protocol

__all__ = ["MORE", "ODD", "OutOfStep", "Parser", "out_of_step"]

MORE = object()
"""There is no whole reply yet."""


class OutOfStep(ConnectionError):
    """What was read is no reply to what was asked: nothing that this connection says is to be believed any more."""


ODD = (TypeError, ValueError, LookupError, AttributeError, struct.error)
"""What bytes of another shape raise in a parser, ours or a client library's: those are made for servers."""


def out_of_step(error: Exception) -> OutOfStep:
    """Return what to raise instead of an error of `ODD`."""
    return OutOfStep(f"{type(error).__name__}: {error}")


class Parser(Protocol):
    """Bytes go in, replies come out."""

    def feed(self, data: bytes | memoryview, /) -> object: ...

    def gets(self) -> Any:
        """The next reply, or MORE."""
