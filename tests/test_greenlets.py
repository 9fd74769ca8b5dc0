"""Several callers in one thread: greenlets, as SQLAlchemy's asyncio extension and gevent have them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

import pytest
from bare import LONG, Gate, Room, World
from greenlet import getcurrent, greenlet

from stampede import RecursiveComputation, cached, try_lock
from stampede.testing import isolated


def await_only(work: Coroutine[Any, Any, Any]) -> Any:
    """In a greenlet of `spawned`: let its driver await this."""
    driver = getcurrent().parent
    assert driver is not None
    return driver.switch(work)


async def spawned(function: Callable[..., Any], *args: Any) -> Any:
    """As SQLAlchemy's `greenlet_spawn`: a sync function whose waiting is awaited by the task that called it."""
    inner = greenlet(function, getcurrent())
    inner.gr_context = getcurrent().gr_context
    got = inner.switch(*args)
    while not inner.dead:
        got = inner.switch(await got)
    return got


def test_greenlets_of_one_event_loop() -> None:
    """Whoever asks while another greenlet of the loop computes would be told that it asks for its own key."""
    computed = []

    async def main() -> list[int]:
        return await asyncio.gather(*(spawned(report, 21) for _ in range(4)))

    with isolated():

        @cached(ttl=60)
        def report(customer: int) -> int:
            await_only(asyncio.sleep(0.01))
            computed.append(customer)
            return customer * 2

        assert asyncio.run(main()) == [42] * 4
        assert report(21) == 42
    assert len(computed) == 4  # only the first is stored: the others would block the thread on which it goes on


def test_a_greenlet_s_computation_is_shared_with_tasks_and_threads() -> None:
    """Each of them would compute for itself."""
    world, calls = World(), []

    def slow() -> str:
        calls.append(1)
        await_only(asyncio.sleep(0.05))
        return "value"

    async def main() -> list[Any]:
        leader = asyncio.create_task(spawned(world.ask, slow))
        while not calls:
            await asyncio.sleep(0)
        return await asyncio.gather(leader, world.aask(never), asyncio.to_thread(world.ask, never))

    def never() -> Any:
        raise AssertionError("a second computation")

    assert asyncio.run(main()) == ["value"] * 3


def test_recursion_in_a_greenlet() -> None:
    """It would compute its own key again and again, each time alone."""
    world = World()

    async def main() -> None:
        with pytest.raises(RecursiveComputation):
            await spawned(world.ask, lambda: world.ask(int))
        with pytest.raises(RecursiveComputation):  # with no context to tell
            await spawned(world.ask, lambda: Context().run(world.ask, int))

    asyncio.run(main())


def test_plain_greenlets() -> None:
    """The second would block the thread on which the first must go on, for ever."""
    world, got = World(), []

    def first() -> None:
        got.append(world.ask(lambda: main.switch() or "the first's"))

    main = getcurrent()
    one = greenlet(first)
    one.switch()  # is in its computation now
    greenlet(lambda: got.append(world.ask(lambda: "alone"))).switch()
    assert world.ask(lambda: "alone, too") == "alone, too"  # the thread's own
    one.switch()
    assert got == ["alone", "the first's"]
    assert world.ask(lambda: "again") == "the first's"


def test_a_greenlet_follows_another_thread() -> None:
    """A computation of another thread goes on while this one waits: it would be done twice."""
    world, gate = World(), Gate()
    got: list[Any] = []
    with Room() as room:
        leader = room.run(world.ask, gate)
        assert gate.begun.wait(LONG)
        threading.Timer(0.02, gate.open.set).start()
        greenlet(lambda: got.append(world.ask(lambda: "a second computation"))).switch()
        assert got == [leader.result(LONG)] == ["value"]


GEVENT = """
{before}
import gevent
from stampede import Cache

cache, computed = Cache("memory://", ttl=60), []

def compute():
    computed.append(1)
    gevent.sleep(0.05)
    return 42

jobs = [gevent.spawn(cache.get_or_compute, "k", compute) for _ in range(5)]
gevent.joinall(jobs, raise_error=True, timeout=20)
assert cache.get("k") == 42
print([job.value for job in jobs], len(computed))
"""


@pytest.mark.parametrize(
    "before, computed", [("", 5), ("from gevent import monkey; monkey.patch_all()", 1)], ids=["plain", "patched"]
)
def test_gevent(before: str, computed: int) -> None:
    """Greenlets would get RecursiveComputation, or a deadlock; those that can wait for each other would not share."""
    script = GEVENT.format(before=before)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.splitlines()[-1:] == [f"[42, 42, 42, 42, 42] {computed}"], ran.stderr


def test_greenlets_of_one_thread_are_not_one_holder() -> None:
    """A greenlet that was refused would be let in beside another that rests in its block."""
    lock = try_lock("a", on="memory://")

    def rests() -> bool:
        with lock as mine:
            getcurrent().parent.switch(bool(mine))
            return lock.held

    def refused() -> bool:
        with lock as mine:
            return bool(mine)

    first = greenlet(rests)
    assert first.switch() is True
    assert greenlet(refused).switch() is False
    assert not lock.held
    assert first.switch() is True
    with lock as mine:
        assert mine
