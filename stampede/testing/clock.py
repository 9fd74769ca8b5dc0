"""A clock that goes only when it is told to."""

from __future__ import annotations

from threading import Lock

__all__ = ["FakeClock"]


class FakeClock:
    """Call it to read it, as one calls `time.monotonic`; `advance` moves it.

    >>> from stampede.testing import FakeClock
    >>> clock = FakeClock()
    >>> began = clock()
    >>> clock.advance(60)
    >>> clock() - began
    60.0
    """

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._lock = Lock()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let so much time pass at once. It never goes back."""
        if not seconds >= 0:
            raise ValueError(f"a clock can't go by {seconds!r} seconds")
        with self._lock:
            self._now += seconds
