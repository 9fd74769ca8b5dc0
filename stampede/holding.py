"""One time of holding a lock, as an object: whoever has it may release it, in any thread or task.

A holding that is dropped without a release is given back, with a ResourceWarning. So a lock whose holder was
interrupted is free again as soon as the interpreter lets go of the holding.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from inspect import iscoroutine
from math import inf
from time import monotonic
from typing import Any, NoReturn
from weakref import ReferenceType, ref

from stampede.colour import BLOCKING, PROMPT, SUSPENDING, Colour, after_commit, run_blocking
from stampede.crowd import Crowd
from stampede.entry import new_id
from stampede.errors import EngineClosed, EngineError, LockLost, OptionError
from stampede.hands import extended, handed_over
from stampede.keeper import Hold, keeper
from stampede.land import quietly
from stampede.loops import Loop
from stampede.metrics.table import LOCKS_HELD, LOCKS_LOST, Metric, add, gauges
from stampede.policy import Seconds, seconds
from stampede.ports import Busy, Engine, Locks, Problem, Sessions
from stampede.problems import problem_of
from stampede.signatures import with_twins

__all__ = ["Access", "Holding", "Release", "naming"]

Hook = Callable[[Callable[[], object]], object]
_log = logging.getLogger("stampede")


def naming(name: str, what: str, error: EngineError) -> EngineError:
    """The same error of an engine, with the lock's name in its message."""
    if isinstance(error, EngineClosed) or repr(name) in str(error):
        return error
    named = EngineError(f"the lock {name!r} {what}: {error}")
    vars(named).update(vars(error))
    return named


