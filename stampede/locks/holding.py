"""One time of holding a lock, as an object: any thread or task that has it may release it. If it is dropped without a
release, the keeper gives its lock back when it would renew it."""

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
from stampede.metrics.table import LOCKS_HELD, LOCKS_LOST, Metric, add, gauges
from stampede.model.entry import new_id
from stampede.model.policy import Seconds, seconds
from stampede.model.ports import Busy, Engine, Holds, Locks, Problem
from stampede.outages.keeper import Hold, keeper
from stampede.runtime.colour import BLOCKING, PROMPT, SUSPENDING, Bell, Colour, after_commit, run_blocking, running_loop
from stampede.runtime.event_loops import Loop
from stampede.runtime.signatures import with_twins

__all__ = ["Access", "Holding", "Hook", "LocksSide", "Release", "holds_of", "naming"]

Hook = Callable[[Callable[[], object]], object]
_log = logging.getLogger("stampede")

NAME, MESSAGE, TRACEBACK = 200, 4000, 16_000
"""Characters of each, at most."""


def naming(name: str, what: str, error: EngineError) -> EngineError:
    """Return the same error of an engine, with the lock's name in its message."""
    if isinstance(error, EngineClosed) or repr(name) in str(error):
        return error
    named = EngineError(f"the lock {name!r} {what}: {error}")
    vars(named).update(vars(error))
    return named


def holds_of(engine: Engine, colour: Colour = BLOCKING) -> Holds:
    """Return what can say who holds the locks of an engine. OptionError: nothing can."""
    holds = engine.lock_engine.side(colour).holds
    if holds is None:
        raise OptionError(f"{engine.lock_engine.called} can't say who has a lock")
    return holds


class Access:
    """What the holdings of one lock object share: its engine, in both colours, and how a holding may end."""

    def __init__(self, engine: Engine, *, release_via: Hook | None, detachable: bool) -> None:
        self.engine = engine  # a holding keeps its engine open
        self.its = engine.lock_engine
        self.called = self.its.called  # in metrics
        self.release_via = release_via
        self.detachable = detachable
        self.hand_on: Callable[[LocksSide, Holding], bool] | None = None  # to a waiter of this process
        self.blocking = LocksSide(self, BLOCKING)
        self.suspending = LocksSide(self, PROMPT if engine.prompt else SUSPENDING)

    def way(self, colour: Colour) -> LocksSide:
        return self.suspending if colour.suspending else self.blocking


class LocksSide:
    """How callers of one colour reach the locks of an engine."""

    __slots__ = ("access", "colour", "locks")

    def __init__(self, access: Access, colour: Colour) -> None:
        locks = access.engine.side(colour).locks
        assert locks is not None
        self.access, self.colour, self.locks = access, colour, locks

    def loop(self) -> Loop | None:
        """The event loop of the caller; None: it is a thread."""
        return running_loop() if self.colour.suspending else None

    async def inside(self, name: str) -> float:
        """How many have this lock. Infinitely many: nobody gets in just now, as its server knows nothing of some."""
        found = await holds_of(self.access.engine, self.colour).holder(name)
        return inf if any(not token for token, _ in found) else len(found)


