"""Who runs where: what each thread is at; and for people, the stacks of who computes. Found by a look at all that
runs."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from stampede import decisions

__all__ = ["innermost_frames", "is_in", "stack_of"]

_COLLECTS = sys.version_info < (3, 11, 9)
"""Does the interpreter run finalizers in the middle of its look at all threads (python/cpython#106883)?"""

_STEPS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOKS = 100

Stack = list[FrameType]  # the outermost frame first


def innermost_frames() -> dict[int, FrameType]:
    """The frame that each thread is in, by its ident."""
    if not _COLLECTS:
        return sys._current_frames()
    with decisions.lock:  # two at once would let the collector on under each other
        collects = gc.isenabled()
        try:
            # The interpreter has locked its list of threads. A finalizer that lets another thread on, as by closing a
            # file, would not come back: the other wants that list, to begin a thread or to end, and never lets go.
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def is_in(thread: int, frame: FrameType) -> bool:
    """Is the thread in that frame, or in what it has called?"""
    for _ in range(_LOOKS):
        at, outermost = innermost_frames().get(thread), None
        while at is not None:
            if at is frame:
                return True
            outermost, at = at, at.f_back
        # It runs on while we go down its stack: a generator that yields has no way on to who has called it.
        if outermost is None or not outermost.f_code.co_flags & _STEPS:
            return False
    return False  # a thread that began with a generator


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
    for innermost in innermost_frames().values():
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
