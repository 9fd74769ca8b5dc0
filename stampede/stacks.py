"""Who runs where: what each thread is at; and for people, the stacks of who computes. Found by a look at all that
runs."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from stampede import decisions

__all__ = ["innermost_frames", "is_in", "stack_of"]

_COLLECTS = sys.version_info < (3, 12)
"""Does the interpreter run finalizers in the middle of a look at threads: at all of them (python/cpython#106883), and
at each frame of one that runs, for which it makes an object?"""

_STEPS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOKS = 100

T = TypeVar("T")
Stack = list[FrameType]  # the outermost frame first


def innermost_frames() -> dict[int, FrameType]:
    """The frame that each thread is in, by its ident."""
    return _undisturbed(sys._current_frames)


def is_in(thread: int, frame: FrameType) -> bool:
    """Is the thread in that frame, or in what it has called?"""
    return _undisturbed(lambda: _is_in(thread, frame))


def _undisturbed(look: Callable[[], T]) -> T:
    """What it sees. No finalizer runs meanwhile: one that lets another thread on, as by closing a file, would not come
    back where the interpreter has locked its list of threads; and what the other leaves by then, we would look at."""
    if not _COLLECTS:
        return look()
    with decisions.lock:  # two at once would let the collector on under each other
        collects = gc.isenabled()
        try:
            gc.disable()
            return look()
        finally:
            if collects:
                gc.enable()


def _is_in(thread: int, frame: FrameType) -> bool:
    for _ in range(_LOOKS):
        at, outermost = sys._current_frames().get(thread), None
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
    for stack in (*_undisturbed(lambda: [*_threads()]), *_tasks(loops)):
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
