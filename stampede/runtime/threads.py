"""The library's own threads: daemons that are started when they are needed, and receive no signals. A program that
blocks a signal in its main thread, as Celery's workers do with SIGTERM, relies on all other threads to block it,
too."""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from stampede.runtime import forks, process_lock
from stampede.runtime.greenlets import cooperative

__all__ = ["ThreadPool", "begun", "on_stack", "signals_blocked", "with_signals_of_caller"]

T = TypeVar("T")

_MASKS = hasattr(signal, "pthread_sigmask")  # not on Windows

REST = 30.0
"""Seconds without a job after which a thread ends."""


def begun(name: str, work: Callable[..., object], *args: Any) -> threading.Thread | None:
    """Start a thread that does the work, and return it, or None if no thread can be started. That happens if the system
    has no more threads, while the interpreter ends, and in an isolated subinterpreter, which refuses daemons."""
    try:
        thread = threading.Thread(target=work, name=name, args=args, daemon=True)
        with signals_blocked():
            thread.start()
    except RecursionError:
        raise  # a RuntimeError that concerns the caller's stack, and not threads
    except RuntimeError:
        return None
    return thread


def on_stack(size: int, work: Callable[[], T]) -> T:
    """Call `work` in a thread of its own with a stack of `size` bytes, and return its value. Raise RuntimeError if no
    thread can be started. It is a real thread even under gevent's patch, because greenlets use the stack of their
    thread."""
    monkey = sys.modules.get("gevent.monkey")
    made = getattr(monkey, "get_original", lambda module, name: getattr(sys.modules[module], name))
    start, lock = made("_thread", "start_new_thread"), made("_thread", "allocate_lock")
    done, run = lock(), contextvars.copy_context().run
    found: list[tuple[Any, BaseException | None]] = []
    done.acquire()

    def call() -> None:
        try:
            found.append((run(work), None))
        except BaseException as error:
            found.append((None, error))
        finally:
            done.release()

    with process_lock.lock, signals_blocked():  # the size applies to all threads that start meanwhile
        before = threading.stack_size((size | 0xFFFF) + 1)  # whole pages
        try:
            start(call, ())
        finally:
            threading.stack_size(before)
    done.acquire()
    value, error = found.pop()
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block all signals in this thread, so that threads which are started in the block never receive any. Under
    gevent's monkey patch this does nothing: a "thread" started there is a greenlet of this thread."""
    if not _MASKS or cooperative():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # read first, because a signal handler may raise below
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def with_signals_of_caller(work: Callable[..., T]) -> Callable[..., T]:
    """Return a function that runs `work` with the signal mask of the thread that calls this. Otherwise a child process
    that a user's function starts in our threads would inherit a mask with SIGTERM blocked."""
    if not _MASKS:
        return work
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def run(*args: Any) -> T:
        before = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return work(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return run


class ThreadPool:
    """A pool of at most `limit` threads. Jobs that can't begin at once wait in the order of arrival."""

    def __init__(self, limit: float, name: str) -> None:
        self._limit, self._name = limit, name
        self._jobs: deque[Callable[[], object]] = deque()
        self._parents: list[deque[Callable[[], object]]] = []
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._parents.append(self._jobs)  # in a forked child, where these jobs must neither run nor be finalized
        self._jobs = deque()
        self._threads = self._idle = 0
        self._lock = threading.RLock()  # reentrant, for finalizers and signals
        self._changed = threading.Condition(self._lock)

    def do(self, job: Callable[[], object]) -> None:
        """Run a job in one of the threads. The job has to handle its own errors."""
        with self._lock:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
                return
            if self._threads >= self._limit:
                return
        try:
            thread = begun(self._name, self._work)
        except RecursionError:
            self.take_back(job)  # the caller gets the error, and keeps the job
            raise
        if thread is None:
            self._work(once=True)  # without threads, the caller runs the waiting jobs

    def take_back(self, job: Callable[[], object]) -> bool:
        """Remove a job that waits. Return False if it has begun."""
        with suppress(ValueError):
            self._jobs.remove(job)
            return True
        return False

    def _work(self, *, once: bool = False) -> None:
        changed, lock, there = self._changed, self._lock, 1
        with lock:
            if not once and self._threads >= self._limit:
                return  # several callers have started a thread at the same time
            self._threads += there
        try:
            while True:
                with lock:
                    self._idle += 1
                    while not self._jobs:
                        if once or (not changed.wait(REST) and not self._jobs):
                            self._idle -= 1
                            self._threads, there = self._threads - 1, 0  # at once, so that a new job starts a thread
                            return
                    self._idle -= 1
                    job = self._jobs.popleft()
                job()
                del job
        finally:
            with lock:
                self._threads -= there
