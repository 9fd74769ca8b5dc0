"""One caller per key and process: the others of a flight wait for its leader, whatever their colour."""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from math import inf
from threading import get_ident
from typing import Any
from weakref import ref

from stampede.model.result import Result
from stampede.runtime import forks, greenlets, process_lock
from stampede.runtime.colour import Bell, Loop
from stampede.runtime.watch import watch

__all__ = ["SAFETY", "Computing", "Flight", "Flights", "Leader", "leave_computations", "nested"]

_log = logging.getLogger("stampede")

SAFETY = 1.0
"""Seconds between two looks at a flight whose leader may never land: its loop may be closed, or rest, under it."""


class _SilentBell(Bell):
    """The bell of flights that nobody follows."""

    def ring(self) -> None:
        return


_silent = _SilentBell()


class Leader(ABC):
    """Owns the flight that it leads, and the lease that it may have. Both end with the coroutine that answers the call,
    which a weak reference tells: an exception that arrives inside our own code may skip any `finally`."""

    # Of the class until they are set: every call makes one of these.
    flight: Flight | None = None  # that it leads
    follows: Flight | None = None  # the flight that counts it among its callers
    work: ref[Coroutine[Any, Any, Any]] | None = None  # the coroutine that answers it
    may_hold_lease = False  # it may have a lease
    token = b""  # of that lease, from the first claim on

    @abstractmethod
    def give_back(self) -> None:
        """Have the lease given back by another thread, if there may be one: this may be a finalizer."""

    def answered_by(self, work: Coroutine[Any, Any, Any]) -> None:
        """From now on this coroutine answers the call."""
        self.work = ref(work, self.is_gone)

    def is_gone(self, _: object) -> None:
        """The coroutine is destroyed: end the flight. If there is no stack left for this (RecursionError), the next
        caller of the key ends it, or the watch; and its lease ends by itself."""
        flight, follows = self.flight, self.follows
        with suppress(RecursionError):
            if follows is not None:
                follows.owner.leave(follows, self)
            if flight is not None:
                flight.owner.end(flight, None)

    @property
    def gone(self) -> bool:
        """Has its coroutine ended? The weak reference may not have told us yet."""
        return self.work is not None and getattr(self.work(), "cr_frame", None) is None


