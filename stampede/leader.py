"""Who leads a flight, as a thing that ends with its coroutine.

No `finally` covers every moment: what a signal's handler raises, or an error for want of stack, may come between any
two of our steps, those of the `finally` among them. A coroutine is destroyed in any case, and as soon as the frame that
awaits it is left, also where a traceback goes on keeping the frames. A weak reference hears of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from weakref import ref

from stampede import forks

__all__ = ["Leader"]


class Leader:
    """One caller that may come to lead; its flight ends with it, and the lease that it may have is given back."""

    # Of the class until they are set: every miss makes one of these.
    owes = False  # it may have a lease
    token = b""  # of that
    flight: Any = None  # that it leads
    follows: Any = None  # the flight that counts it among its callers
    work: ref[Coroutine[Any, Any, Any]] | None = None

    def __init__(self, give_back: Callable[[str, bytes], object]) -> None:
        if _unended:
            _end_them()
        self.give_back = give_back  # from a finalizer: it asks no engine by itself

    def follow(self, work: Coroutine[Any, Any, Any]) -> None:
        """From now on it is this coroutine that leads."""
        self.work = ref(work, self)

    def __call__(self, _: object) -> None:
        """It is gone. Few calls deep, since it may be for want of stack."""
        self.work, flight, follows = None, self.flight, self.follows
        if follows is not None:
            with suppress(RecursionError):
                follows.owner.leave(follows, self)
        if flight is not None:
            try:
                flight.owner.end(flight, None)
            except RecursionError:
                _unended.append(flight)  # in C, which takes no stack: whoever asks for whatever next ends it

    @property
    def gone(self) -> bool:
        """Has its coroutine ended? Whoever asks needs no word of the weak reference, which can be lost."""
        work = self.work() if self.work is not None else None
        return getattr(work, "cr_frame", None) is None


_unended: deque[Any] = deque()
"""Flights whose leaders are gone, and could not end them."""

forks.in_child(lambda: _unended.clear())  # they are the parent's


def _end_them() -> None:
    with suppress(IndexError):
        while True:
            flight = _unended.popleft()
            try:
                flight.owner.end(flight, None)
            except BaseException:
                _unended.append(flight)
                raise
