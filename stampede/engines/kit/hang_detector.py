"""A server that hangs is found out once: the first whose time has run out tells all that wait for it. If it has
answered anybody since, it is slow, or that one connection is broken."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from stampede.runtime.watch import watch

__all__ = ["NOT_TO_OTHERS", "YOUNG", "HangDetector", "hang_up"]

YOUNG = 0.1
"""Seconds for which who has just asked is left alone: it may be another's connection, and no server, that is dead."""

NOT_TO_OTHERS = "no reply to another's question, nor to any since"


class HangDetector:
    """What the connections of this process with one server have heard of it. No lock: each step is one of Python's."""

    __slots__ = ("__weakref__", "found", "heard", "waiters")

    def __init__(self) -> None:
        self.heard = 0.0  # when it has last said something, to anybody
        self.found = 0.0  # when it was last found to hang
        self.waiters: Callable[[float], object] | None = None
        """Tells the threads that wait for it. Is given the moment before which they must have begun to."""

    def ends(self, since: float, patience: float | None) -> None:
        """Somebody has waited in vain since then, on one connection."""
        now = time.monotonic()
        if patience is None or now - since < patience or self.heard >= since:
            return
        self.found = now
        self.look(now)
        watch.add(self, now + YOUNG)  # and those who were young

    def look(self, now: float) -> None:
        if self.waiters is not None and self.heard < self.found:
            self.waiters(min(self.found, now - YOUNG))

    def hangs(self, since: float) -> bool:
        """Whether who waits since then needn't any more."""
        return since < self.found > self.heard and time.monotonic() - since > YOUNG


def hang_up(sock: socket.socket | None) -> None:
    """Wake the thread that waits there. It may be TLS, whose state is in the hands of that thread: no word of that."""
    if sock is not None:
        try:
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        except OSError:
            pass  # else it is closed
