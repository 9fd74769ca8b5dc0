"""The turn to write: one thread of the process at a time, for as long as it is in its write.

No `finally` covers every moment at which a signal's handler may raise. So a turn names its owner, a thread and the
frame that writes, and is taken over when that thread has left that frame, whatever keeps the frame alive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

from stampede import decisions, greenlets
from stampede.colour import BLOCKING, Bell, run_blocking
from stampede.interruptions import pass_on
from stampede.stacks import is_in
from stampede.stalls import Patience

__all__ = ["Interrupted", "Turn", "Turns"]

LOOK = 0.05
"""Seconds between two looks of who waits whether the owner is still at work: who ends as it should rings."""


class Interrupted(Exception):
    """The caller is in a finalizer, or a signal's handler, that interrupted a write of its own thread."""


class Turn:
    """One owner of the turn: it writes as long as its thread is in this frame."""

    def __init__(self, frame: FrameType) -> None:
        self.frame: FrameType | None = frame
        self.thread = get_ident()
        self.bell = Bell()
        self.steps: ref[Generator[Any, Any, Any]] | None = None  # of the write, which may have been left between two
        self.leave: list[Callable[[], object]] = []  # gates that it may have entered
        self.before: Turn | None = None  # whose turn it took over, and has to tidy up after
        self._greenlet = greenlets.here()

    def over(self) -> bool:
        """Has its owner left it?"""
        if self._greenlet != greenlets.here():
            return False  # perhaps it rests: its frames are in no stack
        frame = self.frame
        return frame is None or not is_in(self.thread, frame)

    def is_of_caller(self) -> bool:
        return self.thread == get_ident() and self._greenlet == greenlets.here()

    def leave_all(self) -> None:
        for leave in self.leave:
            try:
                leave()
            except OSError as error:
                pass_on(error)  # else it is closed: nobody has it any more

    def tidy_up(self) -> None:
        """End what the one before has left open."""
        before = self.before
        if before is None:
            return
        before.tidy_up()
        steps = before.steps() if before.steps is not None else None
        if steps is not None:
            steps.close()  # rolls back, and leaves the gate
        before.leave_all()
        before.bell.ring()
        self.before = None


class Turns:
    """Who has the turn."""

    def __init__(self) -> None:
        self._owner: Turn | None = None

    @property
    def left(self) -> bool:
        """Has somebody the turn who is not there any more?"""
        owner = self._owner
        return owner is not None and owner.over()

    def take(self, turn: Turn, patience: Patience) -> bool:
        """False: another thread has had it for so long."""
        while True:
            owner = self._owner
            if owner is None or owner.over():  # asked outside of the lock: it walks a stack, and who is gone stays so
                with decisions.lock:
                    if self._owner is not owner:
                        continue  # another one was here before us
                    turn.before, self._owner = owner, turn
                break
            if owner.is_of_caller():
                raise Interrupted
            if patience.left <= 0:
                return False
            pause = min(patience.left, LOOK)
            run_blocking(BLOCKING.park(owner.bell, pause))
            patience.spend(pause)
        turn.tidy_up()
        return True

    def end(self, turn: Turn) -> None:
        """Leave the gates, and then the turn."""
        turn.leave_all()
        if self._owner is turn:  # without the lock: a finalizer may wait for us that interrupted who has it
            self._owner = None
        turn.frame = None
        turn.bell.ring()
