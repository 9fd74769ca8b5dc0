"""A holding: a lock as it was taken once. Any thread or task that has this object may release it. If a holding is
dropped without a release, the keeper releases the lock when it would renew the lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from inspect import iscoroutine
from math import inf
from time import monotonic
from traceback import TracebackException
from typing import Any, NoReturn
from weakref import ReferenceType, ref

from stampede.algorithm.finish import quietly
from stampede.errors import EngineClosed, EngineError, LockLost, OptionError
from stampede.leases.keeper import Hold, keeper
from stampede.metrics.table import LOCKS_HELD, LOCKS_LOST, Metric, add, gauges
from stampede.model.entry import new_id
from stampede.model.ports import Busy, Engine, Holds, Locks, Problem
from stampede.runtime.colour import BLOCKING, PROMPT, SUSPENDING, Bell, Colour, after_commit, run_blocking, running_loop
from stampede.runtime.event_loops import Loop
from stampede.runtime.signatures import with_twins
from stampede.settings.options import Seconds, seconds

__all__ = ["Access", "Holding", "Hook", "LocksSide", "Release", "holds_of", "naming"]

Hook = Callable[[Callable[[], object]], object]
_log = logging.getLogger("stampede")

NAME, MESSAGE, TRACEBACK = 200, 4000, 16_000
"""The most characters of each that are sent to an engine's records."""


def naming(name: str, what: str, error: EngineError) -> EngineError:
    """Return an engine's error with the lock's name in its message."""
    if isinstance(error, EngineClosed) or repr(name) in str(error):
        return error
    named = EngineError(f"the lock {name!r} {what}: {error}")
    vars(named).update(vars(error))
    return named


def holds_of(engine: Engine, colour: Colour = BLOCKING) -> Holds:
    """Return the port that lists the holders of an engine's locks. Raise OptionError if there is none."""
    holds = engine.lock_engine.side(colour).holds
    if holds is None:
        raise OptionError(f"{engine.lock_engine.called} can't tell who holds a lock")
    return holds


class Access:
    """The things that all holdings of one lock object share: the engine, in both colours, and how a holding ends."""

    def __init__(self, engine: Engine, *, release_via: Hook | None, detachable: bool) -> None:
        self.engine = engine  # a holding keeps its engine open
        self.lock_engine = engine.lock_engine
        self.called = self.lock_engine.called  # in metrics
        self.release_via = release_via
        self.detachable = detachable
        self.hand_on: Callable[[LocksSide, Holding], bool] | None = None  # gives a place to a waiter of this process
        self.blocking = LocksSide(self, BLOCKING)
        self.suspending = LocksSide(self, PROMPT if engine.prompt else SUSPENDING)

    def side(self, colour: Colour) -> LocksSide:
        return self.suspending if colour.suspending else self.blocking


class LocksSide:
    """The way in which callers of one colour use the locks of an engine."""

    __slots__ = ("access", "colour", "locks")

    def __init__(self, access: Access, colour: Colour) -> None:
        locks = access.engine.side(colour).locks
        assert locks is not None
        self.access, self.colour, self.locks = access, colour, locks

    def loop(self) -> Loop | None:
        """Return the event loop of the caller, or None if it is a thread."""
        return running_loop() if self.colour.suspending else None

    async def inside(self, name: str) -> float:
        """Return the number of holders of this lock, and inf if its server does not know all of them yet."""
        found = await holds_of(self.access.engine, self.colour).holder(name)
        return inf if any(not token for token, _ in found) else len(found)


