"""A connection of the blocking colour, for one question at a time. Its bytes are read and written here. The time-out
bounds each piece that is sent or received, not the whole. The first thread whose time-out runs out ends the waits of
all others for the same server."""

from __future__ import annotations

# If Python imported this at the first connection, an exception or a fork in the middle would break all later ones.
import encodings.idna  # noqa: F401
import select
import socket
import time
from collections.abc import Iterable
from math import inf
from typing import Any

from stampede.engines.kit.hang_detector import HangDetector
from stampede.engines.kit.replies import OutOfStep

__all__ = ["Sock", "cut_all"]

SIZE = 1 << 16
"""Bytes that are read, or sent, at once."""


class Sock:
    """A connection that a thread asks over."""

    __slots__ = ("_cut", "_hang_detector", "_watch", "asking", "since", "sock", "stands")

    def __init__(self, hang_detector: HangDetector) -> None:
        self._hang_detector = hang_detector
        self._cut = 0.0
        self.forget()

    def forget(self) -> None:
        """Reset to "not connected"."""
        self.sock: Any = None
        self.stands = False
        self._watch: select.poll | None = None
        # A question is under way; or one was left so, because disconnecting needed a deeper stack than there was.
        self.asking = False
        self.since = inf  # when its current wait began

    def stand(self, sock: Any, patience: float | None) -> None:
        """Use this socket, on which each piece may take `patience` seconds."""
        sock.settimeout(patience)
        self._watch = None
        if not hasattr(sock, "pending"):  # TLS also sends bytes that are no reply
            self._watch = select.poll()
            self._watch.register(sock, select.POLLIN)
        self.sock, self.stands = sock, True

    def speaks(self) -> bool:
        """Return whether something can be read before anything was asked: the connection's end, or an extra reply,
        which would be taken for the reply to the next question."""
        return bool(self.sock.pending() if self._watch is None else self._watch.poll(0))

    def why_it_speaks(self) -> ConnectionError:
        """Return what to raise if `speaks` is true: the server has closed the connection, or sent too much."""
        try:
            ended = self.sock.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # TLS sockets cannot peek
            ended = False
        if ended:
            return ConnectionResetError("the server closed the connection")
        return OutOfStep("the server sent something unasked")

    def send(self, data: bytes) -> None:
        """Send all of it. (`sendall` has one time-out for all pieces, and so has `send` over TLS.)"""
        sent = self.sock.send(data[:SIZE])
        while sent < len(data):
            sent += self.sock.send(data[sent : sent + SIZE])

    def received(self) -> bytes:
        """Return some bytes, as soon as there are any."""
        self.since = time.monotonic()
        data: bytes = self.sock.recv(SIZE)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._hang_detector.heard = time.monotonic()
        return data

    def cut(self) -> None:
        """Mark this wait as useless. Another thread calls this."""
        self._cut = self.since

    def is_cut(self) -> bool:
        """Return whether another thread has marked this very wait as useless."""
        return self._cut == self.since


def cut_all(socks: Iterable[Sock], before: float) -> None:
    """Cut the connections that have waited for their server since before that moment."""
    for each in socks:
        if each.asking and each.since < before:
            each.cut()
