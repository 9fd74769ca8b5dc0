"""Dramatiq actors whose messages are queued once: with a real worker, whose processes are killed."""

from __future__ import annotations

import os
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
from herd import logged_here, until
from servers import PATIENCE, RedisServer, free_port

pytest.importorskip("dramatiq")
pytest.importorskip("redis")

import dramatiq
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries
from dramatiq.results import ResultFailure
from dramatiq.worker import Worker

from stampede import Cache, EngineError, KeyingError, OptionError
from stampede.contrib.dramatiq import OPTION, AlreadyQueued, NotNow, Once

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def actors() -> Iterator[ModuleType]:
    """The application, on a server of its own."""
    with closing(RedisServer()) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASKS_REDIS", server.url)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
        sys.modules.pop("dramatiq_tasks", None)
        import dramatiq_tasks

        yield dramatiq_tasks
        dramatiq_tasks.broker.close()
        dramatiq_tasks.cache.close()
        dramatiq_tasks.board.close()


@contextmanager
def started(queue: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of one queue, with two threads in a process of their own."""
    command = [sys.executable, "-m", "dramatiq", "dramatiq_tasks", "-Q", queue, "-p1", "-t2", "--skip-logging"]
    with subprocess.Popen(command, start_new_session=True, env=os.environ | environment) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def worker(actors: object) -> Iterator[None]:
    with started("default"):
        yield


_words = count()


@pytest.fixture
def word(request: pytest.FixtureRequest) -> str:
    """A word of this test alone, so that no test waits for the locks of another one."""
    return f"{request.node.name}{next(_words)}"


def began(actors: Any, word: str) -> int:
    """Wait until a message is processed, and return the id of its process."""
    found = actors.board.blpop([f"began {word}"], timeout=PATIENCE)
    assert found, "no message is processed"
    return int(found[1])


def go(actors: Any, word: str) -> None:
    actors.board.rpush(f"go {word}", "on")


def result(message: Any) -> Any:
    return message.get_result(block=True, timeout=int(1000 * PATIENCE))


def sent(actor: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a message as soon as it is not queued any more."""
    found: list[Any] = []

    def send() -> bool:
        try:
            found.append(actor.send(*args, **kwargs))
        except AlreadyQueued:
            return False
        return True

    until(send)
    return found[0]


def test_equal_messages_are_one(actors: Any, worker: None, word: str) -> None:
    """While a message is queued or processed, an equal one is refused. Then it is sent anew."""
    first = actors.work.send(word)
    with pytest.raises(AlreadyQueued) as error:
        actors.work.send(word=word, times=1)
    assert error.value.task_id == first.message_id
    began(actors, word)
    with pytest.raises(AlreadyQueued):
        actors.work.send(word)
    other = actors.work.send(word, 2)
    began(actors, word)
    go(actors, word)
    go(actors, word)
    assert [result(first), result(other)] == [word, word * 2]
    go(actors, word)
    assert result(sent(actors.work, word)) == word


def test_an_actor_that_does_not_raise(actors: Any, worker: None, word: str) -> None:
    """An actor of the class OnceActor returns the message that is queued, from which its result can be read."""
    first = actors.quiet.send(word)
    again = actors.quiet.send(word)
    assert again.message_id == first.message_id
    go(actors, word)
    assert result(again) == word


@pytest.mark.parametrize("how", ["fail", "skip"])
def test_a_message_that_fails(actors: Any, worker: None, word: str, how: str) -> None:
    """A message that failed, or was skipped by its own code, can be sent anew."""
    first = actors.work.send(word, how=how)
    go(actors, word)
    began(actors, word)
    second = sent(actors.work, word, how=how)
    assert second.message_id != first.message_id
    go(actors, word)
    began(actors, word)


def test_a_retry_keeps_its_lock(actors: Any, worker: None, word: str) -> None:
    """A message that is retried is the same message: its lock is kept in between, and ends with the last retry."""
    first = actors.again.send(word)
    for _ in range(2):
        began(actors, word)
        with pytest.raises(AlreadyQueued) as error:
            actors.again.send(word, 2)
        assert error.value.task_id == first.message_id
        go(actors, word)
    with pytest.raises(ResultFailure):
        result(first)
    second = sent(actors.again, word)
    for _ in range(2):
        began(actors, word)
        go(actors, word)
    with pytest.raises(ResultFailure):
        result(second)


def test_a_message_with_a_delay(actors: Any, worker: None, word: str) -> None:
    """A message keeps its lock while it is delayed, and when it then goes to its queue."""
    first = actors.work.send_with_options(args=(word,), delay=300)
    began(actors, word)
    with pytest.raises(AlreadyQueued):
        actors.work.send(word)
    go(actors, word)
    assert result(first) == word


def test_a_message_that_is_too_old(actors: Any, worker: None, word: str) -> None:
    """A message that another middleware discards, such as one that is too old, gives its lock back."""
    actors.work.send_with_options(args=(word,), max_age=-1)
    second = sent(actors.work, word)
    go(actors, word)
    assert result(second) == word


def test_a_message_that_is_delivered_twice(actors: Any, word: str) -> None:
    """A message that is delivered again while it is processed is skipped."""
    message = actors.fragile.send(word)
    runs = f"task:{message.options[OPTION]} runs"
    actors.cache.set(runs, message.message_id)
    with actors.cache.lock(runs, lease=60), started("fragile", TASKS_LEASE="0.1s"):  # as its first run has it
        assert result(message) is None  # which dramatiq stores for a message that is skipped
    assert not actors.board.exists(f"began {word}")


def test_a_killed_worker(actors: Any, word: str) -> None:
    """If the worker is killed in the middle, its lock ends with its lease. The broker delivers the message again, and
    the next worker takes the lock over."""
    with started("fragile"):
        first = actors.fragile.send(word)
        began(actors, word)
    with started("fragile", TASKS_SILENCE="2000"):
        began(actors, word)
        with pytest.raises(AlreadyQueued) as error:
            actors.fragile.send(word)
        assert error.value.task_id == first.message_id
        go(actors, word)
        assert result(first) == word
        go(actors, word)
        assert result(sent(actors.fragile, word)) == word


def test_once_of_nothing_is_one_message(actors: Any, word: str) -> None:
    """`once=[]` compares no argument: there is one message of the actor. Other actors have no lock."""
    actors.single.send_with_options(args=(word,), delay=3_600_000)
    with pytest.raises(AlreadyQueued):
        actors.single.send("another word")
    assert OPTION not in actors.usual.send(word).options


@pytest.mark.parametrize("first", [True, False])
def test_the_order_of_the_middleware(first: bool) -> None:
    """Whether `Once` comes before or after `Retries`, a message that waits for its retry keeps its lock."""
    retries = Retries(max_retries=1, min_backoff=3_600_000, max_backoff=3_600_000)
    with Cache() as cache:
        both = [Once(cache), retries]
        broker = StubBroker(middleware=both if first else both[::-1])
        actor = dramatiq.actor(_failing, broker=broker, once=True)
        worker = Worker(broker, worker_timeout=50, worker_threads=1)
        worker.start()
        try:
            message = actor.send(1)
            until(lambda: bool(worker.consumers["default.DQ"].delay_queue.queue))
            with pytest.raises(AlreadyQueued) as error:
                actor.send(1)
            assert error.value.task_id == message.message_id
        finally:
            worker.stop()


def test_an_actor_of_another_program(caplog: pytest.LogCaptureFixture) -> None:
    """A message for an actor that this program does not know is sent as usual, and nothing is logged."""
    with Cache() as cache:
        broker = StubBroker(middleware=[Once(cache)])
        broker.declare_queue("default")
        message: dramatiq.Message[None] = dramatiq.Message("default", "elsewhere", args=(), kwargs={}, options={})
        broker.enqueue(message)
    assert broker.queues["default"].qsize() == 1
    assert not logged_here(caplog)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_without_the_engine_nothing_is_sent(word: str) -> None:
    """If the lock can't be asked for, the call raises: the message may be queued already."""
    broker = StubBroker()
    with Cache(f"redis://127.0.0.1:{free_port()}") as cache:
        broker.add_middleware(Once(cache))
        actor = dramatiq.actor(_nothing, broker=broker, once=True)
        with pytest.raises(NotNow) as error:
            actor.send(1)
    assert isinstance(error.value.__cause__, EngineError)
    assert broker.queues["default"].empty()


def test_arguments_that_can_not_be_told_apart() -> None:
    """Arguments that have no exact key are refused, and the message is not sent."""
    broker = StubBroker()
    with Cache() as cache:
        broker.add_middleware(Once(cache))
        actor = dramatiq.actor(_nothing, broker=broker, once=True)
        with pytest.raises(NotNow) as error:
            actor.send(object())
    assert isinstance(error.value.__cause__, KeyingError)


def test_once_of_an_unknown_argument() -> None:
    """A wrong name is an error. Otherwise all messages would count as equal."""
    broker = StubBroker()
    broker.add_middleware(Once())
    with pytest.raises(NotNow, match="nothing") as error:
        dramatiq.actor(_nothing, broker=broker, once="nothing").send(1)
    assert isinstance(error.value.__cause__, OptionError)


def _nothing(number: object) -> None: ...


def _failing(number: int) -> None:
    raise ValueError(number)
