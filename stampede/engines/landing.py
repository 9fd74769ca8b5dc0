"""Where the bytes of an event loop's connection land, so that none is lost without a word."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

__all__ = ["Landing"]

ROOM = 1 << 16
"""Bytes that are read at once."""

BLANK = b"\xff\x00\x91\xa5\x00\xf8\x0e\xff"
"""What lies at the begin of the room while nothing has been read into it. No reply begins like this."""

_BEGIN = slice(len(BLANK))


class Landing(asyncio.BufferedProtocol, ABC):
    """A connection's protocol that hears of every byte, or that it has missed some.

    What a signal's handler raises may come when a loop has taken bytes from the socket, and has not told us of them.
    The next reply would be taken for the one that they were.
    """

    def __init__(self) -> None:
        self._room = bytearray(ROOM)
        self._seen = memoryview(self._room)
        self._reading = False

    @abstractmethod
    def landed(self, data: memoryview) -> None:
        """Use it, before this returns."""

    @abstractmethod
    def missed(self) -> None:
        """Close it: which reply comes next is not known any more."""

    def look_for_missed(self) -> None:
        """Call `missed` if there is something that was never told. From a turn of the loop that doesn't read."""
        if self._reading and not self._room.startswith(BLANK):  # it may also have tried to read, and there was nothing
            self._reading = False
            self.missed()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reading:
            self.look_for_missed()
        self._room[_BEGIN] = BLANK
        self._reading = True
        return self._seen  # TLS fills slices of it

    def buffer_updated(self, nbytes: int) -> None:
        self.landed(self._seen[:nbytes])
        self._reading = False
