"""Looks after what one event loop has asked, for as long as there are questions.

A callback of a loop that is interrupted is lost, and nobody hears of it. A task is not: its end has callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stampede.loops import nobodys

__all__ = ["LOOK", "Attendant"]

_NAME = "stampede-guard"
"""Of the tasks, for who wonders what runs in a loop."""

LOOK = 0.05
"""Seconds between two looks."""

Look = Callable[[bool], float | None]


class Attendant:
    """One task at most, of one loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def attend(self, loop: asyncio.AbstractEventLoop, look: Look) -> None:
        """Have `look` called until it says None. It says in how many seconds there is trouble; or, below zero, for how
        many it is overdue and to be waited for all the same. Then it is told so."""
        if self._task is not None and not self._task.done():
            return
        self._task = nobodys(self._begun, loop, look)

    def _begun(self, loop: asyncio.AbstractEventLoop, look: Look) -> asyncio.Task[None]:
        task = loop.create_task(_attend(look), name=_NAME)
        # A loop that is closed without cancelling its tasks has nothing to complain of.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.add_done_callback(lambda task: self._ended(loop, look, task))
        return task

    def leave(self) -> None:
        """There are no questions any more."""
        if self._task is not None:
            self._task.cancel()

    def _ended(self, loop: asyncio.AbstractEventLoop, look: Look, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # Who cancels all tasks may ask something yet, even before this one has ended. It has no successor at once:
            # who cancels tasks until there are none would never come to an end.
            loop.call_later(LOOK, self._return, loop, look)
        elif task.exception() is not None:  # interrupted
            self.attend(loop, look)

    def _return(self, loop: asyncio.AbstractEventLoop, look: Look) -> None:
        asked = True
        try:
            asked = look(False) is not None
        finally:  # also if it is interrupted
            if asked:
                self.attend(loop, look)


async def _attend(look: Look) -> None:
    left: float | None = LOOK
    while left is not None:
        await asyncio.sleep(min(left, LOOK) if left > 0 else -left)
        left = look(left < 0)
