"""The demo's processes, and the scenes that they play."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from caller import Task, clock, run
from timeline import Timeline

from stampede.errors import StampedeError

__all__ = ["Fleet"]

LOOK = 0.05
"""Seconds between two updates of the printed line."""

PATIENCE = 60.0
"""Seconds without a report after which the demo gives up."""


@dataclass
class Member:
    """One process, its callers and the pipe to it."""

    process: BaseProcess
    pipe: Connection
    callers: range
    busy: bool = False


class Fleet:
    """A number of processes with a number of callers each. The end of the `with` block ends and reaps them."""

    def __init__(self, directory: str, processes: int, callers: int, room: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._directory = directory
        self._origin = self._context.BoundedSemaphore(room)
        self._killed, self._killed_sender = self._context.Pipe(duplex=False)
        self._sizes = processes, callers
        self._members: list[Member] = []

    @property
    def callers(self) -> int:
        processes, callers = self._sizes
        return processes * callers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members:
            member.pipe.close()  # tells the processes to end
        self._killed.close()
        self._killed_sender.close()
        for member in self._members:
            member.process.join(2.0 if kind is None else 0)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.process.close()

    def start(self) -> Iterator[int]:
        """Start all processes. Yield how many of them are ready, each time that one more is."""
        processes, callers = self._sizes
        with _undisturbed():
            for number in range(processes):
                self._add(range(number * callers, (number + 1) * callers))
        for count, member in enumerate(self._members, 1):
            self._expect(member, "here")
            yield count

    def _add(self, callers: range) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (self._directory, callers, self._origin, self._killed, theirs)
        process = self._context.Process(target=run, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._members.append(Member(process, ours, callers))

    def play(self, timeline: Timeline, task: Task, show: Callable[[Timeline], object], *, lasts: float = 0.0) -> None:
        """Play one scene, and call `show` as it proceeds. A lasting scene is stopped after `lasts` seconds."""
        self._line_up(timeline, task)
        stop_at = timeline.begin + lasts
        for _ in self._reports(timeline, show, until=stop_at if task.lasting else None):
            pass
        if task.lasting:
            for member in self._members:
                member.pipe.send("stop")
            for _ in self._reports(timeline, show):
                pass
        timeline.end = clock()
        show(timeline)

    def play_murder(self, timeline: Timeline, task: Task, show: Callable[[Timeline], object]) -> None:
        """Play a scene in which the computing process is killed, as soon as all callers wait for it."""
        self._line_up(timeline, task)
        for _ in self._reports(timeline, show):
            admitted = [marks["admitted"] for _, marks in timeline.computations if "admitted" in marks]
            if admitted and sum("asked" in marks for marks in timeline.marks.values()) == timeline.callers:
                break
        for _ in self._reports(timeline, show, until=admitted[0] + task.cost):
            pass
        self._kill(timeline, timeline.computations[0][0])
        for _ in self._reports(timeline, show):
            pass
        timeline.end = clock()
        show(timeline)

    def _line_up(self, timeline: Timeline, task: Task) -> None:
        for member in self._members:
            member.pipe.send(task)
        for member in self._members:
            self._expect(member, "ready")
            member.busy = True
        timeline.begin = timeline.end = clock()
        for member in self._members:
            member.pipe.send("go")

    def _reports(
        self, timeline: Timeline, show: Callable[[Timeline], object], *, until: float | None = None
    ) -> Iterator[None]:
        """Receive the callers' reports until all are done, or until `until`. Yield after each round."""
        last_report = shown = clock()
        while busy := {member.pipe: member for member in self._members if member.busy}:
            now = clock()
            if until is not None and now >= until:
                return
            ready = wait(list(busy), timeout=LOOK if until is None else min(LOOK, until - now))
            for pipe in ready:
                member = busy[pipe]  # type: ignore[index]
                report = self._receive(member)
                if report == "done":
                    member.busy = False
                else:
                    timeline.add(report)
            last_report = clock() if ready or until is not None else last_report
            if clock() - last_report > PATIENCE:
                raise StampedeError(f"the demo's callers have sent no report for {PATIENCE:g} s")
            if clock() - shown > LOOK:
                shown = timeline.end = clock()
                show(timeline)
            yield

    def _kill(self, timeline: Timeline, caller: int) -> None:
        (victim,) = (member for member in self._members if caller in member.callers)
        assert victim.process.pid is not None
        at = clock()
        os.kill(victim.process.pid, signal.SIGKILL)
        self._killed_sender.send(at)
        timeline.kill(victim.callers, at)
        victim.process.join()
        victim.busy = False
        victim.pipe.close()
        victim.process.close()
        self._members.remove(victim)
        self._origin.release()  # the killed process held a place at the origin

    def _expect(self, member: Member, word: str) -> None:
        if not member.pipe.poll(PATIENCE) or self._receive(member) != word:
            raise StampedeError(f"a process of the demo is not {word}")

    def _receive(self, member: Member) -> Any:
        try:
            return member.pipe.recv()
        except (EOFError, OSError):
            raise StampedeError("a process of the demo has ended unexpectedly: see its output above") from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Block SIGINT and SIGTERM, so that no process is started without being listed: it would never be ended.

    The started processes inherit the block: a terminal sends Ctrl-C to all of them, but we end them in order.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
