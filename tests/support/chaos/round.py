"""One round: start processes, apply faults, wait, heal, close, and check the history."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from chaos.engines import World
from chaos.faults import Effect, Fault, Planned, planned
from chaos.history import History
from chaos.oracle import Finding, judged
from chaos.plan import LEASE, Part

__all__ = ["LONG", "SHORT", "Outcome", "Size", "played"]

_WORKERS = {
    "kill-worker": Effect(2, (0, 0), 0, hides=False),
    # The worker's own journal shows the stall, which explains its lost leases. The server did reply.
    "freeze-worker": Effect(2, (0.3, 5), 2.5, hides=False),
}
_GATED = Effect(2, (0.3, 5), 2.5)
"""For a worker that may be frozen during a write: no other process can write then."""

_BUSY = Effect(0, (0, 0), 2.5, silent=True)
_DIVERGED = 3.0
"""Seconds before a reported failover in which the new master may have received nothing from the old one."""

_STILL = 0.3
"""A longer stall of the conductor is a fault: connections lead through it, and must be made in half a second."""


@dataclass(frozen=True)
class Size:
    """The size of a round."""

    workers: int
    threads: int
    tasks: int
    pause: float
    seconds: float
    scale: float  # factor for the duration of faults


LONG = Size(workers=4, threads=3, tasks=3, pause=0.06, seconds=16, scale=1.0)
SHORT = Size(workers=2, threads=2, tasks=2, pause=0.03, seconds=2.5, scale=0.2)


@dataclass
class Outcome:
    history: History
    findings: list[Finding]
    local: dict[str, bool]


def played(world: World, seed: int, number: int, size: Size, kinds: Collection[str] = ()) -> Outcome:
    """Play the round of this number: its calls and faults are always the same. `kinds`: use only these faults."""
    return _Round(world, f"{seed} {world.name} {number}", size, kinds).play()


class _Process:
    """A worker, as the round controls it."""

    def __init__(self, part: Part, lines: list[tuple[str, list[Any]]]) -> None:
        self.part = part
        self.name = part.name
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed after it was read
        self._said: Queue[tuple[str, list[Any]]] = Queue()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "chaos.worker", json.dumps(asdict(part))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def _read(self, lines: list[tuple[str, list[Any]]]) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            told = json.loads(line)
            lines.append((self.name, told))
            if told[0] in ("ready", "rested", "healed", "closed"):
                self._said.put((told[0], told[2:]))
        self._said.put(("gone", []))

    def hear(self, word: str, patience: float) -> str | None:
        """Wait until the worker says this word. Return an error text if it does not, otherwise None."""
        try:
            said, _ = self._said.get(timeout=patience)
        except Empty:
            return f"{self.name} doesn't say {word!r} within {patience:.0f} s"
        return None if said == word else f"{self.name} is {said} before it could say {word!r}"

    def tell(self, *words: object) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(" ".join(map(str, words)).encode() + b"\n")
            self._popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join(10)
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def complaints(self) -> str:
        """The part of its standard error that shows a real error, or nothing."""
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace")
        self.errors.close()
        text = re.sub(r"Exception ignored in:[^\n]*\n(?:[^\n]+\n|\n)*?chaos\.caller\.Interrupted[^\n]*\n", "", text)
        found = re.search(
            r"Traceback|Exception ignored|never retrieved|never awaited|Fatal Python|Current thread", text
        )
        return text[max(0, found.start() - 1000) : found.start() + 4000] if found else ""


class _Round:
    def __init__(self, world: World, seed: str, size: Size, kinds: Collection[str]) -> None:
        self.kinds = kinds
        self.world = world
        self.seed = seed
        self.size = size
        self.dice = random.Random(seed)
        self.options = world.options(self.dice)
        self.lines: list[tuple[str, list[Any]]] = []
        self.faults: list[Fault] = []
        self.deaths: dict[str, float] = {}
        self.findings: list[Finding] = []
        self.local: dict[str, bool] = {}
        self.processes: list[_Process] = []
        self.begin = 0.0
        workers = size.workers if world.shared else 1
        self.tiers = [self.dice.random() < 0.5 for _ in range(workers)]
        self.loops = [self.dice.random() < 0.3 for _ in range(workers)]
        self.interrupts = 0.5 if self.dice.random() < 0.3 and size.scale == 1 else 0.0

    def play(self) -> Outcome:
        effects = {**self.world.effects, **_WORKERS}
        if self.world.gated:
            effects["freeze-worker"] = _GATED
        if not self.world.shared:
            del effects["kill-worker"]
        if self.size.scale < 1:
            effects = {kind: effect for kind, effect in effects.items() if effect.seconds[0] < 2}
        if self.kinds:
            effects = {kind: effect for kind, effect in effects.items() if kind in self.kinds}
        schedule = planned(self.dice, effects, self.size.seconds, self.size.scale)
        phases: list[tuple[float, float]] = []
        over = threading.Event()
        threading.Thread(target=self._watch_machine, args=(over,), daemon=True).start()
        threading.Thread(target=self._watch_world, args=(over,), daemon=True).start()
        threading.Thread(target=self._watch_servers, args=(over,), daemon=True).start()
        try:
            self.processes = [self._start(slot) for slot in range(len(self.tiers))]
            self._all_say("ready", 30)
            self.begin = time.monotonic() + 0.05
            for each in self.processes:
                each.tell("begin", self.begin, self.size.seconds)
            for fault in schedule:
                self._do(fault, effects[fault.kind])
            time.sleep(max(0.0, self.begin + self.size.seconds - time.monotonic()))
            self.world.mend()
            self._all_say("rested", 90)
            self._let_pass()
            phases.append(self._heal(1))
            time.sleep(max(self.world.lag.values()))  # a local tier may still return the old values until then
            phases.append(self._heal(2))
            self._nothing_stands()
            for each in self.processes:
                each.tell("close")
            self._all_say("closed", 30)
        except _Gone as gone:
            self._wrong(str(gone))
        finally:
            over.set()
            for each in self.processes:
                each.end()
            self.world.mend()
        for each in self.processes:
            if complaints := each.complaints():
                self._wrong(f"{each.name} complained:\n{complaints}")
        history = History(self.lines, self.faults, self.deaths)
        self.findings += judged(history, self.world, self.local, phases, interrupted=self.interrupts > 0)
        return Outcome(history, self.findings, self.local)

    def _start(self, slot: int, name: str | None = None) -> _Process:
        size, name = self.size, name or f"w{slot}"
        many = 1 if self.world.shared else 3
        part = Part(
            url=self.world.url(slot), name=name, seed=self.seed, namespace=self.seed.replace(" ", "-"),
            local=self.tiers[slot] and self.world.shared, threads=size.threads * many,
            tasks=size.tasks * many, pause=size.pause, uvloop=self.loops[slot],
            interrupts=self.interrupts, options=self.options,
        )  # fmt: skip
        self.local[name] = part.local
        return _Process(part, self.lines)

    def _alive(self) -> list[_Process]:
        return [each for each in self.processes if each.name not in self.deaths]

    def _all_say(self, word: str, patience: float) -> None:
        end = time.monotonic() + patience
        wrong = [each.hear(word, max(0.1, end - time.monotonic())) for each in self._alive()]
        if any(wrong):
            for each in self._alive():  # faulthandler then prints where each worker is
                with contextlib.suppress(ProcessLookupError):
                    each.signal(signal.SIGABRT)
            time.sleep(1)
            raise _Gone("; ".join(filter(None, wrong)))

    def _watch_machine(self, over: threading.Event) -> None:
        """All links lead through this process: while it does not run, no worker gets an answer from the engine."""
        while not over.is_set():
            before = time.monotonic()
            time.sleep(0.02)
            now = time.monotonic()
            if now - before > _STILL and self.world.linked:
                self.faults.append(Fault("busy-machine", "", before, now, now + _BUSY.after, _BUSY))

    def _watch_servers(self, over: threading.Event) -> None:
        """A server that stalls for this long has not answered any worker either."""
        while not over.wait(0.05):
            before = time.monotonic()
            self.world.pulse()
            now = time.monotonic()
            if now - before > _STILL:
                self.faults.append(Fault("busy-server", "", before, now, now + _BUSY.after, _BUSY))

    def _watch_world(self, over: threading.Event) -> None:
        """A failover that the servers started themselves loses as much as one that the round started."""
        while not over.wait(0.25):
            try:
                what = self.world.upheaval()
            except (OSError, ValueError, IndexError):
                continue
            now = time.monotonic()
            if what and not any(fault.effect.forgets and fault.until >= now for fault in self.faults):
                effect = self.world.effects["failover"]
                self.faults.append(Fault("failover-by-itself", what, now - _DIVERGED, now, now + effect.after, effect))

    # -- faults -----------------------------------------------------------------------------------------------------

    def _do(self, fault: Planned, effect: Effect) -> None:
        time.sleep(max(0.0, self.begin + fault.at - time.monotonic()))
        began = time.monotonic()
        done = Fault(fault.kind, "", began, float("inf"), float("inf"), effect)
        self.faults.append(done)
        if fault.kind in _WORKERS:
            alive = self._alive()
            process = alive[int(fault.chance * len(alive))]
            done.worker = None if self.world.gated and fault.kind == "freeze-worker" else process.name
            done.target = self._harm_one(fault, process)
        else:
            done.target = self.world.harm(fault, [each.pid for each in self._alive()])
        done.ended = time.monotonic()
        done.until = done.ended + min(effect.after, 1.5 + self.world.time_out + done.ended - began)

    def _harm_one(self, fault: Planned, process: _Process) -> str:
        if fault.kind == "kill-worker":
            process.signal(signal.SIGKILL)
            self.deaths[process.name] = time.monotonic()
            slot = int(process.name[1:].split("+")[0])
            new = self._start(slot, process.name + "+")
            self.processes.append(new)
            if new.hear("ready", 30):
                raise _Gone(f"{new.name} doesn't come up")
            left = self.begin + self.size.seconds - time.monotonic()
            new.tell("begin", time.monotonic(), max(0.1, left))
        else:
            process.signal(signal.SIGSTOP)
            time.sleep(fault.seconds)
            process.signal(signal.SIGCONT)
        return process.name

    # -- afterwards -------------------------------------------------------------------------------------------------

    def _let_pass(self) -> None:
        """Wait until no fault has effects any more."""
        last = max(fault.until for fault in self.faults)
        heard = time.monotonic() + max(self.world.lag_of_all.values())  # when all have heard of the last `clear`
        time.sleep(max(0.0, max(last, heard) - time.monotonic()))

    def _heal(self, number: int) -> tuple[float, float]:
        start = time.monotonic()
        for each in self._alive():
            each.tell("heal", number)
        self._all_say("healed", 60)
        return start, time.monotonic()

    def _nothing_stands(self) -> None:
        end = time.monotonic() + LEASE + 2
        while standing := self.world.standing():
            if time.monotonic() > end:
                self._wrong(f"leases or locks stand, and nobody computes: {standing}")
                return
            time.sleep(0.2)

    def _wrong(self, what: str) -> None:
        self.findings.append(Finding(what, "", self.begin, time.monotonic()))


class _Gone(Exception):
    """A process does not do what it is told."""
