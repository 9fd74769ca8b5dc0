"""One timer per event loop and server, which runs while questions are outstanding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stampede.loops import nobodys

__all__ = ["LOOK", "Timer"]

LOOK = 0.05
"""Seconds between two looks."""


class Timer:
    """Calls `look` every `LOOK` seconds until it returns False. A timer ends with its loop."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._handle: asyncio.TimerHandle | None = None
        self.late = 0.0
        """Seconds in all by which looks came too late, as the loop was blocked."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing if it runs already."""
        handle = self._handle
        if handle is not None:
            if handle.when() + LOOK > loop.time():
                return
            self.late += loop.time() - handle.when()
            handle.cancel()  # it is late. A loop that an exception has ended, as Ctrl-C, may also have dropped it
        # Without the context of the caller, who is only the first of many to ask.
        self._handle = nobodys(loop.call_later, LOOK, self._due, loop)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._handle is not None:
            self.late += loop.time() - self._handle.when()
        self._handle = None
        again = True
        try:
            again = self._look()
        finally:
            if again:
                self.start(loop)
