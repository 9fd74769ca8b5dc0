"""The turn to write: one thread of the process at a time.

An exception may arrive where no `finally` covers it. Then `tidy_up` ends the turn; or it ends with the writer's frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from threading import get_ident
from typing import Any
from weakref import ref

from stampede import decisions, greenlets
from stampede.colour import BLOCKING, Bell, run_blocking

__all__ = ["Deadline", "Interrupted", "Turn", "Turns"]

LOOK = 0.05
"""Seconds between two looks of a waiting thread whether the turn is free. A writer that ends as it should rings."""


class Deadline:
    """The moment until which something is waited for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left; 0 or less when it has passed."""
        return self._end - time.monotonic()


class Interrupted(Exception):
    """The caller is in a finalizer, or a signal's handler, that interrupted a write of its own thread."""


class Turn:
    """The turn of one writer, which has the only reference to it: it is over when its writer is gone."""

    steps: ref[Generator[Any, Any, Any]] | None = None  # of the write

    def __init__(self) -> None:
        self.bell = Bell()
        self.leave: list[Callable[[], object]] = []  # gates that it may have entered
        self._thread, self._greenlet = get_ident(), greenlets.here()

    def is_of_caller(self) -> bool:
        return self._thread == get_ident() and self._greenlet == greenlets.here()


class Turns:
    """Gives the turn to one writer at a time."""

    def __init__(self) -> None:
        self._owner: ref[Turn] | None = None

    def take(self, turn: Turn, deadline: Deadline) -> bool:
        """Wait for the turn. False: another thread has had it for so long."""
        mine = ref(turn)
        while (bell := self._bell_of_another(mine)) is not None:
            if deadline.left <= 0:
                return False
            run_blocking(BLOCKING.park(bell, min(deadline.left, LOOK)))
        return True

    def _bell_of_another(self, mine: ref[Turn]) -> Bell | None:
        """The bell of the writer that has the turn. None: it is the caller's now."""
        with decisions.lock:
            owner = self._owner() if self._owner is not None else None
            if owner is None:
                self._owner = mine
                return None
        if owner.is_of_caller():
            raise Interrupted
        return owner.bell

    def end(self, turn: Turn) -> None:
        """Leave the gates, and then the turn."""
        for leave in turn.leave:
            try:
                leave()
            except OSError:
                pass  # else it is closed, and no process has it any more
        owner = self._owner
        if owner is not None and owner() is turn:
            self._owner = None
        turn.bell.ring()

    def tidy_up(self) -> None:
        """End the write of this thread that an exception left, if it came at a moment that no `finally` covers."""
        owner = self._owner() if self._owner is not None else None
        if owner is not None and owner.is_of_caller():
            steps = owner.steps() if owner.steps is not None else None
            if steps is not None:
                steps.close()
            self.end(owner)
