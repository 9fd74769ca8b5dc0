"""Keeps leases standing while their holders live: daemon threads of the process, one or two as a rule.

Threads and not tasks, since an event loop that is blocked by its own computation renews nothing. One of them watches
for the next lease that is due; when it leaves to renew it, the next one watches, so that an engine that hangs doesn't
keep the leases of others waiting.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, Protocol

from stampede.colour import run_blocking
from stampede.errors import EngineError

__all__ = ["Hold", "Keeper", "Renewable", "keeper"]

_log = logging.getLogger("stampede")

THREADS = 8
"""At most; there are more than two only after engines have hung, or many leases were due at once."""


class Renewable(Protocol):
    """A lease as its keeper sees it, on the blocking side of its engine."""

    def renew(self, key: str, token: bytes, lease: float) -> Coroutine[Any, Any, bool]: ...


class Hold:
    """One lease in the keeper's hands, as a context: renewal ends with the block, or after `max_hold`."""

    __slots__ = (
        "_keeper",
        "_sure",
        "_until",
        "alive",
        "drop",
        "ended",
        "foreign",
        "key",
        "lease",
        "lost",
        "on_lost",
        "port",
        "token",
    )

    def __init__(
        self,
        keeper: Keeper,
        port: Renewable,
        key: str,
        token: bytes,
        lease: float,
        max_hold: float,
        drop: Callable[[], object],
        alive: Callable[[], bool] | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> None:
        self._keeper = keeper
        self._sure = time.monotonic()  # the lease stood then
        self._until = self._sure + max_hold
        self.port, self.key, self.token, self.lease = port, key, token, lease
        self.drop = drop  # gives the lease back, blocking: when its holder is gone, or at exit
        self.alive = alive  # False: the holder can never end (its loop was closed)
        self.on_lost = on_lost
        self.lost = False
        self.ended = False
        self.foreign = False  # we are a forked child: the lease is the parent's

    def __enter__(self) -> Hold:
        self._keeper.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        self.ended = True
        self._keeper.remove(self)
        # The keeper's queue has it until its time comes: the call behind these, with its arguments, needn't wait.
        self.drop, self.alive, self.on_lost = _nothing, None, None

    def lose(self) -> None:
        self.lost = True
        on_lost = self.on_lost
        if on_lost is not None:
            on_lost()

    def renew(self, now: float) -> bool:
        """Renew once. False: there is nothing to renew any more."""
        alive = self.alive
        if alive is not None and not alive():
            self.drop()
            return False
        if now >= self._until:
            return False
        try:
            if run_blocking(self.port.renew(self.key, self.token, self.lease)):
                self._sure = now
                return True
        except EngineError:
            if now - self._sure < self.lease:
                return True  # unknown is not lost: the next round may reach it
        if not self.ended:
            self.lose()
        return False


class Keeper:
    """Renews every hold each third of its lease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = itertools.count()
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        lock = threading.RLock()  # a finalizer may end a hold in the middle of this
        self._changed = threading.Condition(lock)  # what is due next, for the thread that watches
        self._turn = threading.Condition(lock)  # to watch
        self._holds: set[Hold] = set()
        self._new: deque[tuple[float, Hold]] = deque()  # with their moments, since the watch looked the last time
        self._due: list[tuple[float, int, Hold]] = []
        self._alarm = inf  # when the watch looks again; less than ever: when somebody takes it over
        self._threads = 0
        self._idle = 0  # of them
        self._watched = False  # one of the idle ones waits for the next lease that is due

    def _after_fork(self) -> None:
        for hold in self._holds:
            hold.foreign = hold.ended = True
        self._reset()

    def add(self, hold: Hold) -> None:
        """Without a lock, as a rule: most holds end before the watch looks for what is new."""
        moment = self._clock() + hold.lease / 3
        self._holds.add(hold)
        self._new.append((moment, hold))
        if moment < self._alarm or len(self._new) > 64:
            with self._changed:
                self._wake(moment)

    def _wake(self, moment: float) -> None:
        if not self._threads:
            self._start()
        if moment < self._alarm:
            self._changed.notify()
        elif len(self._new) > 4 * len(self._holds):  # what has ended would pile up until then
            for _ in range(len(self._new)):  # in its place, since others add to it meanwhile
                new = self._new.popleft()
                if new[1] in self._holds:
                    self._new.append(new)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="stampede-keeper", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # no thread to be had: leases won't be renewed, or later
        self._threads += 1

    def remove(self, hold: Hold) -> None:
        self._holds.discard(hold)  # from the queue it goes when its time comes

    def release_all(self) -> None:
        """Give every lease back, when the interpreter exits under computations that still run."""
        with self._changed:
            holds, self._holds = list(self._holds), set()
        for hold in holds:
            hold.ended = True
            _quietly(hold.drop)

    def _schedule(self, moment: float, hold: Hold) -> None:
        heapq.heappush(self._due, (moment, next(self._count), hold))
        if moment < self._alarm:
            self._changed.notify()

    def _next(self) -> Hold:
        """The lease whose time has come. Who gets it leaves the watch to another thread."""
        with self._changed:
            self._idle += 1
            while self._watched:
                self._turn.wait()
            self._watched = True
            hold = self._watch()
            self._watched, self._alarm = False, -inf
            self._idle -= 1
            if self._idle:
                self._turn.notify()
            elif self._threads < THREADS:
                self._start()
            return hold

    def _watch(self) -> Hold:
        while True:
            while self._new:
                moment, hold = self._new.popleft()
                if hold in self._holds:
                    heapq.heappush(self._due, (moment, next(self._count), hold))
            self._alarm = self._due[0][0] if self._due else inf
            if self._new:
                continue  # it may have been added before it could see when we look again
            pause = self._alarm - self._clock()
            if pause <= 0:
                hold = heapq.heappop(self._due)[2]
                if hold in self._holds:
                    return hold
            else:
                self._changed.wait(None if pause == inf else pause)

    def _run(self) -> None:
        while True:
            hold = self._next()
            renewing = _quietly(lambda hold=hold: hold.renew(self._clock()))  # type: ignore[misc]
            with self._changed:
                if hold in self._holds:
                    if renewing:
                        self._schedule(self._clock() + hold.lease / 3, hold)
                    else:
                        self._holds.discard(hold)
            del hold


def _nothing() -> None: ...


def _quietly(action: Callable[[], Any]) -> Any:
    """A port's own bug, or a dying interpreter, must not end the thread that keeps all the others' leases."""
    try:
        return action()
    except BaseException:  # CancelledError is one, too
        _log.exception("a lease could not be kept")
        return True


keeper = Keeper()
weakref.finalize(keeper, _nothing)  # the hook that closes engines at exit is there now: who registers later runs sooner
atexit.register(keeper.release_all)
