"""Looks after what one event loop has asked, for as long as there are questions.

A callback of a loop that is interrupted is lost, and nobody hears of it. A task is not: its end has callbacks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from stampede.interruptions import of_a_caller
from stampede.loops import nobodys

__all__ = ["LOOK", "Attendant", "Attended"]

_NAME = "stampede-guard"
"""Of the tasks, for who wonders what runs in a loop."""

LOOK = 0.05
"""Seconds between two looks."""


class Attended(Protocol):
    """What has been asked, and is looked after."""

    def look(self, sure: bool) -> float | None:
        """In how many seconds there is trouble; below zero, for how many it is overdue, and to be waited for all the
        same: then it is looked at again, `sure`. None: there are no questions."""
        ...

    def interrupted(self, error: BaseException) -> None:
        """Somebody's call has been, while we looked: give it to one who waits."""
        ...


class Attendant:
    """One task at most, of one loop."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def attend(self, loop: asyncio.AbstractEventLoop, asked: Attended) -> None:
        """Look until there are no questions."""
        if self._task is not None and not self._task.done():
            return
        self._task = nobodys(self._begun, loop, asked)

    def _begun(self, loop: asyncio.AbstractEventLoop, asked: Attended) -> asyncio.Task[None]:
        task = loop.create_task(_attend(asked), name=_NAME)
        # A loop that is closed without cancelling its tasks has nothing to complain of.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.add_done_callback(lambda task: self._ended(loop, asked, task))
        return task

    def leave(self) -> None:
        """There are no questions any more."""
        if self._task is not None:
            self._task.cancel()

    def _ended(self, loop: asyncio.AbstractEventLoop, asked: Attended, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # Who cancels all tasks may ask something yet, even before this one has ended. It has no successor at once:
            # who cancels tasks until there are none would never come to an end.
            loop.call_later(LOOK, self._return, loop, asked)
        elif (error := task.exception()) is not None:
            self.attend(loop, asked)
            own = of_a_caller(error)
            if own is not None:
                asked.interrupted(own)

    def _return(self, loop: asyncio.AbstractEventLoop, asked: Attended) -> None:
        some = True
        try:
            some = asked.look(False) is not None
        finally:  # also if it is interrupted
            if some:
                self.attend(loop, asked)


async def _attend(asked: Attended) -> None:
    left: float | None = LOOK
    while left is not None:
        await asyncio.sleep(min(left, LOOK) if left > 0 else -left)
        left = asked.look(left < 0)
