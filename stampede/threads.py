"""Threads that serve: daemons, begun when they are needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from stampede import forks

__all__ = ["Crew", "begun"]

REST = 30.0
"""Seconds without a job after which a thread ends."""


def begun(name: str, work: Callable[..., object], *args: Any) -> Thread | None:
    """A thread that is at it. None: there is none to be had, which each caller survives in its own way.

    So it is where the system has no more, while the interpreter ends, and always in an isolated subinterpreter, which
    refuses daemons when they are made; others would keep it from ending.
    """
    try:
        thread = Thread(target=work, name=name, args=args, daemon=True)
        thread.start()
    except RuntimeError:
        return None
    return thread


class Crew:
    """At most `limit` threads; what none of them can begin at once waits for them, in its order."""

    def __init__(self, limit: float, name: str) -> None:
        self._limit, self._name = limit, name
        self._jobs: deque[Callable[[], object]] = deque()
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._parents = self._jobs  # in a forked child: not to be begun here, and not to be ended, by dropping them
        self._jobs = deque()
        self._threads = self._idle = 0
        self._lock = threading.RLock()  # reentrant, for finalizers and signals
        self._changed = threading.Condition(self._lock)  # to be entered by the lock, which can't be interrupted half in

    def do(self, job: Callable[[], object]) -> None:
        """Have it done. It deals with its own errors. Who is interrupted in here has it done, or taken back."""
        try:
            with self._lock:
                self._jobs.append(job)
                if self._idle >= len(self._jobs):
                    self._changed.notify()
                    return
                if self._threads >= self._limit:
                    return
            if begun(self._name, self._work) is None:
                self._work(once=True)  # the caller does what is left to do
        except BaseException:
            self.take_back(job)
            raise

    def take_back(self, job: Callable[[], object]) -> bool:
        """Whether nobody has begun it; then nobody will."""
        with suppress(ValueError):
            self._jobs.remove(job)
            return True
        return False

    def _work(self, *, once: bool = False) -> None:
        changed, lock, there = self._changed, self._lock, 1
        with lock:
            if not once and self._threads >= self._limit:
                return  # several have begun one
            self._threads += there
        try:
            while True:
                with lock:
                    self._idle += 1
                    while not self._jobs:
                        if once or (not changed.wait(REST) and not self._jobs):
                            self._idle -= 1
                            self._threads, there = self._threads - 1, 0  # at once: who comes now begins another
                            return
                    self._idle -= 1
                    job = self._jobs.popleft()
                job()
                del job
        finally:
            with lock:
                self._threads -= there
