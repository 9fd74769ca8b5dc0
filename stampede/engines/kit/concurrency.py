"""A limit for the questions that a process has under way at once: a crowd that asks all at once makes each of them
slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from stampede.errors import EngineError

__all__ = ["AT_ONCE", "ConcurrencyLimit"]

AT_ONCE = 16


class ConcurrencyLimit:
    """A limit of `AT_ONCE` questions under way. Further callers wait for a turn, and fail without asking if the server
    hung."""

    def __init__(self, called: str, timeout: float) -> None:
        self._called, self._timeout = called, timeout
        self.start_again()

    def start_again(self) -> None:
        """Begin anew in a forked child: the turns under way belong to the parent."""
        self._places = threading.Semaphore(AT_ONCE)
        self._answered = self._hung = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and ask within this block. An EngineError after half the time-out or more means that the
        server hangs."""
        came = monotonic()
        with self._places:
            if self._hung > came:
                raise EngineError(f"{self._called}: a question asked before got no answer, nor has any since")
            began = monotonic()
            try:
                yield
            except EngineError:
                if self._answered < began <= monotonic() - self._timeout / 2:
                    self._hung = monotonic()
                raise
            self._answered = monotonic()
