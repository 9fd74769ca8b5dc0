"""Places beside the caller, for computations that nobody is to wait for: tasks, and bounded pools of daemon threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from math import inf
from typing import Any

from stampede.algorithm.flight import leave_computations
from stampede.model.policy import Policy
from stampede.runtime import forks
from stampede.runtime.colour import Bell, Colour, hold_task, run_blocking, soon
from stampede.runtime.threads import ThreadPool, with_signals_of_caller

__all__ = ["BackgroundPlace", "Workers"]

LOST = 32
"""Places at most that are given to others while the jobs that were begun in them hang, perhaps for ever."""


class Workers:
    """At most `limit` jobs at once. A place is reserved before there is a job, so that no job waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._pool = ThreadPool(inf, name)
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
        self._pool.do(partial(self._do, place, act))

    def _do(self, place: object, act: Callable[[], object]) -> None:
        try:
            act()
        finally:
            self.free(place)


_refreshers = Workers(4, "stampede-refresh")
_beside = Workers(256, "stampede-beside")  # for those who wait, each in a thread of its own: not to be fewer than these


class BackgroundPlace:
    """A place beside the caller, for the computation that its claim may be granted: a task, or a thread of a pool, in a
    copy of the caller's context."""

    def __init__(self, colour: Colour, policy: Policy) -> None:
        self._colour = colour
        self._workers = _refreshers if policy.patience is None and policy.deadline is None else _beside
        self._thread: object | None = None

    def reserve(self) -> bool:
        """Return whether there is a place, which may have been reserved before."""
        if self._thread is None and not self._colour.suspending:
            self._thread = self._workers.reserve()
        return self._colour.suspending or self._thread is not None

    def free(self) -> None:
        """Give the place back, if it wasn't needed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._workers.free(thread)

    def begin(
        self, work: Coroutine[Any, Any, Any], bell: Bell, longest: float, *, waits: bool
    ) -> Callable[[], object] | None:
        """Run the work in the reserved place, and return what cancels it, if anything can.

        After `longest` seconds it counts as hung. If its caller `waits` it is a part of what the caller computes, and
        has that context. The bell also rings for a task that was cancelled before its first step.
        """
        context = copy_context()
        if not waits:
            context.run(leave_computations)
        if self._colour.suspending:
            loop = asyncio.get_running_loop()
            task = hold_task(loop.create_task(work, context=context))
            task.add_done_callback(lambda ended: bell.ring())
            return lambda: soon(loop, task.cancel)
        thread, self._thread = self._thread, None
        self._workers.run(thread, with_signals_of_caller(lambda: context.run(run_blocking, work)), longest)
        return None
