"""Invalidations that an engine could not make. They are repeated until it has made them, or the process ends."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Hashable, Iterable

from stampede.errors import EngineClosed, EngineError
from stampede.runtime import forks, process_lock
from stampede.runtime.threads import ThreadPool
from stampede.runtime.watch import watch

__all__ = ["MOST", "Postponed"]

_log = logging.getLogger("stampede")

MOST = 10_000
"""The most invalidations of a cache that are remembered. Beyond that, they raise an error again."""

PAUSE = 1.0
"""Seconds between two attempts."""


class Postponed:
    """The postponed invalidations of one cache. A thread repeats them, about once a second."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._pool = ThreadPool(1, "stampede-postponed")
        self._start_again()
        forks.in_child(self._start_again)  # the parent repeats its own

    def _start_again(self) -> None:
        self._waiting: dict[Hashable, Callable[[], object]] = {}
        _unfinished.discard(self)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: Hashable, again: Callable[[], object]) -> bool:
        """Remember an invalidation, to be repeated by `again`. Return False if there are too many, or no thread can be
        started. One of the same name is remembered once."""
        with process_lock.lock:
            if len(self._waiting) >= MOST and name not in self._waiting:
                return False
            first = not self._waiting
            self._waiting[name] = again
            _unfinished.add(self)  # the watch alone would not keep this alive
        if first and not watch.add(self, time.monotonic() + PAUSE):
            self.drop([name])
            return False
        return True

    def drop(self, names: Iterable[Hashable]) -> None:
        """Forget these invalidations, because they have been made, or a newer value is stored."""
        with process_lock.lock:
            for name in names:
                self._waiting.pop(name, None)
            if not self._waiting:
                _unfinished.discard(self)

    def look(self, now: float) -> None:
        """Start an attempt. The watch calls this, which must not wait for an engine."""
        self._pool.do(self._repeat)

    def _repeat(self) -> None:
        """Repeat all invalidations once. Stop at a failure that concerns the whole engine."""
        done = 0
        try:
            for name in list(self._waiting):
                again = self._waiting.get(name)
                if again is None:
                    continue
                try:
                    again()
                except EngineClosed:
                    self.close()
                    return
                except EngineError as error:
                    _log.debug("%s still makes no invalidations, of which %d wait: %s", self._engine, len(self), error)
                    if not error.partial:
                        return
                    continue
                done += 1
                if self._waiting.get(name) is again:  # otherwise it was postponed once more
                    self.drop([name])
            if done and not self._waiting:
                _log.warning("%s has made all %d postponed invalidations", self._engine, done)
        finally:
            if self._waiting:
                watch.add(self, time.monotonic() + PAUSE)

    def close(self) -> None:
        """Give up. Old values may be served until their ttl ends."""
        lost = list(self._waiting)
        self.drop(lost)
        if lost:
            _log.error(
                "the cache was closed with %d postponed invalidations that %s has not made: old values may be served "
                "until their ttl ends",
                len(lost),
                self._engine,
            )


_unfinished: set[Postponed] = set()
"""The objects that have something to repeat."""


@atexit.register
def _at_exit() -> None:
    for each in list(_unfinished):
        each.close()
