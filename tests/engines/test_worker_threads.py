"""Threads that make blocking calls for event loops."""

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
    """A function that waits until it may go on."""

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
    """If there are more calls than threads, each call is served, and no more threads are started."""
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
    """An error in a thread is raised in the caller. Otherwise, the caller would wait for ever."""

    def fail() -> None:
        raise EngineError("down")

    async def main() -> None:
        with pytest.raises(EngineError, match="down"):
            await WorkerThreads().run(fail)

    run(main())


def test_who_is_cancelled_waits_for_what_has_begun() -> None:
    """A cancelled caller waits for a call that has begun, even if it is cancelled again, as `asyncio.run` does at its
    end. Its next call comes after this one."""

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
    """If the caller is cancelled before its call has begun, the call is never made, and the caller does not wait."""

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
    """A cancelled caller waits only for `leave` seconds for a call that hangs."""

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
    """A call that hangs blocks only threads of its own engine, not other engines or the loop's default executor."""

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
    """A program can end while a call hangs. Neither the interpreter nor the event loop waits for the thread."""
    program = (
        "import asyncio, threading\n"
        "from stampede.engines.kit.worker_threads import WorkerThreads\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(WorkerThreads().run(threading.Event().wait))\n"
        "    await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG)
