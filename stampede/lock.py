"""The user's face of a lock: mutual exclusion by name, over every process that reaches the engine."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from datetime import timedelta
from inspect import iscoroutine
from math import inf
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, ref

from stampede import greenlets
from stampede.block import Block, BlockEnd, Blocks
from stampede.colour import BLOCKING, PROMPT, SUSPENDING, Bell, Colour, run_blocking, running_loop
from stampede.errors import EngineError, LockLost, LockTimeout, OptionError
from stampede.grip import Grip
from stampede.guarded_locks import PlainLocks, locks_of
from stampede.hands import extended, handed_over, inside, token_of
from stampede.pace import Pace
from stampede.policy import Seconds, seconds
from stampede.ports import Busy, Engine, Granted, Problem, Sessions
from stampede.problems import problem_of
from stampede.signatures import with_twins
from stampede.stalls import LATE

__all__ = ["Lock", "Release", "TryLock", "caller"]

SELF = TypeVar("SELF", bound="Lock")

ROOMY = "memory://, disk://, redis://, postgres://, etcd://, zookeeper:// and zmq://"
"""Whose locks have room for more than one, for people."""


@with_twins
class Lock:
    """A named lock with a lease, renewed while it is held: `with Lock("nightly"): ...`.

    One object may be used again after release, and by several threads and tasks, which exclude each other. It is not
    re-entrant. `release_via` gets the release at the end of the block and calls it when it sees fit (a database's
    on-commit hook; a coroutine is awaited in `async with`); renewal ends with the block, and an exception releases at
    once. `max_hold` seconds after it was
    taken the renewal ends, and up to one `lease` later the lock: then it is `lost`.
    `shared`: others who say so may be inside with it, and nobody else; who came first is first, so that none of those
    who say it not waits for ever.
    `token`: what the lock is taken with, for one that `detach` has let go of: who says the same is the same holder. The
    object is one caller's at a time then.
    Who lets go of the object without a release gets a ResourceWarning, and the lock is given back.

    >>> with Lock("nightly", lease=60, wait=5) as lock:  # of all processes of this machine; on="redis://..." of all
    ...     lock.held
    True
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        lease: float | str | timedelta = 30.0,
        wait: Seconds = None,
        max_hold: Seconds = None,
        release_via: Callable[[Callable[[], object]], object] | None = None,
        shared: bool = False,
        token: bytes | str | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"the name of a lock is {name!r}: give a string that is not empty")
        if release_via is not None and not callable(release_via):
            raise OptionError(f"release_via is {release_via!r}: give a function that takes the release")
        self.name = name
        self._lease = seconds("lease", lease)
        if not 0 < self._lease < inf:
            raise OptionError(f"lease is {lease!r}: give a finite number of seconds, more than 0")
        self._wait = seconds("wait", wait)
        self._max_hold = seconds("max_hold", max_hold)
        self._release_via = release_via
        self._token = token_of(token)
        if shared:
            self._room = inf
        self._use(engine)
        self._asking: set[Grip] = set()  # not granted yet
        self._grips: dict[object, Grip] = {}  # by their callers
        self._refused: set[object] = set()  # callers that entered a TryLock by no `with`, and didn't get it
        self._blocks = Blocks()
        self._vain: dict[int, Block] = {}  # those of a TryLock that didn't get it

    def _use(self, engine: Engine) -> None:
        if engine.locks is None or engine.alocks is None:
            raise OptionError(f"{engine.scheme}:// is no lock engine: name another with on=")
        self._check_room(engine)
        self._engine = engine  # whoever keeps the lock keeps its engine open
        self._suspending = PROMPT if engine.prompt else SUSPENDING
        lone = self._token is None  # else what comes late would take it from who has it by then
        blocking = locks_of(engine, engine.locks, BLOCKING, owes=lone)
        self._locks = blocking, locks_of(engine, engine.alocks, SUSPENDING, owes=lone)

    def _check_room(self, engine: Engine) -> None:
        if self._room != 1 and not engine.lock_engine.rooms:
            raise OptionError(f"a lock of {engine.lock_engine.scheme}:// can't be shared: {ROOMY} have those that can")

    def _bind(self) -> None:
        """Before it is taken: settings may name another engine by now."""

    # -- what is held ---------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Does this caller, and not just somebody through the same object, hold it, as far as is known?"""
        me = caller()
        grip = self._grips.get(me)
        return grip is not None and grip.held and not self._has_refused(me, grip)

    @property
    def lost(self) -> bool:
        """Has it ended before its release, or may it have? Somebody else may be inside.

        True as soon as `lease` has passed, by this process's own clock, since it was last renewed: after `max_hold`,
        or while its engine can't be reached, that is before anybody else can have it.
        """
        grip = self._mine()
        if grip is None:
            return any(each.lapsed_inside for each in list(self._grips.values()))
        return grip.hold is not None and grip.hold.lost

    @property
    def remaining(self) -> float:
        """Seconds for which it stands, as far as is known, if it isn't renewed any more. 0: it isn't held."""
        grip = self._mine()
        return 0.0 if grip is None or not grip.held or grip.hold is None else max(grip.hold.ends - monotonic(), 0.0)

    @property
    def token(self) -> bytes | None:
        """What tells this holder from all others; None while it isn't held."""
        grip = self._mine()
        return None if grip is None else grip.token

    @property
    def fence(self) -> int | None:
        """A number that grows from holder to holder, for resources that can refuse an older one. OptionError where the
        engine has none (`Quorum`)."""
        its = self._engine.lock_engine
        if not its.fences:
            raise OptionError(f"a lock of {its.scheme}:// has no fence, as each of its servers would count for itself")
        grip = self._mine()
        return None if grip is None else grip.fence

    @property
    def connection(self) -> Any:
        """A connection to the database that has the lock (`postgres://`): the lock ends with it, and it with the lock.

        What must not be done by two is done there by who has the lock, or fails. It is made when it is first asked
        for, one for each holder, in autocommit. LockLost if the lock is not held.
        """
        grip, sessions = self._bindable()
        if grip.session is None:
            grip.session = sessions.session(self.name, grip.token)
        return self._session_of(grip)

    async def aconnection(self) -> Any:
        """`connection`, for an event loop."""
        grip, sessions = self._bindable()
        if grip.session is None:
            grip.session = await sessions.asession(self.name, grip.token)
        return self._session_of(grip)

    def _bindable(self) -> tuple[Grip, Sessions]:
        sessions, grip = self._engine.lock_engine.sessions, self._mine()
        if sessions is None:
            raise OptionError(f"{self._engine.scheme}:// has no connections that a lock could be bound to")
        if self._release_via is not None:
            raise OptionError("a lock with release_via outlives its block, and has no connection of its own")
        if grip is None or not grip.held:
            raise self._not_held()
        return grip, sessions

    def _session_of(self, grip: Grip) -> Any:
        if grip.session is None:
            raise self._loss()
        return grip.session

    def __bool__(self) -> bool:
        return self.held

    def __del__(self) -> None:
        for grip in [*getattr(self, "_grips", {}).values(), *getattr(self, "_asking", ())]:
            held = grip.stands and grip.hold is not None and not grip.hold.ended
            if held and (records := self._engine.lock_engine.records) is not None:
                records.failed(grip.token, Problem("ResourceWarning", "it was held, and never released", ""))
            grip.let_go()  # before the warning, which may be an error
            if held:
                message = f"the lock {self.name!r} was held, and never released"
                warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lock can't be copied or pickled: two would release what one took; make another by its name")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {'lost' if self.lost else 'held' if self.held else 'free'}>"

    # -- plain verbs ----------------------------------------------------------------------------------------------

    def acquire(self, wait: Seconds = None) -> bool:
        """Take it, after at most `wait` seconds (the object's, if it is not given). False: somebody else has it.

        >>> lock = Lock("nightly")
        >>> lock.acquire(wait=5)
        True
        >>> lock.release()
        """
        return run_blocking(self._taking(BLOCKING, wait)) is None

    def release(self) -> None:
        """Give it back. LockLost if it had ended before.

        >>> lock = Lock("nightly")
        >>> lock.release()
        Traceback (most recent call last):
        stampede.errors.LockLost: the lock 'nightly' is not held by this thread or task: released, or never taken
        """
        run_blocking(self._releasing(BLOCKING))

    def extend(self, seconds: Seconds) -> None:
        """Have it stand for so long from now at least, also if nobody renews it: before work in which this process may
        be frozen, or `max_hold` over. LockLost if it has ended.

        >>> with Lock("nightly") as lock:
        ...     lock.extend("10m")
        ...     lock.remaining > 590
        True
        """
        run_blocking(self._extending(BLOCKING, seconds))

    def detach(self, seconds: Seconds = None) -> bytes:
        """Let go of it without giving it back: it stands for so long yet (its lease, by default), and who says its
        token, which is returned, goes on with it, here or elsewhere. LockLost if it has ended.

        >>> lock = Lock("report")
        >>> lock.acquire()
        True
        >>> token = lock.detach("1m").hex()  # goes along with the job
        >>> with Lock("report", token=token) as lock:
        ...     lock.held
        True
        """
        return run_blocking(self._detaching(BLOCKING, seconds))

    def locked(self) -> bool:
        """Has anybody the lock, or may have? By the time that it is said, that may be otherwise.

        >>> Lock("nightly").locked()
        False
        """
        return run_blocking(self._is_locked(BLOCKING))

    def __enter__(self: SELF) -> SELF:
        block = self._blocks.take(sys._getframe(1))
        refusal = run_blocking(self._taking(BLOCKING, self._patience, block))
        if refusal is not None:
            self._not_had(block, refusal)
        return self

    # -- and their twins ------------------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None) -> bool:
        return await self._taking(self._suspending, wait) is None

    async def arelease(self) -> None:
        await self._releasing(self._suspending)

    async def aextend(self, seconds: Seconds) -> None:
        await self._extending(self._suspending, seconds)

    async def adetach(self, seconds: Seconds = None) -> bytes:
        return await self._detaching(self._suspending, seconds)

    async def alocked(self) -> bool:
        return await self._is_locked(self._suspending)

    def __aenter__(self: SELF) -> Coroutine[Any, Any, SELF]:
        block = self._blocks.take(sys._getframe(1))
        return self._entered(self._taking(self._suspending, self._patience, block), block)

    async def _entered(self: SELF, taking: Coroutine[Any, Any, Busy | None], block: Block | None) -> SELF:
        refusal = await taking
        if refusal is not None:
            self._not_had(block, refusal)
        return self

    # -- the ends of blocks ---------------------------------------------------------------------------------------

    if TYPE_CHECKING:  # what a `with` statement finds

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:

        @BlockEnd
        def __exit__(self, kind, error, trace, *, block=None) -> None:
            """Give it back. LockLost if it had ended before; EngineError if nobody can say."""
            run_blocking(self._leaving(BLOCKING, error, block))

        @BlockEnd
        def __aexit__(self, kind, error, trace, *, block=None) -> Coroutine[Any, Any, None]:
            """The same."""
            return self._leaving(self._suspending, error, block)

    # -- how ------------------------------------------------------------------------------------------------------

    _patience: float | None = None  # of its blocks; None: the object's
    _room: float = 1  # how many may be inside with it, itself included
    _denied: WeakKeyDictionary[object, int] | None = None  # callers, and which of their grips wasn't granted last

    def _not_had(self, block: Block | None, refusal: Busy) -> None:
        """Somebody else has it, as was said at last, and a block is to be entered. None: by no `with`."""
        if self._own(caller()) is not None:
            raise LockTimeout(f"this very thread or task has the lock {self.name!r}, and would wait for itself")
        raise self._timeout(refusal, f"somebody else has the lock {self.name!r}")

    def _timeout(self, refusal: Busy, why: str) -> LockTimeout:
        if not refusal.grace:
            return LockTimeout(f"{why}, and wait ran out: {self._wait:g} s")
        its, left = self._engine.lock_engine.called, round(refusal.lease, 1)
        return LockTimeout(
            f"{self.name!r} is not to be had yet, and wait ran out: {self._wait:g} s: {its} has just been started, and "
            f"for another {left:g} s grants nothing but what was held before"
        )

    def _asked(self, colour: Colour) -> PlainLocks:
        return self._locks[colour.suspending]

    def _taking(self, colour: Colour, wait: Seconds, block: Block | None = None) -> Coroutine[Any, Any, Busy | None]:
        """To be run, or else dropped. None: it is had; else what was said at last. `block`: the one it is for."""
        self._bind()
        grip = Grip(self, self._engine, self._asked(BLOCKING), self.name, self._token)
        work = self._acquire(grip, colour, wait, block)
        if block is not None:
            block.grip = grip
        loop = running_loop() if colour.suspending or (block is not None and block.suspends) else None
        if loop is not None:
            grip.ends_with(loop)
        grip.belongs_to(work if block is None else block.end())
        self._asking.add(grip)
        return work

    async def _acquire(self, grip: Grip, colour: Colour, wait: Seconds, block: Block | None) -> Busy | None:
        me, locks = caller(), self._asked(colour)
        if block is not None:
            block.caller = ref(me)
        try:
            patience = self._wait if wait is None else seconds("wait", wait)
            began = monotonic()
            end = began + patience  # of all that it waits for, one after the other
            if len(self._asking) > 1 or self._grips:  # more than this one
                await self._tidy_up(colour)
            if self._own(me) is not None:
                self._asking.discard(grip)
                return _OURS  # waiting for ourselves would never end
            if self._token is not None and (len(self._asking) > 1 or self._in_use):
                raise OptionError(f"the lock {self.name!r} has a token of its own, for one caller at a time")
            pace: Pace | None = None
            while True:
                asked = monotonic()
                grip.asked, grip.answered = True, False
                left = max(end - asked, 0.0)
                reply = await self._question(locks, grip, patience > 0, left, began)
                grip.answered = True
                if isinstance(reply, Granted):
                    grip.grant(reply.fence, self._lease, self._max_hold, asked)
                    self._refused.discard(me)  # a block that was interrupted may have left it
                    self._grips[self._slot(me, grip)] = grip
                    self._asking.discard(grip)
                    if block is None:
                        grip.belongs_to_its_lock()
                    return None
                left = end - monotonic()
                if left <= 0:
                    break
                await self._wait_for(locks, grip, reply, left, began)
                pace = pace or Pace()
                rest = pace.rest(monotonic())
                if rest > 0:
                    await colour.park(Bell(), min(rest, max(end - monotonic(), 0.0)))
                if locks.hangs and monotonic() > end + LATE:
                    break  # a look has taken so long: one question more would be one too many
        except GeneratorExit:  # its loop was closed: nothing can be awaited any more
            if grip.asked and not grip.foreign:
                grip.drop()
            self._forget(grip)
            raise
        except BaseException:
            if grip.asked:  # the reply may just have been lost
                await colour.shielded(self._withdrawn(colour, grip))
            self._forget(grip)
            raise
        if patience > 0:  # or it would be its turn one day, and the lock be kept for it
            await colour.shielded(self._withdrawn(colour, grip))
        self._forget(grip)
        self.__dict__.setdefault("_denied", WeakKeyDictionary())[me] = grip.number
        return reply

    async def _question(
        self, locks: PlainLocks, grip: Grip, waits: bool, patience: float, since: float
    ) -> Granted | Busy:
        return await locks.acquire(grip.name, grip.token, self._lease, waits, patience, since, self._room)

    async def _wait_for(self, locks: PlainLocks, grip: Grip, busy: Busy, timeout: float, since: float) -> None:
        await locks.wait(grip.name, busy, timeout, since)

    def _slot(self, me: object, grip: Grip) -> object:
        """Under what it is known which caller has it."""
        return me

    async def _withdrawn(self, colour: Colour, grip: Grip) -> None:
        """Have nothing, and no place among those who wait."""
        if grip.hold is not None:
            grip.hold.end()
        if grip.lone or grip.answered:  # else who asks next with this token may have it
            await self._asked(colour).withdraw(grip.name, grip.token, late=not grip.answered)
        self._forget(grip)

    async def _tidy_up(self, colour: Colour) -> None:
        """Give back what was interrupted: its keeper has been told, and may not have come to it."""
        for grip in [*self._asking, *list(self._grips.values())]:
            if grip.forsaken or grip.over:
                grip.let_go()
                if grip.asked and not grip.foreign:
                    await colour.shielded(self._withdrawn(colour, grip))
                self._forget(grip)

    async def _extending(self, colour: Colour, more: Seconds) -> None:
        lasts = seconds("seconds", more)
        if not lasts < inf:
            raise OptionError(f"seconds is {more!r}: give a finite number")
        grip = self._mine()
        if grip is None or not grip.held:
            raise self._not_held()
        if not await colour.shielded(extended(self._asked(colour), grip, lasts)):
            raise self._loss()

    async def _detaching(self, colour: Colour, stands: Seconds) -> bytes:
        lasts = None if stands is None else seconds("seconds", stands)
        if lasts is not None and not 0 < lasts < inf:
            raise OptionError(f"seconds is {stands!r}: give a finite number, more than 0")
        grip = self._mine()
        if grip is None or not grip.held or grip.hold is None:
            raise self._not_held()
        if grip.session is not None:
            raise OptionError("a lock whose `connection` was asked for ends with that, and can't be handed over")
        if not await colour.shielded(handed_over(self._engine, colour, grip, lasts)):
            raise self._loss()
        grip.leaving = True
        self._forget(grip)
        return grip.token

    async def _is_locked(self, colour: Colour) -> bool:
        self._bind()
        return await inside(self._engine, colour, self.name) > 0

    def _not_held(self) -> LockLost:
        return LockLost(f"the lock {self.name!r} is not held by this thread or task: released, lost, or never taken")

    def _releasing(self, colour: Colour) -> Coroutine[Any, Any, None]:
        grip = self._mine()
        if grip is None:
            raise LockLost(f"the lock {self.name!r} is not held by this thread or task: released, or never taken")
        return grip.belongs_to(self._give_back(colour, grip, None))

    def _leaving(self, colour: Colour, error: BaseException | None, block: Block | None) -> Coroutine[Any, Any, None]:
        grip = self._unclaimed() if block is None or block.grip is None else self._of(block, block.grip)
        if grip is None or (grip.owned and not colour.suspending):
            return self._leave(colour, grip, error)
        return grip.belongs_to(self._leave(colour, grip, error))  # what it belongs to ends when this returns

    async def _leave(self, colour: Colour, grip: Grip | None, error: BaseException | None) -> None:
        if grip is None or grip.hold is None:
            return  # released inside the block, or refused
        if grip.lapsed and not grip.foreign:
            grip.let_go()
            self._forget(grip)
            if error is None:
                raise self._loss()
            return
        if error is not None or self._release_via is None or grip.hold.lost:
            await self._give_back(colour, grip, error)
            return
        grip.leaving = True
        grip.hold.end()
        try:
            hooked = self._release_via(Release(self, grip))
            if iscoroutine(hooked):
                await _awaited(hooked, colour)
        except BaseException as failure:
            await self._give_back(colour, grip, failure)
            raise
        grip.belongs_to_its_lock()
        self._take(grip)

    async def _give_back(self, colour: Colour, grip: Grip, error: BaseException | None) -> None:
        assert grip.hold is not None
        grip.leaving, lost = True, grip.hold.lost
        grip.hold.end()
        if grip.foreign:
            self._forget(grip)
            return  # a forked child: the lock is its parent's
        records = self._engine.lock_engine.records
        if error is not None and records is not None:
            records.failed(grip.token, problem_of(error))
        try:
            kept = await colour.shielded(self._given_back(colour, grip)) and not lost
        except EngineError as trouble:
            if not self._asked(colour).hangs:
                grip.let_go()  # its keeper tries again, once; else its lease ends it
            self._forget(grip)
            if error is None and lost:
                raise self._loss() from trouble
            if error is None:
                raise
            return  # the block's own error goes first
        if not kept and error is None:
            raise self._loss()

    async def _given_back(self, colour: Colour, grip: Grip) -> bool:
        stood = await self._asked(colour).release(grip.name, grip.token)
        self._forget(grip)  # not before: until here, whoever finds that we were interrupted does it
        return stood

    def _loss(self) -> LockLost:
        return LockLost(f"the lock {self.name!r} ended before its block did: somebody else may have been inside")

    def _own(self, me: object) -> Grip | None:
        """What this caller has, and would wait for itself to give back."""
        grip = self._grips.get(me)
        return grip if grip is not None and (grip.held or (grip.leaving and not grip.over)) else None

    def _of(self, block: Block, grip: Grip) -> Grip | None:
        """What the end of a block gives back: what it took; or, where that is no more, what its caller took inside."""
        if grip.hold is not None and not grip.leaving:
            return grip
        me = caller()
        again = self._grips.get(me) if block.caller is not None and block.caller() is me else None
        if again is None or again.owned or again.number < grip.number or not again.stands:
            return None
        return again

    def _has_refused(self, me: object, grip: Grip) -> bool:
        """Is this caller, who has it, in a block that didn't get it since? One thread may run many a generator's."""
        if me in self._refused:
            return True
        for block in list(self._vain.values()):
            if block.end() is None or block.caller is None or block.grip is None:
                continue
            if block.caller() is me and block.grip.number > grip.number:
                return True
        return False

    def _unclaimed(self) -> Grip | None:
        """What is given back where `__exit__` was called by no `with`: nothing that a block has."""
        me = caller()
        if me in self._refused:
            self._refused.discard(me)
            return None
        grip = self._mine()
        return None if grip is None or (grip.owned and grip is not self._grips.get(me)) else grip

    def _mine(self) -> Grip | None:
        me = caller()
        grip = self._grips.get(me)
        if grip is not None:
            return grip if grip.stands else None
        standing = [each for each in list(self._grips.values()) if each.stands]
        denied = -1 if self._denied is None else self._denied.get(me, -1)
        if len(standing) != 1 or standing[0].number < denied:  # it is why this caller was refused
            return None
        return standing[0]  # taken by another thread or task, and handed on

    @property
    def _in_use(self) -> bool:
        return any(grip.stands for grip in list(self._grips.values()))

    def _take(self, grip: Grip) -> None:
        self._asking.discard(grip)
        for caller, held in list(self._grips.items()):
            if held is grip:
                self._grips.pop(caller, None)

    def _forget(self, grip: Grip) -> None:
        self._take(grip)
        grip.end()


