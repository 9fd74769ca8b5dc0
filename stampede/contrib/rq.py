"""RQ jobs that are queued once, and never run twice at a time.

@once_job()
def send(report: int) -> None: ...

send.enqueue(queue, 42); send.enqueue(queue, 42)  # the second call returns the first job, until that has ended"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rq import Queue, Retry, get_current_job
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus

from stampede.api.cache import Cache
from stampede.contrib.tasks import AlreadyQueued, OnceTasks, Run, key_of
from stampede.keys.names import name_of
from stampede.settings.options import Seconds

__all__ = ["AlreadyQueued", "once_job"]

META = "stampede_once"
"""The item of a job's meta that has the name of its lock."""

ENDED = (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED)


def once_job(
    *,
    cache: str | Cache = "default",
    unique_on: str | Collection[str] | None = None,
    raise_on_duplicate: bool = False,
    lease: Seconds = 30.0,
    queued: Seconds = "1h",
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function whose jobs are queued once. The usual workers run it: `rq worker`.

    `send.enqueue(queue, 42)` enqueues a job. While it is queued or runs, further calls with equal arguments enqueue
    nothing, and return that job. `send.enqueue_call(queue, (42,), retry=Retry(3))` also takes options of RQ.

    - `cache`: the cache with the lock: its name in the settings, or a Cache. Its engine must be shared.
    - `unique_on`: the name or names of the arguments that tell jobs apart; by default all of them.
    - `raise_on_duplicate`: raise AlreadyQueued, with the `task_id`, instead of returning the job.
    - `lease`: seconds after which the lock of a killed worker ends.
    - `queued`: how long a job keeps its lock if no worker takes it.

        >>> @once_job(unique_on="report")
        ... def send(report: int, urgent: bool = False) -> None: ...
        >>> send.enqueue(queue, 42).id == send.enqueue(queue, 42, urgent=True).id
        True
    """
    tasks = OnceTasks(cache, lease=lease, queued=queued)

    def decorate(function: Callable[..., Any]) -> Any:
        key = key_of(name_of(function), function, unique_on)
        running: set[str] = set()

        @functools.wraps(function)
        def once(*args: Any, **kwargs: Any) -> Any:
            job = get_current_job()
            name = None if job is None else job.meta.get(META)
            if job is None or name is None or job.id in running:  # a direct call, perhaps of the job itself
                return function(*args, **kwargs)
            running.add(job.id)
            try:
                with tasks.run(name, job.id) as run:
                    return _performed(job, run, functools.partial(function, *args, **kwargs))
            finally:
                running.discard(job.id)

        def enqueue_call(
            queue: Queue,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
            *,
            at_front: bool = False,
            meta: Mapping[Any, Any] | None = None,
            **options: Any,
        ) -> Job:
            kwargs = dict(kwargs or {})
            name = key(*args, **kwargs)
            job = queue.create_job(once, tuple(args), kwargs, meta={**(meta or {}), META: name}, **options)
            job.save()  # before it has the lock: otherwise another caller finds no such job, and takes the lock away
            try:
                _enter(tasks, name, job)
            except BaseException as error:
                queue.connection.delete(job.key)
                if not isinstance(error, AlreadyQueued) or raise_on_duplicate or error.task_id is None:
                    raise
                return queue.job_class.fetch(error.task_id, queue.connection, queue.serializer)
            try:
                return queue.enqueue_job(job, at_front=at_front)
            except BaseException:
                tasks.leave(name, job.id)
                raise

        once.enqueue = lambda queue, /, *args, **kwargs: enqueue_call(queue, args, kwargs)  # type: ignore[attr-defined]
        once.enqueue_call = enqueue_call  # type: ignore[attr-defined]
        return once

    return decorate


def _performed(job: Job, run: Run, function: Callable[[], Any]) -> Any:
    """Return the result of a job. If RQ will retry the job, it keeps its place in the queue."""
    try:
        result = function()
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)  # as RQ does
    except Exception:
        if job.retries_left:
            run.retry(job.get_retry_interval())
        raise
    if isinstance(result, Retry) and (done := job.number_of_retries or 0) < result.max:
        run.retry(Retry.get_interval(done, result.intervals))
    return result


def _enter(tasks: OnceTasks, name: str, job: Job) -> None:
    """Take the place in the queue, also from a job that was cancelled or deleted there, of which no worker is told."""
    try:
        tasks.enter(name, job.id)
    except AlreadyQueued as error:
        if error.task_id is None or not _is_over(error.task_id, job):
            raise
        tasks.leave(name, error.task_id)
        tasks.enter(name, job.id)


def _is_over(job_id: str, like: Job) -> bool:
    try:
        return type(like).fetch(job_id, like.connection, like.serializer).get_status(refresh=False) in ENDED
    except NoSuchJobError:
        return True
