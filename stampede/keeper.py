"""Keeps leases standing while their holders live: daemon threads of the process, one or two as a rule.

Threads and not tasks, since an event loop that is blocked by its own computation renews nothing. One of them watches
for the next lease that is due; when it leaves to renew it, the next one watches. Each engine has a few threads at most:
what else is due there waits for one of them, so that an engine that hangs does not keep the leases of others waiting.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, Protocol

from stampede import forks
from stampede.colour import run_blocking
from stampede.errors import EngineError
from stampede.threads import begun

__all__ = ["Hold", "Keeper", "Renewable", "keeper"]

_log = logging.getLogger("stampede")

THREADS = 8
"""At most for one engine; there are more than two only after engines have hung, or many leases were due at once."""

SHORTEST = 0.005
"""Seconds between two renewals of one lease, however short it is."""

LONGEST = 3600.0
"""Seconds between two looks at what is due next: some clocks can't be waited for longer."""

STUMBLE = 0.1
"""Seconds that a thread rests after an error of its own."""

AT_EXIT = 0.5
"""Seconds for which the end of the program waits for its leases to be given back. Beyond, they end by themselves."""


class Renewable(Protocol):
    """A lease as its keeper sees it, on the blocking side of its engine."""

    def renew(self, key: str, token: bytes, lease: float) -> Coroutine[Any, Any, bool]: ...


class Hold:
    """One lease in the keeper's hands, as a context: renewal ends with the block, or after `max_hold`.

    `lost` needs no thread: whatever the engine's clock says, the lease stood for its length from the moment before
    it was last asked for, and whether it stands longer is known only when a renewal has been answered.
    """

    __slots__ = (
        "_keeper",
        "_floor",
        "_lost",
        "_taken",
        "_until",
        "alive",
        "drop",
        "due",
        "ended",
        "ends",
        "foreign",
        "key",
        "lease",
        "of",
        "on_lost",
        "port",
        "token",
        "under_way",
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
        since: float | None = None,
        of: object = None,
    ) -> None:
        now = time.monotonic()
        self._keeper = keeper
        self._until = now + max_hold
        self._floor = now  # it stands so long, whatever comes
        self.ends = (now if since is None else since) + lease  # `since`: before the question was sent that granted it
        self.port, self.key, self.token, self.lease = port, key, token, lease
        self.drop = drop  # gives the lease back, blocking: when its holder is gone, or at exit
        self.of = of  # whose computations' it is: that may be closed under them. Of a lock: the engine's name
        self.alive = alive  # False: the holder can never end (its loop was closed)
        self.on_lost = on_lost
        self.due = inf  # when the keeper looks at it again
        self.under_way: threading.Thread | None = None  # who renews it just now
        self.ended = False
        self.foreign = False  # the lease is none of ours: a forked child's parent has it, or the interpreter ends
        self._lost = False
        self._taken = False

    def __enter__(self) -> Hold:
        self._keeper.add(self)
        if self._keeper.over:
            self.disown()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    @property
    def lost(self) -> bool:
        """Somebody else may have the lease: it was seen to be lost, or has not been renewed in time."""
        if not self._lost and (self.foreign or time.monotonic() >= self.ends):
            self._lost = True  # for good, even if a renewal is answered after all: somebody may have been told
        return self._lost

    @property
    def overruled(self) -> bool:
        """Whether a lease that the engine does not know any more was taken away, as an invalidation does it, before its
        time was over."""
        return self._taken or not self.lost

    @property
    def extended(self) -> bool:
        """Whether it was to stand until a moment that is still to come, whatever becomes of its holder."""
        return self._floor > time.monotonic()

    @contextmanager
    def standing_until(self, moment: float) -> Iterator[None]:
        """No renewal lets it end before this; unless the block fails: what an engine refuses it would refuse to us."""
        before, self._floor = self._floor, max(self._floor, moment)
        try:
            yield
        except BaseException:
            if self._floor == moment:
                self._floor = before
            raise

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nobody renews it, from here on; unless the block fails."""
        self.ended = True
        self._keeper.remove(self)
        try:
            yield
        except BaseException:
            if not self.foreign:
                self.ended = False
                self._keeper.add(self)
            raise

    def bound(self, seconds: float) -> None:
        """It is renewed for so long from now on."""
        self._until = time.monotonic() + seconds

    def end(self) -> None:
        self.ended = True
        self._keeper.remove(self)
        # The keeper's queue has it until its time comes: the call behind these, with its arguments, needn't wait, nor
        # the engine, which may be closed by then, and has descriptors.
        self.port, self.drop, self.alive, self.on_lost = _nobody, _nothing, None, None
        self.of = None

    def disown(self) -> None:
        """The interpreter ends: give the lease back while there are engines; what is computed has no place to go to."""
        self.ended = self.foreign = True
        _quietly(self.drop)

    def lose(self) -> None:
        self._lost = True
        on_lost = self.on_lost
        if on_lost is not None:
            on_lost()

    def attend(self, now: float) -> float | None:
        """Renew, or lose it if its time is over; then, when to do so again. None: never."""
        alive = self.alive
        if alive is not None and not alive():
            self._lost = self.ended = True  # before another holder can have it
            try:
                self.drop()
            finally:
                self.end()  # what it refers to goes with its loop
            return None
        if self.lost:
            self.lose()
            return None
        if now >= self._until:
            return self.ends  # not renewed any more, and then it is lost
        stands: bool | None = None
        try:
            stands, lease = self._renewed(now)
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
            self.ends = max(now + lease, self.ends)  # an extension that was answered meanwhile stays
        pause = self.lease / 3 if stands else self.lease / 6  # there is less time left
        return min(time.monotonic() + max(pause, SHORTEST), self.ends)

    def _renewed(self, now: float) -> tuple[bool, float]:
        """Whether it stands, and for how long. Who puts its end off meanwhile isn't undone."""
        port = self.port
        while True:
            floor = self._floor
            lease = max(self.lease, floor - now)
            stands = run_blocking(port.renew(self.key, self.token, lease))
            if not stands or self._floor <= floor:
                return stands, lease


