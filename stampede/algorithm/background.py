"""Places for computations whose caller may stop waiting: tasks, and bounded pools of daemon threads."""

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
from stampede.runtime import forks
from stampede.runtime.colour import Bell, Colour, hold_task, run_blocking, soon
from stampede.runtime.threads import ThreadPool, with_signals_of_caller
from stampede.settings.options import Policy

__all__ = ["BackgroundPlace", "Workers"]

LOST = 32
"""The largest number of extra places, for jobs that hang in theirs, perhaps for ever."""


class Workers:
    """At most `limit` jobs at once. A place is reserved before its job exists, so that no job waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._pool = ThreadPool(inf, name)
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self.taken: dict[object, float] = {}  # by place: the moment from which its job counts as hung
        self._lock = threading.RLock()  # reentrant, for finalizers and signals

    def reserve(self) -> object | None:
        """Return a place, or None if all are taken. `free` or the end of its job gives it back."""
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
        """Run a job in a reserved place. After `longest` seconds it counts as hung, and others may take the place."""
        with self._lock:
            self.taken[place] = time.monotonic() + longest
        self._pool.do(partial(self._do, place, act))

    def _do(self, place: object, act: Callable[[], object]) -> None:
        try:
            act()
        finally:
            self.free(place)


_refreshers = Workers(4, "stampede-refresh")
# Each waiting caller has a thread of its own, so there must be at least this many.
_beside = Workers(256, "stampede-beside")


class BackgroundPlace:
    """Where the computation of one call can run beside its caller: a task, or a thread of a pool. It runs in a copy of
    the caller's context."""

    def __init__(self, colour: Colour, policy: Policy) -> None:
        self._colour = colour
        self._workers = _refreshers if policy.patience is None and policy.deadline is None else _beside
        self._thread: object | None = None

    def reserve(self) -> bool:
        """Return whether there is a place, reserving one if necessary."""
        if self._thread is None and not self._colour.suspending:
            self._thread = self._workers.reserve()
        return self._colour.suspending or self._thread is not None

    def free(self) -> None:
        """Give the place back if it was not needed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._workers.free(thread)

    def begin(
        self, work: Coroutine[Any, Any, Any], bell: Bell, longest: float, *, waits: bool
    ) -> Callable[[], object] | None:
        """Run the work in the reserved place, and return a function that cancels it, or None. After `longest` seconds
        it counts as hung. If the caller waits (`waits`), the work is part of the caller's computation and keeps that
        context. The bell also rings for a task that is cancelled before its first step."""
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
