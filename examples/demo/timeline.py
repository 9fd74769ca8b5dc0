"""The record of one scene: the spans of each caller, and the figures computed from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from caller import Mark, Reads

__all__ = ["Counts", "Span", "Timeline"]

VISIBLE = 0.001
"""Seconds below which a span is invisible, and not drawn."""


BLOCKED = 0.02
"""Seconds from which a read counts as blocked. A shorter one waited for the engine, not for a computation."""


class Span(NamedTuple):
    """A period of a caller: waiting, queued (at the origin), computing, served, or blocked (a read under load)."""

    what: str
    start: float
    end: float


class Counts(NamedTuple):
    """The number of computations, and of callers in each state."""

    computations: int
    computing: int
    waiting: int
    served: int
    killed: int


@dataclass
class Timeline:
    """One scene, from its start to its end."""

    name: str  # in a table
    title: str
    callers: int
    lasting: bool = False
    begin: float = 0.0
    end: float = 0.0
    ttl: float = 0.0
    marks: dict[int, dict[str, float]] = field(default_factory=dict)
    computations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)
    killed: range = range(0)  # callers whose process was killed
    killed_at: float | None = None

    def add(self, report: Mark | Reads) -> None:
        if isinstance(report, Reads):
            self.reads.append(report)
            return
        self.marks.setdefault(report.caller, {})[report.what] = report.at
        if report.what == "began":
            self.computations.append((report.caller, {}))
        for caller, moments in reversed(self.computations):
            if caller == report.caller:
                moments[report.what] = report.at
                break

    def kill(self, callers: range, at: float) -> None:
        self.killed, self.killed_at = callers, at

    # -- figures ----------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        computing = sum("ended" not in moments and caller not in self.killed for caller, moments in self.computations)
        served = sum("served" in marks for marks in self.marks.values())
        asked = sum("asked" in marks for marks in self.marks.values())
        killed = len(self.killed)
        waiting = 0 if self.lasting else asked - served - computing - killed
        return Counts(len(self.computations), computing, max(waiting, 0), served, killed)

    @property
    def stored(self) -> float | None:
        """The time at which the last computation ended; None if none has."""
        return max((moments["ended"] for _, moments in self.computations if "ended" in moments), default=None)

    @property
    def last_served(self) -> float:
        return max((marks["served"] for marks in self.marks.values() if "served" in marks), default=self.begin)

    @property
    def lateness(self) -> float | None:
        """Seconds from the end of the computation to the last waiter's answer; None unless exactly one has ended."""
        ended = [moments["ended"] for _, moments in self.computations if "ended" in moments]
        return self.last_served - ended[0] if len(ended) == 1 and not self.lasting else None

    @property
    def takeover(self) -> float | None:
        """Seconds from the kill to the start of the next computation; None if there was none."""
        if self.killed_at is None:
            return None
        began = [moments["began"] for _, moments in self.computations if moments["began"] > self.killed_at]
        return min(began) - self.killed_at if began else None

    @property
    def blocked(self) -> int:
        """The number of callers that were not served at once."""
        if self.lasting:
            return sum(any(end - start > BLOCKED for start, end in reads.blocked) for reads in self.reads)
        return sum("asked" in marks for marks in self.marks.values())

    @property
    def expiries(self) -> list[float]:
        """The times at which the values of a lasting scene would have expired, if they had not been replaced."""
        ended = (moments["ended"] + self.ttl for _, moments in self.computations if "ended" in moments)
        ends = [self.begin + self.ttl, *ended] if self.lasting else []
        return [end for end in ends if end < self.end]

    # -- rows -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[list[Span]]:
        """Return the spans of each caller, in the order in which they are drawn."""
        reads = {each.caller: each for each in self.reads}
        return [
            list(self._lasting(caller, reads.get(caller)) if self.lasting else self._once(caller))
            for caller in range(self.callers)
        ]

    def _lasting(self, caller: int, reads: Reads | None) -> Iterator[Span]:
        if reads is not None:
            yield from (Span("served", *stretch) for stretch in reads.stretches)
            yield from (Span("blocked", start, end) for start, end in reads.blocked if end - start > BLOCKED)
        yield from (span for owner, moments in self.computations if owner == caller for span in self._work(moments))

    def _once(self, caller: int) -> Iterator[Span]:
        marks = self.marks.get(caller, {})
        end = self.killed_at if caller in self.killed and self.killed_at is not None else self.end
        if "asked" not in marks:
            return
        began = marks.get("began", marks.get("served", end))
        yield Span("waiting", marks["asked"], began)
        yield from self._work(marks, end)
        if "served" in marks:
            yield Span("waiting", marks.get("ended", marks["served"]), marks["served"])
            yield Span("served", marks["served"], end)

    def _work(self, moments: dict[str, float], end: float | None = None) -> Iterator[Span]:
        end = self.end if end is None else end
        if "began" in moments:
            yield Span("queued", moments["began"], moments.get("admitted", end))
        if "admitted" in moments:
            yield Span("computing", moments["admitted"], moments.get("ended", end))
