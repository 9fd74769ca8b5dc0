"""A lock that is interrupted anywhere, on its way in or out, is given back, whoever keeps the traceback."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Condition, Event
from time import monotonic, sleep
from types import FrameType
from typing import Any

import pytest
from interrupting import Point, interrupted, moments_of, ours, points_of
from memcached_server import shared_memcached
from servers import shared_redis

from stampede import Cache, EngineError, Lock, try_lock
from stampede.colour import SUSPENDING
from stampede.engines import open_engine
from stampede.engines.kit.errands import Errands
from stampede.keeper import Hold, keeper
from stampede.ports import Engine
from stampede.watch import watch
from stampede.workers import _Errand, within

# A coroutine that was made, and never begun, says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LONG = 5  # seconds; leases are much longer
EVERY = 1_000_000
AT_MOST = {"memory": EVERY, "file": 150}  # moments of one use, else 40; SWEEP=whole for all
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


def nothing_is_left(lock: Lock, engine: Engine, other: ThreadPoolExecutor, use: Any = None) -> None:
    if use in (verbs, averbs) and lock.token is not None:  # interrupted outside of the two: it's the caller's to do
        lock.release()
    assert other.submit(free, engine).result(3 * LONG), "somebody still has it"
    assert not lock.held
    deadline = monotonic() + LONG
    while kept(engine) and monotonic() < deadline:
        sleep(0.001)
    assert not kept(engine)


def swept(engine: Engine, act: Callable[[], Any], still: Callable[[], Any], *, whole: bool = False) -> None:
    """Do it again and again, interrupted a little later each time; after each time, look at how things are."""
    points: list[Point] = []
    points_of(act, points.append)
    assert points
    moments = moments_of(lambda _: act()) if engine.scheme in AT_MOST or whole else []
    many = max(len(points), len(moments))
    at_most = EVERY if whole or os.environ.get("SWEEP") == "whole" else AT_MOST.get(engine.scheme, 40)
    for number in count(0, max(1, many // at_most)):
        error = interrupted(act, number, moments)
        if error is None and number >= many:
            break
        still()  # while the error, and with it all frames, are kept
        del error


@pytest.mark.parametrize("use, kind", [(blocks, Lock), (blocks, try_lock), (raising, Lock), (verbs, Lock)])
def test_a_lock_that_is_interrupted(
    engine: Engine, other: ThreadPoolExecutor, use: Callable[[Lock], None], kind: type[Lock]
) -> None:
    """It would stay held for its process's life, renewed by its keeper for a holder that is gone."""
    lock = kind("a", on=engine, lease=60)
    swept(engine, partial(use, lock), lambda: nothing_is_left(lock, engine, other, use), whole=engine.scheme == "disk")
    use(lock)  # and it can be used again
    assert not lock.held


def test_a_lock_that_nobody_keeps_is_interrupted(engine: Engine, other: ThreadPoolExecutor) -> None:
    """The same for the object of one block alone."""
    lock = Lock("b", on=engine)
    swept(engine, lambda: blocks(Lock("a", on=engine, lease=60)), lambda: nothing_is_left(lock, engine, other))


@pytest.mark.parametrize("engine", NEAR, indirect=True, ids=name_of)  # on a far one, its loop's turns are others' too
@pytest.mark.parametrize("use, kind", [(ablocks, Lock), (ablocks, try_lock), (averbs, Lock)])
def test_a_task_s_lock_that_is_interrupted(
    engine: Engine, other: ThreadPoolExecutor, runner: asyncio.Runner, use: Callable[[Lock], Any], kind: type[Lock]
) -> None:
    """The same for one that is taken by a task."""
    lock = kind("a", on=engine, lease=60)

    def still() -> None:
        runner.run(asyncio.sleep(0))  # what goes on in a task of its own goes on while its loop runs
        nothing_is_left(lock, engine, other, use)

    swept(engine, lambda: runner.run(use(lock)), still, whole=engine.scheme == "disk")
    runner.run(use(lock))
    assert not lock.held


@pytest.mark.parametrize("engine", NEAR, indirect=True, ids=name_of)
@pytest.mark.parametrize("use", [blocks, verbs])
def test_a_lock_at_the_end_of_the_stack(engine: Engine, other: ThreadPoolExecutor, use: Callable[[Lock], Any]) -> None:
    """A RecursionError comes where there is no stack for a `finally` either."""
    lock = Lock("a", on=engine, lease=60)

    def deep(frames: int) -> Any:
        return deep(frames - 1) if frames else use(lock)

    use(lock)
    errors, limit, depth = 0, sys.getrecursionlimit(), len(inspect.stack())
    hook, sys.unraisablehook = sys.unraisablehook, lambda told: None  # pytest's own has no stack left to tell with
    try:
        sys.setrecursionlimit(depth + 100)
        for frames in range(100):
            try:
                deep(frames)
            except (RecursionError, EngineError):
                errors += 1
            nothing_is_left(lock, engine, other, use)
    finally:
        sys.setrecursionlimit(limit)
        sys.unraisablehook = hook
    assert errors > 5


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


def test_who_is_interrupted_half_in_a_condition_stops_no_other(other: ThreadPoolExecutor) -> None:
    """A condition's `__enter__` and `__exit__` are Python's: nobody would be looked after, or renewed, ever again."""
    theirs = {each.__code__ for each in (Condition.__enter__, Condition.__exit__, Condition.notify)}

    def where(frame: FrameType) -> bool:
        return ours(frame) or frame.f_code in theirs

    with closing(open_engine("memory://")) as engine:
        assert engine.locks is not None
        lock = Lock("a", on=engine, lease=0.01)  # so short that its keeper is told of it

        def add() -> None:
            watch.add(Looked(), 0.0)
            blocks(lock)

        def added() -> bool:
            looked = Looked()
            watch.add(looked, 0.0)
            return looked.seen.wait(LONG) and free(engine)

        add()
        for number in count():
            if interrupted(add, number, where=where) is None:
                break
            assert other.submit(added).result(3 * LONG)
