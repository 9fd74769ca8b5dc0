"""A summary of a soak, and the events around a finding."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from chaos.history import Call, History
from chaos.oracle import Finding
from chaos.round import Outcome

__all__ = ["Tally", "story"]

_LINES = 60


class Tally:
    """Counts over all rounds of an engine."""

    def __init__(self) -> None:
        self.rounds = 0
        self.findings = 0
        self.verbs: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.slowest: dict[str, float] = defaultdict(float)
        self.computations = self.grips = self.downs = self.bad = 0
        self.in_trouble = self.answered = 0

    def add(self, outcome: Outcome) -> None:
        history = outcome.history
        self.rounds += 1
        self.findings += len(outcome.findings)
        self.faults.update(fault.kind for fault in history.faults)
        self.computations += len(history.makings)
        self.grips += len(history.grips)
        self.downs += len(history.downs)
        self.bad += history.bad
        for call in history.calls.values():
            self._add_call(history, call)

    def _add_call(self, history: History, call: Call) -> None:
        self.verbs[call.verb] += 1
        if call.outcome == "never ended":
            self.outcomes["killed meanwhile"] += 1
            return
        self.outcomes[call.outcome] += 1
        self.slowest[call.verb] = max(self.slowest[call.verb], call.ended - call.began)
        if call.verb in ("compute", "call", "many", "refresh"):
            hurt = [f for f in history.at(call.worker, call.began, call.ended) if f.began <= call.ended <= f.until]
            if any(fault.effect.hides for fault in hurt):
                self.in_trouble += 1
                self.answered += call.ok or call.outcome in ("Broken", "ComputationFailed")

    def lines(self) -> Iterator[str]:
        calls = sum(self.verbs.values())
        yield f"{self.rounds} rounds, {calls:,} calls, {self.computations:,} computations, {self.grips:,} locks held"
        yield f"calls: {_counts(self.verbs)}"
        yield f"faults: {_counts(self.faults)}; engine told to be down {self.downs:,} times, bad bytes {self.bad:,}"
        yield f"outcomes: {_counts(self.outcomes)}"
        if self.in_trouble:
            yield (
                f"survived: {self.in_trouble:,} calls that compute ended while a fault was felt, {self.answered:,} of "
                f"them ({self.answered / self.in_trouble:.2%}) with a value or their origin's own error"
            )
        slow = sorted(self.slowest.items(), key=lambda item: -item[1])
        yield "slowest: " + ", ".join(f"{verb} {seconds:.2f} s" for verb, seconds in slow)
        yield f"findings: {self.findings}"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


def story(finding: Finding, history: History, begin: float) -> Iterator[str]:
    """The events of the finding's key, and the faults around it."""
    yield f"FINDING: {finding.key or 'all'}: {finding.what}"
    if not finding.key:
        return
    start, end = finding.start - 0.5, finding.end + 0.2
    lines: list[tuple[float, str]] = []
    for call in history.calls.values():
        if finding.key in call.keys or call.verb in ("clear", "end_all", "fork") or call.outcome == "Interrupted":
            lines.append((call.began, f"{call.worker:4} {call.colour} {call.verb} {call.id} begins"))
            given = call.values.get(finding.key, "")
            lines.append((call.ended, f"{call.worker:4} {call.verb} {call.id}: {call.outcome} {call.text} {given}"))
    for making in history.makings.values():
        if finding.key in making.keys:
            lines.append((making.born, f"{making.worker:4} computes {making.id} for {making.call}"))
            lines.append((making.ended, f"{making.worker:4} has computed {making.id}: {making.outcome}"))
    for grip in history.grips.values():
        if finding.key == grip.name:
            lines.append((grip.got, f"{grip.worker:4} got {grip.name} as {grip.id}, fence {grip.fence}"))
            lines += [(moment, f"{grip.worker:4} inside, as {grip.id}") for moment in grip.inside]
            lines.append((grip.left, f"{grip.worker:4} leaves, as {grip.id}"))
    for fault in history.faults:
        lines.append((fault.began, f"FAULT {fault} begins"))
        lines.append((fault.ended, f"FAULT {fault} ends"))
    for worker, moment, why in history.downs:
        lines.append((moment, f"{worker:4} believes the engine to be down: {why}"))
    lines += [(death, f"{worker} was killed") for worker, death in history.deaths.items()]
    for worker, stalls in history.stalls.items():
        lines += [(b, f"{worker:4} did not run for {b - a:.2f} s") for a, b in stalls]
    told = sorted(line for line in lines if start <= line[0] <= end)
    if len(told) > _LINES:
        yield f"  ... {len(told) - _LINES} lines before"
    for moment, text in told[-_LINES:]:
        yield f"  {moment - begin:9.4f}  {text}"
