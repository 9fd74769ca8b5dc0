"""Renews leases while their holders live.

The renewals run in threads and not in event loops: an event loop that is blocked by its own computation renews nothing.
The thread that watches for what is due (see `watch`) never asks an engine itself. Each engine has a crew of a few
threads for that, so that an engine that hangs keeps no lease of another engine waiting.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Protocol

from stampede.errors import EngineError
from stampede.runtime import forks
from stampede.runtime.colour import run_blocking
from stampede.runtime.threads import ThreadPool
from stampede.runtime.watch import watch

__all__ = ["Hold", "Keeper", "Renewable", "keeper"]

_log = logging.getLogger("stampede")

THREADS = 8
"""At most for one engine."""

SHORTEST = 0.005
"""Seconds between two renewals of one lease, however short it is."""

AT_EXIT = 0.5
"""Seconds for which the end of the program waits for its leases to be given back. Beyond, they end by themselves."""


class Renewable(Protocol):
    """A lease as its keeper sees it, on the blocking side of its engine."""

    def renew(self, key: str, token: bytes, lease: float) -> Coroutine[Any, Any, bool]: ...


class Hold:
    """One lease that is renewed, as a context: renewal ends with the block, or after `max_hold`.

    `lost` needs no thread: whatever the engine's clock says, the lease is valid for its length from the moment before
    it was last asked for. Whether it is valid for longer is known only when a renewal has been answered.
    """

    def __init__(
        self,
        keeper: Keeper,
        port: Renewable,
        key: str,
        token: bytes,
        lease: float,
        max_hold: float,
        drop: Callable[[], object],
        alive: Callable[[], object] | None = None,
        since: float | None = None,
        of: object = None,
    ) -> None:
        now = time.monotonic()
        self._keeper = keeper
        self._until = now + max_hold
        self.ends = (now if since is None else since) + lease  # `since`: before the question was sent that granted it
        self.least = 0.0  # a moment before which no renewal lets it end
        self.port, self.key, self.token, self.lease = port, key, token, lease
        self.drop = drop  # gives the lease back, blocking: when its holder is gone, or at exit
        self.of = of  # whose computations' it is: that may be closed under them. Of a lock: the engine's name
        self.alive = alive  # a false result: the holder is gone, or can never end (its loop was closed)
        self.due = inf  # when the keeper looks at it next
        self.under_way = False  # it is being renewed just now
        self.ended = False
        self.foreign = False  # it is not ours to give back: a forked child's parent has it, or the interpreter ends
        self._lost = False
        self._taken = False

    def __enter__(self) -> Hold:
        self._keeper.add(self)
        if self._keeper.over:  # the interpreter ends: give it back while there are engines
            self.ended = self.foreign = True
            _quietly(self.drop)
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    @property
    def lost(self) -> bool:
        """Another holder may have the lease: it was seen to be lost, or has not been renewed in time."""
        if not self._lost and (self.foreign or time.monotonic() >= self.ends):
            self._lost = True  # for good, even if a renewal is answered after all: a caller may have been told
        return self._lost

    @property
    def overruled(self) -> bool:
        """Whether a lease that the engine does not know any more was taken away, as an invalidation does it, before its
        time was over."""
        return self._taken or not self.lost

    def begin(self) -> bool:
        """Whether this caller may ask the engine to renew it: one at a time does, or a renewal could undo an extension
        that was sent after it. To be followed by `again`, or `end`."""
        with self._keeper.lock:
            begun, self.under_way = not self.under_way, True
        return begun

    def again(self, moment: float) -> None:
        """It was asked for: the keeper looks at it again then."""
        self.under_way = False
        self._keeper.look_at(self, moment)

    def bound(self, seconds: float) -> None:
        """Renew it for so long from now on."""
        self._until = time.monotonic() + seconds

    def end(self) -> None:
        self.ended = True
        self._keeper.remove(self)
        self.drop, self.alive, self.of = _nothing, None, None  # these refer to the call, with its arguments

    def lose(self) -> None:
        self._lost = True

    def renew(self) -> float | None:
        """Ask the engine. Return when to do so again; None: never, the lease is lost."""
        now, stands = time.monotonic(), None
        lease = max(self.lease, self.least - now)
        try:
            stands = run_blocking(self.port.renew(self.key, self.token, lease))
        except EngineError:
            pass  # unknown is not lost: the next round may reach it
        except BaseException:  # CancelledError is one, too
            _log.exception("the lease of %r could not be renewed, and is tried again", self.key)
        if stands is False and not self.ended:
            self._taken = self.overruled
            self.lose()
        if stands is False or self._lost:
            return None
        if stands:
            self.ends = max(now + lease, self.ends)
        pause = self.lease / 3 if stands else self.lease / 6  # there is less time left
        return min(time.monotonic() + max(pause, SHORTEST), self.ends)


class Keeper:
    """Renews every hold each third of its lease."""

    def __init__(self) -> None:
        self.over = False
        self._reset()
        forks.in_child(self._after_fork)

    def _reset(self) -> None:
        self.lock = threading.RLock()  # a finalizer may come here in the middle of this
        self._holds: dict[Hold, None] = {}
        self._alarm = inf  # when the watch calls `look`
        self._pools: weakref.WeakKeyDictionary[Renewable, ThreadPool] = weakref.WeakKeyDictionary()
        self._all_released = threading.Condition(self.lock)
        self._being_released = 0  # leases that are being given back

    def _after_fork(self) -> None:
        for hold in self._holds:
            hold.foreign = hold.ended = True
        self._reset()

    def add(self, hold: Hold) -> None:
        """Without a lock, as a rule: most holds end before the first of them is due."""
        hold.due = moment = time.monotonic() + hold.lease / 3
        self._holds[hold] = None
        if moment < self._alarm:
            self._wake(moment)

    def remove(self, hold: Hold) -> None:
        self._holds.pop(hold, None)

    def holds(self) -> list[Hold]:
        """All leases of this process that have not been given back."""
        return list(self._holds)

    def disown(self, of: object) -> list[Hold]:
        """All that computations of this one hold, for it to give back: what they give isn't stored any more."""
        holds = [hold for hold in self.holds() if hold.of is of]
        for hold in holds:
            hold.ended = hold.foreign = True
            self.remove(hold)
        return holds

    def release_all(self) -> None:
        """Give every lease back, when the interpreter exits under computations that still run."""
        self.over = True
        holds = self.holds()
        for hold in holds:
            hold.ended = hold.foreign = True  # all at once: what is computed meanwhile is not stored
        for hold in holds:
            self._drop(hold.port, hold.drop)
        end = time.monotonic() + AT_EXIT
        with self.lock:
            while self._being_released and (left := end - time.monotonic()) > 0:
                self._all_released.wait(left)

    def give_back(
        self, port: Renewable, key: str, token: bytes, by: Callable[[str, bytes], Coroutine[Any, Any, object]]
    ) -> None:
        """Have a lease given back once, by a thread of ours, and soon. A finalizer may call this."""

        def drop() -> None:
            with suppress(EngineError):  # it ends by itself
                run_blocking(by(key, token))

        self._drop(port, drop)

    def _drop(self, port: Renewable, drop: Callable[[], object]) -> None:
        def dropped() -> None:
            _quietly(drop)
            with self.lock:
                self._being_released -= 1
                self._all_released.notify_all()

        with self.lock:
            self._being_released += 1
        try:
            self._pool_of(port).do(dropped)
        except RecursionError:  # the caller has no stack left, and still has the lease
            with self.lock:
                self._being_released -= 1
            raise

    def look(self, now: float) -> float | None:
        """Have renewed what is due. Return when to look again."""
        if now < self._alarm:
            return None  # it was called for an earlier moment, which has come and gone
        # From here on whoever adds a hold calls for another look, so that none is missed which comes after the copy.
        self._alarm = inf
        soonest = inf
        for hold in self.holds():
            if hold.due <= now:
                self._attend(hold, now)
            soonest = min(soonest, hold.due)
        if soonest >= self._alarm:
            return None
        self._alarm = soonest = max(soonest, now + SHORTEST)
        return soonest

    def _attend(self, hold: Hold, now: float) -> None:
        alive, hold.due = hold.alive, inf
        if alive is not None and not alive():
            hold.lose()  # before another holder can have it
            hold.ended = True
            port, drop = hold.port, hold.drop
            hold.end()  # what it refers to goes with its loop
            self._drop(port, drop)
        elif hold.lost:
            self.remove(hold)
        else:
            hold.due = hold.ends  # when it is lost, whether it is renewed no more or its engine hangs
            if now < hold._until and hold.begin():
                self._pool_of(hold.port).do(partial(self._renew, hold))

    def _renew(self, hold: Hold) -> None:
        again = None if hold.ended or hold.lost else hold.renew()
        hold.under_way = False
        if again is None:
            self.remove(hold)
        else:
            self.look_at(hold, again)

    def look_at(self, hold: Hold, moment: float) -> None:
        if hold in self._holds:
            hold.due = moment
            if moment < self._alarm:
                self._wake(moment)

    def _wake(self, moment: float) -> None:
        self._alarm = moment
        if not watch.add(self, moment):
            self._alarm = inf  # there is no thread to be had: the next lease that comes tries again

    def _pool_of(self, port: Renewable) -> ThreadPool:
        with self.lock:
            pool = self._pools.get(port)
            if pool is None:
                pool = self._pools[port] = ThreadPool(THREADS, "stampede-keeper")
            return pool


def _nothing() -> None: ...


def _quietly(action: Callable[[], object]) -> None:
    """A port's own bug, or a dying interpreter, must not keep the others' leases from being given back."""
    try:
        action()
    except BaseException:  # CancelledError is one, too
        _log.exception("a lease could not be given back, and ends by itself")


keeper = Keeper()
weakref.finalize(keeper, int)  # finalizers close engines at exit, and what is registered after them runs before them
atexit.register(keeper.release_all)
