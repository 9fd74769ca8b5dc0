"""The mutex of a region's key: a lease on our engine, with its renewals and pushes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

from dogpile.cache.api import CacheMutex

from stampede import forks
from stampede.errors import EngineClosed, EngineError, LockLost, RecursiveComputation
from stampede.holding import Holding
from stampede.lock import Lock

__all__ = ["Mutex", "Mutexes"]

_log = logging.getLogger("stampede")


class _Local:
    """A lock of this process. (One of `threading` can't be referred to weakly.)"""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Mutexes:
    """The mutexes of one backend: who holds which, and what stands in for the engine while it is down."""

    def __init__(self, make: Callable[[str], Lock], is_down: Callable[[], bool], *, strict: bool) -> None:
        self.make = make
        self.is_down = is_down
        self.strict = strict
        self._locals: WeakValueDictionary[str, _Local] = WeakValueDictionary()
        self._guard = threading.RLock()
        self._held: dict[tuple[str, int], Mutex] = {}
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        """What is held is the parent's, whose threads are not here to give it back."""
        held, self._held = self._held, {}
        self._locals, self._guard = WeakValueDictionary(), threading.RLock()
        for mutex in held.values():
            mutex.start_again()

    def of(self, key: str) -> Mutex:
        return Mutex(key, self)

    def held_here(self, key: str) -> Mutex | None:
        """The one under which this thread computes the key."""
        return self._held.get((key, threading.get_ident()))

    def took(self, mutex: Mutex, thread: int) -> None:
        self._held[mutex.key, thread] = mutex

    def gave(self, mutex: Mutex, thread: int) -> None:
        self._held.pop((mutex.key, thread), None)

    def stand_in(self, key: str) -> _Local:
        with self._guard:
            local = self._locals.get(key)
            if local is None:
                local = self._locals[key] = _Local()
            return local


class Mutex(CacheMutex):
    """Exclusion for one key over every process that reaches the engine, or within this one while it is down.

    Any thread may release it: a region hands it to its `async_creation_runner`.
    """

    def __init__(self, key: str, mutexes: Mutexes) -> None:
        self.key = key
        self._mutexes = mutexes
        self._lock = mutexes.make(key)
        self._stand_in = mutexes.stand_in(key)
        self._takers: list[tuple[int, Holding | None]] = []  # the threads that have it; None: the stand-in

    def start_again(self) -> None:
        self._takers = []
        self._stand_in = self._mutexes.stand_in(self.key)

    @property
    def lost(self) -> bool:
        """Has the lease of this thread ended, so that another may be computing by now?"""
        me = threading.get_ident()
        return any(holding is not None and holding.lost for taker, holding in self._takers if taker == me)

    def acquire(self, wait: bool = True) -> bool:
        """Take it, when it is free. With `wait` False: if it is free; False says that somebody else has it."""
        me, holding = threading.get_ident(), None
        if wait and self._mutexes.held_here(self.key):
            raise RecursiveComputation(f"the creator of {self.key!r} asked for its own key")
        if not self._mutexes.strict and self._mutexes.is_down():  # and each who asks it would pay for that, if it hangs
            taken = self._stand_in.lock.acquire(wait)
        else:
            try:
                holding = self._lock.acquire(None if wait else 0)
                taken = bool(holding)
            except EngineClosed:
                raise
            except EngineError as trouble:
                if self._mutexes.strict:
                    raise
                _log.warning(
                    "the mutex of %r is this process's own, as its engine can't be asked: %s", self.key, trouble
                )
                taken = self._stand_in.lock.acquire(wait)
        if taken:
            self._takers.append((me, holding))
            self._mutexes.took(self, me)
        return taken

    def release(self) -> None:
        """Give it back, and wake who waits. What had ended by then is no error: its value was not stored."""
        me = threading.get_ident()
        mine = [taker for taker in self._takers if taker[0] == me] or self._takers[-1:]
        if not mine:
            raise LockLost(f"the mutex of {self.key!r} is not held")
        taker = mine[-1]
        self._takers.remove(taker)
        self._mutexes.gave(self, taker[0])
        if taker[1] is None:
            self._stand_in.lock.release()
            return
        try:
            taker[1].release()
        except (LockLost, EngineError) as trouble:
            _log.warning("the mutex of %r ended by itself: %s", self.key, trouble)

    def locked(self) -> bool:
        """Does anybody have it? (Asked by taking it for a moment: engines have no other question.)"""
        if self._takers:
            return True
        probe = self._mutexes.make(self.key)
        try:
            holding = probe.acquire(0)
            if not holding:
                return True
            holding.release()
        except (LockLost, EngineError):
            pass
        return self._stand_in.lock.locked()
