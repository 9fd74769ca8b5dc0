"""What belongs to an event loop, and goes with it."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from typing import Generic, TypeVar

__all__ = ["Loop", "PerLoop"]

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop

_numbers = itertools.count()


class PerLoop(Generic[T]):
    """One thing for each event loop.

    The loop itself keeps it: a connection refers to its loop, and in a dictionary, even one with weak keys, it would
    keep it for ever.
    """

    def __init__(self) -> None:
        self._name = f"_stampede_{next(_numbers)}"
        self._loops: dict[int, weakref.ref[Loop]] = {}

    def get(self, loop: Loop) -> T | None:
        thing: T | None = loop.__dict__.get(self._name)
        return thing

    def put(self, loop: Loop, thing: T) -> T:
        number, loops = next(_numbers), self._loops
        loop.__dict__[self._name] = thing
        loops[number] = weakref.ref(loop, lambda _: loops.pop(number, None))
        return thing

    def take_all(self, *, closed: bool = False) -> list[tuple[Loop, T]]:
        """Whatever there is, and it is there no more; or only what belongs to loops that are closed."""
        taken = []
        for number, refer in list(self._loops.items()):
            loop = refer()
            if loop is not None and (not closed or loop.is_closed()):
                self._loops.pop(number, None)
                thing = loop.__dict__.pop(self._name, None)
                if thing is not None:
                    taken.append((loop, thing))
        return taken
