"""Whether to ask an engine that was down the last time: one caller a second does, for all. Pure: takes `now`."""

from __future__ import annotations

from typing import NamedTuple

from stampede.errors import OptionError

__all__ = ["Breaker"]


class _Outage(NamedTuple):
    since: float
    due: float  # the next probe
    claims: dict[int, object]  # who was first: to probe, by the pauses since `due`, or to tell that it is over

    def first(self, claim: int) -> bool:
        """True once, for one thread."""
        me = object()
        return self.claims.setdefault(claim, me) is me


class Breaker:
    """Closed while the engine answers. Open after a failure: one probe per pause, until one of them succeeds.

    No lock, so there is none to inherit locked over a fork: the state is one reference, replaced as a whole.
    """

    __slots__ = ("outage", "pause")

    def __init__(self, pause: float = 1.0) -> None:
        if not pause > 0:
            raise OptionError(f"pause is {pause!r}: give the seconds between two probes, more than 0")
        self.pause = pause
        self.outage: _Outage | None = None  # while the engine answers

    @property
    def open(self) -> bool:
        """True while the engine counts as down."""
        return self.outage is not None

    def allow(self, now: float) -> bool:
        """May this caller ask the engine? Of an engine that is down: one caller, who then tells how it went.

        One who never tells (it hangs, or was killed) is given up after a pause.
        """
        outage = self.outage
        if outage is None:
            return True
        if now < outage.due or not outage.first(int((now - outage.due) // self.pause)):
            return False
        self.outage = _Outage(outage.since, now + self.pause, {})
        return True

    def failed(self, now: float) -> None:
        """It could not be asked: down from now on, or still."""
        outage = self.outage
        since, due = (now, now) if outage is None else (outage.since, outage.due)
        self.outage = _Outage(since, max(due, now + self.pause), {})

    def succeeded(self, now: float) -> float:
        """It answered: up from now on. Seconds that it was down, to one caller; 0 to all others."""
        outage = self.outage
        if outage is None:
            return 0.0
        self.outage = None
        return now - outage.since if outage.first(-1) else 0.0
