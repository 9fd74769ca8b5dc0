"""Work beside the caller: bounded pools of daemon threads, started when they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

from stampede import forks
from stampede.threads import Crew
from stampede.watch import watch

__all__ = ["Reserved", "Workers"]


LOST = 32
"""Places at most that are given to others while what was begun in them goes on: it hangs, and perhaps for ever."""


class Reserved:
    """A place, until it is freed; one that nobody refers to any more frees itself, whatever has interrupted whom."""

    __slots__ = ("counts", "lock", "workers")

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.lock = workers._lock
        self.counts = False

    def free(self) -> None:
        workers, lock = self.workers, self.lock
        with workers._lock:
            if self.counts and lock is workers._lock:  # or it was a parent's, and we are its forked child
                # At once, here and where it is taken: between two statements there may be an interruption.
                workers._taken, self.counts = workers._taken - 1, False

    def __del__(self) -> None:
        if getattr(self, "counts", False):  # or it was interrupted while it was made
            self.free()


class _Job:
    """What is done in a place. Watched, if it may hang: from a moment on, others may have its place."""

    __slots__ = ("__weakref__", "act", "lost", "place", "workers")

    def __init__(self, workers: Workers, place: Reserved, act: Callable[[], object]) -> None:
        self.workers = workers
        self.place = place
        self.act = act
        self.lost = False

    def look(self, now: float) -> None:
        self.workers.lose(self)

    def do(self) -> None:
        try:
            self.act()
        finally:
            self.workers.left(self)


class Workers:
    """At most `limit` jobs at once; a place is reserved before there is a job, and none waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._crew = Crew(inf, name)
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._taken = self._lost = 0
        self._lock = threading.RLock()  # reentrant, for finalizers and signals

    def reserve(self) -> Reserved | None:
        """Take a place; `run` or its `free` gives it back."""
        place = Reserved(self)
        with self._lock:
            if self._taken >= self._limit:
                return None
            self._taken, place.counts = self._taken + 1, True
        return place

    def lose(self, job: _Job) -> None:
        """It hangs: let others have its place."""
        with self._lock:
            if self._lost < LOST and not job.lost:
                job.lost = True
                self._lost += 1
                job.place.free()

    def left(self, job: _Job) -> None:
        with self._lock:
            if job.lost:
                self._lost -= 1
            else:
                job.lost = True  # nobody is to take it for hung any more
                job.place.free()

    def run(self, place: Reserved, act: Callable[[], object], longest: float = inf) -> None:
        """Do it in the place that was reserved, which others may have after so many seconds. It deals with its own
        errors."""
        job = _Job(self, place, act)
        if longest < inf:
            watch.add(job, time.monotonic() + longest)
        self._crew.do(job.do)
