"""Tasks of a queue that are queued once, and never run twice at a time. The adapters of task queues share this.

A task has two locks. Its *place in the queue* is taken when it is enqueued, by the process that enqueues it, and is
given back when the task has ended, in a worker. Its token is the id of the task, which both of them know. Its *run* is
a lock of the worker alone, so that a message that is delivered twice is not run twice at the same time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any

from stampede.api.cache import Cache
from stampede.api.registry import get_cache
from stampede.errors import EngineError, LockLost, OptionError, StampedeError
from stampede.keys import Parameters, in_namespace, key_maker
from stampede.locks.holding import Holding
from stampede.settings.options import Seconds, seconds

__all__ = ["AlreadyQueued", "AlreadyRunning", "OnceTasks", "Run", "key_of"]

_log = logging.getLogger("stampede")

KNOWN = "30d"
"""How long the id of a task is stored: longer than it is queued and runs. Only killed tasks leave it behind."""

SOON = 5.0
"""Seconds in which a process that has taken a place in the queue stores the id of its task."""


class AlreadyQueued(StampedeError):
    """A task was not enqueued, because the same task is queued or runs. `task_id` is the id of that one."""

    def __init__(self, name: str, task_id: str | None) -> None:
        super().__init__(f"{name} is queued already, or runs: {task_id}")
        self.name, self.task_id = name, task_id

    def __reduce__(self) -> Any:
        return type(self), (self.name, self.task_id)


class AlreadyRunning(StampedeError):
    """A worker does not run a task now, because the same task runs elsewhere. If `twice`, it is this very task, whose
    message was delivered twice; otherwise it may run later."""

    def __init__(self, name: str, *, twice: bool) -> None:
        super().__init__(f"{name} runs in another worker")
        self.name, self.twice = name, twice

    def __reduce__(self) -> Any:
        return _again, (type(self), self.name, self.twice)


def _again(kind: type[AlreadyRunning], name: str, twice: bool) -> AlreadyRunning:
    return kind(name, twice=twice)


def key_of(name: str, function: Callable[..., Any], unique_on: str | Collection[str] | None) -> Callable[..., str]:
    """Return a function that takes a task's arguments and returns the name of its lock. `unique_on` are the arguments
    that tell tasks apart, by default all. OptionError: the function has no such argument."""
    known = [each.name for each in Parameters(function).all]
    unique = [unique_on] if isinstance(unique_on, str) else unique_on
    if unique is None:
        return key_maker(function, prefix=f"{name}:")
    if unknown := set(unique).difference(known):
        raise OptionError(f"unique_on of {name} has {sorted(unknown)}: there are {known}")
    return key_maker(function, prefix=f"{name}:", ignore=[each for each in known if each not in unique])


class OnceTasks:
    """The locks of tasks, on the engine of one cache, which also stores the ids of the tasks that have them.

    - `cache`: the name of a cache in the settings, or a Cache.
    - `lease`: seconds after which the lock of a killed worker ends.
    - `queued`: seconds for which a task has its place in the queue, if no worker takes it.
    """

    def __init__(self, cache: str | Cache = "default", *, lease: Seconds = 30.0, queued: Seconds = "1h") -> None:
        self._cache = cache
        self.lease = seconds("lease", lease)
        self.queued = seconds("queued", queued)

    @property
    def cache(self) -> Cache:
        return get_cache(self._cache) if isinstance(self._cache, str) else self._cache

    def _lock(self, name: str, token: str | None = None) -> Any:
        cache = self.cache
        return cache.lock(in_namespace(cache.namespace, f"task:{name}"), lease=self.lease, token=token)

    def _id(self, name: str) -> str | None:
        """Return the id of the task that has this lock. The engine is asked, not the local tier."""
        entry = self.cache.peek(f"task:{name}")
        return None if entry is None else str(entry.value)

    def enter(self, name: str, task_id: str, delay: float = 0.0) -> None:
        """Take the place in the queue, for a task that is to run in `delay` seconds. AlreadyQueued: another task has
        it."""
        lock, end = self._lock(name, task_id), monotonic() + SOON
        holding = lock.acquire(wait=0)
        while not holding:
            existing = self._id(name)
            if existing is not None or monotonic() > end:  # otherwise its process is just about to store the id
                raise AlreadyQueued(name, existing)
            holding = lock.acquire(wait=0.05)
        try:
            self.cache.set(f"task:{name}", task_id, ttl=KNOWN)
            holding.detach(delay + self.queued)
        except BaseException:
            _quietly(name, holding.release)
            raise

    def leave(self, name: str, task_id: str) -> None:
        """Give the place in the queue back, for a task that will not run. If that fails, it ends after `queued`."""
        _quietly(name, lambda: self._give_back(name, task_id, self._lock(name, task_id).acquire(wait=0)))

    def _give_back(self, name: str, task_id: str, lock: Holding) -> None:
        if not lock.unreleased:
            return  # refused, or kept for a retry
        if self._id(name) == task_id:  # before the release, after which another task stores its own
            self.cache.invalidate(f"task:{name}")
        lock.release()

    def run(self, name: str, task_id: str) -> Run:
        """Take the task over, and return its run, to be ended. AlreadyRunning: a worker that lives runs it already."""
        patience = 1.5 * self.lease + 1.0  # longer than the lease of a dead worker
        running = self._lock(runs := _runs(name)).acquire(wait=patience)
        if not running:
            raise AlreadyRunning(name, twice=self._id(runs) == task_id)
        try:
            self.cache.set(f"task:{runs}", task_id, ttl=KNOWN)
            place = self._lock(name, task_id).acquire(wait=0)
        except BaseException:
            _quietly(name, running.release)
            raise
        if not place:
            _log.warning("task %s was queued for longer than %g s, and was queued again meanwhile", name, self.queued)
        return Run(self, name, task_id, running, place)


class Run:
    """One run of a task, while its locks are renewed. It is a context manager: the task ends with the block."""

    def __init__(self, tasks: OnceTasks, name: str, task_id: str, running: Holding, place: Holding) -> None:
        self._tasks, self._name, self._id, self._running, self._place = tasks, name, task_id, running, place

    def retry(self, delay: float) -> None:
        """Keep the place in the queue for another run, which begins in `delay` seconds. Call it when the message of
        that run is sent."""
        if self._place.unreleased:
            _quietly(self._name, lambda: self._place.detach(delay + self._tasks.queued))

    def end(self) -> None:
        """Give both locks back. Losing one is logged: the work is done, so the task does not fail for it."""
        for name, holding in ((self._name, self._place), (_runs(self._name), self._running)):
            _quietly(self._name, partial(self._tasks._give_back, name, self._id, holding))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _runs(name: str) -> str:
    """Return the name of the lock of a task's run."""
    return f"{name} runs"


def _quietly(name: str, act: Callable[[], object]) -> None:
    try:
        act()
    except LockLost:
        _log.warning("task %s: its lock ended before it did, so it may have been queued or run twice", name)
    except EngineError as error:
        _log.warning("task %s: its lock ends with its lease: %s", name, error)
