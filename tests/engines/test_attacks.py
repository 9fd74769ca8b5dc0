"""Attacks that once broke a promise. Each test is the shortest way to break it again."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from herd import until
from interrupting import Line, lines_in, lines_of, looked
from memcached_server import shared_memcached
from servers import RedisServer, shared_redis

from stampede import Cache, EngineError, RecursiveComputation, events
from stampede.engines.disk.rows import key_number
from stampede.engines.kit.boot_clock import clock
from stampede.errors import OptionError
from stampede.model.ports import Busy
from stampede.runtime import process_lock
from stampede.runtime.colour import run_blocking


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(function()), daemon=True)
    thread.start()
    return thread, got


def test_who_comes_after_another_process_s_invalidation_is_not_given_what_was_stored_before_it(tmp_path: Path) -> None:
    """If a key is invalidated between a flight's fill and its landing, a call that joins then gets a new value."""
    stored, go = threading.Event(), threading.Event()

    def linger(event: events.Event) -> None:
        if isinstance(event, events.Computed) and not stored.is_set():
            stored.set()
            go.wait(10)

    with Cache(f"disk://{tmp_path}", observers=[linger]) as here, Cache(f"disk://{tmp_path}") as there:
        first, old = in_thread(lambda: here.get_or_compute("k", lambda: "old"))
        assert stored.wait(10)
        assert there.invalidate("k")
        second, new = in_thread(lambda: here.get_or_compute("k", lambda: "new"))
        until(lambda: any(flight.callers == 2 for flight in here._core.flights._flights.values()))
        go.set()
        first.join(10)
        second.join(10)
    assert (old, new) == (["old"], ["new"])


def test_who_comes_after_another_process_s_invalidation_is_not_given_what_was_pushed_before_it() -> None:
    """A busy event loop reads its news late. A call that begins after an invalidation still gets no older value."""
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    url = shared_redis().url
    with Cache(url, namespace="late", ttl=60) as here, Cache(url, namespace="late", ttl=60) as there:

        def elsewhere() -> None:
            there.get_or_compute("k", lambda: begun.set() or (go.wait(10) and "old"))
            there.invalidate("k")
            done.set()

        async def main() -> list[str]:
            leader = asyncio.create_task(here.aget_or_compute("k", lambda: "the leader's"))
            while not asleep():
                await asyncio.sleep(0.005)
            go.set()
            assert done.wait(10)  # this loop is blocked meanwhile
            return await asyncio.gather(here.aget_or_compute("k", lambda: "new"), leader)

        def asleep() -> bool:
            """The leader listens, and has looked at the lease since it began to listen."""
            news = next(iter(here.engine.blocking.claims._news._channels.values()), None)  # type: ignore[union-attr]
            return news is not None and any(each.bell._listeners for each in news.listeners)

        holder, _ = in_thread(elsewhere)
        assert begun.wait(10)
        got = asyncio.run(main())
        holder.join(10)
    assert got[0] != "old"


