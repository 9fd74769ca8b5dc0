"""The user's face of a lock: mutual exclusion by name, over every process that reaches the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from math import inf
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import NoReturn

from stampede.algorithm.finish import quietly
from stampede.errors import EngineError, LockLost, LockTimeout, OptionError
from stampede.locks.holding import Access, Holding, Hook, LocksSide, naming
from stampede.metrics.table import LOCK, histogram
from stampede.model.backoff import Backoff
from stampede.model.policy import Seconds, seconds
from stampede.model.ports import Busy, Engine, Granted
from stampede.runtime import process_lock
from stampede.runtime.colour import Bell, run_blocking
from stampede.runtime.signatures import with_twins

__all__ = ["Lock", "TryLock", "token_of"]

ROOMY = "memory://, disk://, redis://, postgres://, etcd://, zookeeper:// and zmq://"
"""Whose locks have room for more than one, for people."""

LENGTH = 8
"""Bytes of a token, as engines have them."""


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
    A holding that is dropped without a release is given back when it would be renewed, and that is logged.

    >>> with Lock("nightly", lease=60, wait=5) as lock:  # of all processes of this machine; on="redis://..." of all
    ...     lock.held
    True
    """

    _patience: float | None = None  # of its blocks; None: the object's
    _room: float = 1  # how many may be inside with it, itself included
    _detachable = True

    def __init__(
        self,
        name: str,
        engine: Engine | Callable[[], Engine],
        *,
        lease: float | str | timedelta = 30.0,
        wait: Seconds = None,
        max_hold: Seconds = None,
        release_via: Hook | None = None,
        shared: bool = False,
        token: bytes | str | None = None,
    ) -> None:
        """`engine`: or what finds it each time that the lock is taken, as settings may name another one by then."""
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
        self._find = None if isinstance(engine, Engine) else engine
        self._use(engine if isinstance(engine, Engine) else engine())
        self._last: Holding | None = None  # the one that was granted last
        self._acquired: list[Holding] = []  # by `acquire()`, in this order, for `release()`
        self._blocks: list[tuple[int, Holding]] = []  # and the thread or task that has entered each

    def _use(self, engine: Engine) -> None:
        if engine.blocking.locks is None or engine.suspending.locks is None:
            raise OptionError(f"{engine.scheme}:// is no lock engine: name another with on=")
        self._check_room(engine.lock_engine)
        self._engine = engine
        self._access = Access(engine, release_via=self._release_via, detachable=self._detachable)
        its = self._access.called
        self._waits, self._refusals = (histogram(LOCK, its, outcome) for outcome in ("taken", "refused"))

    def _check_room(self, its: Engine) -> None:
        if self._room != 1 and not its.rooms:
            raise OptionError(f"a lock of {its.scheme}:// can't be shared: {ROOMY} have those that can")

    def _now(self) -> Access:
        """The access to its engine, which settings may have changed."""
        if self._find is not None and (engine := self._find()) is not self._engine:
            self._use(engine)
        return self._access

    # -- what is held through this object -------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Is it held through this object, by whichever thread or task, as far as is known?"""
        return any(each.held for each in [*self._acquired, *(holding for _, holding in list(self._blocks))])

    @property
    def lost(self) -> bool:
        """`lost` of the last holding that was taken through this object."""
        return self._last is not None and self._last.lost

    @property
    def remaining(self) -> float:
        """`remaining` of the last holding; 0 before."""
        return 0.0 if self._last is None else self._last.remaining

    @property
    def token(self) -> bytes | None:
        """What tells this holder from all others; None while the lock isn't held through this object."""
        return self._last.token if self._last is not None and self._last.stands else None

    @property
    def fence(self) -> int | None:
        """`fence` of the last holding; None before."""
        return None if self._last is None else self._last.fence

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
        return self._kept(run_blocking(self._take(self._now().blocking, wait)))

    def release(self) -> None:
        """Give back what `acquire()` took through this object, by whichever thread or task. LockLost if it had ended.

        Threads that share the object release the holding that `acquire()` gave to each. What `with` has taken is
        released by its block, or by its holding.

        >>> lock = Lock("nightly")
        >>> lock.release()
        Traceback (most recent call last):
        stampede.errors.LockLost: the lock 'nightly' is not held through this object: released, or never acquired
        """
        self._first().release()

    def locked(self) -> bool:
        """Has any process the lock, or may have? By the time that it is said, that may be otherwise.

        >>> Lock("nightly").locked()
        False
        """
        return run_blocking(self._is_locked(self._now().blocking))

    def __enter__(self) -> Holding:
        return self._entered(run_blocking(self._take(self._now().blocking, self._patience)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. LockLost if it had ended before; EngineError if the engine could not be told."""
        holding = self._left()
        run_blocking(holding.leave(holding.access.blocking, error))

    # -- and their twins ------------------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None) -> Holding:
        return self._kept(await self._take(self._now().suspending, wait))

    async def arelease(self) -> None:
        await self._first().arelease()

    async def alocked(self) -> bool:
        return await self._is_locked(self._now().suspending)

    async def __aenter__(self) -> Holding:
        holding = self._entered(await self._take(self._now().suspending, self._patience))
        holding.ends_with_loop()
        return holding

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back. LockLost if it had ended before; EngineError if the engine could not be told."""
        holding = self._left()
        await holding.leave(holding.access.suspending, error)

    # -- how it is taken ------------------------------------------------------------------------------------------

    async def _take(self, way: LocksSide, wait: Seconds) -> Holding:
        began = monotonic()
        try:
            holding = await self._taken(way, self._wait if wait is None else seconds("wait", wait))
        except EngineError as error:
            raise naming(self.name, "can't be taken", error) from error.__cause__
        (self._waits if holding.refusal is None else self._refusals).observe(monotonic() - began)
        return holding

    async def _taken(self, way: LocksSide, wait: float, heard: Callable[[], object] | None = None) -> Holding:
        """Ask until it is granted, or `wait` runs out: then the holding has the refusal. `heard` is called before each
        question."""
        holding = Holding(way.access, self.name, self._token)
        if self._token is not None:
            if self._last is not None and not self._last.over:
                raise OptionError(f"the lock {self.name!r} has a token of its own, for one caller at a time")
            self._last = holding
        end, pace = monotonic() + wait, None
        try:
            while True:
                asked = monotonic()
                if heard is not None:
                    heard()
                reply = await self._asked(way, holding, waits=wait > 0)
                if isinstance(reply, Granted):
                    holding.grant(reply.fence, self._lease, self._max_hold, asked)
                    self._last = holding
                    return holding
                left = end - monotonic()
                if left <= 0:
                    break
                await self._woken(way, holding, reply, left)
                pace = pace or Backoff()
                rest = pace.rest(monotonic())
                if rest > 0:
                    await way.colour.park(Bell(), min(rest, max(end - monotonic(), 0.0)))
        except BaseException:  # it may have been granted all the same, or be in the queue
            holding.let_go()
            raise
        holding.over, holding.refusal = True, reply
        if wait > 0:  # or it would be its turn one day, and the lock be kept for it
            await way.colour.shielded(quietly(way.locks.release, holding.key, holding.token))
        return holding

    async def _asked(self, way: LocksSide, holding: Holding, *, waits: bool) -> Granted | Busy:
        return await way.locks.acquire(holding.key, holding.token, self._lease, waits=waits, room=self._room)

    async def _woken(self, way: LocksSide, holding: Holding, busy: Busy, timeout: float) -> None:
        await way.locks.wait(holding.key, busy, timeout)

    async def _is_locked(self, way: LocksSide) -> bool:
        return await way.inside(self.name) > 0

    # -- which holding is whose -----------------------------------------------------------------------------------

    def _kept(self, holding: Holding) -> Holding:
        with process_lock.lock:
            self._acquired = [each for each in (*self._acquired, holding) if each.stands]
        return holding

    def _first(self) -> Holding:
        """What was acquired first: so what was lost is told first, and takes nothing from the next holder."""
        with process_lock.lock:
            standing = [each for each in self._acquired if each.stands]
            self._acquired = standing[1:]
        if not standing:
            raise LockLost(f"the lock {self.name!r} is not held through this object: released, or never acquired")
        return standing[0]

    def _entered(self, holding: Holding) -> Holding:
        if holding.refusal is not None:
            self._refuse(holding.refusal)
        self._blocks.append((_here(), holding))
        return holding

    def _left(self) -> Holding:
        """The holding of the block that ends here.

        A generator's block may end in another thread or task than it began in, while others are in blocks of the same
        object: then it is one that holds nothing, if there is any, so that no lock ends under its holder.
        """
        blocks, here = list(self._blocks), _here()
        mine = [each for each in blocks if each[0] == here][-1:]
        block = (mine or [each for each in blocks if not each[1].stands] or blocks)[0]
        self._blocks.remove(block)
        return block[1]

    def _refuse(self, refusal: Busy) -> None:
        """Another holder has the lock, as was said at last, and a block is to be entered."""
        if self.held:
            raise self._timeout(refusal, f"the lock {self.name!r} is held through this very object (not re-entrant)")
        raise self._timeout(refusal, f"the lock {self.name!r} is already held")

    def _timeout(self, refusal: Busy, why: str) -> LockTimeout:
        if not refusal.grace:
            return LockTimeout(f"{why}, and wait ran out: {self._wait:g} s")
        return LockTimeout(
            f"{self.name!r} is not to be had yet, and wait ran out: {self._wait:g} s: {self._access.called} has just "
            f"been started, and for another {round(refusal.lease, 1):g} s grants nothing but what was held before"
        )


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

    def _refuse(self, refusal: Busy) -> None:
        """Its block is entered all the same."""


def token_of(own: bytes | str | None) -> bytes | None:
    """Return a lock's token from what its user gives: a token, its hexadecimal digits, or any other text."""
    if own is None:
        return None
    if not isinstance(own, (bytes, str)) or not own:
        raise OptionError(f"token is {own!r}: give a lock's `token`, its `.hex()`, or a text of your own")
    if isinstance(own, bytes) and len(own) == LENGTH:
        return own
    if isinstance(own, str) and len(own) == 2 * LENGTH:
        with suppress(ValueError):
            return bytes.fromhex(own)
    words = own if isinstance(own, bytes) else own.encode("utf-8", "surrogatepass")
    return blake2b(words, digest_size=LENGTH, person=b"stampede").digest()


def _here() -> int:
    """A number of the task that runs, or else of the thread or greenlet, while that lives."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return get_ident() if task is None else id(task)
