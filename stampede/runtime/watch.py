"""One daemon thread that looks at things when they are due: followed flights, leases to renew, servers that hang. It is
started with the first of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import weakref
from math import inf
from typing import Protocol

from stampede.runtime import forks, greenlets
from stampede.runtime.threads import begun

__all__ = ["Watch", "Watched", "watch"]

_log = logging.getLogger("stampede")

LONGEST = 3600.0
"""The longest sleep in seconds, because the time-outs of the operating system have a maximum."""


_FOREVER = threading.Lock()  # made before any monkey patch, so that it blocks a real thread
_FOREVER.acquire()


class Watched(Protocol):
    """An object that is looked at when it is due. The watch refers to it weakly."""

    def look(self, now: float) -> float | None:
        """Do what is due. Return the moment of the next look, or None for never."""


class Watch:
    """A thread that calls `look` of each object when it is due."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = itertools.count()
        self._reset()
        forks.in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # re-entrant, because a finalizer may call `add` while it is held
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, weakref.ref[Watched]]] = []
        self._alarm = -inf  # when the thread looks again
        self._running = False  # a thread is running; the thread itself sets this

    def add(self, watched: Watched, moment: float) -> bool:
        """Have `watched.look` called at this moment. Return False if no thread can be started that would call it."""
        due = moment, next(self._count), weakref.ref(watched)
        with self._lock:
            heapq.heappush(self._due, due)
            if moment < self._alarm:
                self._changed.notify()
            served = self._running
        # Outside the lock, because `start` waits for the thread.
        if served or begun(self._name, self._run) is not None:
            return True
        with self._lock:
            if due in self._due:
                self._due.remove(due)  # otherwise the list would grow without a thread that empties it
                heapq.heapify(self._due)
        return False

    def _run(self) -> None:
        lock = self._lock
        with lock:
            if self._running:
                return  # two callers have started a thread at the same time
            self._running = True
        try:
            while True:
                watched = self._next(lock)
                if watched is None:
                    if greenlets.cooperative():  # `threading` does not know this thread any more, and would complain
                        _FOREVER.acquire()
                    return
                try:
                    again = watched.look(time.monotonic())
                except Exception:  # a bug of ours, which must not stop the other looks
                    _log.exception("%s failed to do what was due, and tries again in a second", self._name)
                    again = time.monotonic() + 1.0
                if again is not None:
                    self.add(watched, again)
                del watched
        finally:
            if self._lock is lock:
                self._running = False  # the next `add` starts another thread

    def _next(self, lock: threading.RLock) -> Watched | None:
        """Wait for the next object that is due, and return it. None means that this thread has to end: gevent's patch
        came late, and `_reset` has replaced everything."""
        with lock:
            while self._lock is lock:
                self._alarm = self._due[0][0] if self._due else inf
                pause = self._alarm - time.monotonic()
                if pause > 0:
                    self._changed.wait(min(pause, LONGEST))
                    continue
                watched = heapq.heappop(self._due)[2]()
                if watched is not None:
                    self._alarm = -inf  # everything that is due is looked at before the next sleep
                    return watched
        return None


watch = Watch("stampede-watch")