@pytest.mark.parametrize("holder", ["{}", "../{}", "", ".", "..", "x\0y", b"\xff", 5, "9" * 400 + "-1-2"], ids=repr)
def test_a_hostile_holder_s_name_is_nobody_s_and_no_path(tmp_path: Path, holder: Any) -> None:
    """The name of a holder in a row is not used as a path. Otherwise, an attacker who can write rows could have any
    file of the user deleted, because the engine removes the files of dead processes."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if isinstance(holder, str):
        holder = holder.format(victim if holder == "{}" else victim.name)
    with Cache(f"disk://{tmp_path}/cache", on_engine_error="raise") as cache:
        number, _ = key_number(f"{cache._root.prefix}k")
        lease = 60 if holder else 0.2  # an empty name is that of a lease that was handed over: it is valid to its end
        row = (number, b"somebody", clock() + lease, holder, 1)
        with closing(sqlite3.connect(next(tmp_path.glob("cache/*.sqlite")))) as file, file:
            file.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", row)
        assert cache.get_or_compute("k", lambda: "mine") == "mine"
    assert victim.exists()


@pytest.mark.parametrize("url", ["memory://", "disk://{}"])
def test_a_finalizer_or_signal_may_call_at_every_line_of_ours(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A __del__ or a signal handler may call the function in the middle of a call. The inner call does not wait for the
    outer one, which could not continue."""
    monkeypatch.setattr("stampede.engines.disk.database.LOOK", 0.0)  # all runs reach the same lines, fast or slow
    monkeypatch.setattr("stampede.algorithm.generations.SAFETY", 0.01)  # a question of the outer call gets no answer

    @contextmanager
    def opened(directory: object) -> Iterator[Any]:
        with Cache(url.format(memory_path / str(directory)), ttl=0) as cache:
            yield cache.cached(lambda number: 2 * number)

    def interrupted(function: Any, where: Line) -> bool:
        reached = False

        def at(line: Line) -> None:
            nonlocal reached
            if line == where and not reached:
                reached = True
                try:
                    assert function(1) == 2
                except (RecursiveComputation, EngineError):
                    pass  # raised at once: the inner call did not wait

        lines_of(lambda: function(1), at, lambda frame: frame.f_code.co_filename == where[0])
        return reached

    tried: set[Line] = set()
    new = map("new {}".format, count())
    with opened("old") as called:
        called(1)
        # Each line is tried where it is reached soonest: in a call, in a cache's first, or in a new directory's first.
        for way in (lambda: nullcontext(called), lambda: opened("old"), lambda: opened(next(new))):

            def look() -> dict[Line, None]:
                with way() as function:
                    thread, lines = in_thread(
                        lambda: lines_in(lambda: function(1))
                    )  # a new thread, as this one's context may be in a call
                    thread.join(5)
                    return lines[0]

            for where, always in looked(look).items():
                if where not in tried:
                    tried.add(where)
                    with way() as function:
                        thread, reached = in_thread(partial(interrupted, function, where))
                        thread.join(5)
                        assert reached in ([True], [always]), where


@pytest.mark.parametrize(
    "engine, inside",
    [
        ("redis", {"put", "ask", "answered", "forget", "start", "listen", "failed", "_failed_partly"}),
        ("memcached", {"add", "_call"}),
    ],
)
def test_a_finalizer_or_signal_may_call_where_what_is_known_of_an_engine_changes(engine: str, inside: set[str]) -> None:
    """A finalizer or signal handler may call while its thread holds a lock of the engine, and does not hang."""
    pytest.importorskip("redis" if engine == "redis" else "pymemcache")
    url = shared_redis().url if engine == "redis" else f"memcached://127.0.0.1:{shared_memcached().port}"
    cache, partly = Cache(url, namespace=f"{monotonic()}"), EngineError()
    partly.partial = True
    held, keys, tried = cache.lock("held"), map("k {}".format, count()), set[Line]()
    claims: Any = cache.engine.blocking.claims

    def call() -> None:
        key = next(keys)
        cache.get_or_compute(key, lambda: 1)
        cache.invalidate(key)
        run_blocking(claims.wait(key, Busy(b"gone", 1.0), 0.001))  # as a waiter that listens
        if engine != "redis" or not claims._news._lock._is_owned():  # another thread would wait for this lock
            try:
                assert not cache.lock("held").acquire(wait=0.001)
            except EngineError:  # raised in time: the thread that sends the request waits for the interrupted one
                assert process_lock.lock._is_owned()
        for error in (partly, EngineError()):
            cache._core.outage.failed(error)
            cache._core.outage.answered()

    def at(line: Line) -> None:
        if line not in tried and sys._getframe(2).f_code.co_name in inside:
            tried.add(line)
            call()

    assert held.acquire()
    thread, _ = in_thread(lambda: lines_of(call, at))
    thread.join(15)
    assert not thread.is_alive(), tried  # (a thread that hangs has the lock that closing the cache takes)
    assert tried
    held.release()
    cache.close()


def test_a_computation_that_is_cancelled_before_its_first_step_gives_its_lease_back() -> None:
    """If the event loop ends in the turn in which a computation begins, the lease is given back. Otherwise, the key
    would remain locked until the lease ends."""
    cache = Cache("memory://", lease=60)

    @cache.cached
    async def value() -> int:
        return 1

    async def leave_at_once() -> None:
        begin = asyncio.Event()

        async def ask() -> None:
            await begin.wait()
            await value()

        task = asyncio.create_task(ask())
        await asyncio.sleep(0.01)
        begin.set()
        assert not task.done()

    asyncio.run(leave_at_once())
    assert asyncio.run(asyncio.wait_for(value(), 10)) == 1


