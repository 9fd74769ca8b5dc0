"""`once`: work that is done once per period, over all processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")

from addresses import EMPTY
from forked import python
from servers import PATIENCE, free_port

from stampede import CodecError, EngineError, LockLost, OptionError, get_cache, once
from stampede.locks.holding import holds_of
from stampede.runtime.colour import run_blocking
from stampede.testing import isolated

BRIEF = 0.3
"""The seconds of a period or lease that ends during the test."""


@pytest.fixture(autouse=True)
def _own_engines() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(params=["memory", "disk", "sql", "redis", "postgres"])
def on(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an engine whose locks can outlast their block."""
    return EMPTY[request.param](tmp_path) + ("?timeout=20" if request.param == "disk" else "")


@pytest.fixture
def turn(colour: str) -> Callable[..., bool]:
    """Take one turn in one colour: call `work` if it is this caller's turn. Return whether it was."""

    def blocking(each: once, work: Callable[[], object] = lambda: None) -> bool:
        with each as mine:
            if mine:
                work()
        return bool(mine.hold)

    async def suspending(each: once, work: Callable[[], object] = lambda: None) -> bool:
        async with each as mine:
            if mine:
                work()
        return bool(mine.hold)

    return blocking if colour == "sync" else lambda *args: asyncio.run(suspending(*args))


def fail() -> None:
    raise ValueError("no disk space")


def until(mine: Callable[[], bool]) -> None:
    """Try until it is this caller's turn."""
    end = time.monotonic() + PATIENCE
    while not mine():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- the period -----------------------------------------------------------------------------------------------------


def test_the_second_caller_does_nothing(on: str, turn: Any) -> None:
    """Work that is done is not done again in its period, although the lock's block has ended."""
    assert turn(once("nightly", every="1d", on=on))
    assert not turn(once("nightly", every="1d", on=on))
    assert turn(once("weekly", every="7d", on=on))


def test_the_next_period(on: str, turn: Any) -> None:
    """When the period is over, the next caller may run."""
    assert turn(once("nightly", every=BRIEF, on=on))
    until(lambda: turn(once("nightly", every=BRIEF, on=on)))


def test_the_period_begins_with_the_run(turn: Any) -> None:
    """The period is measured from the start of a run, however long the run takes. A twentieth of it is tolerance: a
    job of every night must not be skipped because it is started a second earlier than the night before."""
    nightly = once("nightly", every=20, on="memory://")
    assert turn(nightly, lambda: time.sleep(0.2))
    with nightly as other:
        ((_, seconds),) = run_blocking(holds_of(other.access.engine).holder("once:nightly"))
    assert seconds <= 18.8


def test_a_run_that_is_longer_than_its_period(turn: Any) -> None:
    """If a run takes longer than the period, the next caller may run as soon as it has ended."""
    assert turn(once("nightly", every=0.02, on="memory://"), lambda: time.sleep(0.05))
    assert turn(once("nightly", every=0.02, on="memory://"))


def test_no_caller_waits_for_a_run(on: str) -> None:
    """While one caller runs, however long, the others go on without it."""
    nightly = once("nightly", every=0.04, on=on)
    with nightly as mine:
        assert mine
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            with once("nightly", every=0.04, on=on) as other:
                assert not other
            time.sleep(0.01)


def test_one_of_many_threads(on: str) -> None:
    """Many callers at the same moment: one of them runs, and they may share the object."""
    nightly, ran, ready = once("nightly", every="1d", on=on), [], threading.Barrier(8)

    def call() -> None:
        ready.wait()
        with nightly as mine:
            if mine:
                ran.append(mine.fence)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(ran) == 1


# -- decorators -----------------------------------------------------------------------------------------------------


def test_a_decorated_function(on: str) -> None:
    """A decorated function returns its value, or None when it is not its turn."""

    @once("nightly", every="1d", on=on)
    def nightly(day: str) -> str:
        return f"done {day}"

    assert (nightly("monday"), nightly("tuesday")) == ("done monday", None)
    assert nightly.__name__ == "nightly"


def test_a_decorated_coroutine_function(on: str) -> None:
    """An async function is decorated alike, and remains async."""

    @once("nightly", every="1d", on=on)
    async def nightly(day: str) -> str:
        return f"done {day}"

    async def both() -> list[str | None]:
        return [await nightly("monday"), await nightly(day="tuesday")]

    assert asyncio.run(both()) == ["done monday", None]


def test_by_default_it_is_on_the_default_cache() -> None:
    """Without `on=` it uses the default cache of the settings, also of settings that come later."""

    @once("nightly", every="1d")
    def nightly() -> bool:
        return True

    for _ in range(2):
        with isolated():
            assert nightly()
            assert run_blocking(holds_of(get_cache().engine).holder("once:nightly"))
            assert nightly() is None


# -- failures -------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_is_not_done(on: str, turn: Any) -> None:
    """After a run that raised, the next caller may run at once."""
    with pytest.raises(ValueError, match="disk space"):
        turn(once("nightly", every="1d", on=on), fail)
    assert turn(once("nightly", every="1d", on=on))


