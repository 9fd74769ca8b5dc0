"""Where the bytes of an event loop's connection land, so that none is lost without a word."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from stampede.interruptions import of_a_caller, thrown

__all__ = ["Interrupted", "Received"]

ROOM = 1 << 16
"""Bytes that are read at once."""

BLANK = b"\xff\x00\x91\xa5\x00\xf8\x0e\xff"
"""What lies at the begin of the room while nothing has been read into it. No reply begins like this."""

_BEGIN = slice(len(BLANK))


class Interrupted(ConnectionResetError):
    """We have broken a connection ourselves, in the midst of a step: that says nothing of its server. What was asked on
    it, and may be sent twice, is asked again, however often this happens."""

    def __init__(self) -> None:
        super().__init__("interrupted")


class Received(asyncio.BufferedProtocol, ABC):
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
    def lose(self, error: Exception) -> None:
        """Close it: it is of no use any more. `Interrupted`: as we don't know what has been read, or sent."""

    @abstractmethod
    def interrupted(self, error: BaseException) -> None:
        """What a signal's handler has raised comes out of the call of one who waits, as if it had come there. If nobody
        does it is raised: the loop may tell."""

    def stumbled(self, error: BaseException) -> None:
        """Over what is no reply; or this was interrupted."""
        own = of_a_caller(error)
        if own is not None:
            try:
                self.interrupted(own)  # first: who has been told isn't asked for any more
            finally:
                self.lose(Interrupted())
        elif isinstance(error, Exception):
            self.lose(error)
        else:
            self.lose(Interrupted())
            raise error

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and thrown(exc) is not None:
            self.stumbled(exc)
        elif isinstance(exc, RuntimeError):
            self.lose(Interrupted())  # so uvloop calls a `get_buffer` that was, and has dropped what was raised there
        else:
            self.lose(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    def look_for_missed(self) -> None:
        """Lose it if there is something that was never told. From a turn of the loop that doesn't read."""
        if self._reading and not self._room.startswith(BLANK):  # it may also have tried to read, and there was nothing
            self._reading = False
            self.lose(Interrupted())

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reading:
            self.look_for_missed()
        self._room[_BEGIN] = BLANK
        self._reading = True
        return self._seen  # TLS fills slices of it

    def buffer_updated(self, nbytes: int) -> None:
        self.landed(self._seen[:nbytes])
        self._reading = False