@with_twins
class Holding:
    """The object that `with` and `acquire()` return: a lock that was taken, or, if false, a refusal.

    Any thread or task may release it. That never releases the lock of another holder.

    >>> lock = Lock("nightly")
    >>> holding = lock.acquire(wait=5)
    >>> if holding:
    ...     holding.release()
    """

    def __init__(self, access: Access, name: str, token: bytes | None) -> None:
        self.name = self.key = name  # the key is the engine's name for the lock
        self.token = token or new_id()
        """The token that identifies this holder."""
        self.hold: Hold | None = None  # renewed by the keeper; None: the lock was not granted
        self.refusal: Busy | None = None  # the engine's last answer, if the lock was not granted
        self.over = False  # there is nothing to release, or not any more
        self.since = 0.0  # when the engine was asked for the lock
        self.access = access
        self._chosen = token is not None  # the user gave the token: another holder may have it, now or later
        self._fence = 0
        self._loop: ReferenceType[Loop] | None = None  # if this loop is closed, the holder is gone

    # -- the state ------------------------------------------------------------------------------------------------

    @property
    def unreleased(self) -> bool:
        """Whether the lock was granted, and was not released, even if it is lost."""
        return self.hold is not None and not self.over

    @property
    def held(self) -> bool:
        """Whether this holding still has the lock, as far as this process knows."""
        return self.hold is not None and not self.over and not self.hold.lost

    @property
    def lost(self) -> bool:
        """Whether the lock ended before its release, or may have ended, so that another holder may be inside.

        It is True as soon as `lease` seconds have passed since the last renewal, by the clock of this process: after
        `max_hold`, or while the engine can't be reached. That is before another holder can get the lock."""
        return self.hold is not None and not self.over and self.hold.lost

    @property
    def remaining(self) -> float:
        """The number of seconds left on the lease, if it is not renewed again. 0 if the lock is not held."""
        return max(self.hold.ends - monotonic(), 0.0) if self.hold is not None and self.held else 0.0

    @property
    def fence(self) -> int | None:
        """A number that grows from holder to holder, so that a resource can refuse an older one. None: not granted."""
        return None if self.hold is None else self._fence

    def __bool__(self) -> bool:
        return self.held

    def __repr__(self) -> str:
        return f"<Holding of {self.name!r}: {'held' if self.held else 'lost' if self.lost else 'not held'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a holding can't be copied or pickled: two objects would release one lock; send its token")

    # -- the user's verbs -----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the lock.

        Raise LockLost if it had ended before, or was never granted, and EngineError if the engine could not be told.

        >>> Lock("nightly").acquire(wait=0).release()
        """
        run_blocking(self.released(self.access.blocking))

    def extend(self, seconds: Seconds) -> None:
        """Keep the lock for at least so many seconds from now, even if it is not renewed.

        Use it before work in which this process may freeze, or `max_hold` may end. Raise LockLost if the lock ended.

        >>> with Lock("nightly") as lock:
        ...     lock.extend("10m")
        ...     lock.remaining > 590
        True
        """
        run_blocking(self._extended(self.access.blocking, seconds))

    def detach(self, seconds: Seconds = None) -> bytes:
        """Stop renewing the lock without releasing it, and return its token. Raise LockLost if the lock has ended.

        The lock remains for so many seconds, by default for its lease. Any process that presents the token holds it.

        >>> lock = Lock("report").acquire()
        >>> token = lock.detach("1m").hex()  # send it with the job
        >>> with Lock("report", token=token) as lock:
        ...     lock.held
        True
        """
        return run_blocking(self.detached(self.access.blocking, seconds))

    async def arelease(self) -> None:
        await self.released(self.access.suspending)

    async def aextend(self, seconds: Seconds) -> None:
        await self._extended(self.access.suspending, seconds)

    async def adetach(self, seconds: Seconds = None) -> bytes:
        return await self.detached(self.access.suspending, seconds)

    # -- implementation -------------------------------------------------------------------------------------------

    def grant(self, fence: int | None, lease: float, max_hold: float, since: float) -> None:
        """Take note that the engine granted the lock, and have the keeper renew it. A fence of None: this holding
        continues another one, and has its fence already."""
        self._fence, self.since = self._fence if fence is None else fence, since
        locks, key, token = self.access.blocking.locks, self.key, self.token
        # The keeper must not refer to the holding, or a dropped one would never be collected. With a chosen token,
        # another holder may have the lock by then, so that it must not be released.
        drop = _nothing if self._chosen else partial(_given_back, locks, key, token)
        alive = partial(_may_be_released, ref(self), self.name)
        self.hold = Hold(keeper, locks, key, token, lease, max_hold, drop, alive, since, self.access.called)
        keeper.add(self.hold)

    def ends_with_loop(self) -> None:
        """Have the keeper release the lock, when it would renew it, if the running loop was closed. Then the task that
        has this holding never continues."""
        loop = running_loop()
        self._loop = None if loop is None else ref(loop)

    def again(self) -> Holding:
        """Return a new holding of this place, for the next holder in this process. This one no longer has it."""
        self.over, other = True, Holding(self.access, self.name, None)
        other.key, other.token, other._fence, other.since = self.key, self.token, self._fence, self.since
        return other

    def let_go(self) -> None:
        """Have the keeper release the lock, or the place in the queue, soon. The engine is not asked here."""
        if not self.over and not self._chosen:
            locks = self.access.blocking.locks
            keeper.give_back(locks, self.key, self.token, locks.release)
        if self.hold is not None:
            self.hold.end()
        self.over = True

    def let_end(self) -> None:
        """Renew the lock no more, and do not release it: it ends with its lease, or with the time of a `detach`."""
        if self.hold is not None:
            self.hold.end()
        self.over = True

    async def released(self, side: LocksSide) -> None:
        if not self.unreleased:
            raise self._not_held()
        await self.give_back(side, None)

    async def leave(self, side: LocksSide, error: BaseException | None) -> None:
        """End a block, which has raised `error` or None: release the lock, or leave the release to `release_via`."""
        via, hold = self.access.release_via, self.hold
        if hold is None or self.over:
            return  # refused, or released inside the block
        if error is not None or via is None or hold.lost:
            await self.give_back(side, error)
            return
        self.over, release = True, Release(self, side)
        hold.end()
        try:
            hooked = via(release)
            if iscoroutine(hooked):
                if not side.colour.suspending:
                    hooked.close()
                    raise OptionError("release_via returned a coroutine, which only `async with` can await")
                await hooked
                if release.task is not None:
                    await release.task
        except BaseException as failure:
            await self.give_back(side, failure)
            raise

    async def give_back(self, side: LocksSide, error: BaseException | None) -> None:
        """Release the lock. `error` is what its block raised. If that is None, raise the errors of `release`."""
        hold, lock_engine = self.hold, self.access.lock_engine
        assert hold is not None
        self.over, lost, ended = True, hold.lost, hold.ended
        hold.end()
        if hold.foreign:  # in a forked child, where the lock is the parent's, or at exit, where it is released already
            return
        if error is not None and lock_engine.records is not None:
            lock_engine.records.failed(self.token, problem_of(error))
        hand_on = self.access.hand_on
        # An extended lock is not handed on, because it would outlive a dead holder.
        sound = error is None and not lost and hold.least <= monotonic()
        if hand_on is not None and sound and hand_on(side, self):
            return
        try:
            # The keeper has released the lock if the holder's loop was closed.
            known = not (ended and lost) and await side.colour.shielded(side.locks.release(self.key, self.token))
        except EngineError as trouble:  # the lock ends with its lease
            if error is not None:
                return  # the block's own error is more important
            if lost:
                raise self._loss() from trouble
            raise naming(self.name, "can't be released", trouble) from trouble.__cause__
        if error is None and (lost or not known):
            raise self._loss()

    async def _extended(self, side: LocksSide, more: Seconds) -> None:
        lasts = seconds("seconds", more)
        if not lasts < inf:
            raise OptionError(f"seconds is {more!r}: give a finite number")
        hold, asked = self._held_now(), monotonic()
        lasts = max(lasts, hold.lease, hold.ends - asked)
        if not await self._between_renewals(side, hold, partial(side.locks.renew, self.key, self.token, lasts)):
            hold.lose()
            raise self._loss()
        hold.ends = hold.least = asked + lasts

    async def detached(self, side: LocksSide, requested: Seconds) -> bytes:
        lasts = None if requested is None else seconds("seconds", requested)
        if lasts is not None and not 0 < lasts < inf:
            raise OptionError(f"seconds is {requested!r}: give a finite number, more than 0")
        if not self.access.detachable:
            raise OptionError("a place in a bulkhead can't be handed to another process: `extend` it")
        hold, lock_engine = self._held_now(), self.access.lock_engine
        handover = lock_engine.side(side.colour).handover
        if handover is None:
            raise OptionError(f"a lock of {lock_engine.scheme}:// ends with its holder, and can't be handed over")
        lasts = hold.lease if lasts is None else lasts
        handed_over = await self._between_renewals(side, hold, partial(handover.hand_over, self.key, self.token, lasts))
        hold.end()
        if not handed_over:
            hold.lose()
            raise self._loss()
        self.over = True
        return self.token

    async def _between_renewals(
        self, side: LocksSide, hold: Hold, question: Callable[[], Coroutine[Any, Any, bool]]
    ) -> bool:
        """Ask while no renewal is under way, which could reach the engine later, and undo the change. Return False if
        the lock is lost."""
        while not hold.begin():
            await side.colour.park(Bell(), 0.005)
        try:
            return await side.colour.shielded(question()) and not hold.lost
        finally:
            hold.again(monotonic() + hold.lease / 3)

    def _held_now(self) -> Hold:
        if self.hold is None or not self.held:
            raise self._not_held()
        return self.hold

    def _not_held(self) -> LockLost:
        if self.hold is None:
            return LockLost(f"the lock {self.name!r} is not held: it was refused, so there is nothing to release")
        return LockLost(f"the lock {self.name!r} is not held: it was released, or lost")

    def _loss(self) -> LockLost:
        add(LOCKS_LOST, self.access.called)
        return LockLost(f"the lock {self.name!r} ended before its block did: another holder may have been inside")


def _may_be_released(refer: ReferenceType[Holding], name: str) -> bool:
    """Return whether the holder of a lock still exists and can release it. `refer` refers to the holding weakly."""
    holding = refer()
    if holding is None:
        _log.warning("the lock %r was held, and never released: its holding was dropped", name)
        return False
    if holding._loop is None:
        return True
    loop = holding._loop()
    return loop is not None and not loop.is_closed()


def _given_back(locks: Locks, key: str, token: bytes) -> None:
    run_blocking(quietly(locks.release, key, token))


def _nothing() -> None: ...


def _held() -> Iterator[tuple[Metric, str]]:
    return ((LOCKS_HELD, hold.of) for hold in keeper.holds() if isinstance(hold.of, str) and not hold.lost)


gauges.append(_held)


def problem_of(error: BaseException) -> Problem:
    """Describe an error for an engine's records. A traceback that is too long loses its beginning."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Problem(name[:NAME], _text_of(error)[:MESSAGE], _trace(error))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # it is the user's own __str__
        return f"<its str() failed: {type(other).__name__}>"


