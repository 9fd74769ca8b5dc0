"""Forks as by gunicorn's preload and by multiprocessing: after use, inside a computation, while locks are held."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from bare_cache import never
from child import Child
from disk_world import Connection, other
from herd import PATIENCE, Herd, Origin, had, until
from postgres_server import prepared_postgres
from servers import RedisServer, shared_redis

from stampede import Cache, Lock, cached, try_lock
from stampede.algorithm.background import Workers
from stampede.runtime import forks
from stampede.testing import isolated

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns of forks with threads

SOON = 8.0
"""The seconds in which something happens that otherwise never happens. A child that takes longer is ended."""


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(params=["memory://", "memory://?codec=sealed", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    with Cache(f"disk://{tmp_path}/c?timeout=20" if request.param == "disk" else request.param) as cache:
        yield cache


def check(condition: object) -> None:
    """Assert something in a child, in which pytest does not rewrite assertions."""
    if not condition:
        raise AssertionError


def test_workers_of_a_parent_that_has_used_the_cache(cache: Cache) -> None:
    """The parent uses the cache and forks, as under gunicorn's preload. Then all processes use what is stored."""
    calls: list[int] = []

    @cache.cached
    def f(x: int) -> int:
        calls.append(x)
        return x

    @cache.cached
    async def g(x: int) -> int:
        return x

    f(1)
    f(1)
    had(g(1))

    def work() -> None:
        check(f(1) == 1)
        check(calls == [1])  # a hit: the child has what the parent stored
        check(had(g(1)) == 1)
        mine = os.getpid() * 100
        check(Herd(*[lambda n=n: f(n) for n in range(mine, mine + 20)]).join() == list(range(mine, mine + 20)))
        check([had(g(n)) for n in (mine, mine + 1)] == [mine, mine + 1])
        check(f.invalidate(mine) is True)
        check(f.peek(mine) is None)
        check(f(mine) == mine)

    children = [Child(work) for _ in range(4)]
    check(f(1) == 1)
    for child in children:
        child.join()
    assert f(3) == 3


def test_workers_share_a_computation_on_disk(tmp_path: Path) -> None:
    """Children of one parent share a computation, like other processes: one of them computes."""
    cache = Cache(f"disk://{tmp_path}/c")
    log = tmp_path / "log"
    start = tmp_path / "start"

    @cache.cached
    def f() -> int:
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.1)
        return 1

    @cache.cached
    def warm() -> int:
        return 0

    warm()

    def work() -> None:
        until(start.exists)
        check(Herd(*[f] * 4).join() == [1] * 4)

    children = [Child(work) for _ in range(4)]
    start.touch()
    for child in children:
        child.join()
    assert log.read_text() == "x"
    cache.close()


def test_a_fork_inside_a_computation(cache: Cache) -> None:
    """A child that is forked inside a computation can make calls, and does not end the parent's lease."""
    children: list[Child] = []

    @cache.cached(lease=60)
    def f() -> int:
        if not children:
            children.append(Child(lambda: check(True)))
            forked = Child(lambda: check(other() == 7))
            children.append(forked)
        return 1

    @cache.cached
    def other() -> int:
        return 7

    assert f() == 1
    for child in children:
        child.join()
    assert f() == 1
    assert f.stats().computed == {"missing": 1}


def test_a_child_that_returns_from_the_computation_it_was_forked_in(tmp_path: Path) -> None:
    """If a child returns from the parent's computation, its value is not stored, and the parent's lease stays valid."""
    cache = Cache(f"disk://{tmp_path}/c")
    forked: list[int] = []
    reading, writing = os.pipe()

    @cache.cached(lease=60)
    def f() -> str:
        if not forked:
            forked.append(os.fork())
            if forked[0] == 0:
                return "child"
            os.read(reading, 1)  # until the child has returned
        return "parent"

    value = f()
    if value == "child":
        os.write(writing, b"x")
        os._exit(0)
    assert value == "parent"
    os.waitpid(forked[0], 0)
    os.close(reading)
    os.close(writing)
    assert f() == "parent"
    assert f.peek().value == "parent"
    cache.close()


