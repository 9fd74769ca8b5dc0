"""The library's own threads: daemons, started when they are needed, which receive no signals. A program that blocks a
signal in its main thread, as Celery's workers do with SIGTERM, relies on no other thread to take it."""

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
    """Return a thread that does the work, or None if there is none to be had: where the system has no more, while the
    interpreter ends, and in an isolated subinterpreter, which refuses daemons."""
    try:
        thread = threading.Thread(target=work, name=name, args=args, daemon=True)
        with signals_blocked():
            thread.start()
    except RecursionError:
        raise  # the caller has no stack left, which says nothing of threads
    except RuntimeError:
        return None
    return thread


def on_stack(size: int, work: Callable[[], T]) -> T:
    """Call this in a thread of its own with a stack of so many bytes, and wait for it. RuntimeError: there is none. It
    is a real thread under gevent's patch, too, as greenlets have the stack of theirs."""
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

    with process_lock.lock, signals_blocked():  # the size is of all threads that start meanwhile
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
    """Block all signals in this thread, so that the threads which it starts in the block never receive any. Under
    gevent's monkey patch this does nothing: a "thread" started there is a greenlet of this very thread."""
    if not _MASKS or cooperative():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # asked first: the next line may already raise
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def with_signals_of_caller(work: Callable[..., T]) -> Callable[..., T]:
    """Return a function that runs `work` with the signal mask of the thread which calls this: a child process that
    users' functions start in our threads would inherit a mask with SIGTERM blocked."""
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
    """At most `limit` threads; what none of them can begin at once waits for them, in its order."""

    def __init__(self, limit: float, name: str) -> None:
        self._limit, self._name = limit, name
        self._jobs: deque[Callable[[], object]] = deque()
        self._parents: list[deque[Callable[[], object]]] = []
        self._start_again()
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._parents.append(self._jobs)  # in a forked child: not to be begun here, nor to be ended, by dropping them
        self._jobs = deque()
        self._threads = self._idle = 0
        self._lock = threading.RLock()  # reentrant, for finalizers and signals
        self._changed = threading.Condition(self._lock)

    def do(self, job: Callable[[], object]) -> None:
        """Have it done. It deals with its own errors."""
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
            self.take_back(job)  # it is its caller's again
            raise
        if thread is None:
            self._work(once=True)  # the caller does what is left to do

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
