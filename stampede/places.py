"""Places beside the caller, for computations that nobody is to wait for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import copy_context
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any

from stampede.colour import Colour, hold_task, run_blocking, running_loop, soon
from stampede.flight import outside
from stampede.policy import Policy
from stampede.threads import with_signals_of_caller
from stampede.workers import Reserved, Workers

__all__ = ["Place"]

_refreshers = Workers(4, "stampede-refresh")
_beside = Workers(256, "stampede-beside")  # for those who wait, each in a thread of its own: not to be fewer than these


class Place:
    """A place beside the caller, for the computation that its claim may be granted.

    A thread of a pool, or a held task; either in a copy of the caller's context.
    """

    def __init__(self, colour: Colour, policy: Policy) -> None:
        self._colour = colour
        self._workers = _refreshers if policy.patience is None and policy.deadline is None else _beside
        self._thread: Reserved | None = None

    def reserve(self) -> bool:
        """Is there one, or was there, before the claim?"""
        if self._thread is None and not self._colour.suspending:
            self._thread = self._workers.reserve()
        return self._colour.suspending or self._thread is not None

    def free(self) -> None:
        """Give it back, if it wasn't needed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.free()

    def spawn(
        self, work: Coroutine[Any, Any, Any], unborn: Callable[[], object], longest: float, *, waits: bool = False
    ) -> Callable[[], object] | None:
        """Have it done; `unborn` is called when a task has ended: it may have been cancelled, or interrupted, before
        its first step. After so many seconds it is taken for hung. What cancels it, if anything can.

        Where its caller `waits` it is inside what he computes, so that what asks for that is told; else outside of it.
        """
        context = copy_context()
        if not waits:
            context.run(outside)
        loop = running_loop()
        if self._colour.suspending and loop is not None:
            task = hold_task(loop.create_task(work, context=context))
            task.add_done_callback(lambda ended: unborn())
            return lambda: soon(loop, task.cancel)
        thread, self._thread = self._thread or Reserved(self._workers), None
        self._workers.run(thread, with_signals_of_caller(lambda: context.run(_done, work)), longest)
        return None


def _done(work: Coroutine[Any, Any, Any]) -> None:
    """Unless it was closed: its caller was interrupted when he had just given it away."""
    if getcoroutinestate(work) == CORO_CREATED:
        run_blocking(work)
