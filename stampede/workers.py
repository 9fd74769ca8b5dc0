"""Work beside the caller: bounded pools of daemon threads, started when they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf

from stampede import forks
from stampede.threads import Crew
from stampede.watch import watch

__all__ = ["Reserved", "Workers"]

LOST = 32
"""Places at most that are given to others while what was begun in them goes on: it hangs, and perhaps for ever."""


class Reserved:
    """A place in a pool, until it is freed; or, while a job is done in it, until that job is taken for hung."""

    __slots__ = ("__weakref__", "_workers")

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def free(self) -> None:
        self._workers.taken.discard(self)

    def look(self, now: float) -> None:
        """By the watch: its job hangs, and others may have the place."""
        workers = self._workers
        with workers.lock:
            if self in workers.taken and len(workers.lost) < LOST:
                workers.taken.discard(self)
                workers.lost.add(self)


class Workers:
    """At most `limit` jobs at once; a place is reserved before there is a job, and none waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._crew = Crew(inf, name)
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self.taken: set[Reserved] = set()  # a parent's places are not among a forked child's
        self.lost: set[Reserved] = set()  # whose jobs hang
        self.lock = threading.RLock()  # reentrant, for finalizers and signals

    def reserve(self) -> Reserved | None:
        """Take a place; `run` or its `free` gives it back."""
        place = Reserved(self)
        with self.lock:
            if len(self.taken) >= self._limit:
                return None
            self.taken.add(place)
        return place

    def run(self, place: Reserved, act: Callable[[], object], longest: float = inf) -> None:
        """Do it in the place that was reserved, which others may have after so many seconds. It deals with its own
        errors."""
        if longest < inf:
            watch.add(place, time.monotonic() + longest)
        self._crew.do(partial(self._do, place, act))

    def _do(self, place: Reserved, act: Callable[[], object]) -> None:
        try:
            act()
        finally:
            with self.lock:
                self.taken.discard(place)
                self.lost.discard(place)
