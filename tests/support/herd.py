"""Many concurrent callers, and origins that wait until the test lets them continue."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 20.0


class Herd:
    """One thread for each job. `join` returns the result or the error of each job, in order."""

    def __init__(self, *jobs: Callable[[], Any]) -> None:
        self._got: list[Any] = [None] * len(jobs)
        self._threads = [
            threading.Thread(target=self._run, args=(number, job), daemon=True) for number, job in enumerate(jobs)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, job: Callable[[], Any]) -> None:
        try:
            self._got[number] = job()
        except BaseException as error:
            self._got[number] = error

    @property
    def waiting(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a caller never came back"
        return self._got


class Origin:
    """A function that counts its calls. Each call waits until the test calls `let_on`."""

    def __init__(self, *, open: bool = False) -> None:
        self.calls = 0
        self.began = threading.Semaphore(0)
        self._gate = threading.Event()
        if open:
            self._gate.set()

    def __call__(self) -> int:
        """Return the number of this call."""
        self.calls += 1
        number = self.calls
        self.began.release()
        assert self._gate.wait(PATIENCE), "nobody let it on"
        return number

    async def suspending(self) -> int:
        self.calls += 1
        number = self.calls
        self.began.release()
        while not self._gate.is_set():
            await asyncio.sleep(0.001)
        return number

    def has_begun(self) -> None:
        """Wait until one more call has begun."""
        assert self.began.acquire(timeout=PATIENCE), "nobody computes"

    def let_on(self) -> None:
        self._gate.set()

    def hold(self) -> None:
        self._gate.clear()


def until(condition: Callable[[], object], bound: float = PATIENCE) -> None:
    """Wait for a condition that has no event."""
    end = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


async def until_async(condition: Callable[[], object], bound: float = PATIENCE) -> None:
    end = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.001)


def logged_here(caplog: Any) -> list[logging.LogRecord]:
    """Return what this thread has logged. Threads that earlier tests have left may log, too."""
    return [record for record in caplog.records if record.thread == threading.get_ident()]


def had(value: Any) -> Any:
    """Return the value. If it is an awaitable, return its result from a new event loop."""
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value