def test_a_fork_while_another_thread_computes(cache: Cache) -> None:
    """The child does not have the parent's flight. A caller in it computes, or waits for the parent (on disk)."""
    origin, parent = Origin(), os.getpid()

    @cache.cached(lease=60)
    def f() -> int:
        return origin() if os.getpid() == parent else 2

    def work() -> None:
        check(f() == (1 if cache.engine.scheme == "disk" else 2))

    leader = Herd(f)
    origin.has_begun()
    child = Child(work)
    if cache.engine.scheme == "disk":  # the parent's lease is valid, and the child waits for its value
        origin.let_on()
    child.join()
    origin.let_on()
    assert leader.join() == [1]
    assert f() == 1


def test_forks_under_load(cache: Cache) -> None:
    """If the process forks while its threads hold internal locks, the child does not find them locked for ever."""
    stop = threading.Event()

    @cache.cached(ttl=60)
    def f(n: int) -> int:
        return n

    @cache.cached(ttl=60)
    async def g(n: int) -> int:
        return n

    def churn(n: int) -> None:
        while not stop.is_set():
            f(n)
            f.invalidate(n)
            had(g(n))
            had(g.invalidate(n))
            with cache.lock(f"l{n}"):
                pass

    def work() -> None:
        for n in range(4):
            check(f(n) == n)
            f.invalidate(n)
            check(f(n) == n)
            check(had(g(n)) == n)
        f.invalidate_all()
        with cache.lock("child", wait=PATIENCE):
            pass
        check(f.stats() is not None)

    churners = Herd(*[lambda n=n: churn(n) for n in range(3)])
    try:
        for _ in range(4):
            Child(work).join()
    finally:
        stop.set()
    assert churners.join() == [None] * 3


def test_functions_bound_in_the_parent_find_their_cache_in_the_child() -> None:
    """A function with `@cached` that the parent has used works in the child, also with other settings."""
    f = cached(lambda x: x)
    f(1)

    def work() -> None:
        check(f(1) == 1)
        check(f(2) == 2)
        with isolated(ttl=5):
            check(f(1) == 1)

    Child(work).join()


@pytest.mark.parametrize("url", ["file://{}", "disk://{}", "memory://", "redis", "postgres"])
def test_a_child_does_not_hold_its_parents_lock(url: str, tmp_path: Path) -> None:
    """A child does not hold its parent's lock. It can take the lock when the parent has released it."""
    servers = {"redis": lambda: shared_redis().url, "postgres": lambda: prepared_postgres().postgres_url}
    lock = Lock("a", on=servers.get(url, lambda: url.format(tmp_path))(), lease=PATIENCE)
    told, tell = os.pipe()
    assert lock.acquire()

    def child() -> None:
        assert not lock.held
        assert lock.lost
        assert os.read(told, 1) == b"!"
        assert lock.acquire(wait=PATIENCE)
        assert lock.held
        assert not lock.lost
        lock.release()

    forked = Child(child)
    assert lock.held
    lock.release()
    os.write(tell, b"!")
    forked.join()
    os.close(told)
    os.close(tell)


def test_a_lock_held_by_the_parent_excludes_its_child(tmp_path: Path) -> None:
    """A lock of the parent keeps its child out, also on files, although the child inherits open files."""
    for url in (f"file://{tmp_path}/f", f"disk://{tmp_path}/d"):

        def work(url: str = url) -> None:
            with try_lock("a", on=url) as attempt:
                check(not attempt)
            with Lock("b", on=url, wait=0):
                pass

        with Lock("a", on=url):
            Child(work).join()
        with Lock("a", on=url, wait=0):
            pass


def test_background_refreshes_work_in_a_child(cache: Cache) -> None:
    """The parent's pool of threads does not exist in the child, so the child starts its own for its refreshes."""
    numbers: Any = iter(range(100))
    f = cache.cached(stale=60, background=True)(lambda: next(numbers))
    f()
    f.expire()
    assert f() == 0
    until(lambda: f() > 0)

    def work() -> None:
        before = f()
        f.expire()
        check(f() == before)
        until(lambda: f() > before)

    Child(work).join()


