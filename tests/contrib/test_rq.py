"""RQ jobs that are queued once: with real workers, whose processes are killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from herd import Herd, until
from servers import PATIENCE, RedisServer, free_port

pytest.importorskip("rq")
pytest.importorskip("redis")

import redis
from rq import Queue, Retry
from rq.job import JobStatus

from stampede import Cache, EngineError, KeyingError, OptionError
from stampede.contrib.rq import AlreadyQueued, once_job

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def jobs() -> Iterator[ModuleType]:
    """The application, on a server of its own."""
    with closing(RedisServer()) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASKS_REDIS", server.url)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
        sys.modules.pop("rq_tasks", None)
        import rq_tasks

        yield rq_tasks
        rq_tasks.cache.close()
        rq_tasks.board.close()


_words = count()


@pytest.fixture
def word(request: pytest.FixtureRequest) -> str:
    """A word of this test alone, so that no test waits for the locks of another one."""
    return f"{request.node.name}{next(_words)}"


@pytest.fixture
def queue(jobs: Any, word: str) -> Iterator[Queue]:
    """A queue of this test alone, whose workers run its jobs only."""
    with redis.Redis.from_url(jobs.URL + "/1") as connection:
        yield Queue(word, connection=connection)


@contextmanager
def worker(queue: Queue, jobs: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that ends when the queue is empty."""
    command = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--url", jobs.URL + "/1", "-q", queue.name]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process
            process.wait(PATIENCE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def began(jobs: Any, word: str) -> int:
    """Wait until a job has begun, and return the id of its process."""
    found = jobs.board.blpop([f"began {word}"], timeout=PATIENCE)
    assert found, "no job has begun"
    return int(found[1])


def go(jobs: Any, word: str, times: int = 1) -> None:
    for _ in range(times):
        jobs.board.rpush(f"go {word}", "on")


def test_equal_calls_are_one_job(jobs: Any, queue: Queue, word: str) -> None:
    """While a job is queued or runs, further calls return it, and enqueue nothing. Then it is enqueued anew."""
    first = jobs.work.enqueue(queue, word)
    assert jobs.work.enqueue(queue, word=word, times=1) == first == jobs.work.enqueue_call(queue, [word])
    other = jobs.work.enqueue(queue, word, 2)
    assert other.id != first.id
    assert queue.job_ids == [first.id, other.id]
    with worker(queue, jobs):
        began(jobs, word)
        assert jobs.work.enqueue(queue, word) == first
        go(jobs, word, 2)
    assert [first.return_value(), other.return_value()] == [word, word * 2]
    assert jobs.work.enqueue(queue, word) != first


def test_many_callers_at_once(jobs: Any, queue: Queue, word: str) -> None:
    """Of many callers at the same moment, one enqueues the job, and all get it. The others leave nothing behind."""
    before = set(queue.connection.scan_iter("rq:job:*"))
    for each in range(5):
        found = Herd(*[lambda each=each: jobs.work.enqueue(queue, word, each)] * 4).join()
        assert len({job.id for job in found}) == 1
    assert len(queue.job_ids) == len(set(queue.job_ids)) == 5
    assert len(set(queue.connection.scan_iter("rq:job:*")) - before) == 5


def test_a_retry_keeps_its_lock(jobs: Any, queue: Queue, word: str) -> None:
    """A job that is retried is the same job: its lock is kept in between, and ends with the last retry."""
    first = jobs.work.enqueue_call(queue, [word], {"fail": True}, retry=Retry(max=1))
    with worker(queue, jobs):
        for _ in range(2):
            began(jobs, word)
            assert jobs.work.enqueue(queue, word, fail=True) == first
            go(jobs, word)
    assert first.get_status() == JobStatus.FAILED
    assert jobs.work.enqueue(queue, word, fail=True) != first


def test_a_killed_job(jobs: Any, queue: Queue, word: str) -> None:
    """If the process of a job is killed in the middle, its lock ends with its lease, and the job is enqueued anew."""
    first = jobs.brief.enqueue(queue, word)
    with worker(queue, jobs):
        os.kill(began(jobs, word), signal.SIGKILL)
    until(lambda: jobs.brief.enqueue(queue, word) != first)
    go(jobs, word)
    second = jobs.brief.enqueue(queue, word)
    with worker(queue, jobs):
        pass
    assert second.return_value() == word


def test_a_killed_job_that_is_retried(jobs: Any, queue: Queue, word: str) -> None:
    """If RQ retries the killed job, the next process takes its lock over when the lease has ended."""
    first = jobs.work.enqueue_call(queue, [word], retry=Retry(max=1))
    with worker(queue, jobs):
        os.kill(began(jobs, word), signal.SIGKILL)
        began(jobs, word)
        assert jobs.work.enqueue(queue, word) == first
        go(jobs, word)
    assert first.return_value() == word


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_is_cancelled(jobs: Any, queue: Queue, word: str, how: str) -> None:
    """The lock of a job that was cancelled or deleted in the queue is given back by the next call."""
    first = jobs.work.enqueue(queue, word)
    getattr(first, how)()
    second = jobs.work.enqueue(queue, word)
    assert second != first
    assert jobs.work.enqueue(queue, word) == second


def test_a_job_that_is_cancelled_while_it_runs(jobs: Any, queue: Queue, word: str) -> None:
    """A cancelled job that runs goes on, and the end of its run takes nothing from the job that came after it."""
    first = jobs.work.enqueue(queue, word)
    with worker(queue, jobs):
        began(jobs, word)
        first.cancel()
        second = jobs.work.enqueue(queue, word)
        assert second != first
        go(jobs, word)
        began(jobs, word)
        assert jobs.work.enqueue(queue, word) == second
        go(jobs, word)
    assert second.return_value() == word


def test_a_time_limit(jobs: Any, queue: Queue, word: str) -> None:
    """A job that exceeds its time limit gives its lock back."""
    first = jobs.work.enqueue(queue, word)
    with worker(queue, jobs):
        os.kill(began(jobs, word), signal.SIGALRM)  # as RQ does when the time is over
    assert first.get_status() == JobStatus.FAILED
    assert jobs.work.enqueue(queue, word) != first


def test_raise_on_duplicate(jobs: Any, queue: Queue, word: str) -> None:
    """If asked for, a duplicate is an error, which names the job. Only the arguments of `unique_on` count."""
    first = jobs.strict.enqueue(queue, word)
    with pytest.raises(AlreadyQueued, match=first.id) as error:
        jobs.strict.enqueue(queue, word, 2)
    assert pickle.loads(pickle.dumps(error.value)).task_id == first.id


def test_an_async_job_and_a_nested_call(jobs: Any, queue: Queue, word: str) -> None:
    """An async function holds its lock until it has ended. A job may call its own function, which takes no lock."""
    first, second = jobs.suspending.enqueue(queue, word), jobs.nested.enqueue(queue, word)
    go(jobs, word, 3)
    with worker(queue, jobs):
        pass
    assert [first.return_value(), second.return_value()] == [word, word]


def test_a_direct_call_takes_no_lock(jobs: Any, queue: Queue, word: str) -> None:
    """A call of the function is only that, and so is a job that RQ's own `enqueue` has made."""
    jobs.work.enqueue(queue, word)
    go(jobs, word, 2)
    assert jobs.work(word) == word
    plain = Queue(word, connection=queue.connection, is_async=False).enqueue(jobs.work, word)
    assert plain.return_value() == word


def test_what_can_not_be_enqueued(jobs: Any, queue: Queue, word: str) -> None:
    """If the job can't be enqueued, the lock is given back."""
    away = Queue(word, connection=redis.Redis(port=free_port(), retry=None))
    with pytest.raises(redis.exceptions.ConnectionError):
        jobs.work.enqueue(away, word)
    assert jobs.work.enqueue(queue, word).id in queue.job_ids
    with pytest.raises(KeyingError):
        jobs.work.enqueue(queue, object())


def test_without_the_engine_nothing_is_enqueued(queue: Queue) -> None:
    """If the lock can't be asked for, the call raises: the job may be queued already."""
    with Cache(f"redis://127.0.0.1:{free_port()}") as cache, pytest.raises(EngineError):
        once_job(cache=cache)(print_it).enqueue(queue)
    assert queue.count == 0


def test_unique_on_an_unknown_argument() -> None:
    """A wrong name is an error. Otherwise all calls would count as equal."""
    with pytest.raises(OptionError, match="nothing"):
        once_job(unique_on="nothing")(print_it)


def print_it() -> None: ...
