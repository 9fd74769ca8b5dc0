"""The callers of one event loop, or of all threads, that wait for a place in one bulkhead, in the order of arrival.

Only a few of them ask the engine at a time, because the cost of a question there grows with the number of waiters. The
others wait for their turn to ask, or for a place that a holder in this process leaves. For a moment after the engine
has granted a place, it may go to another caller here without asking the engine. Then other processes have their turn.

Each event loop has its own crowd, so that a place goes only to a caller that is running."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import islice
from time import monotonic
from weakref import WeakValueDictionary, ref

from stampede.errors import EngineError
from stampede.locks.holding import Holding
from stampede.model.result import own_copy
from stampede.runtime import forks, process_lock
from stampede.runtime.colour import BLOCKING, SUSPENDING, Bell, Loop, running_loop

__all__ = ["Crowd", "Waiter", "crowd_of"]


ASKERS = 4
"""The most callers of a crowd that ask the engine at a time."""

LENT = 0.1
"""Seconds after the engine has granted a place in which it may go from holder to holder inside the process."""

LOOK = 2.0
"""Seconds between two looks of a waiter that is not woken, but at most half a lease. An asker that has not asked for
two looks does not count: its event loop may be blocked, or have ended."""


class Waiter:
    """One caller that waits for a place."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.place: Holding | None = None  # the place that it was given
        self.error: EngineError | None = None  # the error of callers that asked the engine


class Crowd:
    """The waiters of one event loop, or of all threads, for one bulkhead."""

    def __init__(self, lease: float, loop: Loop | None = None) -> None:
        self.look = min(LOOK, lease / 2)
        self._loop = None if loop is None else ref(loop)
        self._colour = BLOCKING if loop is None else SUSPENDING
        self._begin()
        forks.in_child(self._begin)

    def _begin(self) -> None:
        self._waiting: dict[Waiter, None] = {}  # in the order of arrival
        self._asking: dict[Waiter, float] = {}  # with the time of the last question of each
        self._failed = False  # the last asker got an EngineError

    @contextmanager
    def joined(self) -> Iterator[Waiter]:
        """Join the waiters until the block ends. An EngineError that ends the block counts as the asker's answer."""
        me: Waiter = Waiter()
        error: EngineError | None = None
        with process_lock.lock:
            self._waiting[me] = None
        try:
            yield me
        except EngineError as failure:
            error = failure
            raise
        finally:
            self.leave(me, error)

    async def turn(self, me: Waiter, wait: float) -> bool:
        """Wait until this caller may ask the engine, or is given a place. Return False after `wait` seconds."""
        end = monotonic() + wait
        while not self._called(me, now := monotonic()):
            if now >= end:
                return False
            await self._colour.park(me.bell, min(end - now, self.look))
        if me.error is not None:
            raise own_copy(me.error) from me.error
        return True

    def heard(self, me: Waiter) -> None:
        """Take note that this asker is alive, and asks again now."""
        with process_lock.lock:
            self._asking[me] = monotonic()

    def hand_on(self, place: Holding) -> bool:
        """Give a place to the first waiter. Return False if there is none, or if the place has to be released."""
        with process_lock.lock:
            heir = next(iter(self._waiting), None)
            if heir is None or monotonic() > place.since + LENT:
                return False
            del self._waiting[heir]
            heir.place = place.again()
        heir.bell.ring()
        return True

    def is_of(self, loop: Loop | None) -> bool:
        """Return whether this is the crowd of that event loop, or, for None, the crowd of the threads."""
        return loop is (None if self._loop is None else self._loop())

    def _called(self, me: Waiter, now: float) -> bool:
        with process_lock.lock:
            if me in self._waiting and sum(now - heard < 2 * self.look for heard in self._asking.values()) < ASKERS:
                del self._waiting[me]
                self._asking[me] = now
            return me not in self._waiting

    def leave(self, me: Waiter, error: EngineError | None) -> None:
        """Let the next waiter ask. If two askers in a row got an error, all waiters get it. So an engine that hangs
        costs them one time-out together, not one after the other."""
        called: list[Waiter] = []
        with process_lock.lock:
            self._waiting.pop(me, None)
            if self._asking.pop(me, None) is not None:
                down, self._failed = error is not None and self._failed, error is not None
                called = [*islice(self._waiting, None if down else 1)]
                for each in called:
                    del self._waiting[each]
                    if down:
                        each.error = error
                    else:
                        self._asking[each] = monotonic()
            place, me.place = me.place, None
        for each in called:
            each.bell.ring()
        if place is None:
            return
        # A task of a closed loop may be destroyed in any thread. The other tasks of that loop never run again.
        if not ((self._loop is None or self.is_of(running_loop())) and self.hand_on(place)):
            place.let_go()


_crowds: WeakValueDictionary[Hashable, Crowd] = WeakValueDictionary()


def crowd_of(*bulkhead: Hashable, lease: float, loop: Loop | None) -> Crowd:
    """Return the crowd of an event loop (None: of the threads) at a bulkhead with this lease. It exists as long as
    something refers to it."""
    key = (*bulkhead, lease, id(loop))
    with process_lock.lock:
        found = _crowds.get(key)
        if found is None or not found.is_of(loop):  # an earlier loop had this id
            found = _crowds[key] = Crowd(lease, loop)
        return found
