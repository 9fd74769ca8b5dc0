"""What threads do for event loops, in place of a client that blocks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from stampede.engines.kit.worker_threads import WorkerThreads
from stampede.errors import EngineError

LONG = 10.0


class Slow:
    """A function that goes on when it is let."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = Event(), Event(), Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(LONG)
        self.ended.set()
        return "done"


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LONG))


def test_more_than_there_are_threads() -> None:
    """Who came when all threads were at work would never be served, or a thread be made for each."""
    workers, most, now, lock = WorkerThreads(3), [0], [0], threading.Lock()

    def act(number: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.001)
        with lock:
            now[0] -= 1
        return number

    async def main() -> list[int]:
        return await asyncio.gather(*(workers.run(act, number) for number in range(100)))

    assert run(main()) == list(range(100))
    assert most[0] <= 3


def test_an_error_is_the_callers() -> None:
    """It would be lost in a thread, and the caller wait for ever."""

    def fail() -> None:
        raise EngineError("down")

    async def main() -> None:
        with pytest.raises(EngineError, match="down"):
            await WorkerThreads().run(fail)

    run(main())


def test_who_is_cancelled_waits_for_what_has_begun() -> None:
    """What he asks next would come before it. `asyncio.run`, as it ends, cancels again what is cancelled already."""

    async def main() -> None:
        workers, slow = WorkerThreads(leave=LONG), Slow()
        task = asyncio.ensure_future(workers.run(slow))
        await until(slow.begun.is_set)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow.ended.is_set()

    run(main())


def test_who_is_cancelled_before_it_begins_has_it_never_begun() -> None:
    """It would be done for nobody, and behind a server that hangs nobody could be cancelled."""

    async def main() -> None:
        workers, slow, never = WorkerThreads(1), Slow(), Slow()
        first = asyncio.ensure_future(workers.run(slow))
        await until(slow.begun.is_set)
        second = asyncio.ensure_future(workers.run(never))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        slow.go_on.set()
        assert await first == "done"
        assert await workers.run(int) == 0
        assert not never.begun.is_set()

    run(main())


def test_a_cancelled_call_is_left_to_itself_in_time() -> None:
    """A server that hangs would keep a caller that was cancelled."""

    async def main() -> None:
        workers, slow = WorkerThreads(leave=0.01), Slow()
        task = asyncio.ensure_future(workers.run(slow))
        await until(slow.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not slow.ended.is_set()
        slow.go_on.set()
        await until(slow.ended.is_set)

    run(main())


def test_a_hung_call_keeps_no_other_engine_waiting() -> None:
    """With threads for all, or the loop's default executor, one server that hangs would stop everything."""

    async def main() -> None:
        slow, hung = Slow(), WorkerThreads(1)
        first = asyncio.ensure_future(hung.run(slow))
        await until(slow.begun.is_set)
        assert await WorkerThreads(1).run(int) == 0
        assert await asyncio.to_thread(int) == 0
        slow.go_on.set()
        await first

    run(main())


def test_the_program_ends_while_a_call_hangs() -> None:
    """It would never end: a thread that is no daemon is waited for, and so is a task by the loop that ends."""
    program = (
        "import asyncio, threading\n"
        "from stampede.engines.kit.worker_threads import WorkerThreads\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(WorkerThreads().run(threading.Event().wait))\n"
        "    await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG)
