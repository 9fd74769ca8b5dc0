"""Objects that belong to an event loop, and are freed with it."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any, Generic, TypeVar

__all__ = ["Loop", "PerLoop", "in_empty_context"]

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop

_numbers = itertools.count()


def _objects_of(loop: Any) -> dict[int, Any]:
    """Return the objects that a loop stores for us, by number. They are in one attribute of the loop. Never use the
    loop's `__dict__`: after that, CPython makes this loop slower by a fifth until its end."""
    try:
        objects: dict[int, Any] = loop._stampede
    except AttributeError:
        objects = loop._stampede = {}
    return objects


class PerLoop(Generic[T]):
    """One object for each event loop, stored in the loop itself. A connection refers to its loop. So a dictionary, even
    one with weak keys, would keep the loop alive for ever."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._loops: dict[int, weakref.ref[Loop]] = {}

    def get(self, loop: Loop) -> T | None:
        try:
            return loop._stampede.get(self._number)  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return None

    def put(self, loop: Loop, value: T) -> T:
        number, loops = next(_numbers), self._loops
        loops[number] = weakref.ref(loop, lambda _: loops.pop(number, None))
        _objects_of(loop)[self._number] = value  # last, because `take_all` must find every stored object
        return value

    def take_all(self, *, closed: bool = False) -> list[tuple[Loop, T]]:
        """Remove and return all loops with their objects, or, with `closed`, only those of closed loops."""
        taken = []
        for number, refer in list(self._loops.items()):
            loop = refer()
            if loop is not None and (not closed or loop.is_closed()):
                self._loops.pop(number, None)
                value = _objects_of(loop).pop(self._number, None)
                if value is not None:
                    taken.append((loop, value))
        return taken


def in_empty_context(begin: Callable[..., T], *args: Any) -> T:
    """Call `begin` in an empty context, and return its value. Use it to start work that serves all callers. A timer or
    task would keep a copy of its caller's context, and all that it refers to, such as a request, for as long as a
    connection lasts."""
    return Context().run(begin, *args)