class Flight:
    """All callers of one key in this process."""

    # Of the class until they are set: every look makes one of these, and most are never followed.
    callers = 1
    loops: set[Loop] | None = None  # whose tasks lead, or wait, if there are others than the leader's
    result: Result | None = None
    offered: Result | None = None  # to be had without waiting, while the leader computes
    cancel: Callable[[], object] | None = None  # ends a computation for which nobody waits any more
    continues = False  # somebody has left it who had no more time: it is for who comes next, whoever leaves it now
    caller_left = False  # its leader's caller is gone: `callers` are followers only
    span: tuple[str, float, float] | None = None  # its computation's label and lease, and when it must have ended
    followed_since = inf  # since when
    latest = -inf  # when the last of its followers began, as far as the leader needs to know
    watched = False
    since: float | None = None  # when its computation began
    warned = False  # it has been waited for so long that people were told
    probed: float | None = None  # when the leader's loop was asked for a sign of life that hasn't come yet
    detached = False
    ended = False
    bell: Bell = _silent  # until the first follower comes
    thread: int | None = None  # of a blocking leader
    greenlet: ref[Any] | None = None  # of that thread

    def __init__(self, owner: Flights, key: str, loop: Loop | None, leader: Leader | None = None) -> None:
        self.owner = owner
        self.key = key
        self.loop = loop  # of a suspending leader
        self.leader = leader  # ends with its coroutine, whatever happens; None: it has landed
        if loop is None:
            self.thread = get_ident()
            current = getattr(sys.modules.get("greenlet"), "getcurrent", None)  # as `greenlets.here`, and a call less
            if current is not None and current().parent is not None:
                self.greenlet = ref(current())
        if leader is not None:
            leader.flight = self  # both ways, until it ends

    def computes(self, label: str, lease: float, max_hold: float) -> None:
        """From now on its leader computes: beyond `max_hold` it is taken for hung."""
        now = self.owner.clock()
        self.span, self.since = (label, lease, now + max_hold), now
        if self.watched and min(lease, max_hold) < SAFETY:
            self.owner.watch(self, now + min(lease, max_hold))

    @property
    def token(self) -> bytes | None:
        """Of the lease that it may have."""
        return None if self.leader is None else self.leader.token

    @property
    def work(self) -> object:
        """The coroutine that leads it."""
        leader = self.leader
        return None if leader is None or leader.work is None else leader.work()

    def look(self, now: float) -> float | None:
        """Is there anything to wait for? If not, its followers are sent away. When to look again; None: never."""
        if self.leader is not None and self.leader.gone:
            self.owner.end(self, None)
            return None
        if self.ended or self.detached:
            return None
        if now >= self._end(now):
            self.owner.cut(self)
            return None
        soon = now + SAFETY if self.loop is not None or self.span is None else inf
        if self.span is None:
            return soon
        label, lease, until = self.span
        began = self._waited_since
        if not self.warned and self.callers > 1 and now >= began + lease:
            self.warned = True
            _log.warning(
                "other callers have waited %.3g s for %r, longer than its lease of %.3g s: possibly a deadlock, if it "
                "asks for its own key in another thread",
                now - began,
                label,
                lease,
            )
        return min(soon, until, inf if self.warned else (began if self.callers > 1 else now) + lease)

    @property
    def _waited_since(self) -> float:
        """Until it computed here, it was somebody else's lease that was waited for."""
        return self.followed_since if self.since is None else max(self.followed_since, self.since)

    def _end(self, now: float) -> float:
        """When there is nothing to wait for any more, as far as can be said now."""
        loop = self.loop
        if not self.is_under_way():
            return now
        if self.span is not None:
            return self.span[2]
        if loop is None:
            return inf  # in a thread of its own: its engine answers, or doesn't in time
        if self.probed is not None:
            return self.probed + SAFETY  # its loop rests, or is blocked, and nothing is computed that could be lost
        self.probed = now
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            return now  # closed meanwhile
        return inf

    def _answer(self) -> None:
        self.probed = None

    def leave(self, leader: Leader | None = None) -> bool:
        if leader is None:
            self.caller_left = True
        return self.owner.leave(self, leader)

    @property
    def has_followers(self) -> bool:
        return self.callers > (0 if self.caller_left else 1)

    def hand_over(self) -> None:
        """The computation goes on in another thread: its caller isn't inside it any more."""
        if self.thread is not None:
            self.thread = 0  # until it is there

    def is_under_way(self) -> bool:
        """It may land: its leader is not gone, nor was its loop closed under it."""
        leader = self.leader
        if self.ended or (leader is not None and leader.gone):
            return False
        return self.thread is not None or self.loop is None or not self.loop.is_closed()

    def led_by(self, work: Coroutine[Any, Any, Any]) -> None:
        """The computation goes on without its caller."""
        if self.leader is not None:
            self.leader.answered_by(work)

    def over(self) -> None:
        """The task of its computation has ended. One that was cancelled before its first step has ended nothing."""
        if not self.ended:
            self.owner.end(self, None)

    def waits_in(self, loop: Loop | None) -> bool:
        """Is it led, or followed, by a task of this loop?"""
        return loop is not None and (loop is self.loop or (self.loops is not None and loop in self.loops))

    def led_here(self) -> bool:
        """Is it the caller who leads it? Told by the thread and the greenlet, where no context tells."""
        return self.thread == get_ident() and self.greenlet == greenlets.here()

    def led_beside(self) -> bool:
        """Does a greenlet lead it that can't go on while the caller blocks its thread?"""
        return self.thread == get_ident() and self.greenlet != greenlets.here() and not greenlets.cooperative()


class Computing:
    """The computation of some flights, as a context: a call inside it knows which leases its caller holds."""

    __slots__ = ("_before", "_flights")

    def __init__(self, *flights: Flight) -> None:
        self._flights = flights

    def __enter__(self) -> None:
        for flight in self._flights:
            if flight.thread == 0:
                flight.thread, flight.greenlet = get_ident(), greenlets.here()
        self._before = _inside.get()
        _inside.set(tuple(map(ref, (*_current_flights(), *self._flights) if self._before else self._flights)))

    def __exit__(self, *exc: object) -> None:
        _inside.set(self._before)


# Weakly: tasks, timers and connections that are begun in a computation have a copy of its context for as long as they
# live, and the flight has its error, with all frames that this has passed. Who computes refers to its flight.
_inside: ContextVar[tuple[ref[Flight], ...]] = ContextVar("stampede_inside", default=())


def _current_flights() -> list[Flight]:
    """The flights inside whose computations the caller is."""
    return [flight for reference in _inside.get() if (flight := reference()) is not None and not flight.ended]


def nested() -> bool:
    """Is this call made by a computation, which holds a lease?"""
    return bool(_current_flights())


def leave_computations() -> None:
    """This context is no computation's: what runs in it holds no caller up."""
    _inside.set(())


