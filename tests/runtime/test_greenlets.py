"""Several callers in one thread: greenlets, as SQLAlchemy's asyncio extension and gevent use them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from bare_cache import LONG, Gate, Room, World
from etcd_server import shared_etcd
from forked import python
from greenlet import getcurrent, greenlet
from memcached_server import shared_memcached
from servers import shared_redis

import stampede
from stampede import RecursiveComputation, cached, try_lock
from stampede.testing import isolated

PACKAGE = Path(stampede.__file__).parent


def await_only(work: Coroutine[Any, Any, Any]) -> Any:
    """Called in a greenlet of `spawned`: let the greenlet's driver await the work."""
    driver = getcurrent().parent
    assert driver is not None
    return driver.switch(work)


async def spawned(function: Callable[..., Any], *args: Any) -> Any:
    """Like SQLAlchemy's `greenlet_spawn`: run a sync function, and let the calling task await what it waits for."""
    inner = greenlet(function, getcurrent())
    inner.gr_context = getcurrent().gr_context
    got = inner.switch(*args)
    while not inner.dead:
        got = inner.switch(await got)
    return got


def test_greenlets_of_one_event_loop() -> None:
    """A greenlet that asks for a key, while another greenlet of its loop computes it, is not refused as recursive."""
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
    assert len(computed) == 4  # each computes: a greenlet that waited would block the thread on which the first goes on


def test_a_greenlet_s_computation_is_shared_with_tasks_and_threads() -> None:
    """Tasks and other threads get the result of a greenlet's computation, and do not compute again."""
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
    """A computation that asks for its own key in a greenlet is refused. Otherwise it would compute again and again."""
    world = World()

    async def main() -> None:
        with pytest.raises(RecursiveComputation):
            await spawned(world.ask, lambda: world.ask(int))
        with pytest.raises(RecursiveComputation):  # without the context that shows it
            await spawned(world.ask, lambda: Context().run(world.ask, int))

    asyncio.run(main())


def test_plain_greenlets() -> None:
    """A second greenlet computes alone. If it waited, it would block the thread on which the first must go on."""
    world, got = World(), []

    def first() -> None:
        got.append(world.ask(lambda: main.switch() or "the first's"))

    main = getcurrent()
    one = greenlet(first)
    one.switch()  # it is in its computation now
    greenlet(lambda: got.append(world.ask(lambda: "alone"))).switch()
    assert world.ask(lambda: "alone, too") == "alone, too"  # the thread's main greenlet
    one.switch()
    assert got == ["alone", "the first's"]
    assert world.ask(lambda: "again") == "the first's"


def test_a_greenlet_follows_another_thread() -> None:
    """A greenlet waits for a computation of another thread, which goes on meanwhile, and does not compute again."""
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
    """Greenlets get no RecursiveComputation and no deadlock. Under gevent's patch, they share a computation."""
    script = GEVENT.format(before=before)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.splitlines()[-1:] == [f"[42, 42, 42, 42, 42] {computed}"], ran.stderr


PRELOADED = """
import os, sys, time
from stampede import Cache

cache = Cache(sys.argv[1], ttl=60, lease=5, namespace=str(os.getpid()))

@cache.cached
def one(n): time.sleep(0.05); return n

@cache.cached.many
def several(ids: list[int]): time.sleep(0.05); return {i: i for i in ids}

one(-1), several([-1, -2])  # the parent uses what its children inherit
with cache.lock("a"): pass

if sys.argv[2] == "fork" and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
from gevent import monkey; monkey.patch_all()
import gevent

def ask(n):
    if n % 2: return several([n, n + 1, n + 2])
    with cache.lock(f"l{n % 4}", wait=50): return one(n % 6)

jobs = [gevent.spawn(ask, n) for n in range(20)]
gevent.joinall(jobs, raise_error=True, timeout=60)
assert all(job.ready() for job in jobs), "some hang"
"""