def _trace(error: BaseException) -> str:
    try:
        text = "".join(TracebackException.from_exception(error, compact=True).format())
    except Exception:  # a source that can't be read, or the user's own attributes
        return ""
    return text if len(text) <= TRACEBACK else f"...\n{text[-TRACEBACK:]}"


class Release:
    """The function that `release_via` gets. Calling it releases the lock. It raises LockLost if the lock had ended. It
    is called after a commit, when it is too late to fail. So an EngineError is logged, and the lock ends with its
    lease. For an `async with` in a running event loop it returns a task, which also logs a LockLost."""

    __slots__ = ("_holding", "_suspending", "name", "task", "token")

    def __init__(self, holding: Holding, side: LocksSide) -> None:
        self.name, self.token = holding.key, holding.token
        self._holding = holding
        self._suspending = side.colour.suspending and not side.access.lock_engine.prompt
        self.task: asyncio.Task[None] | None = None

    def __call__(self) -> asyncio.Task[None] | None:
        expected = (EngineError, LockLost) if self._suspending else EngineError
        holding = self._holding
        self.task = after_commit(
            lambda colour: holding.give_back(holding.access.side(colour), None),
            self._complain,
            suspending=self._suspending,
            expected=expected,
        )
        return self.task

    def _complain(self, why: object) -> None:
        _log.error(
            "the lock %r was not released after a commit, so it ends with its lease: %s", self._holding.name, why
        )
