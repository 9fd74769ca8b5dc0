"""Celery tasks that are queued once, and never run twice at a time.

@app.task(base=Once)
def send(report: int) -> None: ...

send.delay(42); send.delay(42)  # the second call returns the AsyncResult of the first, until that has ended"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_revoked
from kombu.utils.uuid import uuid

from stampede.api.cache import Cache
from stampede.contrib.tasks import AlreadyQueued, AlreadyRunning, OnceTasks, key_of
from stampede.errors import EngineError, OptionError
from stampede.settings.options import Seconds, nearest

__all__ = ["AlreadyQueued", "Once"]

_log = logging.getLogger("stampede")

HEADER = "stampede_once"
"""The header of a message that carries the name of the task's lock. The arguments may arrive as other types."""

BEGUN = "stampede_begun"
"""The attribute of a request whose task has begun."""


class Once(Task):  # type: ignore[misc]  # celery has no types
    """The base of tasks that are queued once: `@app.task(base=Once)`.

    While a task is queued or runs, `delay` and `apply_async` with equal arguments send nothing, and return the
    AsyncResult of that task. The options are attributes: give them to `@app.task`, or to a base class of your own.

    - `once_cache`: the cache with the lock: its name in the settings, or a Cache. Its engine must be shared.
    - `once_lease`: seconds after which the lock of a killed worker ends.
    - `once_queued`: how long a task keeps its lock if no worker takes it, after its countdown or eta.
    - `unique_on`: the name or names of the arguments that tell tasks apart; by default all of them.
    - `raise_on_duplicate`: raise AlreadyQueued, with the `task_id`, instead of returning its AsyncResult.

        >>> @app.task(base=Once, unique_on="report")
        ... def send(report: int, urgent: bool = False) -> None: ...
        >>> send.delay(42).id == send.delay(42, urgent=True).id
        True
    """

    abstract = True
    once_cache: str | Cache = "default"
    once_lease: Seconds = 30.0
    once_queued: Seconds = "1h"
    unique_on: str | Collection[str] | None = None
    raise_on_duplicate = False
    _locks: OnceTasks | None = None
    _key: Callable[..., str] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = [name for name in vars(Once) if name.startswith("once_")]
        for name in vars(cls):
            if name.startswith("once_") and name not in known:
                raise OptionError(f"a task has no option {name!r}: {nearest(name, known)}")

    def lock_name(self, args: Any = None, kwargs: Any = None) -> str:
        """Return the name of the lock of a task with these arguments. KeyingError: they can't be told apart exactly.

        >>> send.lock_name([42])
        'shop.tasks.send:(42)'
        """
        if self._key is None:
            self._key = key_of(self.name, self.run, self.unique_on)
        return self._key(*(args or ()), **(kwargs or {}))

    @property
    def _once(self) -> OnceTasks:
        if self._locks is None:
            self._locks = OnceTasks(self.once_cache, lease=self.once_lease, queued=self.once_queued)
        return self._locks

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any) -> Any:
        """Send the task, unless it is queued already or runs: then return the AsyncResult of that one.

        EngineError: the lock can't be asked for, and nothing was sent.
        """
        headers = options.get("headers") or {}
        if HEADER in headers:  # a retry, which has the lock
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        task_id, name = task_id or uuid(), self.lock_name(args, kwargs)
        try:
            self._once.enter(name, task_id, self._seconds_until(options.get("eta") or options.get("countdown")))
        except AlreadyQueued as error:
            if self.raise_on_duplicate or error.task_id is None:
                raise
            return self.AsyncResult(error.task_id)
        options["headers"] = {**headers, HEADER: name}
        try:
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        except BaseException:
            self._once.leave(name, task_id)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task. In a worker, hold its lock meanwhile. A direct call takes no lock."""
        request = self.request
        name = (request.headers or {}).get(HEADER)
        if request.called_directly or request.get(BEGUN):
            return super().__call__(*args, **kwargs)
        if name is None:  # sent by `send_task`, which takes no lock
            return self.run(*args, **kwargs)
        request.update({BEGUN: True})  # further calls come from the task itself
        try:
            run = self._once.run(name, request.id)
        except (AlreadyRunning, EngineError) as error:
            self._put_off(error)
            raise Ignore from error
        except BaseException:  # such as a time limit, while it waits for the lease of a killed worker
            self._once.leave(name, request.id)
            raise
        with run:
            try:
                return self.run(*args, **kwargs)
            except Retry as retry:
                run.retry(self._seconds_until(retry.when))
                raise
            except Reject as reject:
                if reject.requeue:
                    run.retry(0.0)
                raise

    def _put_off(self, error: AlreadyRunning | EngineError) -> None:
        """Send the task again, for later, if it can't run now. It does not count as a retry."""
        if self.request.is_eager:
            raise error
        if isinstance(error, AlreadyRunning) and error.twice:
            _log.warning("task %s[%s] was delivered again while it runs, and is ignored", self.name, self.request.id)
            return
        _log.warning("task %s[%s] can't run now, and is sent again for later: %r", self.name, self.request.id, error)
        self.signature_from_request(countdown=self._once.lease).apply_async()

    def _seconds_until(self, when: Any) -> float:
        """Return the seconds until a task is to run: `when` is a countdown, an eta, perhaps as a text, or None."""
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, datetime):
            now = self.app.now()
            when = (when - (now if when.tzinfo else now.replace(tzinfo=None))).total_seconds()
        return max(float(when or 0.0), 0.0)


@task_revoked.connect  # type: ignore[untyped-decorator]
def _revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Give back the lock of a task that was revoked, or has expired."""
    name = (request.headers or {}).get(HEADER) if isinstance(sender, Once) else None
    if name is not None:
        sender._once.leave(name, request.id)
