"""What a server says, as it comes in pieces. Pure."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["MORE", "OutOfStep", "Parser"]

MORE = object()
"""There is no whole reply yet."""


class OutOfStep(ConnectionError):
    """What was read is no reply to what was asked: nothing that this connection says is to be believed any more."""


class Parser(Protocol):
    """Bytes go in, replies come out."""

    def feed(self, data: bytes | memoryview, /) -> object: ...

    def gets(self) -> Any:
        """The next reply, or MORE."""
        ...
