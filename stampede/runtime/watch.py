"""Looks at things when they are due: flights that are followed, leases to be renewed, servers that hang. One daemon
thread of the process, started with the first of them."""

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
"""Seconds between two looks at what is due: a clock can't be waited for much longer."""


_FOREVER = threading.Lock()  # as it was before any patch
_FOREVER.acquire()


class Watched(Protocol):
    """What is looked after. Only weakly referred to: with its last caller it goes."""

    def look(self, now: float) -> float | None:
        """Do what is due. When to look again; None: never."""


class Watch:
    """Looks at each thing when it is due."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = itertools.count()
        self._reset()
        forks.in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a finalizer may add in the middle of this
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, weakref.ref[Watched]]] = []
        self._alarm = -inf  # when the thread looks again
        self._served = False  # a thread is at it, and says so itself

    def add(self, watched: Watched, moment: float) -> bool:
        """Look at it then. False: there is no thread to be had, so who relies on it must look himself."""
        due = moment, next(self._count), weakref.ref(watched)
        with self._lock:
            heapq.heappush(self._due, due)
            if moment < self._alarm:
                self._changed.notify()
            served = self._served
        # Outside the lock: a thread that is begun is waited for.
        if served or begun(self._name, self._run) is not None:
            return True
        with self._lock:
            if due in self._due:
                self._due.remove(due)  # or what nobody will ever look at piles up
                heapq.heapify(self._due)
        return False

    def _run(self) -> None:
        lock = self._lock
        with lock:
            if self._served:
                return  # two have begun one
            self._served = True
        try:
            while True:
                watched = self._next(lock)
                if watched is None:
                    if greenlets.cooperative():  # `threading` would not find a thread that ends now, and complain
                        _FOREVER.acquire()
                    return
                try:
                    again = watched.look(time.monotonic())
                except Exception:  # our own bug: the others are looked after
                    _log.exception("%s could not look after what was due", self._name)
                    again = time.monotonic() + 1.0
                if again is not None:
                    self.add(watched, again)
                del watched
        finally:
            if self._lock is lock:
                self._served = False  # the next flight begins another thread

    def _next(self, lock: threading.RLock) -> Watched | None:
        """What is due. None: gevent's patch came late, and `_reset` has left this thread behind."""
        with lock:
            while self._lock is lock:
                self._alarm = self._due[0][0] if self._due else inf
                pause = self._alarm - time.monotonic()
                if pause > 0:
                    self._changed.wait(min(pause, LONGEST))
                    continue
                watched = heapq.heappop(self._due)[2]()
                if watched is not None:
                    self._alarm = -inf  # we look at all that is due before we sleep again
                    return watched
        return None


watch = Watch("stampede-watch")
