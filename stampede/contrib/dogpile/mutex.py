"""The mutex of a region's key: a lease on our engine, which is renewed, and wakes waiters when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from dogpile.cache.api import CacheMutex

from stampede.errors import EngineClosed, EngineError, LockLost, RecursiveComputation
from stampede.locks.holding import Holding
from stampede.locks.lock import Lock
from stampede.runtime import forks

__all__ = ["Mutex", "Mutexes"]

_log = logging.getLogger("stampede")


class Mutexes:
    """The mutexes of one backend, by key and thread, and the local locks that are used while the engine is down."""

    def __init__(self, make: Callable[[str], Lock], is_down: Callable[[], bool], *, strict: bool) -> None:
        self.make = make
        self.is_down = is_down
        self.strict = strict
        self.held: dict[tuple[str, int], Mutex] = {}  # by key and thread
        self._stand_ins: dict[str, threading.Lock] = {}
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        """Forget what is held: the parent's threads hold it, and are not in this child to release it."""
        held, self.held, self._stand_ins = self.held, {}, {}
        for mutex in held.values():
            mutex.takers = []

    def of(self, key: str) -> Mutex:
        return Mutex(key, self)

    def held_here(self, key: str) -> Mutex | None:
        """Return the mutex under which this thread computes the key; None if it does not."""
        return self.held.get((key, threading.get_ident()))

    def stand_in(self, key: str) -> threading.Lock:
        return self._stand_ins.setdefault(key, threading.Lock())

    def engine_is_back(self) -> None:
        """Forget the local locks that were used while the engine was down. Their holders keep them."""
        self._stand_ins = {}


class Mutex(CacheMutex):
    """Exclusion for one key over every process that reaches the engine, or within this one while it is down. Any thread
    may release it: a region hands it to its `async_creation_runner`."""

    def __init__(self, key: str, mutexes: Mutexes) -> None:
        self.key = key
        self.takers: list[tuple[int, Any]] = []  # the threads that hold it, with what they hold
        self._mutexes = mutexes
        self._lock = mutexes.make(key)

    @property
    def lost(self) -> bool:
        """Whether this thread's lease has ended, so that another process may be computing by now."""
        me = threading.get_ident()
        return any(isinstance(held, Holding) and held.lost for taker, held in self.takers if taker == me)

    def acquire(self, wait: bool = True) -> bool:
        """Acquire the mutex. With `wait` False, return False at once if another thread or process holds it."""
        me, mutexes = threading.get_ident(), self._mutexes
        if wait and mutexes.held_here(self.key):
            raise RecursiveComputation(f"the creator of {self.key!r} asked for its own key")
        # A request to a hung engine costs a time-out: so none is made while the engine is known to be down.
        holding = None if mutexes.is_down() and not mutexes.strict else self._of_engine(wait)
        stand_in = mutexes.stand_in(self.key) if holding is None else None
        if not (holding if stand_in is None else stand_in.acquire(wait)):
            return False
        self.takers.append((me, holding or stand_in))
        mutexes.held[self.key, me] = self
        return True

    def _of_engine(self, wait: bool) -> Holding | None:
        """Return the engine's holding, falsy if it is refused; None if the engine can't be reached."""
        try:
            holding = self._lock.acquire(None if wait else 0)
        except EngineClosed:
            raise
        except EngineError as trouble:
            if self._mutexes.strict:
                raise
            _log.warning(
                "the mutex of %r works in this process only, as its engine can't be reached: %s", self.key, trouble
            )
            return None
        self._mutexes.engine_is_back()
        return holding

    def release(self) -> None:
        """Release the mutex, and wake waiters. It is no error if the lease had ended: the value was not stored."""
        me = threading.get_ident()
        taker = next((each for each in reversed(self.takers) if each[0] == me), None)
        if taker is None and not self.takers:
            raise LockLost(f"the mutex of {self.key!r} is not held")
        taker = taker or self.takers[-1]  # another thread releases it, such as an `async_creation_runner`'s
        self.takers.remove(taker)
        thread, held = taker
        self._mutexes.held.pop((self.key, thread), None)
        try:
            held.release()
        except (LockLost, EngineError) as trouble:
            _log.warning("the mutex of %r had ended before it was released: %s", self.key, trouble)

    def locked(self) -> bool:
        """Return whether the mutex is held. Engines can't be asked that, so it is acquired for a moment."""
        if self.takers:
            return True
        try:
            holding = self._mutexes.make(self.key).acquire(0)
            if not holding:
                return True
            holding.release()
        except (LockLost, EngineError):
            pass
        return self._mutexes.stand_in(self.key).locked()