class Access:
    """What the holdings of one lock object share: its engine, in both colours, and how a holding may end."""

    def __init__(self, engine: Engine, *, release_via: Hook | None, detachable: bool) -> None:
        self.engine = engine  # a holding keeps its engine open
        self.called = engine.lock_engine.called  # in metrics
        self.release_via = release_via
        self.detachable = detachable
        self.crowd: Callable[[Colour], Crowd[Holding]] | None = None  # whose next waiter may have what is released
        self.suspending = PROMPT if engine.prompt else SUSPENDING

    def locks(self, colour: Colour) -> Locks:
        locks = self.engine.side(colour).locks
        assert locks is not None
        return locks


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
        self.lone = token is None  # no other holder has this token, now or later
        self.hold: Hold | None = None  # renewed by the keeper; None: not granted
        self.refusal: Busy | None = None  # the engine's last word, if the lock was not granted
        self.asked = False
        self.answered = True  # each time that the engine was asked
        self.leaving = False  # it is being released, or was
        self.over = False  # there is nothing to release any more, or the keeper has been told to
        self.block: int | None = None  # the thread or task that entered a `with` block for it
        self._access = access
        self.since = 0.0  # when the engine was asked for it
        self._fence = 0
        self._session: Any = None  # the connection that it is bound to
        self._alive: Callable[[], bool] | None = None
        self._pid = os.getpid()

    # -- what is held ---------------------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """It was granted, and nobody has released it."""
        return self.hold is not None and not self.over and not self.leaving

    @property
    def held(self) -> bool:
        """Is the lock still this holding's, as far as is known?"""
        return self.stands and not self.lost

    @property
    def lost(self) -> bool:
        """Has it ended before its release, or may it have? Another holder may be inside.

        True as soon as `lease` has passed, by this process's own clock, since it was last renewed: after `max_hold`,
        or while its engine can't be reached, that is before another holder can get the lock.
        """
        return self.hold is not None and not self.leaving and (self.over or self.hold.lost)

    @property
    def remaining(self) -> float:
        """Seconds that are left of the lease, as far as is known, if it isn't renewed any more. 0: it isn't held."""
        return max(self.hold.ends - monotonic(), 0.0) if self.hold is not None and self.held else 0.0

    @property
    def fence(self) -> int | None:
        """A number that grows from holder to holder, for resources that can refuse an older one. None: the lock was
        not granted."""
        return None if self.hold is None else self._fence

    @property
    def connection(self) -> Any:
        """A connection to the database that has the lock (`postgres://`): the lock ends with it, and it with the lock.

        What is done on it is done by the holder of the lock, or fails. It is made when it is first asked for, one for
        each holding, in autocommit. LockLost if the lock is not held.
        """
        sessions = self._bindable()
        if self._session is None:
            self._session = sessions.session(self.key, self.token)
        return self._bound()

    async def aconnection(self) -> Any:
        """`connection`, for an event loop."""
        sessions = self._bindable()
        if self._session is None:
            self._session = await sessions.asession(self.key, self.token)
        return self._bound()

    def _bindable(self) -> Sessions:
        sessions = self._access.engine.lock_engine.sessions
        if sessions is None:
            raise OptionError(f"{self._access.engine.scheme}:// has no connections that a lock could be bound to")
        if self._access.release_via is not None:
            raise OptionError("a lock with release_via outlives its block, and has no connection of its own")
        if not self.held:
            raise self._not_held()
        return sessions

    def _bound(self) -> Any:
        if self._session is None:
            raise self._loss()
        return self._session

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
        run_blocking(self.releasing(BLOCKING))

    def extend(self, seconds: Seconds) -> None:
        """Keep the lock for at least so long from now, even if it is not renewed: before work in which this process
        may be frozen, or `max_hold` over. LockLost if it has ended.

        >>> with Lock("nightly") as lock:
        ...     lock.extend("10m")
        ...     lock.remaining > 590
        True
        """
        run_blocking(self._extending(BLOCKING, seconds))

    def detach(self, seconds: Seconds = None) -> bytes:
        """Stop renewing the lock without giving it back: it lasts for so long (its lease, by default). Return its
        token: any process that presents it holds the lock. LockLost if it has ended.

        >>> lock = Lock("report").acquire()
        >>> token = lock.detach("1m").hex()  # goes along with the job
        >>> with Lock("report", token=token) as lock:
        ...     lock.held
        True
        """
        return run_blocking(self._detaching(BLOCKING, seconds))

    async def arelease(self) -> None:
        await self.releasing(self._access.suspending)

    async def aextend(self, seconds: Seconds) -> None:
        await self._extending(self._access.suspending, seconds)

    async def adetach(self, seconds: Seconds = None) -> bytes:
        return await self._detaching(self._access.suspending, seconds)

    # -- how ------------------------------------------------------------------------------------------------------

    def grant(self, fence: int | None, lease: float, max_hold: float, asked: float) -> None:
        """The engine granted it. Without a fence, it has one: of the holding that it goes on from."""
        self._fence, self.since = self._fence if fence is None else fence, asked
        self.hold = self._hold(lease, max_hold, asked)
        self.hold.of = self._access.called
        keeper.add(self.hold)

    def _hold(self, lease: float, max_hold: float, since: float | None = None) -> Hold:
        """A lease in the keeper's hands. It does not refer to this object, which may be dropped."""
        locks, name, token = self._access.locks(BLOCKING), self.key, self.token
        drop = partial(_drop, locks, name, token)
        return Hold(keeper, locks, name, token, lease, max_hold, drop, self._alive, since=since)

    def again(self) -> Holding:
        """The same place, to be granted to its next holder in this process. This holding has it no more."""
        self.over, its = True, Holding(self._access, self.name, None)
        its.key, its.token, its._fence, its.since, its.asked = self.key, self.token, self._fence, self.since, True
        return its

    async def withdraw(self, colour: Colour) -> None:
        """Leave nothing at the engine: neither the lock nor a place in its queue."""
        if self.hold is not None:
            self.hold.end()
        if self.lone or self.answered:  # else the next one that asks with this token may have it
            await quietly(self._access.locks(colour).release, self.key, self.token)
        self.over = True

    def let_go(self) -> None:
        """Have the keeper give it back soon. Nothing is asked here, so that a finalizer may call this.

        Another holder may have the same token, if that was chosen by the user: then the lease ends it.
        """
        if self.over or not self.asked or self._foreign:
            return
        if self.lone:  # another hold: a renewal of the first may be under way, to an engine that hangs
            locks = self._access.locks(BLOCKING)
            keeper.give_back(locks, self.key, self.token, locks.release)
        if self.hold is not None:
            self.hold.end()
        self.over = True

    def ends_with(self, loop: Loop) -> None:
        """If this loop is closed, the task that has this holding never goes on: the keeper gives the lock back then,
        when it would renew it."""
        self._alive = partial(_runs, ref(loop))
        if self.hold is not None:
            self.hold.alive = self._alive

    def outlives_its_loop(self) -> None:
        self._alive = None
        if self.hold is not None:
            self.hold.alive = None

    def __del__(self) -> None:
        held = self.stands and self.hold is not None and not self.hold.ended
        if held and (records := self._access.engine.lock_engine.records) is not None:
            records.failed(self.token, Problem("ResourceWarning", "it was held, and never released", ""))
        self.let_go()  # before the warning, which may be an error
        if held:
            message = f"the lock {self.name!r} was held, and never released"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    async def releasing(self, colour: Colour) -> None:
        if not self.stands:
            raise self._not_held()
        await self._give_back(colour, None)

    async def _extending(self, colour: Colour, more: Seconds) -> None:
        lasts = seconds("seconds", more)
        if not lasts < inf:
            raise OptionError(f"seconds is {more!r}: give a finite number")
        if not self.held:
            raise self._not_held()
        if not await colour.shielded(extended(self._access.locks(colour), self, lasts)):
            raise self._loss()

    async def _detaching(self, colour: Colour, stands: Seconds) -> bytes:
        lasts = None if stands is None else seconds("seconds", stands)
        if lasts is not None and not 0 < lasts < inf:
            raise OptionError(f"seconds is {stands!r}: give a finite number, more than 0")
        if not self._access.detachable:
            raise OptionError("a place in a bulkhead can't be handed to another process: `extend` it")
        if not self.held:
            raise self._not_held()
        if self._session is not None:
            raise OptionError("a lock whose `connection` was asked for ends with that, and can't be handed over")
        if not await colour.shielded(handed_over(self._access.engine, colour, self, lasts)):
            raise self._loss()
        self.leaving = self.over = True
        return self.token

    async def leave(self, colour: Colour, error: BaseException | None) -> None:
        """At the end of a block, which has raised this error."""
        if self.hold is None or self.leaving:
            return  # refused, or released inside the block
        if (self.over or self.hold.ended) and not self._foreign:  # given back, as the task's loop was closed
            if error is None:
                raise self._loss()
            return
        if error is not None or self._access.release_via is None or self.hold.lost:
            await self._give_back(colour, error)
            return
        self.leaving = True
        self.hold.end()
        try:
            release = Release(self, colour)
            hooked = self._access.release_via(release)
            if iscoroutine(hooked):
                await _awaited(hooked, colour)
                if release.task is not None:
                    await release.task
        except BaseException as failure:
            await self._give_back(colour, failure)
            raise
        self.over = True  # the rest is the hook's

    async def _give_back(self, colour: Colour, error: BaseException | None) -> None:
        assert self.hold is not None
        self.leaving, lost = True, self.hold.lost
        self.hold.end()
        if self._foreign:  # in a forked child: the lock is its parent's
            self.over = True
            return
        locks, records = self._access.locks(colour), self._access.engine.lock_engine.records
        if error is not None and records is not None:
            records.failed(self.token, problem_of(error))
        elif error is None and not lost and self._handed_on(colour):
            self._end()  # for the next holder in this process, without a word to the engine
            return
        try:
            kept = await colour.shielded(locks.release(self.key, self.token)) and not lost
        except EngineError as trouble:
            self._end()  # and its lease ends it
            if error is None and lost:
                raise self._loss() from trouble
            if error is None:
                raise naming(self.name, "can't be given back", trouble) from trouble.__cause__
            return  # the block's own error goes first
        self._end()
        if not kept and error is None:
            raise self._loss()

    def _handed_on(self, colour: Colour) -> bool:
        """Give the place to the next holder in this process. Not one that is bound to this holder's connection, or that
        lasts longer than its lease: it would end with the connection, or outlive the next holder's death."""
        crowd, hold = self._access.crowd, self.hold
        if crowd is None or hold is None or self._session is not None or hold.extended:
            return False
        return crowd(colour).hand_on(self)

    def _end(self) -> None:
        self.over = True
        session, self._session = self._session, None
        sessions = self._access.engine.lock_engine.sessions
        if session is not None and sessions is not None:
            sessions.close(session)

    @property
    def _foreign(self) -> bool:
        """In a forked child, a holding is its parent's; and at exit, leases have been given back already."""
        return self._pid != os.getpid() or (self.hold is not None and self.hold.foreign)

    def _not_held(self) -> LockLost:
        if self.hold is None:
            return LockLost(f"the lock {self.name!r} is not held: it was refused, so there is nothing to release")
        return LockLost(f"the lock {self.name!r} is not held: it was released, or lost")

    def _loss(self) -> LockLost:
        add(LOCKS_LOST, self._access.called)
        return LockLost(f"the lock {self.name!r} ended before its block did: somebody else may have been inside")


