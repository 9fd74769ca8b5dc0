"""The history of a round, built from the journals of its processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from chaos.faults import Fault

__all__ = ["Call", "Grip", "History", "Making"]


@dataclass
class Call:
    id: str
    worker: str
    pid: int
    verb: str
    keys: list[str]
    began: float
    colour: str
    wait: float | None
    nap: float
    ended: float = inf
    outcome: str = "never ended"
    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass
class Making:
    """One computation."""

    id: str
    worker: str
    pid: int
    call: str
    keys: list[str]
    born: float
    ended: float = inf
    outcome: str = "never ended"


@dataclass
class Grip:
    """One hold of a lock."""

    id: str
    worker: str
    pid: int
    name: str
    asked: float
    got: float
    fence: int
    inside: list[float] = field(default_factory=list)  # moments at which the lock told its holder that it is held
    left: float = inf


class History:
    """All calls, computations, locks and faults of a round."""

    def __init__(self, lines: Iterable[tuple[str, list[Any]]], faults: list[Fault], deaths: dict[str, float]) -> None:
        self.faults = list(faults)
        self.deaths = deaths  # the moment at which each process was killed
        self.calls: dict[str, Call] = {}
        self.makings: dict[str, Making] = {}
        self.grips: dict[str, Grip] = {}
        self.stalls: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.downs: list[tuple[str, float, str]] = []  # process, moment, error
        self.ups: list[tuple[str, float]] = []
        self.hangs: list[str] = []
        self.pids: dict[str, int] = {}
        self.left: dict[str, list[str]] = {}
        self.bad = 0
        for worker, (what, pid, *details) in lines:
            self._read(worker, what, pid, details)
        self.faults += [each for fault in faults if fault.effect.lurks for each in self._met(fault)]
        for each in (*self.calls.values(), *self.makings.values()):
            each.ended = min(each.ended, self._death(each))
        for making in self.makings.values():
            if making.ended == inf and making.call in self.calls:  # interrupted before it could write its end
                making.ended = self.calls[making.call].ended
        for grip in self.grips.values():
            grip.left = min(grip.left, self._death(grip))

    def _met(self, fault: Fault) -> Iterator[Fault]:
        """The fault again, for each process that noticed it later: others may just have moved the file aside."""
        for _, moment, told in self.downs:
            if moment > fault.until - 0.5 and ("damaged" in told or "was removed" in told):
                yield Fault(f"{fault.kind}-met", "", moment - 0.5, moment, moment + fault.effect.after, fault.effect)

    def _death(self, each: Call | Making | Grip) -> float:
        """The moment at which its process was killed. Forked children of that process live on."""
        return self.deaths.get(each.worker, inf) if each.pid == self.pids.get(each.worker) else inf

    def _read(self, worker: str, what: str, pid: int, told: list[Any]) -> None:
        match what:
            case "ready":
                self.pids[worker] = pid
            case "call":
                self.calls[told[0]] = Call(told[0], worker, pid, *told[1:6], nap=sum(told[6]))
            case "done":
                call = self.calls[told[0]]
                call.ended, call.outcome, call.values, call.text = told[1:]
            case "make":
                self.makings[told[0]] = Making(told[0], worker, pid, *told[1:])
            case "made":
                self.makings[told[0]].ended, self.makings[told[0]].outcome = told[1:]
            case "locked":
                self.grips[told[0]] = Grip(told[0], worker, pid, *told[1:])
            case "inside":
                self.grips[told[0]].inside.append(told[1])
            case "leaving":
                self.grips[told[0]].left = told[1]
            case "stall":
                self.stalls[worker].append((told[0], told[1]))
            case "down":
                self.downs.append((worker, told[0], told[1]))
            case "up":
                self.ups.append((worker, told[0]))
            case "hang":
                self.hangs.append(f"{worker}: {told[0]}")
            case "closed":
                self.left[worker] = told[0]
            case "bad":
                self.bad += 1

    # -- faults between two moments ---------------------------------------------------------------------------------

    def at(self, worker: str, start: float, end: float) -> Iterator[Fault]:
        """Faults that this process may have noticed between these moments."""
        for fault in self.faults:
            if fault.began <= end and fault.until >= start and fault.worker in (None, worker):
                yield fault

    def blurred(self, worker: str, start: float, end: float) -> bool:
        """The process may not have reached the engine, or the engine may have lost leases."""
        return any(fault.effect.hides for fault in self.at(worker, start, end))

    def believed_down(self, worker: str, start: float, end: float) -> bool:
        """The process worked without the engine for at least a part of this time."""
        for who, since, _ in self.downs:
            if who == worker and since <= end:
                over = min((moment for each, moment in self.ups if each == who and moment >= since), default=inf)
                if over >= start:
                    return True
        return False

    def stalled(self, worker: str, start: float, end: float) -> float:
        """Seconds between these moments in which the process didn't run."""
        return sum(max(0.0, min(b, end) - max(a, start)) for a, b in self.stalls[worker])
