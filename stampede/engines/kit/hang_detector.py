"""Detects a server that hangs, once for all: the first caller whose time-out runs out tells all others that wait for
it. If the server has answered any caller since, it is slow, or that one connection is broken."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from stampede.runtime.watch import watch

__all__ = ["NOT_TO_OTHERS", "YOUNG", "HangDetector", "hang_up"]

YOUNG = 0.1
"""Seconds for which a new question is left alone: perhaps only the other caller's connection is dead, not the
server."""

NOT_TO_OTHERS = "the server did not reply to an earlier question of another caller, nor to any since"


class HangDetector:
    """What all connections of this process know about one server. No lock: each step is atomic in Python."""

    __slots__ = ("__weakref__", "found", "heard", "waiters")

    def __init__(self) -> None:
        self.heard = 0.0  # when it last sent something, on any connection
        self.found = 0.0  # when it was last found to hang
        self.waiters: Callable[[float], object] | None = None
        """Ends the waits of threads. The argument is a moment: only waits that began before it end."""

    def ends(self, since: float, patience: float | None) -> None:
        """Report that a caller has waited in vain since this moment, on one connection. `patience` None means no
        time-out."""
        now = time.monotonic()
        if patience is None or now - since < patience or self.heard >= since:
            return
        self.found = now
        self.look(now)
        watch.add(self, now + YOUNG)  # and later for those that had just begun to wait

    def look(self, now: float) -> None:
        """End the waits that are older than `YOUNG`, if the server still hangs."""
        if self.waiters is not None and self.heard < self.found:
            self.waiters(min(self.found, now - YOUNG))

    def hangs(self, since: float) -> bool:
        """Return whether a caller that waits since this moment should give up."""
        return since < self.found > self.heard and time.monotonic() - since > YOUNG


def hang_up(sock: socket.socket | None) -> None:
    """Wake the thread that waits on this socket. With TLS this skips the goodbye, since that thread is using the TLS
    state."""
    if sock is not None:
        try:
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        except OSError:
            pass  # closed already
