"""Shared locks and bulkheads, as users use them, on engines with shared locks and on those without."""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from stampede import Bulkhead, Cache, Lock, LockLost, LockTimeout, OptionError, try_lock


@pytest.fixture(params=["memory", "disk", "file", "redis"])
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    url = "memory://" if request.param == "memory" else f"{request.param}://{tmp_path}"
    if request.param == "redis":
        pytest.importorskip("redis")
        url = request.getfixturevalue("server").url
    with Cache("memory://", locks=url) if request.param == "file" else Cache(url) as cache:
        yield cache


def many(visitors: int, visit: Callable[[], None]) -> None:
    threads = [threading.Thread(target=visit) for _ in range(visitors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


class Visits:
    """How many visitors are inside now, and how many were at most."""

    def __init__(self) -> None:
        self.inside = self.most = self.done = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self.inside -= 1
            self.done += 1


def test_a_bulkhead_of_threads(on: Cache) -> None:
    """A bulkhead lets in as many threads as its concurrency, and no more. In the end, all threads get in."""
    bulkhead, visits = on.bulkhead("b", concurrency=3, wait=20), Visits()
    full, numbers = threading.Barrier(3), count()

    @bulkhead
    def visit() -> None:
        with visits:
            if next(numbers) < 3:
                full.wait(10)  # if three are not inside at once, this breaks
            time.sleep(0.001)

    many(9, visit)
    assert (visits.most, visits.done) == (3, 9)
    assert not bulkhead.held


def test_a_bulkhead_of_tasks(on: Cache) -> None:
    """A bulkhead lets in as many tasks as its concurrency. Cancelled tasks, inside or in the queue, keep no place."""
    visits = Visits()

    async def main() -> None:
        bulkhead, full = on.bulkhead("b", concurrency=2, wait=20), asyncio.Event()

        @bulkhead
        async def visit(*, stay: bool = False) -> None:
            with visits:
                if visits.inside == 2:
                    full.set()
                await (asyncio.sleep(60) if stay else asyncio.sleep(0.001))

        staying = [asyncio.create_task(visit(stay=True)) for _ in range(2)]
        await asyncio.wait_for(full.wait(), 10)
        assert not await on.bulkhead("b", concurrency=2).aacquire(wait=0)
        waiting = [asyncio.create_task(visit()) for _ in range(2)]
        await asyncio.sleep(0.01)
        for task in [waiting[0], *staying]:
            task.cancel()
        await asyncio.gather(*staying, waiting[0], return_exceptions=True)
        await asyncio.gather(waiting[1], *[visit() for _ in range(6)])

    asyncio.run(main())
    assert visits.most == 2


def test_each_entry_is_one_place(on: Cache) -> None:
    """Each entry takes its own place, also if one caller enters twice. A block gives back only its own place."""
    bulkhead, other = on.bulkhead("b", concurrency=3, wait=0), on.bulkhead("b", concurrency=3, wait=0)
    with bulkhead, bulkhead:
        assert bulkhead.held and not other.held
        assert other.acquire()
        assert not bulkhead.acquire()
        with pytest.raises(LockTimeout, match="3 holders are inside 'b'"), bulkhead:
            pass
        other.release()
        with ExitStack() as stack:
            stack.enter_context(bulkhead)
            assert not other.acquire()
        assert other.acquire()
    assert not bulkhead.held
    assert bulkhead.acquire() and bulkhead.acquire() and not bulkhead.acquire()
    for each in (bulkhead, other, bulkhead):
        each.release()


@pytest.mark.parametrize("by", ["holding", "bulkhead"])
def test_places_are_given_back_by_others_than_took_them(on: Cache, by: str) -> None:
    """A place can be given back by another thread or task than the one that took it. Otherwise, places taken in an
    executor or by `asyncio.wait_for` would be renewed for ever."""
    bulkhead = on.bulkhead("b", concurrency=2, wait=5)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for take in (
            lambda: loop.run_in_executor(None, bulkhead.acquire),
            lambda: loop.create_task(bulkhead.aacquire()),
        ):
            for holding in await asyncio.gather(take(), take()):
                await (holding if by == "holding" else bulkhead).arelease()

    asyncio.run(main())
    assert not bulkhead.held and not bulkhead.locked()
    with bulkhead, pytest.raises(LockLost, match="is not held through this object"):
        bulkhead.release()  # the place belongs to the block


def test_what_is_dropped_is_free(on: Cache) -> None:
    """If an object is garbage, its places are soon free. Otherwise, they would be taken until their leases end."""
    bulkhead = on.bulkhead("b", concurrency=1, wait=0, lease=3)
    assert bulkhead.acquire()
    del bulkhead
    gc.collect()
    with on.bulkhead("b", concurrency=1, wait=10) as another:
        assert another.held


@pytest.mark.parametrize("on", ["memory", "disk"], indirect=True)
def test_readers_and_writers_of_one_process(on: Cache) -> None:
    """Readers share the lock, and a writer is alone. A writer that waits is not overtaken by later readers."""
    engine = on
    readers = [Lock("l", on=engine, shared=True, wait=0) for _ in range(3)]
    for reader in readers:
        assert reader.acquire()
    assert not try_lock("l", on=engine).acquire()
    taken = threading.Event()

    def write() -> None:
        with Lock("l", on=engine, wait=20):
            taken.set()

    writer = threading.Thread(target=write)
    writer.start()
    probe = try_lock("l", on=engine, shared=True)
    while probe.acquire():  # until the writer waits: then no reader passes it
        probe.release()
    for reader in readers:
        reader.release()
    assert taken.wait(10)
    writer.join(10)
    with try_lock("l", on=engine, shared=True) as lock:
        assert lock.held


def test_what_an_engine_can_t_is_said(tmp_path: Path) -> None:
    """An option that an engine or a bulkhead cannot fulfil is refused. The error says why."""
    with pytest.raises(OptionError, match=r"a lock of file:// can't be shared: memory://.* have locks that can"):
        Lock("l", on=f"file://{tmp_path}", shared=True)
    for wrong in (0, -1, 1.5, True, "8", 2**31, 10**400):
        with pytest.raises(OptionError, match=r"concurrency is .*: give a whole number, from 1 to"):
            Bulkhead("b", concurrency=wrong, on="memory://")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="is a generator function"):
        Bulkhead("b", on="memory://")(lambda: (yield))
    with pytest.raises(OptionError, match="is a generator function"):
        Bulkhead("b", on="memory://")(functools.partial(lambda: (yield)))
    for no_function in (None, 5, Lock, staticmethod(len), property(len)):
        with pytest.raises(OptionError, match=r"is applied to .* below @staticmethod"):
            Bulkhead("b", on="memory://")(no_function)  # type: ignore[type-var]


def test_a_place_is_kept_for_as_long_as_what_is_decorated_runs() -> None:
    """A place is kept until what is decorated has run. A call that returns a coroutine which the decorator cannot see
    is refused."""
    bulkhead = Bulkhead("as long", concurrency=1, on="memory://")

    class Report:
        async def __call__(self) -> bool:
            return await bulkhead.alocked()

    assert asyncio.run(bulkhead(Report())())

    @bulkhead
    def begun() -> Any:
        return Report()()

    with pytest.raises(OptionError, match=r"the coroutine that .* would run after its place is released"):
        begun()
    assert not bulkhead.locked()


HOLDER = """
import sys, time
from stampede import Bulkhead
bulkhead = Bulkhead("b", concurrency=2, on=sys.argv[1], lease=float(sys.argv[2]), wait=0)
assert bulkhead.acquire()
print("inside", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("engine", ["disk", "file"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_place_ends_with_its_holder(engine: str, how: signal.Signals, tmp_path: Path) -> None:
    """If a holder is killed or hangs, its place becomes free. Otherwise, no caller could get in after a while."""
    if (engine, how) == ("file", signal.SIGSTOP):
        pytest.skip("a lock of file:// is its holder's while that lives")
    url = f"{engine}://{tmp_path}"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url, "2.5" if how == signal.SIGSTOP else "60"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "inside\n"
        bulkhead = Bulkhead("b", concurrency=2, on=url, wait=20)
        with bulkhead:
            assert not bulkhead.acquire(wait=0)
            holder.send_signal(how)
            assert bulkhead.acquire(wait=20)
            bulkhead.release()
    finally:
        holder.kill()
        holder.communicate()
