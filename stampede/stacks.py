"""Who computes, and who waits for it: their stacks, for people. Found by a look at all that runs."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

__all__ = ["stack_of"]

Stack = list[FrameType]  # the outermost frame first


def stack_of(flight: object, functions: Iterable[str], loops: Iterable[Any]) -> str:
    """The stack of a thread, or of a task of these loops, in which a function of such a name has this very flight."""
    for stack in (*_threads(), *_tasks(loops)):
        if any(frame.f_code.co_name in functions and _has(frame, flight) for frame in stack):
            lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in stack)
            return "".join(lines.format()).rstrip()
    return "  (in no thread and no task that can be seen)"


def _has(frame: FrameType, flight: object) -> bool:
    names = frame.f_locals
    granted = names.get("granted")  # perhaps a user's own function has such a name, and such a variable
    together = granted if type(granted) is list else []
    return names.get("flight") is flight or any(getattr(each, "flight", None) is flight for each in together)


def _threads() -> Iterator[Stack]:
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        stack: Stack = []
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        yield stack[::-1]


def _tasks(loops: Iterable[Any]) -> Iterator[Stack]:
    """Those that sleep: whichever runs is in its thread's stack."""
    for loop in loops:
        for task in asyncio.all_tasks(loop):
            awaited: Any = task.get_coro()
            stack: Stack = []
            while awaited is not None:
                frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
                if frame is not None:
                    stack.append(frame)
                awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
            yield stack
