"""Many calls of one function: cached values are read together, and the other calls are made as usual."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from functools import partial
from time import monotonic
from typing import Any

from stampede.algorithm.call import Once
from stampede.algorithm.scope import ScopeSide
from stampede.model.result import Result, values_of
from stampede.runtime.colour import run_blocking
from stampede.runtime.threads import begun, with_signals_of_caller
from stampede.settings.options import Policy

__all__ = ["value_by_key"]


async def value_by_key(
    scope: ScopeSide,
    origins: Mapping[str, Callable[[], Any]],
    policy_of: Callable[[str], Policy],
    *,
    workers: int = 1,
    once: Once | None = None,
) -> dict[str, Any]:
    """Return the value of each key. Async functions compute missing values all at once; others compute them in turn, in
    `workers` threads. The first failure ends it."""
    at_hand = scope.at_hand if once is None else partial(scope.at_hand_of, once)
    values = {key: found.value for key in origins if (found := at_hand(key)) is not None}
    missing = [key for key in origins if key not in values]
    results = {} if once is not None else await scope.seen(missing, policy_of)
    calls = _Calls(scope, origins, policy_of, once, [key for key in missing if key not in results])
    if scope.colour.suspending:
        await calls.all_at_once()
    else:
        calls.in_turn(workers)
    results |= calls.results
    calls.results.clear()  # or its errors and this frame would refer to each other
    # If several calls raised, the caller's own interruption comes first.
    order = sorted((key for key in missing if key in results), key=lambda key: not results[key].is_interruption)
    return values | values_of({key: results[key] for key in order}, scope.policy)


class _Failed(Exception):
    """A failure of one of the calls. Its result holds the error."""


class _Calls:
    """Calls of one function, which end at the first failure."""

    def __init__(
        self,
        scope: ScopeSide,
        origins: Mapping[str, Callable[[], Any]],
        policy_of: Callable[[str], Policy],
        once: Once | None,
        keys: list[str],
    ) -> None:
        self.results: dict[str, Result] = {}
        self._scope = scope
        self._origins = origins
        self._policy_of = policy_of
        self._once = once
        self._left = deque(keys)
        self._began = monotonic()
        self._over = False

    async def all_at_once(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for key in self._left:
                    tasks.create_task(self._call(key))
        except* _Failed:
            pass

    async def _call(self, key: str) -> None:
        if await self._fetch(key, 0.0):
            raise _Failed

    def in_turn(self, workers: int) -> None:
        """Make the calls in threads, one of which is the caller's. They begin in their order, so that the first failure
        is the one that would occur without threads."""
        number, some = min(workers, len(self._left)) - 1, partial(self._some, copy_context())
        helping = with_signals_of_caller(some)
        threads = [thread for _ in range(number) if (thread := begun("stampede-many", helping)) is not None]
        try:
            some()
            _join(threads)
        except BaseException:
            self._over = True
            _join(threads)  # leave no thread behind, unless there is a second interrupt
            raise

    def _some(self, context: Context) -> None:
        """Make calls, each in a copy of the caller's context. One `wait` covers all the waiting of this thread."""
        waited = 0.0
        while not self._over:
            try:
                key = self._left.popleft()
            except IndexError:
                return
            began = monotonic()
            if context.copy().run(run_blocking, self._fetch(key, waited)):
                self._over = True
            result = self.results.get(key)
            waited += 0.0 if result is None or result.stored else monotonic() - began

    async def _fetch(self, key: str, waited: float) -> bool:
        """Make one call. Return whether it has failed."""
        policy = self._policy_of(key).after(waited, monotonic() - self._began)
        try:
            result = await self._scope.fetch(key, self._origins[key], policy, once=self._once)
        except Exception as error:  # from waiting, or from the engine
            result = Result(error=error)
        self.results[key] = result
        return result.error is not None


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
