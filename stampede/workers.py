"""Places beside the caller: a small bounded pool of daemon threads, started when they are needed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from math import inf
from typing import Any

from stampede import forks
from stampede.colour import Colour, hold_task, run_blocking, running_loop
from stampede.flight import outside
from stampede.threads import begun
from stampede.watch import watch

__all__ = ["Place", "Workers"]


LOST = 32
"""Places at most that are given to others while what was begun in them goes on: it hangs, and perhaps for ever."""


class _Job:
    """What is done in a place. Watched, if it may hang: from a moment on, others may have its place."""

    __slots__ = ("__weakref__", "act", "lost", "workers")

    def __init__(self, workers: Workers, act: Callable[[], object]) -> None:
        self.workers = workers
        self.act = act
        self.lost = False

    def look(self, now: float) -> None:
        self.workers.lose(self)


class Workers:
    """At most `limit` jobs at once; a place is reserved before there is a job, and none waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._taken = 0
        self._idle = 0
        self._lost = 0
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()  # reentrant, for finalizers and signals

    def reserve(self) -> bool:
        """Take a place; `run` or `free` gives it back."""
        with self._changed:
            if self._taken >= self._limit:
                return False
            self._taken += 1
            return True

    def free(self) -> None:
        with self._changed:
            self._taken -= 1

    def lose(self, job: _Job) -> None:
        """It hangs: let others have its place."""
        with self._changed:
            if self._lost < LOST and not job.lost:
                job.lost = True
                self._lost += 1
                self._taken -= 1

    def _left(self, job: _Job) -> None:
        with self._changed:
            if job.lost:
                self._lost -= 1
            else:
                job.lost = True  # nobody is to take it for hung any more
                self._taken -= 1

    def run(self, act: Callable[[], object], longest: float = inf) -> None:
        """Do it in the place that was reserved, which others may have after so many seconds. It deals with its own
        errors."""
        job = _Job(self, act)
        if longest < inf:
            watch.add(job, time.monotonic() + longest)
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
                return
        if begun(self._name, self._work) is None:
            self._work(once=True)  # the caller does what is left to do

    def _work(self, *, once: bool = False) -> None:
        changed = self._changed
        while not once or self._jobs:
            with changed:
                self._idle += 1
                while not self._jobs:
                    if not changed.wait(30) and not self._jobs:
                        self._idle -= 1
                        return
                self._idle -= 1
                job = self._jobs.popleft()
            try:
                job.act()
            finally:
                self._left(job)
                del job


_refreshers = Workers(4, "stampede-refresh")


class Place:
    """A place beside the caller, reserved before the claim for the computation that the claim may be granted.

    A thread of a small pool, or a held task; either in a copy of the caller's context, outside of its leases.
    """

    def __init__(self, colour: Colour) -> None:
        self._colour = colour
        self.reserved = colour.suspending or _refreshers.reserve()
        self._unused = self.reserved

    def free(self) -> None:
        """Give it back, if it wasn't needed."""
        if self._unused and not self._colour.suspending:
            _refreshers.free()

    def spawn(self, work: Coroutine[Any, Any, Any], unborn: Callable[[], object], longest: float) -> None:
        """Have it done; `unborn` is called if a task is cancelled, since that may be before its first step. After so
        many seconds it is taken for hung."""
        self._unused = False
        context = copy_context()
        context.run(outside)
        loop = running_loop()
        if self._colour.suspending and loop is not None:
            task = hold_task(loop.create_task(work, context=context))
            task.add_done_callback(lambda ended: unborn() if ended.cancelled() else None)
        else:
            _refreshers.run(lambda: context.run(run_blocking, work), longest)
