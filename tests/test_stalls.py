"""A time that runs out while we ourselves don't run says nothing of the server: its reply lies there to be read.

A process is stopped, or its event loop blocked, in the very moment in which the reply has come and has not been read.
"""

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
from typing import Any, NamedTuple

import pytest
from herd import Herd, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from proxy import Proxy
from server_process import freeze, states
from servers import shared_redis

from stampede import Cache, EngineError, try_lock

PATIENCE = 0.4
"""Seconds that a reply, or a connection, may take."""

STALL = 0.7


class Link(NamedTuple):
    near: str
    far: str
    proxy: Proxy


@pytest.fixture(params=["redis", "memcached", "postgres"])
def link(request: pytest.FixtureRequest, before: Callable[[Any], Proxy]) -> Link:
    """A server with a value, as it is, and behind a proxy: there a reply may take but a moment."""
    servers = {"redis": shared_redis, "memcached": shared_memcached, "postgres": prepared_postgres}
    server: Any = servers[request.param]()
    near = server.postgres_url if request.param == "postgres" else server.url
    proxy = before(server)
    if request.param == "redis":
        server.cli("FLUSHALL")
        far = f"{proxy.url}?socket_timeout={PATIENCE}&socket_connect_timeout={PATIENCE}"
    elif request.param == "postgres":
        far = f"postgres://root@127.0.0.1:{proxy.port}/postgres?sslmode=disable&timeout={PATIENCE}"
    else:
        server.empty()
        far = f"memcached://127.0.0.1:{proxy.port}?timeout={PATIENCE}&connect_timeout={PATIENCE}"
    with Cache(near) as cache:
        cache.set_many({"k": "kept", "l": "kept"})
        assert cache.get_or_compute("k", lambda: "computed") == "kept"  # no script is missing any more
    return Link(near, far, proxy)


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    made = None if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=made) as runner:
        yield runner