@with_twins
class Holding:
    """What `with` and `acquire()` give: the lock as held this once, or a refusal, which is false.

    Any thread or task may release it, and nothing else than this holding is released by that.

    >>> lock = Lock("nightly")
    >>> holding = lock.acquire(wait=5)
    >>> if holding:
    ...     holding.release()
    """

    def __init__(self, access: Access, name: str, token: bytes | None) -> None:
        self.name = self.key = name  # the key is the engine's name for it
        self.token = token or new_id()
        """What tells this holder from all others."""
        self.hold: Hold | None = None  # renewed by the keeper; None: not granted
        self.refusal: Busy | None = None  # the engine's last word, if the lock was not granted
        self.over = False  # there is nothing to release, or no more
        self.since = 0.0  # when the engine was asked for it
        self.access = access
        self._chosen = token is not None  # by the user: another holder may have this token, now or later
        self._fence = 0
        self._loop: ReferenceType[Loop] | None = None  # with which its holder ends

    # -- what is held ---------------------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """It was granted, and nobody has released it."""
        return self.hold is not None and not self.over

    @property
    def held(self) -> bool:
        """Is the lock still this holding's, as far as is known?"""
        return self.hold is not None and not self.over and not self.hold.lost

    @property
    def lost(self) -> bool:
        """Has it ended before its release, or may it have? Another holder may be inside.

        True as soon as `lease` has passed, by this process's own clock, since it was last renewed: after `max_hold`,
        or while its engine can't be reached, that is before another holder can get the lock.
        """
        return self.hold is not None and not self.over and self.hold.lost

    @property
    def remaining(self) -> float:
        """Seconds that are left of the lease, as far as is known, if it isn't renewed any more. 0: it isn't held."""
        return max(self.hold.ends - monotonic(), 0.0) if self.hold is not None and self.held else 0.0

    @property
    def fence(self) -> int | None:
        """A number that grows from holder to holder, for resources that can refuse an older one. None: the lock was
        not granted."""
        return None if self.hold is None else self._fence

    def __bool__(self) -> bool:
        return self.held

    def __repr__(self) -> str:
        return f"<Holding of {self.name!r}: {'held' if self.held else 'lost' if self.lost else 'not held'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a holding can't be copied or pickled: two would release what was taken once")

    # -- its end --------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give the lock back. LockLost if it had ended before, or was never granted; EngineError if the engine could
        not be told.

        >>> Lock("nightly").acquire(wait=0).release()
        """
        run_blocking(self.released(self.access.blocking))

    def extend(self, seconds: Seconds) -> None:
        """Keep the lock for at least so long from now, even if it is not renewed: before work in which this process
        may be frozen, or `max_hold` over. LockLost if it has ended.

        >>> with Lock("nightly") as lock:
        ...     lock.extend("10m")
        ...     lock.remaining > 590
        True
        """
        run_blocking(self._extended(self.access.blocking, seconds))

    def detach(self, seconds: Seconds = None) -> bytes:
        """Stop renewing the lock without giving it back: it lasts for so long (its lease, by default). Return its
        token: any process that presents it holds the lock. LockLost if it has ended.

        >>> lock = Lock("report").acquire()
        >>> token = lock.detach("1m").hex()  # goes along with the job
        >>> with Lock("report", token=token) as lock:
        ...     lock.held
        True
        """
        return run_blocking(self._detached(self.access.blocking, seconds))

    async def arelease(self) -> None:
        await self.released(self.access.suspending)

    async def aextend(self, seconds: Seconds) -> None:
        await self._extended(self.access.suspending, seconds)

    async def adetach(self, seconds: Seconds = None) -> bytes:
        return await self._detached(self.access.suspending, seconds)

    # -- how ------------------------------------------------------------------------------------------------------

    def grant(self, fence: int | None, lease: float, max_hold: float, since: float) -> None:
        """The engine granted it. Without a fence, it has one: of the holding that it goes on from."""
        self._fence, self.since = self._fence if fence is None else fence, since
        locks, key, token = self.access.blocking.locks, self.key, self.token
        # None of this refers to the holding itself. With a chosen token another holder may have the lock by then.
        drop = _nothing if self._chosen else partial(_given_back, locks, key, token)
        alive = partial(_lives, ref(self), self.name)
        self.hold = Hold(keeper, locks, key, token, lease, max_hold, drop, alive, since, self.access.called)
        keeper.add(self.hold)

    def ends_with_loop(self) -> None:
        """If the loop that runs here is closed, the task that has this holding never goes on: the keeper gives the lock
        back then, when it would renew it."""
        loop = running_loop()
        self._loop = None if loop is None else ref(loop)

    def again(self) -> Holding:
        """The same place, to be granted to its next holder in this process. This holding has it no more."""
        self.over, its = True, Holding(self.access, self.name, None)
        its.key, its.token, its._fence, its.since = self.key, self.token, self._fence, self.since
        return its

    def let_go(self) -> None:
        """Have the keeper give it back soon, or the place in the queue. Nothing is asked here."""
        if not self.over and not self._chosen:
            locks = self.access.blocking.locks
            keeper.give_back(locks, self.key, self.token, locks.release)
        if self.hold is not None:
            self.hold.end()
        self.over = True

    async def released(self, way: LocksSide) -> None:
        if not self.stands:
            raise self._not_held()
        await self.give_back(way, None)

    async def leave(self, way: LocksSide, error: BaseException | None) -> None:
        """At the end of a block, which has raised this error."""
        via, hold = self.access.release_via, self.hold
        if hold is None or self.over:
            return  # refused, or released inside the block
        if error is not None or via is None or hold.lost:
            await self.give_back(way, error)
            return
        self.over, release = True, Release(self, way)
        hold.end()
        try:
            hooked = via(release)
            if iscoroutine(hooked):
                if not way.colour.suspending:
                    hooked.close()
                    raise OptionError("release_via gives a coroutine, which can be awaited in an `async with` only")
                await hooked
                if release.task is not None:
                    await release.task
        except BaseException as failure:
            await self.give_back(way, failure)
            raise

    async def give_back(self, way: LocksSide, error: BaseException | None) -> None:
        """After this error of its block. LockLost and EngineError as `release` raises them, if there was none."""
        hold, its = self.hold, self.access.its
        assert hold is not None
        self.over, lost, ended = True, hold.lost, hold.ended
        hold.end()
        if hold.foreign:  # in a forked child the lock is its parent's; and at exit it was given back already
            return
        if error is not None and its.records is not None:
            its.records.failed(self.token, problem_of(error))
        hand_on = self.access.hand_on
        # One that was extended would outlive a dead holder.
        sound = error is None and not lost and hold.least <= monotonic()
        if hand_on is not None and sound and hand_on(way, self):
            return
        try:
            # Not if the keeper has given it back, as the holder's loop was closed.
            known = not (ended and lost) and await way.colour.shielded(way.locks.release(self.key, self.token))
        except EngineError as trouble:  # its lease ends it
            if error is not None:
                return  # the block's own error goes first
            if lost:
                raise self._loss() from trouble
            raise naming(self.name, "can't be given back", trouble) from trouble.__cause__
        if error is None and (lost or not known):
            raise self._loss()

    async def _extended(self, way: LocksSide, more: Seconds) -> None:
        lasts = seconds("seconds", more)
        if not lasts < inf:
            raise OptionError(f"seconds is {more!r}: give a finite number")
        hold, asked = self._held_now(), monotonic()
        lasts = max(lasts, hold.lease, hold.ends - asked)
        if not await self._alone(way, hold, partial(way.locks.renew, self.key, self.token, lasts)):
            hold.lose()
            raise self._loss()
        hold.ends = hold.least = asked + lasts

    async def _detached(self, way: LocksSide, stands: Seconds) -> bytes:
        lasts = None if stands is None else seconds("seconds", stands)
        if lasts is not None and not 0 < lasts < inf:
            raise OptionError(f"seconds is {stands!r}: give a finite number, more than 0")
        if not self.access.detachable:
            raise OptionError("a place in a bulkhead can't be handed to another process: `extend` it")
        hold, its = self._held_now(), self.access.its
        handover = its.side(way.colour).handover
        if handover is None:
            raise OptionError(f"a lock of {its.scheme}:// ends with its holder, and can't be handed over")
        lasts = hold.lease if lasts is None else lasts
        kept = await self._alone(way, hold, partial(handover.hand_over, self.key, self.token, lasts))
        hold.end()
        if not kept:
            hold.lose()
            raise self._loss()
        self.over = True
        return self.token

    async def _alone(self, way: LocksSide, hold: Hold, question: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Ask with no renewal under way, which could come to the engine behind the question, and undo it. False: the
        lock is lost."""
        while not hold.begin():
            await way.colour.park(Bell(), 0.005)
        try:
            return await way.colour.shielded(question()) and not hold.lost
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
        return LockLost(f"the lock {self.name!r} ended before its block did: somebody else may have been inside")


