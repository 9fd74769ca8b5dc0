"""One process of the demo. Its callers are threads: they do what the conductor asks, and report when they did it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from stampede import events
from stampede.api.cache import Cache

__all__ = ["Mark", "Reads", "Task", "run"]

clock = time.monotonic
"""The clock, which all processes of the machine share."""

PACE = 0.01
"""Seconds between two reads of one caller under load."""

GAP = 0.2
"""Seconds without a read that end one stretch of reads and begin another."""


_EXPECTED = {"asked": 0, "began": 1, "admitted": 0, "ended": -1, "served": 0}
"""How many more reports to expect after each mark: a computation in the background may outlast its caller's reads."""


class Task(NamedTuple):
    """What each caller does with a key, once or until it is stopped."""

    key: str
    cost: float  # seconds that the origin needs for it
    ttl: float
    guarded: bool  # true: get_or_compute; false: get, compute, set
    lasting: bool
    doomed: bool = False  # the first computation lasts until its process is killed; the next one ends


class Mark(NamedTuple):
    """A step of a caller, and its time: asked, began (to compute), admitted (by the origin), ended, served."""

    what: str
    caller: int
    at: float


class Reads(NamedTuple):
    """A summary of a caller's reads."""

    caller: int
    reads: int
    slowest: float
    stretches: list[tuple[float, float]]
    blocked: list[tuple[float, float]]  # reads that waited for a computation, or did it themselves


def run(
    directory: str, callers: range, origin: AbstractContextManager[Any], killed: Connection, pipe: Connection
) -> None:
    """Perform tasks until the pipe is closed: the main function of a process."""
    try:
        process = Process(directory, callers, origin, killed, pipe)
        pipe.send("here")
        while True:
            process.perform(pipe.recv())
    except (EOFError, OSError):
        return  # the conductor has ended, or closed the pipe


class Process:
    def __init__(
        self,
        directory: str,
        callers: range,
        origin: AbstractContextManager[Any],
        killed: Connection,
        pipe: Connection,
    ) -> None:
        self._callers = callers
        self._origin = origin  # admits a limited number of computations
        self._killed = killed  # becomes readable when a process is killed; it is never read
        self._pipe = pipe
        self._here = threading.local()
        self._cache = Cache(f"disk://{directory}", local=True, background=True, stale=0, observers=[self._notice])

    def _notice(self, event: events.Event) -> None:
        if isinstance(event, events.Waited):
            self._here.blocked = True

    def perform(self, task: Task) -> None:
        """Prepare the callers, start them when the conductor says so, and pass on their reports."""
        reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        go, stop = threading.Event(), threading.Event()
        act = self._read_on if task.lasting else self._ask_once
        for caller in self._callers:
            threading.Thread(target=act, args=(task, caller, reports.put, go, stop), daemon=True).start()
        self._pipe.send("ready")
        self._pipe.recv()
        go.set()
        left = len(self._callers)
        while left:
            if self._pipe.poll():
                self._pipe.recv()
                stop.set()
            try:
                report = reports.get(timeout=0.02)
            except queue.Empty:
                continue
            self._pipe.send(report)
            left += _EXPECTED[report.what] if isinstance(report, Mark) else -1
        self._pipe.send("done")

    def _ask_once(
        self, task: Task, caller: int, send: Callable[[Any], object], go: threading.Event, stop: threading.Event
    ) -> None:
        go.wait()
        asked = clock()
        send(Mark("asked", caller, asked))
        self._ask(task, caller, send)
        served = clock()
        send(Mark("served", caller, served))
        send(Reads(caller, 1, served - asked, [], []))

    def _read_on(
        self, task: Task, caller: int, send: Callable[[Any], object], go: threading.Event, stop: threading.Event
    ) -> None:
        count, slowest = 0, 0.0
        stretches: list[tuple[float, float]] = []
        blocked: list[tuple[float, float]] = []
        go.wait()
        while not stop.is_set():
            self._here.blocked = False
            start = clock()
            self._ask(task, caller, send)
            end = clock()
            count, slowest = count + 1, max(slowest, end - start)
            begun = stretches.pop()[0] if stretches and start - stretches[-1][1] < GAP else start
            stretches.append((begun, end))
            if self._here.blocked:
                blocked.append((start, end))
            stop.wait(PACE)
        send(Reads(caller, count, slowest, stretches, blocked))

    def _ask(self, task: Task, caller: int, send: Callable[[Any], object]) -> Any:
        compute = partial(self._compute, task, caller, send, threading.get_ident())
        if task.guarded:
            return self._cache.get_or_compute(task.key, compute, ttl=task.ttl)
        value = self._cache.get(task.key)
        if value is None:
            value = compute()
            self._cache.set(task.key, value, ttl=task.ttl)
        return value

    def _compute(self, task: Task, caller: int, send: Callable[[Any], object], asker: int) -> str:
        self._here.blocked = threading.get_ident() == asker  # false in a background thread
        send(Mark("began", caller, clock()))
        with self._origin:
            send(Mark("admitted", caller, clock()))
            if task.doomed:
                self._killed.poll(None)
            time.sleep(task.cost)
        send(Mark("ended", caller, clock()))
        return f"computed for caller {caller}"
