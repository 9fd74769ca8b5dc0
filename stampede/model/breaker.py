"""A circuit breaker: while an engine is down, one caller a second asks it, for all. The time is an argument."""

from __future__ import annotations

from stampede.errors import OptionError
from stampede.runtime import process_lock

__all__ = ["Breaker"]


class Breaker:
    """The state of one engine. After a failure one probe per pause is allowed, until a probe succeeds."""

    __slots__ = ("_due", "pause", "since")

    def __init__(self, pause: float = 1.0) -> None:
        if not pause > 0:
            raise OptionError(f"pause is {pause!r}: give the seconds between two probes, more than 0")
        self.pause = pause
        self.since: float | None = None  # the first failure; None while the engine answers
        self._due = 0.0  # the next probe

    @property
    def open(self) -> bool:
        """Whether the engine counts as down."""
        return self.since is not None

    def allow(self, now: float) -> bool:
        """Return whether this caller may ask the engine. While it is down, one caller per pause may. That caller has to
        call `failed` or `succeeded`. If it never does, because it hangs or was killed, another caller may ask after the
        pause."""
        if self.since is None:
            return True
        with process_lock.lock:
            if now < self._due:
                return False
            self._due = now + self.pause
        return True

    def failed(self, now: float) -> None:
        """Take note that the engine could not be asked. It counts as down."""
        with process_lock.lock:
            self._due = now + self.pause if self.since is None else max(self._due, now + self.pause)
            self.since = now if self.since is None else self.since

    def succeeded(self, now: float) -> float:
        """Take note that the engine has answered. Return how many seconds it was down, to one caller; 0 to others."""
        if self.since is None:
            return 0.0
        with process_lock.lock:
            since, self.since = self.since, None
        return 0.0 if since is None else now - since
