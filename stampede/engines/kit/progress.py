"""Time-outs that count since the last byte: what moves is alive, in either direction, however slow its link."""

from __future__ import annotations

import select
import time
from math import inf
from typing import Any

from stampede.interruptions import pass_on
from stampede.stalls import given_back

try:
    from fcntl import ioctl
    from struct import unpack
    from termios import TIOCOUTQ
except ImportError:  # no such thing here: what the system has taken counts as sent

    def queued(sock: Any) -> int:
        return 0

else:

    def queued(sock: Any) -> int:
        """Bytes that the other end has not taken yet from the system's own buffer."""
        try:
            return int(unpack("i", ioctl(sock.fileno(), TIOCOUTQ, b"\0\0\0\0"))[0])
        except (OSError, ValueError) as error:
            pass_on(error)
            return 0


__all__ = ["LARGE", "LOOKS", "Progress", "comes", "queued", "send", "unsent"]

LARGE = 1 << 16
"""Bytes that take a while on a slow link."""

HIDDEN, SLOWEST = 4 << 20, 1 << 20
"""Of what is sent, so much may be kept back by proxies that nobody sees into; and bytes a second that they let go."""

LOOKS = 4
"""A sender is looked at so often in the time for which one that doesn't move is waited for."""


class Progress:
    """Whether anything moves on a connection that owes a reply. Pure."""

    __slots__ = ("_hidden", "_moved", "_unsent")

    def __init__(self) -> None:
        self._moved = self._hidden = 0.0
        self._unsent = 0

    def begin(self, now: float) -> None:
        """It had nothing to say until now."""
        self._moved, self._hidden = now, 0.0

    def sends(self, size: int) -> None:
        """So many bytes, more than `LARGE`, are on their way, which may go on where nobody sees them."""
        self._hidden = max(self._hidden, min(size, HIDDEN) / SLOWEST)

    def heard(self, now: float) -> None:
        self._moved = now

    @property
    def since(self) -> float:
        """When it last moved; never, if something large may be on its way."""
        return inf if self._hidden else self._moved

    def left(self, patience: float, unsent: int, now: float) -> float:
        """Seconds until it is to be called hung, if nothing moves until then."""
        if unsent < self._unsent:
            self._moved = now
        self._unsent = unsent
        return self._moved + patience + self._hidden - now


def unsent(transport: Any) -> int:
    """Bytes that are still on this side of an event loop's connection."""
    return int(transport.get_write_buffer_size()) + queued(transport.get_extra_info("socket"))


def comes(sock: Any, since: float, patience: float) -> bool:
    """Whether there is something to read after all, though the time for it, since then, ran out: if we did not run in
    it, it may have come, or need the time that we have lost."""
    if hasattr(sock, "pending") and sock.pending():  # what TLS has read already
        return True
    look = select.poll()
    look.register(sock, select.POLLIN)
    return bool(look.poll(1000 * given_back(time.monotonic() - since - patience, patience)))


def send(sock: Any, data: bytes) -> None:
    """Send all of it over a blocking socket, whose time-out is for each piece; then wait for what is said to it, for
    as long as it moves."""
    if len(data) <= LARGE:
        sent = sock.send(data)  # all of it, as a rule. (`sendall` has one time-out for all pieces.)
        while sent < len(data):
            sent += sock.send(data[sent:])
        return
    patience = sock.gettimeout()
    if patience is None:
        sock.sendall(data)
        return
    view, sent = memoryview(data), 0
    while sent < len(view):
        sent += sock.send(view[sent : sent + LARGE])
    pace = Progress()
    pace.begin(time.monotonic())
    pace.sends(len(data))
    reply = select.poll()
    reply.register(sock, select.POLLIN)
    while (left := pace.left(patience, queued(sock), time.monotonic())) > 0:
        if reply.poll(1000 * min(left, patience / LOOKS)):
            return
    raise TimeoutError("timed out")
