"""Hangs up on a server that answers too late, for clients without a time-out of their own."""

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
        forks.in_child(self._begin)  # or a child would shut its parent's connections

    def _begin(self) -> None:
        self._asked: dict[object, tuple[float, int]] = {}
        self._alarm = inf  # when `look` runs next

    @contextmanager
    def asking(self, client: Any) -> Iterator[None]:
        """Bound the question asked in this block. The client's own error is raised when its connection is shut."""
        fd, end, question = _descriptor(client), time.monotonic() + self._seconds, object()
        if fd is None:
            yield
            return
        try:
            with process_lock.lock:
                self._asked[question] = end, fd
                first, self._alarm = self._alarm == inf, min(self._alarm, end)
            if first and not watch.add(self, end):
                self._alarm = inf  # no thread can be started
            yield
        finally:
            with process_lock.lock:  # from now on the number may belong to another file
                self._asked.pop(question, None)

    def look(self, now: float) -> float | None:
        """Shut the connections that are overdue. Return when to look next, None if nothing is left to do."""
        with process_lock.lock:
            for end, fd in self._asked.values():
                if end <= now:
                    _shut(fd)
            self._alarm = min((end for end, _ in self._asked.values() if end > now), default=inf)
            return self._alarm if self._alarm < inf else None


def _descriptor(client: Any) -> int | None:
    try:
        return int(client.fileno())
    except (OSError, ValueError, TypeError, AttributeError):  # no descriptor, or closed
        return None


def _shut(fd: int) -> None:
    try:
        with socket.socket(fileno=os.dup(fd)) as same:
            hang_up(same)
    except OSError:
        pass  # not a socket, or closed already
