"""One process of the demo. Its callers are threads that do what the conductor asks, and tell when they did it."""

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
"""One clock for all processes of the machine."""

PACE = 0.01
"""Seconds between two reads of a caller under load."""

GAP = 0.2
"""Seconds without a read that end one stretch of reads and begin another."""


_OWED = {"asked": 0, "began": 1, "admitted": 0, "ended": -1, "served": 0}
"""What is still to come after a mark: a computation in the background may outlast its caller's reads."""


class Task(NamedTuple):
    """What each caller is to do with a key, once or until it is told to stop."""

    key: str
    cost: float  # seconds that the origin needs for it
    ttl: float
    guarded: bool  # get_or_compute; else get, compute, set
    lasting: bool
    doomed: bool = False  # the computation goes on until its process is killed; the next one ends


class Mark(NamedTuple):
    """What a caller did, and when: asked, began (to compute), admitted (by the origin), ended, served."""

    what: str
    caller: int
    at: float


class Reads(NamedTuple):
    """What a caller's reads under load came to."""

    caller: int
    reads: int
    slowest: float
    stretches: list[tuple[float, float]]
    blocked: list[tuple[float, float]]  # those that waited for a computation, or had to do it


def run(
    directory: str, callers: range, origin: AbstractContextManager[Any], killed: Connection, pipe: Connection
) -> None:
    """A process's whole life: tasks, until the pipe is closed."""
    try:
        process = Process(directory, callers, origin, killed, pipe)
        pipe.send("here")
        while True:
            process.perform(pipe.recv())
    except (EOFError, OSError):
        return  # the conductor is gone, or has no more to ask


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
        self._origin = origin  # lets in so many at once
        self._killed = killed  # readable, and never read, once a process has been killed
        self._pipe = pipe
        self._here = threading.local()
        self._cache = Cache(f"disk://{directory}", local=True, background=True, stale=0, observers=[self._notice])

    def _notice(self, event: events.Event) -> None:
        if isinstance(event, events.Waited):
            self._here.blocked = True

    def perform(self, task: Task) -> None:
        """Line the callers up, let them go at the conductor's word, and pass on what they tell."""
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        go, stop = threading.Event(), threading.Event()
        act = self._read_on if task.lasting else self._ask_once
        for caller in self._callers:
            threading.Thread(target=act, args=(task, caller, told.put, go, stop), daemon=True).start()
        self._pipe.send("ready")
        self._pipe.recv()
        go.set()
        left = len(self._callers)
        while left:
            if self._pipe.poll():
                self._pipe.recv()
                stop.set()
            try:
                news = told.get(timeout=0.02)
            except queue.Empty:
                continue
            self._pipe.send(news)
            left += _OWED[news.what] if isinstance(news, Mark) else -1
        self._pipe.send("done")

    def _ask_once(
        self, task: Task, caller: int, tell: Callable[[Any], object], go: threading.Event, stop: threading.Event
    ) -> None:
        go.wait()
        asked = clock()
        tell(Mark("asked", caller, asked))
        self._ask(task, caller, tell)
        served = clock()
        tell(Mark("served", caller, served))
        tell(Reads(caller, 1, served - asked, [], []))

    def _read_on(
        self, task: Task, caller: int, tell: Callable[[Any], object], go: threading.Event, stop: threading.Event
    ) -> None:
        count, slowest = 0, 0.0
        stretches: list[tuple[float, float]] = []
        blocked: list[tuple[float, float]] = []
        go.wait()
        while not stop.is_set():
            self._here.blocked = False
            start = clock()
            self._ask(task, caller, tell)
            end = clock()
            count, slowest = count + 1, max(slowest, end - start)
            begun = stretches.pop()[0] if stretches and start - stretches[-1][1] < GAP else start
            stretches.append((begun, end))
            if self._here.blocked:
                blocked.append((start, end))
            stop.wait(PACE)
        tell(Reads(caller, count, slowest, stretches, blocked))

    def _ask(self, task: Task, caller: int, tell: Callable[[Any], object]) -> Any:
        compute = partial(self._compute, task, caller, tell, threading.get_ident())
        if task.guarded:
            return self._cache.get_or_compute(task.key, compute, ttl=task.ttl)
        value = self._cache.get(task.key)
        if value is None:
            value = compute()
            self._cache.set(task.key, value, ttl=task.ttl)
        return value

    def _compute(self, task: Task, caller: int, tell: Callable[[Any], object], asker: int) -> str:
        self._here.blocked = threading.get_ident() == asker  # not in the background
        tell(Mark("began", caller, clock()))
        with self._origin:
            tell(Mark("admitted", caller, clock()))
            if task.doomed:
                self._killed.poll(None)
            time.sleep(task.cost)
        tell(Mark("ended", caller, clock()))
        return f"computed for caller {caller}"
