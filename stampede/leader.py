"""The owner of a flight: an object that ends with the coroutine that leads it.

An exception that arrives inside our own code (a signal handler's, or a RecursionError) may skip any `finally`. But the
coroutine is destroyed in any case, as soon as the frame that awaits it is left, even if a traceback keeps the frames.
A weak reference tells us, the flight ends, and its lease is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from weakref import ref

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
        self.give_back = give_back  # from a finalizer: it asks no engine by itself

    def follow(self, work: Coroutine[Any, Any, Any]) -> None:
        """From now on it is this coroutine that leads."""
        self.work = ref(work, self)

    def __call__(self, _: object) -> None:
        """The coroutine is gone: end its flight. If there is no stack left for this (RecursionError), the next caller
        of the key ends it, or the watch; and its lease ends by itself."""
        self.work, flight, follows = None, self.flight, self.follows
        with suppress(RecursionError):
            if follows is not None:
                follows.owner.leave(follows, self)
            if flight is not None:
                flight.owner.end(flight, None)

    @property
    def gone(self) -> bool:
        """Has its coroutine ended? The weak reference may not have told us yet."""
        work = self.work() if self.work is not None else None
        return getattr(work, "cr_frame", None) is None
