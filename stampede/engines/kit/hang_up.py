"""Hangs up on a server that answers too late, for clients who can't be told how long they may wait for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from stampede.engines.kit.hang_detector import hang_up
from stampede.runtime import forks, process_lock
from stampede.runtime.watch import watch

__all__ = ["HangUp"]


class HangUp:
    """Questions under way, by clients whose connections have a file descriptor. None takes longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin()
        forks.in_child(self._begin)  # or a child would shut what its parent has open

    def _begin(self) -> None:
        self._asked: dict[object, tuple[float, int]] = {}
        self._alarm = inf  # when we look

    @contextmanager
    def asking(self, client: Any) -> Iterator[None]:
        """What the client raises when its connection is shut is his."""
        fd, end, question = _descriptor(client), time.monotonic() + self._seconds, object()
        if fd is None:
            yield
            return
        try:
            with process_lock.lock:
                self._asked[question] = end, fd
                first, self._alarm = self._alarm == inf, min(self._alarm, end)
            if first and not watch.add(self, end):
                self._alarm = inf  # there is no thread to be had
            yield
        finally:
            with process_lock.lock:  # from now on the number may be anybody's
                self._asked.pop(question, None)

    def look(self, now: float) -> float | None:
        """Shut those that are overdue."""
        with process_lock.lock:
            for end, fd in self._asked.values():
                if end <= now:
                    _shut(fd)
            self._alarm = min((end for end, _ in self._asked.values() if end > now), default=inf)
            return self._alarm if self._alarm < inf else None


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