def test_a_run_that_fails_rests(on: str, turn: Any) -> None:
    """With `retry_after`, no caller tries again for that time."""
    nightly = once("nightly", every="1d", retry_after=BRIEF, on=on)
    with pytest.raises(ValueError, match="disk space"):
        turn(nightly, fail)
    until(lambda: turn(nightly))
    assert not turn(nightly)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interruption_is_no_failure(error: type[BaseException]) -> None:
    """A cancellation or an exit says nothing about the work: the next caller may run at once."""
    nightly = once("nightly", every="1d", retry_after="1h", on="memory://")
    with pytest.raises(error), nightly:
        raise error
    with nightly as mine:
        assert mine


def test_a_turn_that_is_given_back(on: str, turn: Any) -> None:
    """A caller that finds nothing to do, or not yet, releases its turn, which then does not count."""
    nightly = once("nightly", every="1d", on=on)
    with nightly as mine:
        mine.release()
    assert turn(nightly)


def test_a_turn_that_is_taken_away(on: str) -> None:
    """`stampede locks --break once:nightly` lets another caller run. The first one learns of it at its end."""

    def work() -> None:
        with once("nightly", every="1d", on=on) as mine:
            locks = mine.access.engine.blocking.locks
            assert locks is not None
            assert run_blocking(locks.release("once:nightly", mine.token))
            with once("nightly", every="1d", on=on) as other:
                assert other

    with pytest.raises(LockLost):
        work()


def test_a_failure_is_more_important_than_a_lost_turn() -> None:
    """If a run raises and its turn was lost, too, its own error is raised."""

    def work() -> None:
        with once("nightly", every="1d", retry_after=5, on="memory://") as mine:
            assert mine.hold is not None
            mine.hold.lose()
            fail()

    with pytest.raises(ValueError, match="disk space"):
        work()


def test_a_cancellation_at_the_end_of_a_run(on: str) -> None:
    """If the task is cancelled while its turn ends, the lock ends with the period: it is not renewed for ever."""
    nightly = once("nightly", every="1d", on=on)

    async def work() -> None:
        async with nightly as mine:
            assert mine
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # it arrives in the end of the block

    async def cancelled() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.create_task(work())
        assert nightly.token is None  # nothing is held any more, or renewed
        async with nightly as mine:
            assert not mine

    asyncio.run(cancelled())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_that_leaves_the_block(on: str) -> None:
    """The turn is the parent's: a child that is forked in the block ends it without an effect, and without an error."""
    nightly = once("nightly", every="1d", on=on)
    with nightly as mine:
        assert mine
        child = os.fork()
        if child == 0:
            try:
                nightly.__exit__(None, None, None)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        with once("nightly", every="1d", on=on) as other:
            assert not other
    with nightly as mine:
        assert not mine


@pytest.mark.redis
def test_without_the_engine_no_caller_runs(turn: Any) -> None:
    """If the engine can't be asked, no caller runs: it may have been done already."""
    pytest.importorskip("redis")
    nobody = once("nightly", every="1d", on=f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(EngineError):
        turn(nobody, fail)


RUN = """
import sys, time
from stampede import once

with once("nightly", every="1d", lease=3, on=sys.argv[1]) as mine:
    print("mine" if mine else "not mine", flush=True)
    time.sleep(float(sys.argv[2]) if mine else 0)
"""


def test_a_killed_process_is_replaced(on: str) -> None:
    """If the process is killed in the middle, the work counts as not done, and another process may do it."""
    if on == "memory://":
        pytest.skip("its locks are one process's")
    with subprocess.Popen([sys.executable, "-c", RUN, on, "60"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        nightly = once("nightly", every="1d", on=on)
        with nightly as mine:
            assert not mine
        process.send_signal(signal.SIGKILL)

    def is_mine() -> bool:
        with nightly as mine:
            return bool(mine)

    until(is_mine)


def test_two_crons_that_are_apart(on: str) -> None:
    """Two machines start a short job a second apart: the second one finds it done. A lock would let both do it."""
    if on == "memory://":
        pytest.skip("its locks are one process's")
    done = [python("-c", RUN, on, "0") for _ in range(2)]
    assert [each.stdout for each in done] == ["mine\n", "not mine\n"], done


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, None, "forever", "soon"])
def test_no_such_period(wrong: Any) -> None:
    """A period without an end would never let the work be done again."""
    with pytest.raises(OptionError, match="every"):
        once("nightly", every=wrong, on="memory://")


def test_locks_that_end_with_their_process() -> None:
    """Locks of files end with their process. They are refused at once, and not when the work is done."""
    with pytest.raises(OptionError, match="file:// ends with its process"):
        once("nightly", every="1d", on="file://")


def test_work_that_is_not_done_when_the_function_returns() -> None:
    """A def that returns a coroutine has done nothing yet. That is an error, and no turn."""

    async def work() -> None: ...

    nightly = once("nightly", every="1d", on="memory://")
    with pytest.raises(CodecError, match="async def"):
        nightly(lambda: work())()
    with nightly as mine:
        assert mine


def test_only_functions_are_decorated() -> None:
    """Anything else than a function is refused, with the remedy."""
    with pytest.raises(OptionError, match="once"):
        once("nightly", every="1d", on="memory://")(42)  # type: ignore[call-overload]
