"""Flights: of all callers of one key in a process, one leads, and the others wait for it, whatever their colour."""

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

__all__ = [
    "SAFETY",
    "Computing",
    "Flight",
    "Flights",
    "Inside",
    "Leader",
    "innermost",
    "leave_computations",
    "nested",
]  # fmt: skip

_log = logging.getLogger("stampede")

SAFETY = 1.0
"""Seconds between two looks at a flight whose leader may never finish: its event loop may be closed, or not run."""


class _SilentBell(Bell):
    """The bell of a flight without followers: ringing it does nothing."""

    def ring(self) -> None:
        return


_silent = _SilentBell()


class Leader(ABC):
    """The owner of a flight, and of its lease, if it has one. Both end with the coroutine that answers the call. A weak
    reference to the coroutine notices that, because an exception that arrives inside our own code may skip any
    `finally`."""

    # Class attributes until they are set, because every call makes one of these.
    flight: Flight | None = None  # the flight that it leads
    follows: Flight | None = None  # the flight that counts it among its callers
    work: ref[Coroutine[Any, Any, Any]] | None = None  # the coroutine that answers the call
    may_hold_lease = False  # a claim was sent, and the lease not given back
    token = b""  # the token of that lease, from the first claim on

    @abstractmethod
    def context_of_computation(self) -> Any:
        """Return what `stampede.current()` returns inside the computation."""

    @abstractmethod
    def give_back(self) -> None:
        """Have another thread give the lease back, if there may be one. This may be called by a finalizer."""

    def answered_by(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let this coroutine answer the call from now on."""
        self.work = ref(work, self.is_gone)

    def is_gone(self, _: object) -> None:
        """End the flight, because the coroutine was destroyed. If no stack is left for this (RecursionError), the next
        caller of the key ends the flight, or the watch does. The lease ends by itself."""
        flight, follows = self.flight, self.follows
        with suppress(RecursionError):
            if follows is not None:
                follows.owner.leave(follows, self)
            if flight is not None:
                flight.owner.end(flight, None)

    @property
    def gone(self) -> bool:
        """Whether the coroutine has ended, also if `is_gone` has not been called yet."""
        return self.work is not None and getattr(self.work(), "cr_frame", None) is None


class Flight:
    """All callers of one key in this process."""

    # Class attributes until they are set, because every look makes one of these, and most are never followed.
    callers = 1
    loops: set[Loop] | None = None  # the event loops of followers, other than the leader's
    result: Result | None = None
    offered: Result | None = None  # what followers may take at once while the leader computes
    cancel: Callable[[], object] | None = None  # ends the computation when the last caller has left
    continues = False  # a follower ran out of time: the computation goes on for later callers, even if all others leave
    caller_left = False  # the leader's caller has left: `callers` counts followers only
    span: tuple[str, float, float] | None = None  # the computation's label, its lease, and the latest moment of its end
    followed_since = inf  # when the first follower came
    latest = -inf  # the latest beginning of a follower's call
    watched = False
    since: float | None = None  # when the computation began
    warned = False  # a long wait was logged
    probed: float | None = None  # when the leader's loop was asked for a sign of life that has not come yet
    detached = False
    ended = False
    bell: Bell = _silent  # replaced when the first follower comes
    thread: int | None = None  # of a blocking leader; 0 while the computation changes threads
    greenlet: ref[Any] | None = None  # the greenlet of a blocking leader

    def __init__(self, owner: Flights, key: str, loop: Loop | None, leader: Leader | None = None) -> None:
        self.owner = owner
        self.key = key
        self.loop = loop  # of an async leader
        self.leader = leader  # None: the flight has ended
        if loop is None:
            self.thread = get_ident()
            current = getattr(sys.modules.get("greenlet"), "getcurrent", None)  # as `greenlets.here`, without the call
            if current is not None and current().parent is not None:
                self.greenlet = ref(current())
        if leader is not None:
            leader.flight = self  # a cycle until the flight ends

    def computes(self, label: str, lease: float, max_hold: float) -> None:
        """Note that the leader computes from now on. After `max_hold` seconds its computation counts as hung."""
        now = self.owner.clock()
        self.span, self.since = (label, lease, now + max_hold), now
        if self.watched and min(lease, max_hold) < SAFETY:
            self.owner.watch(self, now + min(lease, max_hold))

    @property
    def token(self) -> bytes | None:
        """The token of the leader's lease, or of the one it may be granted."""
        return None if self.leader is None else self.leader.token

    @property
    def work(self) -> object:
        """The coroutine that leads the flight."""
        leader = self.leader
        return None if leader is None or leader.work is None else leader.work()

    def look(self, now: float) -> float | None:
        """Release the followers if there is nothing left to wait for. Return when to look again; None: never."""
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
        """The moment since which followers wait for a computation here, and not for another lease."""
        return self.followed_since if self.since is None else max(self.followed_since, self.since)

    def _end(self, now: float) -> float:
        """Return the moment from which waiting is pointless, as far as is known; inf if it is not."""
        loop = self.loop
        if not self.is_under_way():
            return now
        if self.span is not None:
            return self.span[2]
        if loop is None:
            return inf  # a thread of its own: the engine answers, or its client times out
        if self.probed is not None:
            # The loop does not run or is blocked, and no computation has begun that could be lost.
            return self.probed + SAFETY
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
        """Note that the computation moves to another thread, so that its caller is no longer inside it."""
        if self.thread is not None:
            self.thread = 0  # until the other thread sets its own

    def is_under_way(self) -> bool:
        """Return whether the flight can still end normally: its leader exists, and the leader's event loop is open."""
        leader = self.leader
        if self.ended or (leader is not None and leader.gone):
            return False
        return self.thread is not None or self.loop is None or not self.loop.is_closed()

    def led_by(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let this coroutine lead the flight: the computation goes on without its caller."""
        if self.leader is not None:
            self.leader.answered_by(work)

    def over(self) -> None:
        """End the flight if its task did not, as a task that was cancelled before its first step."""
        if not self.ended:
            self.owner.end(self, None)

    def waits_in(self, loop: Loop | None) -> bool:
        """Return whether a task of this loop leads or follows the flight."""
        return loop is not None and (loop is self.loop or (self.loops is not None and loop in self.loops))

    def led_here(self) -> bool:
        """Return whether the caller itself leads, judging by thread and greenlet where no context tells."""
        return self.thread == get_ident() and self.greenlet == greenlets.here()

    def led_beside(self) -> bool:
        """Return whether a greenlet leads that cannot run while the caller blocks their thread."""
        return self.thread == get_ident() and self.greenlet != greenlets.here() and not greenlets.cooperative()


class Computing:
    """A context manager around a computation of some flights, so that calls inside it know which leases are held."""

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


class Inside:
    """A context manager around a user's function: `innermost` returns `context` meanwhile, and no flight."""

    __slots__ = ("_before", "_context", "_own")

    def __init__(self, context: Any) -> None:
        """Keep `context` until the end of the block. Its `ended` is True, because it is no computation with a lease."""
        self._context = context

    def __enter__(self) -> None:
        self._before = _inside.get()
        self._own = (*self._before, ref(self._context))
        _inside.set(self._own)

    def __exit__(self, *exc: object) -> None:
        if _inside.get() is self._own:  # not in a coroutine that is destroyed: it ends in another context
            _inside.set(self._before)


# Weak references: tasks, timers and connections that a computation starts keep a copy of its context for as long as
# they live, and a flight may hold an error with all its frames. The computation itself keeps its flight alive.
_inside: ContextVar[tuple[ref[Any], ...]] = ContextVar("stampede_inside", default=())


def _current_flights() -> list[Flight]:
    """Return the flights whose computations the caller is inside."""
    return [flight for reference in _inside.get() if (flight := reference()) is not None and not flight.ended]


def innermost() -> Any:
    """Return the flight whose computation the caller is inside, or the context of `Inside`. None: the caller is outside
    of all, or inside one that has ended."""
    inside = _inside.get()
    return inside[-1]() if inside else None


def nested() -> bool:
    """Return whether this call is made by a computation, which holds a lease."""
    return bool(_current_flights())


def leave_computations() -> None:
    """Mark this context as outside all computations: no caller waits for what runs in it."""
    _inside.set(())


class Flights:
    """The flights of one cache. Decisions are made under the process lock, and bells are rung outside it."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        forks.in_child(self.forget_all)

    def forget_all(self) -> None:
        """Forget all flights in a forked child: they are the parent's, and their leaders do not run here."""
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
        """Return the flight of the key, and whether the caller leads it. If `anew` returns True, the caller starts a
        new flight, and one that is under way is detached."""
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
        """Have the watch look after a flight that has its first follower."""
        flight.followed_since = now = self.clock()
        _, lease, until = flight.span or ("", inf, inf)
        flight.watched = self.watch(flight, min(now + lease, until, now + SAFETY))

    def watch(self, flight: Flight, moment: float) -> bool:
        """Have the flight looked at from that moment on. False: no thread could be started for it."""
        return watch.add(flight, moment)

    def get(self, key: str) -> Flight | None:
        """Return the flight of the key if it is under way."""
        return self._flights.get(key)

    def computing(self, key: str) -> Flight | None:
        """Return the flight of this key if the caller is inside its computation."""
        if not _inside.get() and key not in self._flights:
            return None
        for flight in _current_flights():
            if flight.key == key and flight.owner is self and flight.is_under_way():
                return flight
        # The caller may be on the leading thread in another context (a signal handler, a finalizer).
        led = self._flights.get(key)
        return led if led is not None and led.led_here() and led.is_under_way() else None

    def leave(self, flight: Flight, leader: Leader | None = None) -> bool:
        """Remove one caller. Return True if it was the last one, so that the computation was cancelled."""
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
        """End the flight. Followers take the result as far as it may be shared; otherwise they claim again."""
        leader = flight.leader
        if result is None and leader is not None:
            leader.give_back()
        with process_lock.lock:
            flight.ended = True
            if flight.cancel is not None:
                flight.cancel = None  # it refers to the task, which refers to its error
            bell = flight.bell
            if bell is not _silent and result is not None and not flight.detached and flight.has_followers:
                flight.result = result.for_followers()
            if self._flights.get(flight.key) is flight:
                self._flights.pop(flight.key, None)  # a finalizer may just have done so
        if bell is not _silent:
            bell.ring()
        if leader is not None:
            leader.work = None  # last: if this is interrupted, the end of the coroutine calls this method again
            leader.flight = flight.leader = None

    def offer(self, flight: Flight, result: Result) -> None:
        """Offer followers a value that they may take at once. Those that prefer to wait get a new bell. The flight is
        closed to new callers, which ask the engine: the value may have changed by then."""
        with process_lock.lock:
            bell = flight.bell
            if not flight.detached:
                flight.offered = result
                if bell is not _silent:
                    flight.bell = Bell()
            self._forget(flight)
        bell.ring()

    def detach(self, key: str) -> None:
        """Start a new flight for calls from now on. The result of the old one goes to its leader alone."""
        with process_lock.lock:
            flight = self._flights.pop(key, None)
        if flight is not None:
            self._cut(flight)

    def cut(self, flight: Flight) -> None:
        """Give up a flight that hangs. Its followers claim again, and its result, if any, goes to its leader alone."""
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
            self._flights.pop(flight.key, None)  # a finalizer may just have done so
