"""A clock for tests, which moves only when the test advances it."""

from __future__ import annotations

from threading import Lock

__all__ = ["FakeClock"]


class FakeClock:
    """A clock that is read by calling it, like `time.monotonic`, and moved by `advance`.

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
        """Move the clock forward by so many seconds. Raise ValueError for a negative number."""
        if not seconds >= 0:
            raise ValueError(f"a clock can't advance by {seconds!r} seconds: give a number >= 0")
        with self._lock:
            self._now += seconds
