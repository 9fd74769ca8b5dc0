"""Once per period: a lock that stays after its block, so that a second caller does not repeat the work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from datetime import timedelta
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from stampede.errors import EngineError, LockLost, OptionError
from stampede.locks.holding import Holding, LocksSide
from stampede.locks.lock import TryLock
from stampede.model.ports import Busy, Engine
from stampede.runtime.colour import lasting, run_blocking
from stampede.runtime.signatures import is_async
from stampede.settings.options import Seconds, seconds

__all__ = ["Once"]

P = ParamSpec("P")
T = TypeVar("T")

TOLERANCE = 1 / 20
"""The share of `every` by which a run may begin early. A nightly job is started a little earlier than the night before,
if only by a second, and an hour earlier when the clocks go forward. It must not skip that night."""


class Once(TryLock):
    """Work that is done once per period, over all processes that use the same engine.

    `with once("nightly", every="1d") as mine: if mine: ...`, or `@once("nightly", every="1d")` on a def or an async
    def, which then returns None when it is not this caller's turn. Callers never wait.

    - `every`: the period, measured by the engine from the start of a run. A run may begin a twentieth earlier.
    - `on`: a cache's name in the settings, a Cache, or a URL. By default it is the default cache.
    - `retry_after`: after a run that raised, no caller tries again for this many seconds. By default the next one does.
    - `lease`: if the process of a run dies, the next caller may run after this many seconds.
    - `max_hold`: seconds after which a run counts as hung, and its lease is not renewed; None is never.

    `mine.release()` in the block ends the turn without counting it as done.

    >>> with once("nightly", every="1d") as mine:
    ...     print("I do it" if mine else "it is done, or being done")
    I do it
    >>> with once("nightly", every="1d") as mine:
    ...     print("I do it" if mine else "it is done, or being done")
    it is done, or being done
    """

    def __init__(
        self,
        name: str,
        engine: Engine | Callable[[], Engine],
        *,
        every: Seconds,
        retry_after: float | str | timedelta = 0.0,
        lease: float | str | timedelta = 30.0,
        max_hold: Seconds = None,
    ) -> None:
        self._every = seconds("every", every)
        self._retry_after = seconds("retry_after", retry_after)
        for option, length in (("every", self._every), ("retry_after", self._retry_after)):
            if length == inf:
                raise OptionError(f"{option} of once({name!r}) has no end: give a finite number of seconds")
        if not self._every:
            raise OptionError(f"every is {every!r}: it must be more than 0")
        super().__init__(name, engine, lease=lease, max_hold=max_hold)
        self.name = f"once:{name}"  # the lock's name, which no other lock has by accident

    def _use(self, engine: Engine) -> None:
        if engine.lock_engine.blocking.handover is None:
            raise OptionError(
                f"a lock of {engine.lock_engine.scheme}:// ends with its process, so it can't last for a period: name "
                "another engine with on="
            )
        super()._use(engine)

    def _refuse(self, refusal: Busy) -> None:
        if refusal.grace:  # "not mine" would mean that the work is done, or being done
            raise EngineError(
                f"{self._access.called} was just started, and can't tell for another {round(refusal.lease, 1):g} s "
                f"whether {self.name!r} was done"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the turn. Raise LockLost if another caller may have begun meanwhile, and EngineError if the engine could
        not be told that the work is done."""
        holding = self._leave_block()
        run_blocking(self._end(holding.access.blocking, holding, error))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the turn. Raise LockLost if another caller may have begun meanwhile, and EngineError if the engine could
        not be told that the work is done."""
        holding = self._leave_block()
        await self._end(holding.access.suspending, holding, error)

    async def _end(self, side: LocksSide, holding: Holding, error: BaseException | None) -> None:
        if holding.hold is None or holding.over or holding.hold.foreign:
            return  # it was not this caller's turn, or was released inside the block; in a forked child it never is
        if error is None:
            rest = self._every * (1 - TOLERANCE) - (monotonic() - holding.since)
        else:  # a cancellation or an exit says nothing about the work
            rest = self._retry_after if isinstance(error, Exception) else 0.0
        if rest <= 0:
            await holding.leave(side, error)
            return
        try:
            await holding.detached(side, rest)
        except BaseException as failure:  # also a cancellation
            # Unknown is whether the engine keeps the lock for `rest`. It is not released: the work may be done.
            holding.let_end()
            if error is None or not isinstance(failure, (EngineError, LockLost)):
                raise

    @overload  # an async function matches both: the narrower overload comes first
    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T | None]]: ...
    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]: ...

    def __call__(self, function: Callable[P, Any]) -> Callable[P, Any]:
        """Decorate a function: it is called if it is this caller's turn, and otherwise the call returns None."""
        if is_async(function, "@once"):

            @functools.wraps(function)
            async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with self as mine:
                    return await function(*args, **kwargs) if mine else None

            return awaited

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> Any:
            with self as mine:
                return lasting(function(*args, **kwargs)) if mine else None  # an awaitable is work to be done

        return called
