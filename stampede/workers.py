"""Work beside the caller: bounded pools of daemon threads, started when they are needed; and tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import Enum
from inspect import CORO_CREATED, getcoroutinestate
from math import inf
from random import uniform
from typing import Any, TypeAlias, TypeVar, final

from stampede import forks, stalls
from stampede.colour import Colour, Loop, hold_task, run_blocking, running_loop
from stampede.threads import Crew
from stampede.watch import watch

__all__ = ["Late", "Reserved", "Told", "Workers", "within"]

T = TypeVar("T")


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


MOMENT = 0.25
"""Seconds between two questions of one who finds no place to wait in."""


@final
class Late(Enum):
    """What there is instead of a result that takes too long."""

    LATE = 0  # it goes on beside the caller
    UNASKED = 1  # it has not been begun, as others take too long


Told: TypeAlias = Callable[[Any, BaseException | None], object]
"""Is given the result, or the error."""


async def within(
    colour: Colour, work: Coroutine[Any, Any, T], seconds: float, late: Told, *, waits: bool = False
) -> T | Late:
    """The result of the work, or LATE: then it goes on beside the caller, and `late` is told how it ended.

    Blocking, it takes a place. Where none is free, UNASKED: for work that only `waits` after a moment, so that its
    caller asks instead, now and then; for a question when its time is over.
    """
    loop = running_loop()
    if colour.suspending and loop is not None:
        try:
            return await _within_loop(hold_task(loop.create_task(work)), seconds, late)
        except BaseException:
            _forsake(work, loop)
            raise
    began, place = time.monotonic(), (_waiters if waits else _askers).reserve()
    if place is None and waits:
        time.sleep(max(min(seconds, MOMENT * uniform(0.8, 1.2)), 0.0))
    while place is None:
        left = began + seconds - time.monotonic()
        if waits or left <= 0:
            work.close()
            return Late.UNASKED
        time.sleep(min(left, stalls.NEXT))  # a question takes no longer
        place = _askers.reserve()
    errand = _Errand(work, late)
    try:
        (_waiters if waits else _askers).run(place, errand.run)
        del place
        answer: T | Late = errand.result(max(began + seconds - time.monotonic(), 0.0))  # we may not have run meanwhile
    except BaseException:
        errand.leave()
        raise
    return answer


def _forsake(work: Coroutine[Any, Any, T], loop: Loop) -> None:
    """Who was interrupted before he had its task: what it takes would be taken behind its giving back."""
    if getcoroutinestate(work) == CORO_CREATED:
        for task in asyncio.all_tasks(loop):
            if task.get_coro() is work:
                task.cancel()


async def _within_loop(task: asyncio.Task[T], seconds: float, late: Told) -> T | Late:
    began = time.monotonic()
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():  # its reply may have come while this loop was blocked
            await asyncio.wait([task], timeout=stalls.given_back(time.monotonic() - began - seconds, seconds))
    except BaseException:
        with suppress(RuntimeError):  # its loop was closed
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody is there to hear of it
        raise
    if task.done():
        return task.result()

    def ended(task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        late(task.result() if error is None else None, error)

    task.add_done_callback(ended)
    return Late.LATE


class _Errand:
    """Blocking work, done by another thread."""

    def __init__(self, work: Coroutine[Any, Any, Any], late: Told) -> None:
        self._work, self._late = work, late
        self._done = threading.Lock()
        self._done.acquire()
        self._first: dict[str, bool] = {}  # who came first: the work's end (True), or the end of the caller's patience
        self._result: Any = None
        self._error: BaseException | None = None

    def _is_first(self, done: bool) -> bool:
        return self._first.setdefault("first", done) is done

    def run(self) -> None:
        try:
            self._result = run_blocking(self._work)
        except BaseException as error:
            self._error = error
        if self._is_first(True):
            self._done.release()
        else:
            self._late(self._result, self._error)

    def leave(self) -> None:
        """The caller was interrupted: what comes of it is told, unless it has come."""
        self._is_first(False)

    def result(self, seconds: float) -> Any:
        began = time.monotonic()
        ended = self._done.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        if not ended:  # its reply may have come while this process was stopped
            ended = self._done.acquire(timeout=stalls.given_back(time.monotonic() - began - seconds, seconds))
        if not ended and self._is_first(False):
            return Late.LATE
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # or it would refer to itself through this frame
        return self._result


_askers = Workers(1000, "stampede-ask")
_waiters = Workers(1000, "stampede-wait")  # of their own: who waits for somebody's computation keeps no question
