"""Celery tasks that are queued once: with a real worker, whose processes are killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from herd import until
from servers import PATIENCE, RedisServer, free_port

pytest.importorskip("celery")
pytest.importorskip("redis")

from celery import group
from celery.exceptions import Ignore, SoftTimeLimitExceeded, WorkerLostError
from kombu.exceptions import EncodeError

from stampede import Cache, EngineError, KeyingError, OptionError, get_cache
from stampede.contrib.celery import HEADER, AlreadyQueued, Once

pytestmark = [pytest.mark.redis, pytest.mark.filterwarnings("ignore::DeprecationWarning:celery|kombu|billiard|vine")]


@pytest.fixture(scope="module")
def tasks() -> Iterator[ModuleType]:
    """The application, on a server of its own."""
    with closing(RedisServer()) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASKS_REDIS", server.url)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
        sys.modules.pop("celery_tasks", None)
        import celery_tasks

        yield celery_tasks
        celery_tasks.cache.close()
        celery_tasks.board.close()
        celery_tasks.app.close()


@pytest.fixture(scope="module")
def worker(tasks: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of a worker with two processes."""
    log = tmp_path_factory.mktemp("celery") / "log"
    command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "--pool=prefork", "-c2", "-lWARNING"]
    command += ["--without-gossip", "--without-mingle", f"--logfile={log}"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            until(lambda: bool(tasks.app.control.ping(timeout=1, limit=1)))
            yield log
        finally:
            os.killpg(process.pid, signal.SIGKILL)


_words = count()


@pytest.fixture
def word(request: pytest.FixtureRequest) -> str:
    """A word of this test alone, so that no test waits for the locks of another one."""
    return f"{request.node.name}{next(_words)}"


class Stage:
    """The tasks of one word: when they began, and when they may go on."""

    def __init__(self, board: Any, word: str) -> None:
        self._board, self._word = board, word

    def began(self) -> int:
        """Wait until a task has begun, and return the id of its process."""
        found = self._board.blpop([f"began {self._word}"], timeout=PATIENCE)
        assert found, "no task has begun"
        return int(found[1])

    def others(self) -> int:
        """Return how many tasks have begun besides those that were waited for."""
        return int(self._board.llen(f"began {self._word}"))

    def go(self) -> None:
        """Let one task go on."""
        self._board.rpush(f"go {self._word}", "on")


@pytest.fixture
def stage(tasks: ModuleType, word: str) -> Stage:
    return Stage(tasks.board, word)


def after(first: Any, task: Any, *args: Any) -> Any:
    """Queue a task as soon as the first one of these arguments has ended."""
    found = [first]

    def is_another() -> bool:
        found.append(task.delay(*args))
        return bool(found[-1] != first)

    until(is_another)
    return found[-1]


def test_equal_calls_are_one_task(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """While a task is queued or runs, further calls return its AsyncResult, and send nothing."""
    first = tasks.work.delay(word)
    assert tasks.work.delay(word) == first
    stage.began()
    same = [tasks.work.delay(word=word), tasks.work.delay(word, 1), tasks.work.apply_async([word], {"fail": False})]
    assert same == [first] * 3  # a default is the same as its value
    other = tasks.work.delay(word, 2)
    assert other != first
    stage.began()
    stage.go()
    stage.go()
    assert [first.get(timeout=PATIENCE), other.get(timeout=PATIENCE)] == [word, word * 2]
    assert stage.others() == 0


@pytest.mark.parametrize("fail", [False, True])
def test_after_its_end_it_is_queued_again(tasks: Any, worker: object, stage: Stage, word: str, fail: bool) -> None:
    """When the AsyncResult of a task is ready, whether it succeeded or failed, the next call sends it anew."""
    first = tasks.work.delay(word, fail=fail)
    stage.go()
    assert isinstance(first.get(timeout=PATIENCE, propagate=False), ValueError if fail else str)
    second = tasks.work.delay(word, fail=fail)
    assert second != first
    stage.go()
    second.get(timeout=PATIENCE, propagate=False)


def test_a_task_that_runs_for_longer_than_its_lease(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """The lock of a task that runs is renewed, until the task ends."""
    first = tasks.work.delay(word)
    stage.began()
    for _ in range(8):  # of four seconds, with a lease of three
        tasks.board.blpop(["nothing"], timeout=0.5)
        assert tasks.work.delay(word) == first
    stage.go()
    assert first.get(timeout=PATIENCE) == word


def test_raise_on_duplicate(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """If asked for, a duplicate is an error, which names the task that is queued. It can be pickled."""
    first = tasks.strict.delay(word)
    with pytest.raises(AlreadyQueued, match=first.id) as error:
        tasks.strict.delay(word)
    assert error.value.task_id == pickle.loads(pickle.dumps(error.value)).task_id == first.id
    stage.go()
    first.get(timeout=PATIENCE)


def test_what_can_not_be_sent(tasks: Any) -> None:
    """If the message can't be sent, the error is raised, and the lock is given back."""
    for _ in range(2):
        with pytest.raises(EncodeError):
            tasks.single.delay(object())
    tasks.single.apply_async([1], countdown=3600)


# -- what tells tasks apart -------------------------------------------------------------------------------------------


def test_unique_on(tasks: Any) -> None:
    """Only these arguments tell tasks apart, whether they are given by position, by name or by default."""
    later = {"countdown": 3600}
    first = tasks.some.apply_async([1, 2], **later)
    assert tasks.some.apply_async([1, 7, 3], **later) == first
    assert tasks.some.apply_async((), {"a": 1, "b": 8, "c": 3}, **later) == first
    assert tasks.some.apply_async([1, 2, 4], **later) != first
    assert tasks.some.apply_async([2, 2], **later) != first
    first = tasks.one.apply_async([1, 2], **later)
    assert tasks.one.apply_async([5, 5], **later) == first
    assert tasks.one.lock_name([5, 5]) == "celery_tasks.one:(c=3)"


def test_unique_on_an_unknown_argument(tasks: Any) -> None:
    """A wrong name is an error. Otherwise all calls would count as equal."""
    with pytest.raises(OptionError, match="nothing"):
        tasks.wrong.delay(1)


@pytest.mark.parametrize("when", ["countdown", "eta", "text"])
def test_the_time_in_the_queue(tasks: Any, word: str, when: str) -> None:
    """A task that no worker takes keeps its lock for `once_queued`, an hour, after its countdown or eta."""
    eta = tasks.app.now() + timedelta(seconds=600)
    later = {"countdown": {"countdown": 600}, "eta": {"eta": eta}, "text": {"eta": eta.isoformat()}}
    tasks.work.apply_async([word], **later[when])
    lock = tasks.cache.lock(f"task:{tasks.work.lock_name([word])}").acquire(wait=0)
    assert lock.refusal is not None
    assert 3600 < lock.refusal.lease <= 4200


def test_arguments_are_told_apart_exactly(tasks: Any) -> None:
    """`1`, `True` and `"1"` are different tasks. What can't be told apart exactly is refused."""
    names = {tasks.work.lock_name([each]) for each in (1, True, "1", 1.0, [1], (1,))}
    assert len(names) == 6
    assert tasks.work.lock_name([UUID(int=1)]) != tasks.work.lock_name([str(UUID(int=1))])
    with pytest.raises(KeyingError):
        tasks.work.delay(object())


# -- workers that die -------------------------------------------------------------------------------------------------


def test_a_killed_worker(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """If the process of a task is killed, as after a hard time limit, its lock ends with its lease, and the task can be
    queued again."""
    first = tasks.brief.delay(word)
    os.kill(stage.began(), signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        first.get(timeout=PATIENCE)
    second = after(first, tasks.brief, word)
    stage.began()
    stage.go()
    assert second.get(timeout=PATIENCE) == word


def test_a_killed_worker_whose_message_comes_back(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """With `acks_late` the message is delivered again, and the next worker takes the lock of the dead one over."""
    first = tasks.late.delay(word)
    os.kill(stage.began(), signal.SIGKILL)
    stage.began()
    assert tasks.late.delay(word) == first
    stage.go()
    assert first.get(timeout=PATIENCE) == word


def test_a_time_limit_while_it_waits(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A task that exceeds its time limit while it waits for an equal one, or for a dead worker, gives its lock back."""
    with tasks.cache.lock(f"task:{tasks.work.lock_name([word])} runs"):
        first = tasks.work.apply_async([word], soft_time_limit=2)
        with pytest.raises(SoftTimeLimitExceeded):
            first.get(timeout=PATIENCE)
    second = tasks.work.delay(word)
    assert second != first
    stage.began()
    stage.go()
    assert second.get(timeout=PATIENCE) == word


def test_a_message_that_is_delivered_twice(tasks: Any, worker: Path, stage: Stage, word: str) -> None:
    """A message that is delivered again while its task runs, as by Redis after its visibility timeout, is ignored."""
    name = tasks.brief.lock_name([word])
    with tasks.cache.lock(f"task:{name} runs", lease=60):  # as its first run has it
        tasks.cache.set(f"task:{name} runs", f"id of {word}")
        tasks.app.send_task(tasks.brief.name, [word], task_id=f"id of {word}", headers={HEADER: name})
        until(lambda: f"id of {word}] was delivered again" in worker.read_text())
    assert stage.others() == 0


def test_a_task_that_lost_its_place(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A task that was queued for too long may be queued twice. The two never run at the same time."""
    name = tasks.work.lock_name([word])
    first = tasks.work.delay(word)
    stage.began()
    tasks.work._once.leave(name, first.id)  # as if its time in the queue were over
    second = tasks.work.delay(word)
    assert second != first
    for _ in range(6):
        tasks.board.blpop(["nothing"], timeout=0.25)
        assert stage.others() == 0
    stage.go()
    assert first.get(timeout=PATIENCE) == word
    stage.began()
    stage.go()
    assert second.get(timeout=PATIENCE) == word


def test_a_time_limit(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A soft time limit gives the lock back."""
    first = tasks.work.delay(word)
    os.kill(stage.began(), signal.SIGUSR1)  # as the worker does when the time is over
    with pytest.raises(SoftTimeLimitExceeded):
        first.get(timeout=PATIENCE)
    second = tasks.work.delay(word)
    assert second != first
    stage.began()
    stage.go()
    assert second.get(timeout=PATIENCE) == word


# -- retries and revocations ------------------------------------------------------------------------------------------


def test_a_retry_keeps_its_lock(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A task that is retried is the same task: its lock is kept in between."""
    first = tasks.again.delay(word)
    stage.began()
    stage.go()
    until(lambda: first.state == "RETRY")
    assert tasks.again.delay(word) == first
    stage.began()
    assert tasks.again.delay(word) == first
    stage.go()
    assert first.get(timeout=PATIENCE) == 1
    second = tasks.again.delay(word)
    assert second != first
    second.revoke()
    stage.go()
    stage.go()


def test_retries_that_come_to_an_end(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """After the last retry the lock is given back."""
    first = tasks.hopeless.delay(word)
    for _ in range(2):
        stage.began()
        stage.go()
    with pytest.raises(ValueError, match=word):
        first.get(timeout=PATIENCE)
    second = tasks.hopeless.delay(word)
    assert second != first
    for _ in range(2):
        stage.began()
        stage.go()


def test_a_revoked_task(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A task that is revoked before it runs gives its lock back when a worker discards its message."""
    revoked = f"id of {word}"
    tasks.app.control.revoke(revoked, reply=True, timeout=PATIENCE, limit=1)
    first = tasks.work.apply_async([word], task_id=revoked)
    assert first.id == revoked
    second = after(first, tasks.work, word)
    stage.began()
    stage.go()
    assert (second.get(timeout=PATIENCE), stage.others()) == (word, 0)


def test_an_expired_task(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A task that expires in the queue gives its lock back, too."""
    first = tasks.work.apply_async([word], expires=-1)
    second = after(first, tasks.work, word)
    stage.began()
    stage.go()
    assert (second.get(timeout=PATIENCE), stage.others()) == (word, 0)


def test_a_task_that_is_revoked_while_it_runs(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """Its place in the queue is free at once. The next one runs when the lease of the killed process has ended."""
    first = tasks.brief.delay(word)
    stage.began()
    first.revoke(terminate=True, signal="SIGKILL")
    second = after(first, tasks.brief, word)
    stage.began()
    stage.go()
    assert second.get(timeout=PATIENCE) == word


# -- refresh_by -------------------------------------------------------------------------------------------------------


def test_a_worker_refreshes_a_value(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """A stale value is refreshed by one task of a worker, and served until that has ended."""
    assert tasks.computed_by(word) == os.getpid()
    tasks.computed_by.expire(word)
    assert [tasks.computed_by(word) for _ in range(3)] == [os.getpid()] * 3
    process = stage.began()
    assert [tasks.computed_by(word) for _ in range(3)] == [os.getpid()] * 3
    stage.go()
    until(lambda: tasks.computed_by(word) == process)
    assert stage.others() == 0


# -- other ways to call a task ----------------------------------------------------------------------------------------


def test_a_group(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """The tasks of a canvas, which have their ids beforehand, take their locks, too."""
    result = group(tasks.work.s(word), tasks.work.s(word, 2)).apply_async()
    assert tasks.work.delay(word).id == result.results[0].id
    stage.go()
    stage.go()
    assert result.get(timeout=PATIENCE) == [word, word * 2]


def test_a_direct_call_takes_no_lock(tasks: Any, stage: Stage, word: str) -> None:
    """A call of the function is only that."""
    tasks.work.apply_async([word], countdown=3600)
    stage.go()
    assert tasks.work(word) == word


def test_a_task_that_is_sent_by_its_name(tasks: Any, worker: object, stage: Stage, word: str) -> None:
    """`send_task` knows only the name of a task, so it takes no lock."""
    stage.go()
    assert tasks.app.send_task(tasks.work.name, [word]).get(timeout=PATIENCE) == word


def test_eager_tasks(tasks: Any, stage: Stage, word: str) -> None:
    """With `task_always_eager`, as in tests of applications, the lock is taken and given back."""
    tasks.app.conf.task_always_eager = True
    try:
        for _ in range(2):
            stage.go()
            assert tasks.work.delay(word).get() == word
            stage.go()
            stage.go()
            assert tasks.again.delay(word).get() == 1
    finally:
        tasks.app.conf.task_always_eager = False


def test_without_the_engine_nothing_is_sent(tasks: Any) -> None:
    """If the lock can't be asked for, the call raises: the task may be queued already."""
    with Cache(f"redis://127.0.0.1:{free_port()}") as cache:

        @tasks.app.task(base=Once, once_cache=cache, name="unsent")
        def unsent() -> None: ...

        with pytest.raises(EngineError):
            unsent.delay()
        del tasks.app.tasks["unsent"]


def test_without_the_engine_nothing_runs(tasks: Any, word: str) -> None:
    """A worker that can't ask for the lock sends the task again, for later."""
    with Cache(f"redis://127.0.0.1:{free_port()}") as cache:

        @tasks.app.task(base=Once, once_cache=cache, name="put off")
        def put_off() -> None:
            raise AssertionError("it has run")

        put_off.push_request(id=word, headers={HEADER: "put off:()"}, called_directly=False, args=(), kwargs={})
        with pytest.raises(Ignore):
            put_off()
        put_off.pop_request()
        del tasks.app.tasks["put off"]


def test_the_default_cache(tasks: Any) -> None:
    """Without `once_cache`, the lock is on the default cache of the settings."""

    @tasks.app.task(base=Once, name="by default", once_queued=timedelta(minutes=5))
    def by_default() -> None: ...

    from stampede.testing import isolated

    with isolated():
        first = by_default.apply_async(countdown=3600)
        assert get_cache().peek("task:by default:()").value == first.id
        assert by_default.delay() == first
    del tasks.app.tasks["by default"]


def test_a_misspelt_option(tasks: Any) -> None:
    """An option that does not exist is an error that names the right one."""
    with pytest.raises(OptionError, match="'once_quued': did you mean 'once_queued'"):

        @tasks.app.task(base=Once, once_quued="1h")
        def send() -> None: ...
