"""What belongs to an event loop, and goes with it."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any, Generic, TypeVar

__all__ = ["Loop", "PerLoop", "nobodys"]

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop

_numbers = itertools.count()


def _things(loop: Any) -> dict[int, Any]:
    """Return what a loop keeps for us, as one attribute, by number. Never by way of its `__dict__`: CPython makes a
    loop that was asked for that slower by a fifth, to its end."""
    try:
        things: dict[int, Any] = loop._stampede
    except AttributeError:
        things = loop._stampede = {}
    return things


class PerLoop(Generic[T]):
    """One thing for each event loop, kept by the loop itself. A connection refers to its loop, so that in a dictionary,
    even one with weak keys, it would keep the loop for ever."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._loops: dict[int, weakref.ref[Loop]] = {}

    def get(self, loop: Loop) -> T | None:
        try:
            return loop._stampede.get(self._number)  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return None

    def put(self, loop: Loop, thing: T) -> T:
        number, loops = next(_numbers), self._loops
        loops[number] = weakref.ref(loop, lambda _: loops.pop(number, None))
        _things(loop)[self._number] = thing  # last: nobody would close what is known by its loop alone
        return thing

    def take_all(self, *, closed: bool = False) -> list[tuple[Loop, T]]:
        """Whatever there is, and it is there no more; or only what belongs to loops that are closed."""
        taken = []
        for number, refer in list(self._loops.items()):
            loop = refer()
            if loop is not None and (not closed or loop.is_closed()):
                self._loops.pop(number, None)
                thing = _things(loop).pop(self._number, None)
                if thing is not None:
                    taken.append((loop, thing))
        return taken


def nobodys(begin: Callable[..., T], *args: Any) -> T:
    """What it gives. What it begins in a loop is for all callers, so that it has no copy of this one's context: for as
    long as a connection lasts, that would keep whatever it refers to, as a request."""
    return Context().run(begin, *args)
