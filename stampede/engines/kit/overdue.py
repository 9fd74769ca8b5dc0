"""Hangs up on a server that answers too late, for clients who can't be told how long they may wait for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from stampede import decisions, forks
from stampede.engines.kit.vigil import hang_up
from stampede.watch import watch

__all__ = ["Overdue"]

GRACE = 1.0
"""Seconds by which a look may be late."""


class Overdue:
    """Questions under way, by clients whose connections have a file descriptor. None takes longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin()
        forks.in_child(self._begin)  # or a child would shut what its parent has open

    def _begin(self) -> None:
        self._asked: dict[object, tuple[float, int]] = {}
        self._alarm = -inf  # when we look

    @contextmanager
    def asking(self, client: Any) -> Iterator[None]:
        """What the client raises when its connection is shut is his."""
        fd, now, question = _descriptor(client), time.monotonic(), object()
        if fd is None:
            yield
            return
        try:
            with decisions.lock:
                self._asked[question] = now, fd
                alone = self._alarm + GRACE <= now
                self._alarm = now + self._seconds if alone else self._alarm
            if alone and not watch.add(self, now + self._seconds):
                self._alarm = -inf  # there is no thread to be had
            yield
        finally:
            with decisions.lock:  # from now on the number may be anybody's
                self._asked.pop(question, None)

    def look(self, now: float) -> float | None:
        """Shut those that are overdue."""
        with decisions.lock:
            if now < self._alarm:
                return None  # another look was asked for since
            asked, late = [*self._asked.values()], now - self._seconds
            for began, fd in asked:
                if began <= late:
                    _shut(fd)
            self._alarm = min((began for began, _ in asked if began > late), default=-inf) + self._seconds
            return self._alarm if self._alarm > now else None


def _descriptor(client: Any) -> int | None:
    try:
        return int(client.fileno())
    except (OSError, ValueError, TypeError, AttributeError):  # it has none, or is closed
        return None


def _shut(fd: int) -> None:
    try:
        with socket.socket(fileno=os.dup(fd)) as same:
            hang_up(same)
    except OSError:
        pass  # else it is none, or is closed already