@pytest.mark.parametrize("fork", ["fork", "no fork"])
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(shared_memcached, marks=pytest.mark.memcached),
        pytest.param(shared_etcd, marks=pytest.mark.etcd),
        pytest.param(shared_redis, marks=pytest.mark.redis),
    ],
    ids=["memcached", "etcd", "redis"],
)
def test_gevent_s_patch_after_the_first_use(server: Callable[[], Any], fork: str) -> None:
    """If gevent's patch comes after the first use (gunicorn --preload -k gevent), no greenlet waits for ever."""
    url = server().url
    ran = python("-W", "ignore", "-c", PRELOADED, url, fork)
    assert (ran.returncode, ran.stderr) == (0, "")


LEFT_BEHIND = """
import os, threading, time
from stampede.runtime import forks
from stampede.engines.kit.flock import shut
from stampede.runtime.watch import Watch
class Due:
    def look(self, now):
        looked.set()
        return now + 0.05
looked, due, watch = threading.Event(), Due(), Watch("watched")
assert watch.add(due, time.monotonic())
assert looked.wait(10)
(thread,) = [each for each in threading.enumerate() if each.name == "watched"]
forks.as_in_child()
thread.join(10)
assert not thread.is_alive()
looked.clear()
assert watch.add(due, time.monotonic())
assert looked.wait(10)
close, os.close = os.close, lambda fd: close(fd) if fd >= 0 else 1 // 0  # as gevent's, which is no OSError
shut(-1)
"""


def test_a_late_patch_leaves_a_watch_behind() -> None:
    """After a late patch, the thread of a watch ends without a traceback, and the watch starts another one."""
    ran = python("-W", "error", "-c", LEFT_BEHIND)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_eventlet_is_refused() -> None:
    """Under eventlet's patch, each use raises. Otherwise some calls would fail later, without an explanation."""
    program = """
import sys, threading, types
patcher = types.ModuleType("eventlet.patcher")
patcher.is_monkey_patched = lambda name: True
sys.modules["eventlet.patcher"] = patcher
from stampede import StampedeError, cached, Lock
def lock():
    with Lock("a", on="memory://"): pass
for use in (cached(lambda: 1), cached(lambda: 2), lock):
    try: use()
    except StampedeError as error: print(type(error).__name__, "use gevent" in str(error))
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "UnsupportedPatch True\n" * 3, ran.stderr


def test_eventlet_is_refused_to_async_functions_too() -> None:
    """Under eventlet's patch, an async function raises, too, even if the patch came after the import."""
    program = """
import asyncio, sys, threading, types
from stampede import StampedeError, cached
@cached(ttl=60)
async def one(x): return x
patcher = types.ModuleType("eventlet.patcher")
patcher.is_monkey_patched = lambda name: True
sys.modules["eventlet.patcher"] = patcher
threading.Lock = lambda: __import__("_thread").allocate_lock()
for number in (1, 2):
    try: asyncio.run(one(number))
    except StampedeError as error: print(type(error).__name__, "use gevent" in str(error))
"""
    ran = python("-W", "error", "-c", program)
    assert ran.stdout == "UnsupportedPatch True\n" * 2, ran.stderr


def test_what_gevent_replaces_is_looked_up_when_it_is_used() -> None:
    """Names that gevent replaces are not imported from their modules. They would remain the unpatched ones."""
    line = re.compile(
        r"^from (?:threading|queue|time|select|subprocess) import (?!get_ident$|Empty$|monotonic$).*", re.M
    )
    files = [path for path in PACKAGE.rglob("*.py") if not {"testing"} & set(path.parts)]
    found = [f"{path.name}: {each}" for path in files for each in line.findall(path.read_text("utf-8"))]
    assert found == []


def test_greenlets_of_one_thread_are_not_one_holder() -> None:
    """Greenlets of one thread are different holders of a lock. While one is inside, another is refused."""
    lock = try_lock("a", on="memory://")

    def rests() -> bool:
        with lock as mine:
            getcurrent().parent.switch(bool(mine))
            return mine.held

    def refused() -> bool:
        with lock as mine:
            return bool(mine)

    first = greenlet(rests)
    assert first.switch() is True
    assert greenlet(refused).switch() is False
    assert first.switch() is True
    with lock as mine:
        assert mine