class Shaped(Exception):
    def __init__(self, status: int, *, reason: str) -> None:
        super().__init__(f"{status} {reason}")


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("url", ["memory://", "disk://{}"])
def test_errors_with_odd_constructors_are_raised_again_as_themselves(tmp_path: Path, url: str) -> None:
    """An error whose __init__ takes other arguments than it passes on is raised again as itself, not as a TypeError."""
    with Cache(url.format(tmp_path)) as cache:

        def fail() -> None:
            raise Shaped(404, reason="gone")

        for _ in range(2):
            with pytest.raises(Shaped, match="404 gone"):
                cache.get_or_compute("k", fail, raises=Shaped)


@pytest.mark.parametrize("url", ["memory://", "disk://{}"])
def test_an_error_whose_message_fails_reaches_its_caller(tmp_path: Path, url: str) -> None:
    """An error whose __str__ raises reaches its caller unchanged."""
    with Cache(url.format(tmp_path)) as cache:

        def fail() -> None:
            raise Mute

        with pytest.raises(Mute):
            cache.get_or_compute("k", fail)


def test_an_exit_under_computations_releases_before_it_closes(tmp_path: Path) -> None:
    """At exit, running computations give back their leases before the engine is closed, and no warning is shown."""
    script = """
import sys, threading
import stampede.leases.keeper
from stampede import Cache
stampede.leases.keeper.AT_EXIT = 20
cache, begun = Cache(sys.argv[1]), threading.Event()
def compute():
    begun.set()
    threading.Event().wait()
threading.Thread(target=lambda: cache.get_or_compute("k", compute), daemon=True).start()
begun.wait()
"""
    command = [sys.executable, "-c", script, f"disk://{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    with closing(sqlite3.connect(next(tmp_path.glob("*.sqlite")))) as file:
        assert (done.stderr, file.execute("SELECT * FROM leases").fetchall()) == ("", [])


def test_more_seconds_than_a_float_can_hold_are_an_option_error() -> None:
    """A ttl that no float can hold is an OptionError that names the option, not an OverflowError."""
    with pytest.raises(OptionError, match="ttl"):
        Cache("memory://", ttl=10**400)


def test_wrong_types_in_the_file_are_a_miss(tmp_path: Path) -> None:
    """A row whose columns have wrong types is a miss. Callers get no TypeError from our comparisons."""
    with Cache(f"disk://{tmp_path}/c", ttl=60) as cache:
        f = cache.cached(lambda n: n)
        assert [f(n) for n in range(3)] == [0, 1, 2]
        (file,) = (tmp_path / "c").glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection, connection:
        for name in ("fresh", "keep", "cost", "margin", "ttl"):
            connection.execute(f"UPDATE entries SET {name} = 'soon'")
        connection.execute("INSERT INTO pasts SELECT number, 'a text', 'never' FROM entries")
    with Cache(f"disk://{tmp_path}/c", ttl=60) as cache:
        g = cache.cached(lambda n: n)
        assert [g(n) for n in range(3)] == [0, 1, 2]


def test_a_refresh_that_never_began_gives_its_lease_back() -> None:
    """If the loop ends in the turn in which a refresh begins, the lease is given back. Otherwise, the key would remain
    locked until the lease ends."""
    cache = Cache("memory://?codec=sealed", ttl=60, stale=60, background=True, lease=60)

    @cache.cached
    async def f() -> int:
        return 1

    async def main(*, last: bool) -> None:
        await f()
        await f.expire()
        if last:
            await f()  # creates a task, and then the loop ends

    asyncio.run(main(last=True))
    began = monotonic()
    assert asyncio.run(f()) == 1
    assert asyncio.run(f.refresh()) == 1
    assert monotonic() - began < 10
    keys = cache.engine._parts[0]
    assert not len(keys.records)


def test_a_call_that_is_closed_while_it_asks_leaves_its_flight() -> None:
    """A coroutine that is closed before its end leaves its flight. Otherwise, later callers of the key would hang."""
    with Cache(shared_redis().url, namespace="closed", ttl=60) as cache:
        cache.set("k", "there")

        async def main() -> Any:
            call = cache.aget_or_compute("k", lambda: "mine")
            call.send(None)
            call.close()
            return await asyncio.wait_for(cache.aget_or_compute("k", lambda: "mine"), 10)

        assert asyncio.run(main()) == "there"


def test_who_is_interrupted_while_an_observer_hears_of_a_hit_leaves_its_flight() -> None:
    """If Ctrl-C interrupts an observer of a hit, the call leaves its flight. Otherwise, later callers would hang."""

    def interrupted(event: events.Event) -> None:
        if isinstance(event, events.Found) and interrupts:
            raise interrupts.pop()

    interrupts: list[BaseException] = [KeyboardInterrupt()]
    with Cache("memory://?codec=sealed", observers=[interrupted]) as cache:
        cache.set("k", "there")
        with pytest.raises(KeyboardInterrupt):
            cache.get_or_compute("k", lambda: "mine")
        thread, got = in_thread(lambda: cache.get_or_compute("k", lambda: "mine"))
        thread.join(10)
        assert got == ["there"]


def test_a_call_that_is_cancelled_while_it_asks_leaves_nothing_to_the_garbage_collector() -> None:
    """What the caller of a cancelled call held is freed at once, without the garbage collector."""

    class Held:
        pass

    async def cancelled(cache: Cache) -> weakref.ref[Held]:
        held = Held()
        task = asyncio.ensure_future(cache.aget_or_compute("k", lambda: held))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return weakref.ref(held)

    with Cache(shared_redis().url, namespace="cancelled") as cache:
        cache.set("k", "there")
        gc.collect()
        gc.disable()
        try:
            assert asyncio.run(cancelled(cache))() is None
        finally:
            gc.enable()


def test_a_client_of_a_class_of_one_s_own_leads_to_its_server() -> None:
    """A client whose class is a subclass of redis.Redis is accepted."""
    redis = pytest.importorskip("redis")

    class Mine(redis.Redis):  # type: ignore[name-defined, misc]
        pass

    with Cache(Mine(port=shared_redis().port), namespace="mine") as cache:
        assert cache.get_or_compute("k", lambda: 1) == 1
        assert shared_redis().cli("KEYS", "*mine*k") != ""


@pytest.mark.usefixtures("default_timeouts")
def test_a_refusal_is_an_answer_that_ends_an_outage() -> None:
    """A server that comes back full refuses writes. This ends the outage, so that its values are read again."""
    server = RedisServer()
    try:
        with Cache(server.url, ttl=60) as cache:
            cache.set("there", "kept")
            server.cli("CONFIG", "SET", "maxmemory", "1")
            server.freeze()
            assert cache.get_or_compute("missing", lambda: "mine", ttl=0) == "mine"
            outage = cache._core.outage
            assert outage is not None
            assert outage.down
            server.thaw()
            until(lambda: cache.get_or_compute("missing", lambda: "mine", ttl=0) and not outage.down)
            assert cache.get_or_compute("there", lambda: "mine") == "kept"
    finally:
        server.close()


def test_a_call_near_the_end_of_the_stack_does_not_crash_the_process() -> None:
    """A call near the end of the stack may raise RecursionError. It does not crash the process in hiredis."""
    script = """
import sys
from stampede import Cache
cache = Cache(sys.argv[1], namespace="deep")
cache.set("other", "its value")
def deep(depth, key):
    return deep(depth - 1, key) if depth else cache.get_or_compute(key, lambda: depth)
for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit()):
    assert cache.get("other") == "its value"  # connects, which takes a deeper stack
    try:
        deep(depth, str(depth))
    except RecursionError:
        pass
print("alive")
"""
    command = [sys.executable, "-c", script, shared_redis().url]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout == "alive\n"


@pytest.mark.parametrize("one, two", [("_adopt", "put"), ("end", "change"), ("_adopt", "end")])
def test_finalizers_that_interrupt_two_threads_do_not_wait_for_each_other(one: str, two: str) -> None:
    """Two threads are interrupted under different locks, and each finalizer needs the other lock. They do not hang."""
    with Cache("memory://", ttl=60) as cache:
        function, met = cache.cached(lambda key: key), threading.Barrier(2)
        function("warm")
        threads = [in_thread(partial(_interrupted_in, name, function, met))[0] for name in (one, two)]
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()


def _interrupted_in(name: str, function: Any, met: threading.Barrier) -> None:
    """A call that a finalizer interrupts when the other call is interrupted, too. The finalizer invalidates a key."""
    where: list[Line] = []

    def at(line: Line) -> None:
        if sys._getframe(2).f_code.co_name == name and process_lock.lock._is_owned() and not where:
            where.append(line)
            with suppress(threading.BrokenBarrierError):
                met.wait(0.2)  # if both need the same lock, they do not meet
            function.invalidate("warm")

    lines_of(lambda: function(name), at)
    assert where
