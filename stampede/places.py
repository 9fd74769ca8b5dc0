"""Places beside the caller, for computations that nobody is to wait for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from stampede.colour import Colour, hold_task, run_blocking, running_loop
from stampede.flight import outside
from stampede.workers import Reserved, Workers

__all__ = ["Place"]

_refreshers = Workers(4, "stampede-refresh")


class Place:
    """A place beside the caller, reserved before the claim for the computation that the claim may be granted.

    A thread of a small pool, or a held task; either in a copy of the caller's context, outside of its leases.
    """

    def __init__(self, colour: Colour) -> None:
        self._colour = colour
        self._thread = None if colour.suspending else _refreshers.reserve()
        self.reserved = colour.suspending or self._thread is not None

    def free(self) -> None:
        """Give it back, if it wasn't needed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.free()

    def spawn(self, work: Coroutine[Any, Any, Any], unborn: Callable[[], object], longest: float) -> None:
        """Have it done; `unborn` is called if a task is cancelled, since that may be before its first step. After so
        many seconds it is taken for hung."""
        context = copy_context()
        context.run(outside)
        loop = running_loop()
        if self._colour.suspending and loop is not None:
            task = hold_task(loop.create_task(work, context=context))
            task.add_done_callback(lambda ended: unborn() if ended.cancelled() else None)
        else:
            thread, self._thread = self._thread or Reserved(_refreshers), None
            _refreshers.run(thread, lambda: context.run(run_blocking, work), longest)