class Keeper:
    """Renews every hold each third of its lease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = itertools.count()
        self.over = False
        self._reset()
        forks.in_child(self._after_fork)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a finalizer may end a hold in the middle of this
        self._changed = threading.Condition(self._lock)  # what is due next, for the thread that watches
        self._turn = threading.Condition(self._lock)  # to watch
        self._emptied = threading.Condition(self._lock)  # there are no holds any more, at exit
        self._holds: dict[Hold, None] = {}
        self._new: deque[tuple[float, Hold]] = deque()  # with their moments, since the watch looked the last time
        self._due: list[tuple[float, int, Hold]] = []
        self._busy: dict[Renewable, int] = {}  # threads that are at this engine
        self._behind: dict[Renewable, deque[Hold]] = {}  # what is due there, and waits for one of them
        self._alarm = inf  # when the watch looks again; less than ever: when somebody takes it over
        self._threads = 0
        self._idle = 0  # of them
        self._working = 0  # of them: at an engine, or in what is called for a lease that is lost
        self._watched = False  # one of the idle ones waits for the next lease that is due

    def _after_fork(self) -> None:
        for hold in self._holds:
            hold.foreign = hold.ended = True
        self._reset()

    def add(self, hold: Hold) -> None:
        """Without a lock, as a rule: most holds end before the watch looks for what is new."""
        hold.due = moment = self._clock() + hold.lease / 3
        self._holds[hold] = None
        self._new.append((moment, hold))
        if moment < self._alarm or len(self._new) > 64:
            with self._lock:
                self._wake(moment)
                kept = self._threads
            if not kept:
                self._start()

    def _wake(self, moment: float) -> None:
        if moment < self._alarm:
            self._changed.notify_all()
        elif len(self._new) > 4 * len(self._holds):  # what has ended would pile up until then
            for _ in range(len(self._new)):  # in its place, since others add to it meanwhile
                new = self._new.popleft()
                if new[1] in self._holds:
                    self._new.append(new)

    def _start(self) -> bool:
        """Begin one more thread, which counts itself. False: none can be begun, and no lease is renewed."""
        return begun("stampede-keeper", self._run) is not None

    def remove(self, hold: Hold) -> None:
        self._holds.pop(hold, None)  # from the queue it goes when its time comes

    def holds(self) -> list[Hold]:
        """All leases of this process that have not been given back."""
        return list(self._holds)

    def release_all(self) -> None:
        """Give every lease back, when the interpreter exits under computations that still run."""
        with self._lock:
            self.over = True
            holds = list(self._holds)
        for hold in holds:
            hold.ended = hold.foreign = True  # all at once: what is computed meanwhile is not stored
        if not holds or not (self._threads or self._start()):
            for hold in holds:
                _quietly(hold.drop)
            return
        for hold in holds:
            self.let_go(hold)
        end = self._clock() + AT_EXIT
        with self._lock:
            while self._holds and (left := end - self._clock()) > 0:
                self._emptied.wait(left)

    def disowned(self, of: object) -> list[Hold]:
        """All that computations of this one hold, for it to give back: what they give isn't stored any more."""
        holds = [hold for hold in list(self._holds) if hold.of is of]
        for hold in holds:
            hold.ended = hold.foreign = True
            self.remove(hold)
        return holds

    def let_go(self, hold: Hold) -> None:
        """Have a lease given back, and soon, whose holder is gone. From a finalizer: nothing is asked here."""
        hold.alive = _never
        hold.due = moment = self._clock()
        self._holds[hold] = None
        self._new.append((moment, hold))
        with self._lock:  # as `add` does it, and fewer calls deep: the stack may be at its end
            kept = self._threads
            if kept:
                self._changed.notify_all()
        if not kept:
            self._start()

    def give_back(
        self, port: Renewable, key: str, token: bytes, by: Callable[[str, bytes], Coroutine[Any, Any, object]]
    ) -> None:
        """Have a lease given back once, by a thread of ours, and soon. A finalizer may call this."""

        def drop() -> None:
            with suppress(EngineError):  # it ends by itself
                run_blocking(by(key, token))

        self.let_go(Hold(self, port, key, token, 1.0, 0.0, drop))

    def _schedule(self, moment: float, hold: Hold) -> None:
        hold.due = moment
        heapq.heappush(self._due, (moment, next(self._count), hold))
        if moment < self._alarm:
            self._changed.notify_all()

    def _next(self) -> tuple[Hold, Renewable | None]:
        """The lease whose time has come, and the engine at which it is to be renewed. None: its end came before the
        answer to its renewal. Who gets it leaves the watch to another thread."""
        with self._lock:
            self._idle += 1
            try:
                while self._watched:
                    self._turn.wait()
                self._watched = True
                try:
                    hold = self._watch()
                    port = hold.port if hold.under_way is None else None
                    if port is not None:
                        hold.under_way = threading.current_thread()
                        self._busy[port] = self._busy.get(port, 0) + 1
                        if hold.ends > self._clock():
                            self._schedule(hold.ends, hold)
                finally:
                    self._watched, self._alarm = False, -inf
            finally:
                self._idle -= 1
            self._working += 1
            if self._idle:
                self._turn.notify()
            # Else another thread is needed, unless one has done its work, and is on its way to watch.
            lonely = not self._idle and self._threads <= self._working
        if lonely:
            self._start()
        return hold, port

    def _watch(self) -> Hold:
        while True:
            while self._new:
                moment, hold = self._new.popleft()
                if hold in self._holds:
                    heapq.heappush(self._due, (moment, next(self._count), hold))
                del hold  # what we wait for may be long in coming: its engine may be closed by then
            self._alarm = self._due[0][0] if self._due else inf
            if self._new:
                continue  # it may have been added before it could see when we look again
            pause = self._alarm - self._clock()
            if pause <= 0:
                moment, _, hold = heapq.heappop(self._due)
                if hold in self._holds and moment == hold.due and not self._waits(hold):
                    return hold
                del hold
            else:
                self._changed.wait(min(pause, LONGEST))

    def _waits(self, hold: Hold) -> bool:
        """Put it behind others of its engine, if all threads that may be there are. Until its end: that needs none."""
        if hold.under_way is not None or hold.ends <= self._clock() or self._busy.get(hold.port, 0) < THREADS:
            return False
        self._behind.setdefault(hold.port, deque()).append(hold)
        self._schedule(hold.ends, hold)
        return True

    def _left(self, port: Renewable) -> None:
        """A thread is at this engine no more: the next of those that wait for it is due."""
        self._busy[port] -= 1
        if not self._busy[port]:
            del self._busy[port]
        behind = self._behind.get(port, ())
        while behind:
            hold = behind.popleft()
            if hold in self._holds and hold.under_way is None:
                self._schedule(self._clock(), hold)
                return
        self._behind.pop(port, None)

    def _run(self) -> None:
        with self._lock:
            if self._idle:
                return
            self._threads += 1
        try:
            while True:
                try:
                    self._attend(*self._next())
                except Exception:  # our own bug, or no memory for a moment: whose leases should that end?
                    _log.exception("the keeper of leases stumbled")
                    self._take_up()
                    time.sleep(STUMBLE)
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._alarm = inf  # the next lease that comes starts another
                self._take_up()

    def _take_up(self) -> None:
        """Have all holds looked at again but those that others are renewing: which of them was dropped isn't known."""
        with self._lock:
            for hold in list(self._holds):
                if hold.under_way in (None, threading.current_thread()):
                    hold.under_way = None
                    self._schedule(self._clock(), hold)
            if self._holds and not self._threads:
                self._start()

    def _attend(self, hold: Hold, port: Renewable | None) -> None:
        again: float | None = None
        try:
            if port is not None:
                again = hold.attend(self._clock())
            elif hold.lost:
                hold.lose()
        except BaseException:  # its holder's own callback
            _log.exception("the lease of %r could not be looked after, and ends by itself", hold.key)
        with self._lock:
            self._working -= 1
            if port is not None:
                hold.under_way = None
                self._left(port)
            if again is None:
                self._holds.pop(hold, None)
                if not self._holds:
                    self._emptied.notify_all()
            elif hold in self._holds:
                self._schedule(again, hold)


def _never() -> bool:
    return False


def _nothing() -> None: ...


class _Nobody:
    """The port of a hold that has ended."""

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return False


_nobody = _Nobody()


def _quietly(action: Callable[[], object]) -> None:
    """A port's own bug, or a dying interpreter, must not keep the others' leases from being given back."""
    try:
        action()
    except BaseException:  # CancelledError is one, too
        _log.exception("a lease could not be given back, and ends by itself")


keeper = Keeper()
weakref.finalize(keeper, int)  # finalizers close engines at exit, and what is registered after them runs before them
atexit.register(keeper.release_all)
