"""Places beside the caller: a small bounded pool of daemon threads, started when they are needed."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Workers"]


class Workers:
    """At most `limit` jobs at once; a place is reserved before there is a job, and none waits in a queue."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._start_again()
        os.register_at_fork(after_in_child=self._start_again)

    def _start_again(self) -> None:
        self._taken = 0
        self._idle = 0
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition(threading.Lock())

    def reserve(self) -> bool:
        """Take a place; `run` or `free` gives it back."""
        with self._changed:
            if self._taken >= self._limit:
                return False
            self._taken += 1
            return True

    def free(self) -> None:
        with self._changed:
            self._taken -= 1

    def run(self, job: Callable[[], object]) -> None:
        """Do the job in the place that was reserved. It deals with its own errors."""
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
                return
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:  # no thread to be had: the caller does what is left to do
            self._work(once=True)

    def _work(self, *, once: bool = False) -> None:
        changed = self._changed
        while not once or self._jobs:
            with changed:
                self._idle += 1
                while not self._jobs:
                    if not changed.wait(30) and not self._jobs:
                        self._idle -= 1
                        return
                self._idle -= 1
                job = self._jobs.popleft()
            try:
                job()
            finally:
                del job
                self.free()