def block_at_reply(proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop blocked when the next reply comes, before it can be read."""
    began = threading.Event()

    def sleep() -> None:
        began.set()
        time.sleep(STALL)

    def block() -> None:
        loop.call_soon_threadsafe(sleep)
        assert began.wait(5)

    proxy.at(b"", after=block)


WHEN = {"connecting": ("", ""), "asking": ("warm", ""), "impatient": ("warm", str(PATIENCE))}
when = pytest.mark.parametrize("warm, wait", WHEN.values(), ids=WHEN)


@when
def test_a_blocked_loop_takes_the_reply(link: Link, runner: asyncio.Runner, warm: str, wait: str) -> None:
    """The server would be taken for hung, and the process go on without it: with older values, and work done twice."""

    terms = {"wait": float(wait)} if wait else {}

    async def scenario(cache: Cache) -> None:
        if warm:
            assert await cache.aget_or_compute("k", lambda: "computed") == "kept"
        block_at_reply(link.proxy, asyncio.get_running_loop())
        assert await cache.aget_or_compute("k", lambda: "computed", **terms) == "kept"

    with Cache(link.far) as cache:
        runner.run(scenario(cache))
        assert link.proxy.met == 1
        assert cache.stats().engine_downs == 0


CHILD = """
import asyncio, sys
from stampede import Cache, EngineError, try_lock

url, colour, warm, wait = sys.argv[1:]
terms = {"wait": float(wait)} if wait else {}

async def asked(cache):
    if warm:
        await cache.aget_or_compute("k", lambda: "computed")
    print("asks", flush=True)
    sys.stdin.readline()
    return await cache.aget_or_compute("k", lambda: "computed", **terms)

def asked_at_once(cache):
    if warm:
        cache.get_or_compute("k", lambda: "computed")
    print("asks", flush=True)
    sys.stdin.readline()
    return cache.get_or_compute("k", lambda: "computed", **terms)

with Cache(url) as cache:
    value = asyncio.run(asked(cache)) if colour == "async" else asked_at_once(cache)
    print(value, cache.stats().engine_downs, flush=True)
"""


class Child:
    """A process that asks, and is stopped for a while when the reply has come."""

    def __init__(self, link: Link, colour: str, warm: str, wait: str, late: float = 0.0) -> None:
        self._link = link
        self._late = late  # seconds after the stop, in which the reply comes
        args = [sys.executable, "-c", CHILD, link.far, colour, warm, wait]
        self._popen = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _stop(self) -> None:
        pid = self._popen.pid
        until(lambda: states(pid) == {"S"})  # it waits for the reply
        freeze(pid)
        go_on = threading.Timer(STALL, os.kill, (pid, signal.SIGCONT))
        go_on.start()
        if self._late:
            go_on.join()
            time.sleep(self._late)

    def says(self) -> str:
        child = self._popen
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.closing(child.stdin), contextlib.closing(child.stdout):
            try:
                assert child.stdout.readline() == "asks\n"
                self._link.proxy.at(b"", after=self._stop)
                child.stdin.write("\n")
                child.stdin.flush()
                return child.stdout.readline().strip()
            finally:
                child.kill()
                child.wait()


@when
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_stopped_process_takes_the_reply(link: Link, colour: str, warm: str, wait: str) -> None:
    """The same of a process that did not come to run (SIGSTOP, a suspended container, a busy machine)."""
    assert Child(link, colour, warm, wait).says() == "kept 0"
    assert link.proxy.met == 1


@pytest.mark.parametrize("wait", ["", str(PATIENCE)], ids=["patient", "impatient"])
@pytest.mark.parametrize("colour", ["sync", "async"])
def test_who_stood_still_with_the_server_waits_for_it(link: Link, colour: str, wait: str) -> None:
    """A machine that stands still for a moment would have all its processes go on without each other."""
    assert Child(link, colour, "warm", wait, late=PATIENCE / 8).says() == "kept 0"
    assert link.proxy.met == 1


def test_a_question_that_was_answered_meanwhile_does_not_hang(link: Link) -> None:
    """Who comes while the loop was blocked would take it for one that hangs, and not even ask."""

    async def scenario(cache: Cache) -> None:
        assert await cache.aget("k") == "kept"
        loop, began = asyncio.get_running_loop(), threading.Event()
        second: list[asyncio.Task[str]] = []

        def come() -> None:
            began.set()
            time.sleep(STALL)
            second.append(loop.create_task(cache.aget_or_compute("l", lambda: "computed", wait=0.0)))

        def block() -> None:
            loop.call_soon_threadsafe(come)
            assert began.wait(5)

        link.proxy.at(b"", after=block)
        assert await cache.aget_or_compute("k", lambda: "computed", wait=0.0) == "kept"
        assert await second[0] == "kept"

    with Cache(link.far) as cache:
        asyncio.run(scenario(cache))


def locked(cache: Cache) -> str:
    with try_lock("free", on=cache) as lock:
        return "had" if lock else "refused"


async def locks(cache: Cache) -> str:
    async with try_lock("its own", on=cache) as lock:
        return "had" if lock else "refused"


QUESTIONS: dict[str, tuple[Any, Any, str]] = {
    "locks": (locks, locked, "had"),
    "calls": (
        lambda cache: cache.aget_or_compute("k", lambda: "computed", wait=0.25),
        lambda cache: cache.get_or_compute("l", lambda: "computed", wait=0.25),
        "kept",
    ),
}


@pytest.mark.parametrize("late", [False, True], ids=["blocked", "late and blocked"])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_blocked_loop_keeps_nobody_else_from_the_server(
    link: Link, monkeypatch: pytest.MonkeyPatch, kind: str, late: bool
) -> None:
    """Its question has an answer, which it doesn't read, or had none for a moment: other threads would not even ask,
    and have an error instead of a lock, or compute what is there."""
    monkeypatch.setattr("stampede.guarded_locks.LEAST", 0.3)
    monkeypatch.setattr("stampede.guarded_locks.AGAIN", 0.3)
    ask, ask_at_once, answer = QUESTIONS[kind]
    blocked, end = threading.Event(), threading.Event()

    async def scenario(cache: Cache) -> None:
        loop = asyncio.get_running_loop()
        assert await ask(cache) == answer

        def block() -> None:
            loop.call_soon_threadsafe(lambda: (blocked.set(), end.wait(5)))
            assert blocked.wait(5)

        if late:
            link.proxy.at(b"", before=link.proxy.hold)
            with contextlib.suppress(EngineError):
                await ask(cache)
            block_here()
            return
        link.proxy.at(b"", after=block)
        assert await ask(cache) == answer

    def block_here() -> None:
        blocked.set()
        assert end.wait(5)

    with Cache(link.far.replace(f"={PATIENCE}", "=2")) as cache:
        assert ask_at_once(cache) == answer
        herd = Herd(lambda: asyncio.run(scenario(cache)))
        assert blocked.wait(5)
        link.proxy.let_go()
        time.sleep(0.35)  # longer than each of them is waited for
        assert [ask_at_once(cache) for _ in range(3)] == [answer] * 3
        assert set(Herd(*[lambda: ask_at_once(cache)] * 5).join()) <= {answer, "refused"}
        end.set()
        assert herd.join() == [None]


def test_a_hiccup_gives_back_no_more_than_it_took(link: Link) -> None:
    """A loop that is blocked for a moment now and then would wait for a server that hangs, time-out after time-out."""
    patience, hiccup = 0.8, 0.12

    async def scenario(cache: Cache) -> float:
        asyncio.get_running_loop().call_later(0.1, time.sleep, hiccup)
        began = time.monotonic()
        assert await cache.aget_or_compute("k", lambda: "computed") == "computed"
        return time.monotonic() - began

    with Cache(link.far.replace(f"={PATIENCE}", f"={patience}")) as cache:
        link.proxy.hold()
        assert patience <= asyncio.run(scenario(cache)) < 2 * patience - hiccup
        assert cache.stats().engine_downs == 1


def test_who_asks_when_all_tasks_are_told_to_end_is_not_left_waiting(link: Link, runner: asyncio.Runner) -> None:
    """Code that shuts a program down cancels all tasks and then uses the cache: it would wait for a hung server for
    ever, as who looks after its question was told to end and has not ended yet."""

    async def scenario(cache: Cache) -> None:
        assert await cache.aget("k") == "kept"
        link.proxy.hold()
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        async with asyncio.timeout(5):
            assert await cache.aget("k") is None

    with Cache(link.far) as cache:
        runner.run(scenario(cache))


def test_who_is_spared_when_all_tasks_are_told_to_end_is_not_cancelled(link: Link, runner: asyncio.Runner) -> None:
    """The same code, while the connection is being made: it would get a CancelledError that was not meant for it."""

    async def scenario(cache: Cache) -> None:
        asked = asyncio.create_task(cache.aget("k"))
        await asyncio.sleep(0)  # it connects
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        assert await cache.aget("k") in (None, "kept")
        assert asked.cancelled()

    with Cache(link.far) as cache:
        runner.run(scenario(cache))


def test_a_question_outlives_the_task_that_attends_to_it(link: Link, runner: asyncio.Runner) -> None:
    """Who cancels all tasks but some would have these wait for a hung server for ever."""

    async def scenario(cache: Cache) -> None:
        assert await cache.aget("k") == "kept"
        loop, spared = asyncio.get_running_loop(), asyncio.current_task()

        def cancel() -> None:
            for other in asyncio.all_tasks(loop) - {spared}:
                other.cancel()

        link.proxy.at(b"", answered=0, silent=True, before=lambda: loop.call_soon_threadsafe(cancel))
        async with asyncio.timeout(5):
            assert await cache.aget("k") in (None, "kept")  # or it was asked once more, on another connection
        assert link.proxy.met == 1

    with Cache(link.far) as cache:
        runner.run(scenario(cache))


def test_all_tasks_of_a_loop_can_be_ended(link: Link, runner: asyncio.Runner) -> None:
    """Code that cancels tasks until there are none would go on for ever, if one that is cancelled had a successor."""

    async def scenario(cache: Cache) -> None:
        assert await cache.aget("k") == "kept"
        loop, sent, rounds = asyncio.get_running_loop(), asyncio.Event(), 0
        link.proxy.at(b"", answered=0, silent=True, before=lambda: loop.call_soon_threadsafe(sent.set))
        asked = asyncio.create_task(cache.aget("k"))
        await sent.wait()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            rounds += 1
            assert rounds <= 3
            for other in others:
                other.cancel()
            await asyncio.wait(others)
        assert asked.cancelled()

    with Cache(link.far.replace(f"={PATIENCE}", "=30")) as cache:
        runner.run(scenario(cache))