class Flights:
    """The flights of one cache. Decides under its lock, wakes outside it."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        forks.in_child(self.forget_all)

    def forget_all(self) -> None:
        """We are a forked child: the flights are the parent's, and their leaders aren't here."""
        for flight in self._flights.values():
            flight.ended = True
            if flight.leader is not None:
                flight.leader.may_hold_lease = False
        self._flights = {}

    def join(
        self,
        key: str,
        loop: Loop | None,
        *,
        anew: Callable[[], bool] | None = None,
        leader: Leader | None = None,
    ) -> tuple[Flight, bool]:
        """The key's flight, and whether the caller is to lead it. `anew`: whether not to join one that is under way."""
        with process_lock.lock:
            flight, alone = self._flights.get(key), anew is not None and anew()
            if flight is not None and not alone and flight.is_under_way():
                if flight.bell is _silent:
                    flight.bell = Bell()
                if loop is not None and loop is not flight.loop:
                    flight.loops = flight.loops or set()
                    flight.loops.add(loop)
                older, leading = None, False
                if leader is None:
                    flight.callers += 1
                else:
                    flight.callers, leader.follows = flight.callers + 1, flight
            else:
                older, leading = flight, True
                flight = self._flights[key] = Flight(self, key, loop, leader)
        if older is not None and older.is_under_way():
            self._cut(older)
        elif older is not None:
            self.end(older, None)
        if not leading and not flight.watched:
            self._look_after(flight)
        return flight, leading

    def _look_after(self, flight: Flight) -> None:
        """Somebody waits for it."""
        flight.followed_since = now = self.clock()
        _, lease, until = flight.span or ("", inf, inf)
        flight.watched = self.watch(flight, min(now + lease, until, now + SAFETY))

    def watch(self, flight: Flight, moment: float) -> bool:
        """Have it looked after from that moment on, as somebody waits for it. False: nobody can."""
        return watch.add(flight, moment)

    def get(self, key: str) -> Flight | None:
        """That of the key, if it is under way."""
        return self._flights.get(key)

    def computing(self, key: str) -> Flight | None:
        """The flight of this key, inside whose computation the caller itself is."""
        if not _inside.get() and key not in self._flights:
            return None
        for flight in _current_flights():
            if flight.key == key and flight.owner is self and flight.is_under_way():
                return flight
        # Perhaps it is the very thread that leads it, in a context of its own (a signal, a finalizer).
        led = self._flights.get(key)
        return led if led is not None and led.led_here() and led.is_under_way() else None

    def leave(self, flight: Flight, leader: Leader | None = None) -> bool:
        """One caller less. True: it was the last one, and the computation was cancelled."""
        with process_lock.lock:
            if leader is None:
                flight.callers -= 1
            elif leader.follows is flight:
                flight.callers, leader.follows = flight.callers - 1, None
            else:
                return False
            if flight.ended and flight.result is not None and not flight.has_followers:
                flight.result = None  # its error refers to frames that refer to the flight
            abandoned = flight.callers == 0 and not flight.ended and not flight.continues
            cancel = flight.cancel if abandoned else None
            if cancel is not None:
                self._forget(flight)
        if cancel is not None:
            cancel()
        return cancel is not None

    def end(self, flight: Flight, result: Result | None) -> None:
        """Land: the followers share what may be shared, and claim again otherwise."""
        leader = flight.leader
        if result is None and leader is not None:
            leader.give_back()
        with process_lock.lock:
            flight.ended = True
            if flight.cancel is not None:
                flight.cancel = None  # and this to the task, which refers to its error
            bell = flight.bell
            if bell is not _silent and result is not None and not flight.detached and flight.has_followers:
                flight.result = result.for_followers()
            if self._flights.get(flight.key) is flight:
                self._flights.pop(flight.key, None)  # a finalizer may have done so just now
        if bell is not _silent:
            bell.ring()
        if leader is not None:
            leader.work = None  # not before: if this is interrupted, the end of its coroutine comes here again
            leader.flight = flight.leader = None

    def offer(self, flight: Flight, result: Result) -> None:
        """Send the followers home with what is there, unless they would rather wait: until another bell rings. Who
        comes later asks the engine: it may have changed by then."""
        with process_lock.lock:
            bell = flight.bell
            if not flight.detached:
                flight.offered = result
                if bell is not _silent:
                    flight.bell = Bell()
            self._forget(flight)
        bell.ring()

    def detach(self, key: str) -> None:
        """Who calls from now on starts a new flight; this one's result goes to its leader alone."""
        with process_lock.lock:
            flight = self._flights.pop(key, None)
        if flight is not None:
            self._cut(flight)

    def cut(self, flight: Flight) -> None:
        """It hangs. Who waits for it asks anew, and one of them leads; what it gives in the end is its leader's own."""
        with process_lock.lock:
            if flight.ended:
                return
            flight.detached = True
            self._forget(flight)
        self._cut(flight)

    def detach_all(self, prefix: str = "") -> None:
        with process_lock.lock:
            keys = list(self._flights)
        for key in keys:
            if key.startswith(prefix):
                self.detach(key)

    def _cut(self, flight: Flight) -> None:
        flight.detached = True
        flight.offered = None
        flight.bell.ring()

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            self._flights.pop(flight.key, None)  # a finalizer may have done so just now
