"""The user's face of a lock: mutual exclusion by name, over every process that reaches the engine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from math import inf
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn

from stampede.colour import BLOCKING, Bell, Colour, run_blocking, running_loop
from stampede.errors import EngineError, LockLost, LockTimeout, OptionError
from stampede.hands import inside, token_of
from stampede.holding import Access, Holding, Hook, naming
from stampede.metrics.table import LOCK, histogram
from stampede.pace import Pace
from stampede.policy import Seconds, seconds
from stampede.ports import Busy, Engine, Granted, Locks
from stampede.signatures import with_twins

__all__ = ["Lock", "TryLock"]

ROOMY = "memory://, disk://, redis://, postgres://, etcd://, zookeeper:// and zmq://"
"""Whose locks have room for more than one, for people."""


def nothing() -> None:
    """Do nothing."""


@with_twins
class Lock:
    """A named lock with a lease, renewed while it is held: `with Lock("nightly"): ...`.

    `with` and `acquire()` give a holding, which has `held`, `lost`, `fence`, `token`, `remaining`, `release()`,
    `extend()` and `detach()`. Any thread or task may release it. A Lock object may be used again after release, and by
    several threads and tasks, which exclude each other. It is not re-entrant.

    `release_via` gets the release at the end of the block and calls it when it sees fit (a database's on-commit hook; a
    coroutine is awaited in `async with`); renewal ends with the block, and an exception releases at once.
    `max_hold` seconds after the lock was taken its renewal ends, and up to one `lease` later the lock is `lost`.
    `shared`: other holders that say so may be inside as well, and nobody else; waiters are served in the order of
    arrival, so that readers who come and go keep no writer out for ever.
    `token`: the token of a lock that `detach` has let go of; with the same token it is the same holder. Such an object
    is for one caller at a time.
    A holding that is dropped without a release is given back, with a ResourceWarning.

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
        release_via: Hook | None = None,
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
        self._holdings: list[Holding] = []  # of `acquire()`, until released, and of blocks, until these end

    def _use(self, engine: Engine) -> None:
        if engine.blocking.locks is None or engine.suspending.locks is None:
            raise OptionError(f"{engine.scheme}:// is no lock engine: name another with on=")
        self._check_room(engine)
        self._engine = engine
        self._access = Access(engine, release_via=self._release_via, detachable=self._detachable)
        its = self._access.called
        self._waits, self._refusals = (histogram(LOCK, its, outcome) for outcome in ("taken", "refused"))

    def _check_room(self, engine: Engine) -> None:
        if self._room != 1 and not engine.lock_engine.rooms:
            raise OptionError(f"a lock of {engine.lock_engine.scheme}:// can't be shared: {ROOMY} have those that can")

    def _bind(self) -> None:
        """Before it is taken: settings may name another engine by now."""

    # -- what is held through this object -------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Is it held through this object, by whichever thread or task, as far as is known?"""
        return any(holding.held for holding in list(self._holdings))

    @property
    def lost(self) -> bool:
        """`lost` of the last holding that was taken through this object."""
        return self._last is not None and self._last.lost

    @property
    def remaining(self) -> float:
        """Seconds that are left of the lease, as far as is known, if it isn't renewed any more. 0: it isn't held."""
        return 0.0 if self._last is None else self._last.remaining

    @property
    def token(self) -> bytes | None:
        """What tells this holder from all others; None while it isn't held."""
        return self._last.token if self._last is not None and self._last.stands else None

    @property
    def fence(self) -> int | None:
        """`fence` of the last holding that was taken through this object; None before."""
        return self._taken().fence

    @property
    def connection(self) -> Any:
        """`connection` of the last holding that was taken through this object (`postgres://`)."""
        return self._taken().connection

    async def aconnection(self) -> Any:
        """`connection`, for an event loop."""
        return await self._taken().aconnection()

    @property
    def _last(self) -> Holding | None:
        return next((each for each in reversed(list(self._holdings)) if each.hold is not None), None)

    @property
    def _in_use(self) -> bool:
        return any(holding.stands for holding in list(self._holdings))

    def _taken(self) -> Holding:
        """The last holding, for what is done with one that is held."""
        last = self._last  # which is false if it was lost
        return Holding(self._access, self.name, self._token) if last is None else last

    def __bool__(self) -> bool:
        return self.held

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lock can't be copied or pickled: two would release what one took; make another by its name")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {'lost' if self.lost else 'held' if self.held else 'free'}>"

    # -- plain verbs ----------------------------------------------------------------------------------------------

    def acquire(self, wait: Seconds = None) -> Holding:
        """Take it, after at most `wait` seconds (the object's, if it is not given). The holding is false if another
        holder has the lock.

        >>> holding = Lock("nightly").acquire(wait=5)
        >>> if holding:
        ...     holding.release()
        """
        return self._kept(run_blocking(self._taken_by(BLOCKING, wait)), None)

    def release(self) -> None:
        """Give back what was taken through this object, by whichever thread or task. LockLost if it had ended before.

        Threads that share the object release the holding that `acquire()` gave to each.

        >>> lock = Lock("nightly")
        >>> lock.release()
        Traceback (most recent call last):
        stampede.errors.LockLost: the lock 'nightly' is not held through this object: released, or never taken
        """
        run_blocking(self._releasing(BLOCKING))

    def extend(self, seconds: Seconds) -> None:
        """`extend` of the last holding that was taken through this object.

        >>> lock = Lock("nightly")
        >>> with lock:
        ...     lock.extend("10m")
        """
        self._taken().extend(seconds)

    def detach(self, seconds: Seconds = None) -> bytes:
        """`detach` of the last holding that was taken through this object.

        >>> lock = Lock("report")
        >>> with lock:
        ...     token = lock.detach("1m").hex()
        """
        return self._taken().detach(seconds)

    def locked(self) -> bool:
        """Has any process the lock, or may have? By the time that it is said, that may be otherwise.

        >>> Lock("nightly").locked()
        False
        """
        return run_blocking(self._is_locked(BLOCKING))

    def __enter__(self) -> Holding:
        return self._entered(run_blocking(self._taken_by(BLOCKING, self._patience)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. LockLost if it had ended before; EngineError if the engine could not be told."""
        run_blocking(self._leaving(BLOCKING, error))

    # -- and their twins ------------------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None) -> Holding:
        return self._kept(await self._taken_by(self._access.suspending, wait), None)

    async def arelease(self) -> None:
        await self._releasing(self._access.suspending)

    async def aextend(self, seconds: Seconds) -> None:
        await self._taken().aextend(seconds)

    async def adetach(self, seconds: Seconds = None) -> bytes:
        return await self._taken().adetach(seconds)

    async def alocked(self) -> bool:
        return await self._is_locked(self._access.suspending)

    async def __aenter__(self) -> Holding:
        return self._entered(await self._taken_by(self._access.suspending, self._patience))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. LockLost if it had ended before; EngineError if the engine could not be told."""
        await self._leaving(self._access.suspending, error)

    # -- how ------------------------------------------------------------------------------------------------------

    _patience: float | None = None  # of its blocks; None: the object's
    _room: float = 1  # how many may be inside with it, itself included
    _detachable = True

    def _entered(self, holding: Holding) -> Holding:
        if holding.refusal is not None:
            self._not_had(holding.refusal)
        return self._kept(holding, _here())

    def _kept(self, holding: Holding, block: int | None) -> Holding:
        """The object keeps it for its release. What interrupts us here leaves it to nobody, which releases it."""
        if block is None and holding.refusal is not None:
            return holding
        try:
            holding.block = block
            if block is None:
                holding.outlives_its_loop()
            self._tidy_up()
            if holding not in self._holdings:
                self._holdings.append(holding)
        except BaseException:
            self._forget(holding)
            raise
        return holding

    def _tidy_up(self) -> None:
        """Forget what was released by its holding."""
        for each in list(self._holdings):
            if each.block is None and (each.leaving or each.over):
                self._forget(each)

    def _forget(self, holding: Holding) -> None:
        with suppress(ValueError):  # another thread has
            self._holdings.remove(holding)

    def _not_had(self, refusal: Busy) -> None:
        """Another holder has it, as was said at last, and a block is to be entered."""
        if self._in_use:
            raise self._timeout(refusal, f"the lock {self.name!r} is held through this very object (not re-entrant)")
        raise self._timeout(refusal, f"the lock {self.name!r} is already held")

    def _timeout(self, refusal: Busy, why: str) -> LockTimeout:
        if not refusal.grace:
            return LockTimeout(f"{why}, and wait ran out: {self._wait:g} s")
        its, left = self._engine.lock_engine.called, round(refusal.lease, 1)
        return LockTimeout(
            f"{self.name!r} is not to be had yet, and wait ran out: {self._wait:g} s: {its} has just been started, and "
            f"for another {left:g} s grants nothing but what was held before"
        )

    async def _taken_by(self, colour: Colour, wait: Seconds) -> Holding:
        """Take it for a caller, and count that."""
        began = monotonic()
        try:
            holding = await self._taking(colour, wait)
        except EngineError as error:
            raise naming(self.name, "can't be taken", error) from error.__cause__
        (self._waits if holding.refusal is None else self._refusals).observe(monotonic() - began)
        return holding

    async def _taking(self, colour: Colour, wait: Seconds, heard: Callable[[], object] = nothing) -> Holding:
        """Ask until it is granted, or `wait` runs out: then the holding has the refusal. `heard` is called before each
        question."""
        self._bind()
        holding = Holding(self._access, self.name, self._token)
        loop = running_loop() if colour.suspending else None
        if loop is not None:
            holding.ends_with(loop)
        if self._token is not None:
            if any(not each.over for each in self._holdings):
                raise OptionError(f"the lock {self.name!r} has a token of its own, for one caller at a time")
            self._holdings.append(holding)
        locks = self._access.locks(colour)
        try:
            patience = self._wait if wait is None else seconds("wait", wait)
            began = monotonic()
            end = began + patience  # of all that it waits for, one after the other
            pace: Pace | None = None
            while True:
                asked = monotonic()
                holding.asked, holding.answered = True, False
                heard()
                reply = await self._question(locks, holding, waits=patience > 0)
                holding.answered = True
                if isinstance(reply, Granted):
                    holding.grant(reply.fence, self._lease, self._max_hold, asked)
                    return holding
                left = end - monotonic()
                if left <= 0:
                    break
                await self._wait_for(locks, holding, reply, left)
                pace = pace or Pace()
                rest = pace.rest(monotonic())
                if rest > 0:
                    await colour.park(Bell(), min(rest, max(end - monotonic(), 0.0)))
            if patience > 0:  # or it would be its turn one day, and the lock be kept for it
                await colour.shielded(holding.withdraw(colour))
        except GeneratorExit:  # its loop was closed: nothing can be awaited any more
            holding.let_go()
            self._forget(holding)
            raise
        except EngineError:
            holding.let_go()  # what may have been granted is given back beside the caller, who has waited long enough
            self._forget(holding)
            raise
        except BaseException:
            if holding.asked and not holding.over:  # the reply may just have been lost
                await colour.shielded(holding.withdraw(colour))
            self._forget(holding)
            raise
        self._forget(holding)
        holding.over, holding.refusal = True, reply
        return holding

    async def _question(self, locks: Locks, holding: Holding, *, waits: bool) -> Granted | Busy:
        room = {} if self._room == 1 else {"room": self._room}
        return await locks.acquire(holding.key, holding.token, self._lease, waits=waits, **room)

    async def _wait_for(self, locks: Locks, holding: Holding, busy: Busy, timeout: float) -> None:
        await locks.wait(holding.key, busy, timeout)

    async def _is_locked(self, colour: Colour) -> bool:
        self._bind()
        return await inside(self._engine, colour, self.name) > 0

    async def _releasing(self, colour: Colour) -> None:
        standing = [each for each in list(self._holdings) if each.stands]
        plain = [each for each in standing if each.block is None]
        if not plain and len(standing) != 1:
            raise self._not_held(len(standing))
        holding = (plain or standing)[0]  # what was lost first is told first, and takes nothing from the next
        try:
            await holding.releasing(colour)
        finally:
            if holding.block is None:
                self._forget(holding)

    def _not_held(self, blocks: int) -> LockLost:
        if blocks:
            return LockLost(f"all that is held of {self.name!r} is of {blocks} blocks: release what one of `with` gave")
        return LockLost(f"the lock {self.name!r} is not held through this object: released, or never taken")

    async def _leaving(self, colour: Colour, error: BaseException | None) -> None:
        holding = self._ending()
        if holding is not None:
            self._forget(holding)
            await holding.leave(colour, error)

    def _ending(self) -> Holding | None:
        """The holding of the block that ends here.

        A generator's block may end in another thread or task than it began in, while others are in blocks of the same
        object: then it is one that holds nothing, if there is any, so that nobody's lock ends under its holder.
        """
        blocks, here = [each for each in list(self._holdings) if each.block is not None], _here()
        for each in reversed(blocks):
            if each.block == here:
                return each
        idle = [each for each in blocks if not each.stands]
        return next(iter(idle or blocks or list(self._holdings)), None)


defaults = {name: each.default for name, each in inspect.signature(Lock).parameters.items()}
"""Of its options."""


class TryLock(Lock):
    """A lock that is never waited for: `with try_lock("nightly") as lock: if lock: ...`.

    >>> with try_lock("nightly") as lock:
    ...     print("I do it" if lock else "somebody else does")
    I do it
    """

    _patience = 0

    def acquire(self, wait: Seconds = 0) -> Holding:
        return super().acquire(wait)

    async def aacquire(self, wait: Seconds = 0) -> Holding:
        return await super().aacquire(wait)

    def _not_had(self, refusal: Busy) -> None:
        """Its block is entered all the same."""


def _here() -> int:
    """A number of the task that runs, or else of the thread or greenlet, while that lives."""
    task = asyncio.current_task() if running_loop() is not None else None
    return get_ident() if task is None else id(task)