def test_the_failure_of_one_hook_is_nobody_elses() -> None:
    """If one hook fails in the child, the others still run. Otherwise the child would use its parent's connections."""

    class Part:
        again = 0

        def fail(self) -> None:
            raise OSError("a socket of a kind that nobody knew")

        def start_again(self) -> None:
            self.again += 1
            forks.each([self.fail, self.count])

        def count(self) -> None:
            self.again += 1

    parts = [Part() for _ in range(3)]
    for part in parts:
        forks.in_child(part.fail)
        forks.in_child(part.start_again)
    del parts[0], part

    def work() -> None:
        check([part.again for part in parts] == [2, 2])

    Child(work).join()
    assert [part.again for part in parts] == [0, 0]


@pytest.mark.usefixtures("default_timeouts")
def test_a_question_that_is_the_parents_has_no_answer_for_the_child(before: Callable[[Any], Any]) -> None:
    """The child does not wait for an answer to its parent's question, and so does not take the engine for hung."""
    proxy = before(shared_redis())
    with Cache(proxy.url, namespace=str(time.monotonic_ns())) as cache:
        cache.get_or_compute("warm", lambda: 1)
        proxy.hold()
        assert cache.get_or_compute("k", lambda: 1, wait=0.05) == 1

        def stored() -> bool:
            return cache.get_or_compute("other", lambda: 2, wait=0.05) == cache.get("other") == 2

        child = Child(lambda: until(stored, bound=SOON))
        proxy.let_go()
        child.join()


def test_a_refresh_that_was_to_begin_is_left_to_the_parent() -> None:
    """A refresh that waits to begin is left to the parent. The child must not drop it, because this would end it."""
    workers = Workers(1, "test")
    done = threading.Event()
    with workers._pool._lock:  # so that no thread begins it before the fork
        place = workers.reserve()
        assert place is not None
        workers.run(place, done.set, 60.0)
        waiting = weakref.ref(workers._pool._jobs[0])
        pid = os.fork()
        if pid == 0:
            os._exit(0 if waiting() is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert done.wait(10)


# -- while a loop runs ------------------------------------------------------------------------------------------------


def open_sockets() -> set[str]:
    links: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it by now
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in links if name.startswith("socket:")}


def fork_in_a_loop(pipe: Connection, url: str, uvloop: bool) -> None:
    """A server in asyncio that forks while it serves. Its child makes calls in threads, and waits for news."""
    url += "?socket_timeout=20"
    caches = [Cache(f"{url}&client_name={number}", local=True, early=0) for number in range(3)]
    plain, ours = Cache(url, early=0), set[str]()

    def child() -> None:
        assert ours and not ours & open_sockets()
        assert [cache.get_or_compute("k", never) for cache in caches] == ["old"] * 3
        for _ in range(3):  # from the local tier by now
            assert [cache.get("k") for cache in caches] == ["old"] * 3
        pipe.send("asked")
        until(lambda: [cache.get_or_compute("k", never) for cache in caches] == ["new"] * 3, SOON)

    async def main() -> None:
        caches[0].set("k", "old")
        for cache in caches:
            for _ in range(3):
                assert await cache.aget_or_compute("k", never) == "old"
        while not all(cache.engine._servers.news.reporter for cache in caches):  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)  # a connection that is being made during the fork would stay open
        before = open_sockets()
        await plain.aget("k")
        ours.update(open_sockets() - before)
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if Herd(child).join() == [None] else 1)
            finally:
                os._exit(1)
        pipe.recv()
        await caches[0].aset("k", "new")
        code = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
        end = time.monotonic() + SOON  # the parent may hear the news later than its child
        while (seen := [await cache.aget("k") for cache in caches]) != ["new"] * 3 and time.monotonic() < end:
            await asyncio.sleep(0.001)
        pipe.send((code, seen, [cache.stats().engine_downs for cache in caches]))

    with asyncio.Runner(loop_factory=import_module("uvloop").new_event_loop if uvloop else None) as runner:
        runner.run(main())


@pytest.mark.parametrize("uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_fork_in_a_running_loop(server: RedisServer, uvloop: bool) -> None:
    """Promise 13: parent and child do not read each other's replies, and both hear of changes."""
    if uvloop:
        pytest.importorskip("uvloop")
    with other(fork_in_a_loop, server.url, uvloop) as parent:
        assert parent.hear() == "asked"
        parent.tell()
        assert parent.hear() == (0, ["new"] * 3, [0] * 3)
