"""What belongs to an event loop, and goes with it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar

from stampede import greenlets

__all__ = ["Loop", "PerLoop", "heed", "nobodys", "on_close", "unheeded"]

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop

_numbers = itertools.count()


class _Ours:
    """What a loop keeps for us, as one attribute of it.

    Never by way of its `__dict__`: a loop that has been asked for that is slower by a fifth, in whatever it does, to
    its end. (Until then CPython has no dictionary of it, but an array.)
    """

    __slots__ = ("heeded", "things")

    def __init__(self) -> None:
        self.heeded = False
        self.things: dict[int, Any] = {}  # by the numbers of what they are one each of


def _ours(loop: Any) -> _Ours:
    try:
        ours: _Ours = loop._stampede
    except AttributeError:
        ours = loop._stampede = _Ours()
    return ours


class PerLoop(Generic[T]):
    """One thing for each event loop.

    The loop itself keeps it: a connection refers to its loop, and in a dictionary, even one with weak keys, it would
    keep it for ever.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._loops: dict[int, weakref.ref[Loop]] = {}

    def get(self, loop: Loop) -> T | None:
        try:
            return loop._stampede.things.get(self._number)  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return None

    def put(self, loop: Loop, thing: T) -> T:
        number, loops = next(_numbers), self._loops
        loops[number] = weakref.ref(loop, lambda _: loops.pop(number, None))
        _ours(loop).things[self._number] = thing  # last: nobody would close what is known by its loop alone
        return thing

    def take_all(self, *, closed: bool = False) -> list[tuple[Loop, T]]:
        """Whatever there is, and it is there no more; or only what belongs to loops that are closed."""
        taken = []
        for number, refer in list(self._loops.items()):
            loop = refer()
            if loop is not None and (not closed or loop.is_closed()):
                self._loops.pop(number, None)
                thing = _ours(loop).things.pop(self._number, None)
                if thing is not None:
                    taken.append((loop, thing))
        return taken


def nobodys(begin: Callable[..., T], *args: Any) -> T:
    """What it gives. What it begins in a loop is for all callers, so that it has no copy of this one's context: for as
    long as a connection lasts, that would keep whatever it refers to, as a request."""
    return Context().run(begin, *args)


class _Closing:
    """Lies among a loop's timers, which go when it is closed: nobody else is told of that."""

    def __call__(self) -> None:
        """Its time has come, after ten years."""

    def __del__(self) -> None:
        for refer in list(_told.values()):
            told = refer()
            if told is not None:
                told.end_orphans()


class _Told(Protocol):
    def end_orphans(self) -> None:
        """A loop that is heeded was closed, or is gone; from a finalizer, perhaps."""


_TEN_YEARS = 10 * 365 * 86400.0
_told: dict[int, weakref.ref[_Told]] = {}  # no WeakSet: others may add to it while a finalizer goes through it


def on_close(told: _Told) -> None:
    """Have it told when a loop is closed."""
    number, those = next(_numbers), _told
    those[number] = weakref.ref(told, lambda _: those.pop(number, None))


def heed(loop: Any) -> None:
    """Have it told when this one is closed."""
    try:
        if loop._stampede.heeded:
            return
    except AttributeError:
        pass  # nothing of ours is in it yet
    if threading.Lock is not greenlets.known:
        greenlets.adapt()  # for those that never block, and so don't ask in `run_blocking`
    _ours(loop).heeded = True
    loop.call_later(_TEN_YEARS, _Closing(), context=Context())


def unheeded(loop: Any) -> None:
    """Have nobody told of this one's end."""
    _ours(loop).heeded = True
