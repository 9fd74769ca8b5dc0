"""Work beside the caller: bounded pools of daemon threads, started when they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf

from stampede import forks
from stampede.threads import Crew

__all__ = ["Workers"]

LOST = 32
"""Places at most that are given to others while the jobs that were begun in them hang, perhaps for ever."""


class Workers:
    """At most `limit` jobs at once. A place is reserved before there is a job, so that no job waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._crew = Crew(inf, name)
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self.taken: dict[object, float] = {}  # places, and the moment from which the job in each counts as hung
        self._lock = threading.RLock()  # reentrant, for finalizers and signals

    def reserve(self) -> object | None:
        """Return a place, which `free` or the end of a job gives back. None: all are taken."""
        place, now = object(), time.monotonic()
        with self._lock:
            busy = sum(hung > now for hung in self.taken.values())
            if busy >= self._limit or len(self.taken) >= self._limit + LOST:
                return None
            self.taken[place] = inf
        return place

    def free(self, place: object) -> None:
        with self._lock:
            self.taken.pop(place, None)

    def run(self, place: object, act: Callable[[], object], longest: float) -> None:
        """Run a job in a reserved place. After `longest` seconds the place is given to others, too."""
        with self._lock:
            self.taken[place] = time.monotonic() + longest
        self._crew.do(partial(self._do, place, act))

    def _do(self, place: object, act: Callable[[], object]) -> None:
        try:
            act()
        finally:
            self.free(place)
