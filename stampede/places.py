"""Places beside the caller, for computations that nobody is to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from stampede.colour import Bell, Colour, hold_task, run_blocking, soon
from stampede.flight import outside
from stampede.policy import Policy
from stampede.threads import with_signals_of_caller
from stampede.workers import Workers

__all__ = ["Beside"]

_refreshers = Workers(4, "stampede-refresh")
_beside = Workers(256, "stampede-beside")  # for those who wait, each in a thread of its own: not to be fewer than these


class Beside:
    """A place beside the caller, for the computation that its claim may be granted.

    It is a task, or a thread of a pool, and runs in a copy of the caller's context.
    """

    def __init__(self, colour: Colour, policy: Policy) -> None:
        self._colour = colour
        self._workers = _refreshers if policy.patience is None and policy.deadline is None else _beside
        self._thread: object | None = None

    def reserve(self) -> bool:
        """Return whether there is a place, which may have been reserved before."""
        if self._thread is None and not self._colour.suspending:
            self._thread = self._workers.reserve()
        return self._colour.suspending or self._thread is not None

    def free(self) -> None:
        """Give the place back, if it wasn't needed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._workers.free(thread)

    def begin(
        self, work: Coroutine[Any, Any, Any], bell: Bell, longest: float, *, waits: bool
    ) -> Callable[[], object] | None:
        """Run the work in the reserved place, and return what cancels it, if anything can.

        After `longest` seconds it counts as hung. If its caller `waits` it is a part of what the caller computes, and
        has that context. The bell also rings for a task that was cancelled before its first step.
        """
        context = copy_context()
        if not waits:
            context.run(outside)
        if self._colour.suspending:
            loop = asyncio.get_running_loop()
            task = hold_task(loop.create_task(work, context=context))
            task.add_done_callback(lambda ended: bell.ring())
            return lambda: soon(loop, task.cancel)
        thread, self._thread = self._thread, None
        self._workers.run(thread, with_signals_of_caller(lambda: context.run(run_blocking, work)), longest)
        return None
