"""So many questions of a process under way at once: a crowd that asks all at once would make each of them slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from stampede.errors import EngineError

__all__ = ["AT_ONCE", "ConcurrencyLimit"]

AT_ONCE = 16


class ConcurrencyLimit:
    """Callers beyond `AT_ONCE` wait for a turn; if none before them has an answer, they need not ask."""

    def __init__(self, called: str, timeout: float) -> None:
        self._called, self._timeout = called, timeout
        self.start_again()

    def start_again(self) -> None:
        """In a forked child: whose turn it is there are the parent's."""
        self._places = threading.Semaphore(AT_ONCE)
        self._answered = self._hung = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Ask in here. An EngineError after half the time-out or more was one of a server that hangs."""
        came = monotonic()
        with self._places:
            if self._hung > came:
                raise EngineError(f"{self._called}: no answer to another's question, nor to any since")
            began = monotonic()
            try:
                yield
            except EngineError:
                if self._answered < began <= monotonic() - self._timeout / 2:
                    self._hung = monotonic()
                raise
            self._answered = monotonic()
