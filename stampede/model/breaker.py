"""Whether to ask an engine that was down the last time: one caller a second does, for all. Callers bring the time."""

from __future__ import annotations

from stampede.errors import OptionError
from stampede.runtime import process_lock

__all__ = ["Breaker"]


class Breaker:
    """Closed while the engine answers. Open after a failure: one probe per pause, until one of them succeeds."""

    __slots__ = ("_due", "pause", "since")

    def __init__(self, pause: float = 1.0) -> None:
        if not pause > 0:
            raise OptionError(f"pause is {pause!r}: give the seconds between two probes, more than 0")
        self.pause = pause
        self.since: float | None = None  # the first failure; None while the engine answers
        self._due = 0.0  # the next probe

    @property
    def open(self) -> bool:
        """True while the engine counts as down."""
        return self.since is not None

    def allow(self, now: float) -> bool:
        """May this caller ask the engine? Of an engine that is down: one caller, who then tells how it went.

        One who never tells (it hangs, or was killed) is given up after a pause.
        """
        if self.since is None:
            return True
        with process_lock.lock:
            if now < self._due:
                return False
            self._due = now + self.pause
        return True

    def failed(self, now: float) -> None:
        """It could not be asked: down from now on, or still."""
        with process_lock.lock:
            self._due = now + self.pause if self.since is None else max(self._due, now + self.pause)
            self.since = now if self.since is None else self.since

    def succeeded(self, now: float) -> float:
        """It answered: up from now on. Seconds that it was down, to one caller; 0 to all others."""
        if self.since is None:
            return 0.0
        with process_lock.lock:
            since, self.since = self.since, None
        return 0.0 if since is None else now - since
