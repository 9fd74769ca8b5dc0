"""The lock that users see: mutual exclusion by name, across all processes that use the same engine."""

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
from stampede.model.ports import Busy, Engine, Granted
from stampede.runtime import process_lock
from stampede.runtime.colour import Bell, run_blocking
from stampede.runtime.signatures import with_twins
from stampede.settings.options import Seconds, seconds

__all__ = ["Lock", "TryLock", "token_of"]

ROOMY = "memory://, disk://, redis://, postgres://, etcd://, zookeeper:// and zmq://"
"""The engines whose locks may have several holders, for messages."""

LENGTH = 8
"""The length of a token in bytes."""


@with_twins
class Lock:
    """A named lock with a lease, renewed while it is held: `with Lock("nightly"): ...`.

    `with` and `acquire()` return a holding, which has `held`, `lost`, `fence`, `token`, `remaining`, `release()`,
    `extend()` and `detach()`. Any thread or task may release it. If a holding is dropped without a release, the lock
    is released when its lease would be renewed, and a warning is logged. A Lock object can be used again after release.
    Several threads and tasks can share it, and exclude each other. It is not re-entrant.

    - `lease`: seconds after which the lock ends if it is not renewed, for example because the process died.
    - `wait`: the most seconds that a caller waits; None is for ever. After that, a block raises LockTimeout.
    - `max_hold`: seconds after which renewal ends; None is never. Up to one `lease` later the lock is `lost`.
    - `shared`: several holders may be inside together, if all of them use `shared`. Waiters are served in the order of
      arrival, so that a stream of readers never keeps a writer out for ever.
    - `token`: the token from `detach`. With the same token it is the same holder. Such an object is for one caller at a
      time.
    - `release_via`: a function that gets the release at the end of the block, and calls it later, such as a database's
      on-commit hook. `async with` awaits it if it returns a coroutine. Renewal ends with the block. If the block
      raises, the lock is released at once.

    >>> with Lock("nightly", lease=60, wait=5) as lock:  # on this machine; with on="redis://...": in a fleet
    ...     lock.held
    True
    """

    _patience: float | None = None  # the seconds that a block waits; None: `wait`
    _room: float = 1  # how many holders it allows inside together, itself included
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
        """Take an engine, or a function that finds it each time, because settings may name another engine later."""
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
        self._last: Holding | None = None  # the holding that was granted last
        self._acquired: list[Holding] = []  # the holdings of `acquire()`, in order, for `release()`
        self._blocks: list[tuple[int, Holding]] = []  # the blocks under way, each with its thread or task

    def _use(self, engine: Engine) -> None:
        if engine.blocking.locks is None or engine.suspending.locks is None:
            raise OptionError(f"{engine.scheme}:// has no locks: name another engine with on=")
        self._check_room(engine.lock_engine)
        self._engine = engine
        self._access = Access(engine, release_via=self._release_via, detachable=self._detachable)
        called = self._access.called
        self._waits, self._refusals = (histogram(LOCK, called, outcome) for outcome in ("taken", "refused"))

    def _check_room(self, lock_engine: Engine) -> None:
        if self._room != 1 and not lock_engine.rooms:
            raise OptionError(f"a lock of {lock_engine.scheme}:// can't be shared: {ROOMY} have locks that can")

    def _current_access(self) -> Access:
        """Return the access to the lock's engine. Settings may have changed the engine since the last time."""
        if self._find is not None and (engine := self._find()) is not self._engine:
            self._use(engine)
        return self._access

    # -- what is held through this object -------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether any thread or task holds the lock through this object, as far as this process knows."""
        return any(each.held for each in [*self._acquired, *(holding for _, holding in list(self._blocks))])

    @property
    def lost(self) -> bool:
        """Whether the last holding that was taken through this object is lost: see `Holding.lost`."""
        return self._last is not None and self._last.lost

    @property
    def remaining(self) -> float:
        """The seconds left on the lease of the last holding; 0 if there was none."""
        return 0.0 if self._last is None else self._last.remaining

    @property
    def token(self) -> bytes | None:
        """The token that identifies this holder. None if the lock is not held through this object."""
        return self._last.token if self._last is not None and self._last.unreleased else None

    @property
    def fence(self) -> int | None:
        """The fence of the last holding, a number that grows from holder to holder. None if there was none."""
        return None if self._last is None else self._last.fence

    def __bool__(self) -> bool:
        return self.held

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lock can't be copied or pickled: two objects would release one lock; make another by name")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {'lost' if self.lost else 'held' if self.held else 'free'}>"

    # -- plain verbs ----------------------------------------------------------------------------------------------

    def acquire(self, wait: Seconds = None) -> Holding:
        """Take the lock, waiting at most `wait` seconds (by default, the object's `wait`).

        The holding that is returned is false if another holder has the lock. Raise EngineError if the engine fails.

        >>> holding = Lock("nightly").acquire(wait=5)
        >>> if holding:
        ...     holding.release()
        """
        return self._remember(run_blocking(self._take(self._current_access().blocking, wait)))

    def release(self) -> None:
        """Release the lock that `acquire()` took through this object, in any thread or task.

        Raise LockLost if it had ended before, and EngineError if the engine could not be told. If threads share the
        object, each should release the holding that its `acquire()` returned. A lock taken by `with` is released by
        the end of its block, or by its holding.

        >>> lock = Lock("nightly")
        >>> lock.release()
        Traceback (most recent call last):
        stampede.errors.LockLost: the lock 'nightly' is not held through this object: released, or never acquired
        """
        self._first_acquired().release()

    def locked(self) -> bool:
        """Return whether any process holds the lock, or may hold it. That may have changed when this returns.

        >>> Lock("nightly").locked()
        False
        """
        return run_blocking(self._is_locked(self._current_access().blocking))

    def __enter__(self) -> Holding:
        return self._enter_block(run_blocking(self._take(self._current_access().blocking, self._patience)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock. Raise LockLost if it had ended before, and EngineError if the engine could not be told."""
        holding = self._leave_block()
        run_blocking(holding.leave(holding.access.blocking, error))

    # -- the same verbs, awaited ----------------------------------------------------------------------------------

    async def aacquire(self, wait: Seconds = None) -> Holding:
        return self._remember(await self._take(self._current_access().suspending, wait))

    async def arelease(self) -> None:
        await self._first_acquired().arelease()

    async def alocked(self) -> bool:
        return await self._is_locked(self._current_access().suspending)

    async def __aenter__(self) -> Holding:
        holding = self._enter_block(await self._take(self._current_access().suspending, self._patience))
        holding.ends_with_loop()
        return holding

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock. Raise LockLost if it had ended before, and EngineError if the engine could not be told."""
        holding = self._leave_block()
        await holding.leave(holding.access.suspending, error)

    # -- taking the lock ------------------------------------------------------------------------------------------

    async def _take(self, side: LocksSide, wait: Seconds) -> Holding:
        began = monotonic()
        try:
            holding = await self._ask_until_granted(side, self._wait if wait is None else seconds("wait", wait))
        except EngineError as error:
            raise naming(self.name, "can't be taken", error) from error.__cause__
        (self._waits if holding.refusal is None else self._refusals).observe(monotonic() - began)
        return holding

    async def _ask_until_granted(
        self, side: LocksSide, wait: float, on_ask: Callable[[], object] | None = None
    ) -> Holding:
        """Ask the engine until the lock is granted, or `wait` seconds have passed. Then the holding has a `refusal`.
        `on_ask` is called before each question."""
        holding = Holding(side.access, self.name, self._token)
        if self._token is not None:
            if self._last is not None and not self._last.over:
                raise OptionError(f"the lock {self.name!r} was made with token=, and is for one caller at a time")
            self._last = holding
        end, backoff = monotonic() + wait, None
        try:
            while True:
                asked = monotonic()
                if on_ask is not None:
                    on_ask()
                reply = await self._ask_once(side, holding, waits=wait > 0)
                if isinstance(reply, Granted):
                    holding.grant(reply.fence, self._lease, self._max_hold, asked)
                    self._last = holding
                    return holding
                left = end - monotonic()
                if left <= 0:
                    break
                await self._wait_for_change(side, holding, reply, left)
                backoff = backoff or Backoff()
                pause = backoff.rest(monotonic())
                if pause > 0:
                    await side.colour.park(Bell(), min(pause, max(end - monotonic(), 0.0)))
        except BaseException:  # it may be granted nevertheless, or be in the queue
            holding.let_go()
            raise
        holding.over, holding.refusal = True, reply
        if wait > 0:  # leave the queue: otherwise the lock would be reserved for this caller when its turn comes
            await side.colour.shielded(quietly(side.locks.release, holding.key, holding.token))
        return holding

    async def _ask_once(self, side: LocksSide, holding: Holding, *, waits: bool) -> Granted | Busy:
        return await side.locks.acquire(holding.key, holding.token, self._lease, waits=waits, room=self._room)

    async def _wait_for_change(self, side: LocksSide, holding: Holding, busy: Busy, timeout: float) -> None:
        await side.locks.wait(holding.key, busy, timeout)

    async def _is_locked(self, side: LocksSide) -> bool:
        return await side.inside(self.name) > 0

    # -- the holdings of this object ------------------------------------------------------------------------------

    def _remember(self, holding: Holding) -> Holding:
        with process_lock.lock:
            self._acquired = [each for each in (*self._acquired, holding) if each.unreleased]
        return holding

    def _first_acquired(self) -> Holding:
        """Return the holding that was acquired first. So a lost one is reported before a later one is released."""
        with process_lock.lock:
            unreleased = [each for each in self._acquired if each.unreleased]
            self._acquired = unreleased[1:]
        if not unreleased:
            raise LockLost(f"the lock {self.name!r} is not held through this object: released, or never acquired")
        return unreleased[0]

    def _enter_block(self, holding: Holding) -> Holding:
        if holding.refusal is not None:
            self._refuse(holding.refusal)
        self._blocks.append((_caller_id(), holding))
        return holding

    def _leave_block(self) -> Holding:
        """Return the holding of the block that ends here. A generator's block may end in another thread or task than it
        began in, while other callers are in blocks of the same object. Then take a block that holds nothing, if there
        is one, so that no caller loses its lock."""
        blocks, here = list(self._blocks), _caller_id()
        mine = [each for each in blocks if each[0] == here][-1:]
        block = (mine or [each for each in blocks if not each[1].unreleased] or blocks)[0]
        self._blocks.remove(block)
        return block[1]

    def _refuse(self, refusal: Busy) -> None:
        """Raise LockTimeout, because a block can't be entered: another holder has the lock."""
        if self.held:
            raise self._timeout(refusal, f"this Lock object already holds {self.name!r}, and is not re-entrant")
        raise self._timeout(refusal, f"the lock {self.name!r} is already held")

    def _timeout(self, refusal: Busy, why: str) -> LockTimeout:
        if not refusal.grace:
            return LockTimeout(f"{why}, and wait ran out: {self._wait:g} s")
        return LockTimeout(
            f"{self.name!r} is not available yet, and wait ran out: {self._wait:g} s: {self._access.called} was just "
            f"started, and for another {round(refusal.lease, 1):g} s grants only what was held before"
        )


class TryLock(Lock):
    """A lock that never waits: `with try_lock("nightly") as lock: if lock: ...`.

    The block is entered in any case. The holding is false if another holder has the lock.

    >>> with try_lock("nightly") as lock:
    ...     print("I do it" if lock else "another process does it")
    I do it
    """

    _patience = 0

    def acquire(self, wait: Seconds = 0) -> Holding:
        return super().acquire(wait)

    async def aacquire(self, wait: Seconds = 0) -> Holding:
        return await super().aacquire(wait)

    def _refuse(self, refusal: Busy) -> None:
        """Do nothing, because the block is entered even without the lock."""


def token_of(own: bytes | str | None) -> bytes | None:
    """Return the token of a lock for `token=`: a token itself, its hexadecimal digits, or any other text. Raise
    OptionError if it is neither bytes nor a text, or empty."""
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


def _caller_id() -> int:
    """Return a number that identifies the current task, or else the thread or greenlet, while it lives."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return get_ident() if task is None else id(task)