async def _awaited(hooked: Coroutine[Any, Any, object], colour: Colour) -> None:
    if not colour.suspending:
        hooked.close()
        raise OptionError("release_via gives a coroutine, which can be awaited at the end of an `async with` only")
    await hooked


_OURS = Busy(b"", 0.0)


class Release:
    """What `release_via` gets. Called, it gives the lock back: LockLost if that had ended by then."""

    __slots__ = ("_grip", "_lock", "name", "token")

    def __init__(self, lock: Lock, grip: Grip) -> None:
        self.name, self.token = lock.name, grip.token
        self._lock, self._grip = lock, grip

    def __call__(self) -> None:
        run_blocking(self._lock._give_back(BLOCKING, self._grip, None))


defaults = {name: each.default for name, each in inspect.signature(Lock).parameters.items()}
"""Of its options."""


class TryLock(Lock):
    """A lock that is never waited for: `with try_lock("nightly") as lock: if lock: ...`.

    >>> with try_lock("nightly") as lock:
    ...     print("I do it" if lock else "somebody else does")
    I do it
    """

    _patience = 0

    def acquire(self, wait: Seconds = 0) -> bool:
        return super().acquire(wait)

    async def aacquire(self, wait: Seconds = 0) -> bool:
        return await super().aacquire(wait)

    def _not_had(self, block: Block | None, refusal: Busy) -> None:
        if block is None or block.grip is None:
            self._refused.add(caller())
            return
        for number, other in list(self._vain.items()):
            if other.end() is None:
                self._vain.pop(number, None)
        self._vain[block.grip.number] = block


class _Runner:
    """A thread, or a greenlet of it. An ident would be another's as soon as it has ended."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.thread = _Runner()
        self.greenlets: WeakKeyDictionary[Any, _Runner] = WeakKeyDictionary()


_here = _Here()


def caller() -> object:
    """Who calls: the task, or the thread or greenlet outside of tasks. Compared by identity."""
    if running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return task
    here = greenlets.here()
    if here is None:
        return _here.thread
    return _here.greenlets.setdefault(here(), _Runner())
