"""Times in which this process, or this event loop, did not come to run: what ran out then says nothing of others.

A server may have answered long ago; its reply lies there, and nobody has read it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

__all__ = ["LATE", "NEXT", "Patience", "Stalls", "given_back", "unhurried"]

T = TypeVar("T")

NEXT = 0.01
"""Seconds until a loop, or another thread, has looked at its sockets."""

LATE = 0.05
"""Seconds by which nothing comes too late on a machine that isn't busy."""


def given_back(late: float, seconds: float) -> float:
    """Seconds more for what was to take no longer than `seconds`, if we look at it so much too late. Pure."""
    return min(max(late, NEXT), max(seconds, NEXT))


class Patience:
    """Seconds that something is waited for in short pauses, without those in which we did not run."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._counted = time.monotonic()

    def spend(self, pause: float) -> None:
        """Such a pause is over."""
        now = time.monotonic()
        self.left -= min(now - self._counted, pause + LATE)
        self._counted = now

    def rest(self, pause: float) -> None:
        time.sleep(pause)
        self.spend(pause)


class Stalls:
    """Seconds in which the running loop has failed to run in the block."""

    lost = 0.0

    def __enter__(self) -> Stalls:
        self._loop = asyncio.get_running_loop()
        self._wind(time.monotonic())
        return self

    def _wind(self, now: float) -> None:
        self._due = now + LATE
        self._timer = self._loop.call_later(LATE, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        self._count(now)
        self._wind(now)

    def _count(self, now: float) -> None:
        late = now - self._due
        if late > LATE:
            self.lost += late

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._count(time.monotonic())


async def unhurried(connect: Callable[[], Awaitable[T]], hung: type[Exception] | tuple[type[Exception], ...]) -> T:
    """What is connected to. If the time for it ran out while this loop did not run, it is tried once more, for as long
    as was lost: who is often blocked for a moment doesn't wait much longer for a server that hangs."""
    stalls = Stalls()
    kinds: tuple[type[Exception], ...] = hung if isinstance(hung, tuple) else (hung,)
    try:
        with stalls:
            return await connect()
    except kinds:
        if not stalls.lost:
            raise
        more: tuple[type[Exception], ...] = (TimeoutError, *kinds)
        try:
            async with asyncio.timeout(stalls.lost):
                return await connect()
        except more:
            pass
        raise
