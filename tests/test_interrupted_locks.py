"""A lock that is interrupted anywhere, on its way in or out, is given back, whoever keeps the traceback."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
from interrupting import Point, interrupted, points_of
from memcached_server import shared_memcached
from servers import shared_redis

from stampede import Cache, Lock
from stampede.colour import SUSPENDING
from stampede.engines import open_engine
from stampede.engines.kit.errands import Errands
from stampede.keeper import Hold, keeper
from stampede.ports import Engine
from stampede.workers import _Errand, within

# A coroutine that was made, and never begun, says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LONG = 5  # seconds; leases are much longer
AT_MOST = int(os.environ.get("SWEEP", "40"))  # moments of one use
NEAR = ["memory://", "file://{}/f", "disk://{}/d", "memory:// memory://", "disk://{}/d file://{}/f"]
FAR = ["redis", "memcached"]


def name_of(urls: str) -> str:
    return "+".join(url.partition(":")[0] for url in urls.split())


@pytest.fixture(autouse=True)
def _all_is_told() -> Iterator[None]:
    """What was interrupted before it began says so here, and in no later test."""
    yield
    gc.collect()


@pytest.fixture(params=NEAR + FAR, ids=name_of)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    servers = {"redis": shared_redis, "memcached": shared_memcached}
    logging.getLogger("stampede").setLevel(logging.CRITICAL)
    if request.param in servers:
        urls = [servers[request.param]().url]
    else:
        urls = request.param.format(tmp_path, tmp_path).split()
    if urls[0].startswith("file"):
        with closing(open_engine(urls[0])) as engine:
            yield engine
    else:
        with Cache(urls[0], locks=urls[1] if urls[1:] else None) as cache:
            yield cache.engine
    logging.getLogger("stampede").setLevel(logging.NOTSET)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as other:
        yield other


def blocks(lock: Lock) -> None:
    with lock:
        pass


def raising(lock: Lock) -> None:
    with suppress(ZeroDivisionError), lock:
        raise ZeroDivisionError


def verbs(lock: Lock) -> None:
    lock.acquire()
    lock.release()


async def ablocks(lock: Lock) -> None:
    async with lock:
        pass


async def averbs(lock: Lock) -> None:
    await lock.aacquire()
    await lock.arelease()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda *_: None)
        yield runner


def free(engine: Engine) -> bool:
    """Can another have it, at once or as soon as it is given back?"""
    lock = Lock("a", on=engine, wait=LONG)
    if lock.acquire():
        assert kept(engine)
        lock.release()
        return True
    return False


def kept(engine: Engine) -> list[Hold]:
    """The holds of its locks: the keeper has others, which other tests have left to it until their time comes."""
    return [hold for hold in list(keeper._holds) if hold.port is engine.locks]


def nothing_is_left(engine: Engine, other: ThreadPoolExecutor) -> None:
    assert other.submit(free, engine).result(3 * LONG), "somebody still has it"
    deadline = monotonic() + LONG
    while kept(engine) and monotonic() < deadline:
        sleep(0.001)
    assert not kept(engine)


def swept(engine: Engine, act: Callable[[], Any], still: Callable[[], Any]) -> None:
    """Do it again and again, interrupted a little later each time; after each time, look at how things are."""
    points: list[Point] = []
    points_of(act, points.append)
    assert points
    for number in range(0, len(points), max(1, len(points) // AT_MOST)):
        interrupted(act, number)
        gc.collect()  # the traceback has gone, and all frames with it
        still()
    act()


@pytest.mark.parametrize("use", [blocks, raising, verbs])
def test_a_lock_that_is_interrupted(engine: Engine, other: ThreadPoolExecutor, use: Callable[[Lock], None]) -> None:
    """It would stay held for its process's life, renewed by its keeper for a holder that is gone."""
    swept(engine, lambda: use(Lock("a", on=engine, lease=60)), lambda: nothing_is_left(engine, other))


@pytest.mark.parametrize("engine", NEAR, indirect=True, ids=name_of)  # on a far one, its loop's turns are others' too
@pytest.mark.parametrize("use", [ablocks, averbs])
def test_a_task_s_lock_that_is_interrupted(
    engine: Engine, other: ThreadPoolExecutor, runner: asyncio.Runner, use: Callable[[Lock], Any]
) -> None:
    """The same for one that is taken by a task."""

    def still() -> None:
        runner.run(asyncio.sleep(0))  # what goes on in a task of its own goes on while its loop runs
        nothing_is_left(engine, other)

    swept(engine, lambda: runner.run(use(Lock("a", on=engine, lease=60))), still)


def test_what_a_thread_takes_for_who_is_gone_is_given_back(runner: asyncio.Runner) -> None:
    """A lock on disk, or a lease, would be granted to nobody, after its release had found nothing."""
    begun, go_on, undone = Event(), Event(), Event()

    def take() -> bool:
        begun.set()
        return go_on.wait(LONG)

    async def main() -> None:
        work: Any = Errands().run(take, undo=undone.set)
        work.send(None)
        assert begun.wait(LONG)
        work.close()
        go_on.set()
        assert undone.wait(LONG)

    runner.run(main())


def test_a_question_whose_caller_was_interrupted_is_not_asked(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of its task and the moment at which anybody has hold of that: what it takes would be taken
    behind its giving back."""
    asked: list[str] = []

    async def question() -> None:
        asked.append("asked")

    def interrupted(task: asyncio.Task[None]) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("stampede.workers.hold_task", interrupted)
            with pytest.raises(KeyboardInterrupt):
                await within(SUSPENDING, question(), LONG, lambda result, error: None)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    runner.run(main())
    assert asked == []


def test_an_answer_that_nobody_waits_for_is_told() -> None:
    """What a thread takes for a caller that was interrupted meanwhile would be nobody's to give back."""
    told: list[object] = []
    errand = _Errand(_answer("taken"), lambda result, error: told.append(result))
    errand.leave()
    errand.run()
    assert told == ["taken"]


async def _answer(value: str) -> str:
    return value


class Looked:
    """What the watch is to look at."""

    def __init__(self) -> None:
        self.seen = Event()

    def look(self, now: float) -> None:
        self.seen.set()
