"""Renews leases while their holders live. Renewals run in threads, because an event loop that is blocked by its own
computation renews nothing. The thread that watches for what is due (`runtime.watch`) never asks an engine itself. Each
engine has a few threads for that, so that an engine that hangs does not delay the leases of another engine."""

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
"""The largest number of threads for one engine."""

SHORTEST = 0.005
"""The shortest time between two renewals of one lease, in seconds."""

AT_EXIT = 0.5
"""Seconds for which the end of the program waits until its leases are given back. The rest end by themselves."""


class Renewable(Protocol):
    """What the keeper needs of a port with leases: the blocking side's `renew`."""

    def renew(self, key: str, token: bytes, lease: float) -> Coroutine[Any, Any, bool]: ...


class Hold:
    """A context manager that has one lease renewed until the block ends, or for at most `max_hold` seconds. `lost`
    needs no thread. A lease is valid for its length, counted from the moment before it was last asked for, whatever the
    engine's clock says. Whether it is valid for longer is known only when a renewal has been answered."""

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
        self.ends = (now if since is None else since) + lease  # `since`: the moment before the lease was asked for
        self.least = 0.0  # no renewal may let the lease end before this moment
        self.port, self.key, self.token, self.lease = port, key, token, lease
        self.drop = drop  # gives the lease back, blocking: when its holder is gone, or at exit
        self.of = of  # the `Core` whose computation it is, which may be closed meanwhile; of a lock: the engine's name
        # Returns a false value if the holder is gone, or can never end because its event loop was closed.
        self.alive = alive
        self.due = inf  # when the keeper looks at it next
        self.under_way = False  # a renewal is under way
        self.ended = False
        self.foreign = False  # not ours to give back: it is the forked child's parent's, or the interpreter ends
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
        """Whether another holder may have the lease, because it was taken or not renewed in time."""
        if not self._lost and (self.foreign or time.monotonic() >= self.ends):
            self._lost = True  # for good, even if a renewal is answered after all: a caller may have been told
        return self._lost

    @property
    def overruled(self) -> bool:
        """Whether the lease was taken away before its time was over, as by an invalidation."""
        return self._taken or not self.lost

    def begin(self) -> bool:
        """Return whether this caller may ask the engine for a renewal. If so, `again` or `end` must follow. Only one
        caller at a time may: a renewal could undo an extension that was sent after it."""
        with self._keeper.lock:
            begun, self.under_way = not self.under_way, True
        return begun

    def again(self, moment: float) -> None:
        """Note that the renewal has been asked for, and have the keeper look again at that moment."""
        self.under_way = False
        self._keeper.look_at(self, moment)

    def bound(self, seconds: float) -> None:
        """Limit the renewals to this many seconds from now."""
        self._until = time.monotonic() + seconds

    def end(self) -> None:
        self.ended = True
        self._keeper.remove(self)
        self.drop, self.alive, self.of = _nothing, None, None  # these refer to the call, with its arguments

    def lose(self) -> None:
        self._lost = True

    def renew(self) -> float | None:
        """Ask the engine to renew the lease. Return when to do so again, or None if the lease is lost."""
        now, renewed = time.monotonic(), None
        lease = max(self.lease, self.least - now)
        try:
            renewed = run_blocking(self.port.renew(self.key, self.token, lease))
        except EngineError:
            pass  # unknown is not lost: the next renewal may reach the engine
        except BaseException:  # CancelledError, for example, is no Exception
            _log.exception("the lease of %r could not be renewed; this is tried again", self.key)
        if renewed is False and not self.ended:
            self._taken = self.overruled
            self.lose()
        if renewed is False or self._lost:
            return None
        if renewed:
            self.ends = max(now + lease, self.ends)
        pause = self.lease / 3 if renewed else self.lease / 6  # less time is left
        return min(time.monotonic() + max(pause, SHORTEST), self.ends)


class Keeper:
    """The renewals of all leases of this process, each after a third of its length."""

    def __init__(self) -> None:
        self.over = False
        self._reset()
        forks.in_child(self._after_fork)

    def _reset(self) -> None:
        self.lock = threading.RLock()  # a finalizer may enter in the middle of this
        self._holds: dict[Hold, None] = {}
        self._alarm = inf  # when the watch calls `look`
        self._pools: weakref.WeakKeyDictionary[Renewable, ThreadPool] = weakref.WeakKeyDictionary()
        self._all_released = threading.Condition(self.lock)
        self._being_released = 0  # how many leases are being given back

    def _after_fork(self) -> None:
        for hold in self._holds:
            hold.foreign = hold.ended = True
        self._reset()

    def add(self, hold: Hold) -> None:
        """Have a hold renewed. Usually this takes no lock, as most holds end before they are due."""
        hold.due = moment = time.monotonic() + hold.lease / 3
        self._holds[hold] = None
        if moment < self._alarm:
            self._wake(moment)

    def remove(self, hold: Hold) -> None:
        self._holds.pop(hold, None)

    def holds(self) -> list[Hold]:
        """Return all leases of this process that have not been given back."""
        return list(self._holds)

    def disown(self, of: object) -> list[Hold]:
        """Return the leases of this core's computations, for it to give back. Their values are not stored any more."""
        holds = [hold for hold in self.holds() if hold.of is of]
        for hold in holds:
            hold.ended = hold.foreign = True
            self.remove(hold)
        return holds

    def release_all(self) -> None:
        """Give all leases back, because the interpreter ends while computations still run."""
        self.over = True
        holds = self.holds()
        for hold in holds:
            hold.ended = hold.foreign = True  # all of them first, so that no value of theirs is stored
        for hold in holds:
            self._drop(hold.port, hold.drop)
        end = time.monotonic() + AT_EXIT
        with self.lock:
            while self._being_released and (left := end - time.monotonic()) > 0:
                self._all_released.wait(left)

    def give_back(
        self, port: Renewable, key: str, token: bytes, by: Callable[[str, bytes], Coroutine[Any, Any, object]]
    ) -> None:
        """Have a thread give a lease back, once and soon. A finalizer may call this."""

        def drop() -> None:
            with suppress(EngineError):  # the lease ends by itself
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
        """Start the renewals that are due. Return when to look again."""
        if now < self._alarm:
            return None  # called for a moment that has been changed meanwhile
        # From here on, adding a hold asks for another look, so that one that is added after the copy is not missed.
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
            hold.lose()  # first, before another holder can have it
            hold.ended = True
            port, drop = hold.port, hold.drop
            hold.end()  # what it refers to ends with its loop
            self._drop(port, drop)
        elif hold.lost:
            self.remove(hold)
        else:
            hold.due = hold.ends  # it is lost then, if it is renewed no more or its engine hangs
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
            self._alarm = inf  # no thread could be started: the next lease that is added tries again

    def _pool_of(self, port: Renewable) -> ThreadPool:
        with self.lock:
            pool = self._pools.get(port)
            if pool is None:
                pool = self._pools[port] = ThreadPool(THREADS, "stampede-keeper")
            return pool


def _nothing() -> None: ...


def _quietly(action: Callable[[], object]) -> None:
    """Run an action that gives a lease back, and log what it raises, so that other leases are given back, too. It may
    raise because of a port's own bug, or because the interpreter ends."""
    try:
        action()
    except BaseException:  # CancelledError, for example, is no Exception
        _log.exception("a lease could not be given back; it ends by itself")


keeper = Keeper()
weakref.finalize(keeper, int)  # finalizers close engines at exit: what is registered after them runs before them
atexit.register(keeper.release_all)