def _runs(refer: ReferenceType[Loop]) -> bool:
    loop = refer()
    return loop is not None and not loop.is_closed()


def _held() -> Iterator[tuple[Metric, str]]:
    return ((LOCKS_HELD, hold.of) for hold in keeper.holds() if isinstance(hold.of, str) and not hold.lost)


gauges.append(_held)


class Release:
    """What `release_via` gets. Called, it gives the lock back: LockLost if that had ended by then.

    It is called after a commit, where it is too late to fail: an EngineError is logged, and the lock ends with its
    lease. Of an `async with`, in a running event loop, it returns a task, which logs a LockLost, too.
    """

    __slots__ = ("_holding", "_suspending", "name", "task", "token")

    def __init__(self, holding: Holding, colour: Colour) -> None:
        self.name, self.token = holding.key, holding.token
        self._holding = holding
        self._suspending = colour.suspending and not holding._access.engine.lock_engine.prompt
        self.task: asyncio.Task[None] | None = None

    def __call__(self) -> asyncio.Task[None] | None:
        expected = (EngineError, LockLost) if self._suspending else EngineError
        work = partial(self._holding._give_back, error=None)
        self.task = after_commit(work, self._complain, suspending=self._suspending, expected=expected)
        return self.task

    def _complain(self, why: object) -> None:
        _log.error(
            "the lock %r was not released after a commit, so it ends with its lease: %s", self._holding.name, why
        )


async def _awaited(hooked: Coroutine[Any, Any, object], colour: Colour) -> None:
    if not colour.suspending:
        hooked.close()
        raise OptionError("release_via gives a coroutine, which can be awaited at the end of an `async with` only")
    await hooked


def _drop(locks: Locks, name: str, token: bytes) -> None:
    """Give back a lock whose holder is gone: called by the keeper."""
    run_blocking(quietly(locks.release, name, token))