def _lives(refer: ReferenceType[Holding], name: str) -> bool:
    """Whether anybody can release the holding yet."""
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
    """Of a traceback that is too long, what is nearest to the error is kept."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Problem(name[:NAME], _said(error)[:MESSAGE], _trace(error))


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # it is the user's own __str__
        return f"<str() of it failed: {type(other).__name__}>"


def _trace(error: BaseException) -> str:
    try:
        text = "".join(TracebackException.from_exception(error, compact=True).format())
    except Exception:  # sources that can't be read, or one's own attributes
        return ""
    return text if len(text) <= TRACEBACK else f"...\n{text[-TRACEBACK:]}"


class Release:
    """What `release_via` gets. Called, it gives the lock back: LockLost if that had ended by then.

    It is called after a commit, where it is too late to fail: an EngineError is logged, and the lock ends with its
    lease. Of an `async with`, in a running event loop, it returns a task, which logs a LockLost, too.
    """

    __slots__ = ("_holding", "_suspending", "name", "task", "token")

    def __init__(self, holding: Holding, way: LocksSide) -> None:
        self.name, self.token = holding.key, holding.token
        self._holding = holding
        self._suspending = way.colour.suspending and not way.access.its.prompt
        self.task: asyncio.Task[None] | None = None

    def __call__(self) -> asyncio.Task[None] | None:
        expected = (EngineError, LockLost) if self._suspending else EngineError
        holding = self._holding
        self.task = after_commit(
            lambda colour: holding.give_back(holding.access.way(colour), None),
            self._complain,
            suspending=self._suspending,
            expected=expected,
        )
        return self.task

    def _complain(self, why: object) -> None:
        _log.error(
            "the lock %r was not released after a commit, so it ends with its lease: %s", self._holding.name, why
        )
