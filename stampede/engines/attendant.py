"""Looks after what one event loop has asked, for as long as there are questions.

A callback of a loop that is interrupted is lost, and nobody hears of it. A task is not: its end has callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["GUARD", "LOOK", "attended"]

GUARD = "stampede-guard"
"""The name of tasks that are there to see their loop's end."""

LOOK = 0.05
"""Seconds between two looks."""

Look = Callable[[bool], float | None]


def attended(loop: asyncio.AbstractEventLoop, look: Look) -> asyncio.Task[None]:
    """Have `look` called until it says None. It says in how many seconds there is trouble; or, below zero, for how many
    it is overdue and to be waited for all the same. Then it is told so."""
    task = loop.create_task(_attend(look), name=GUARD)
    # A loop that is closed without cancelling its tasks has nothing to complain of.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.add_done_callback(lambda task: _ended(loop, look, task))
    return task


async def _attend(look: Look) -> None:
    left: float | None = LOOK
    while left is not None:
        await asyncio.sleep(min(left, LOOK) if left > 0 else -left)
        left = look(left < 0)


def _ended(loop: asyncio.AbstractEventLoop, look: Look, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:  # interrupted
        attended(loop, look)
