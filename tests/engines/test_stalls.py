"""A request to a server survives the cancellation of its task, and all tasks of a loop can be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from proxy import Proxy
from servers import shared_redis

from stampede import Cache

PATIENCE = 1.0
"""Seconds that a reply or a connection may take."""


class Link(NamedTuple):
    near: str
    far: str
    proxy: Proxy


@pytest.fixture(params=["redis", "memcached", "postgres"])
def link(request: pytest.FixtureRequest, before: Callable[[Any], Proxy]) -> Link:
    """A server with a value: its own URL, and that of a proxy before it, where replies may take only a moment."""
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
        assert cache.get_or_compute("k", lambda: "computed") == "kept"  # now no script is missing
    return Link(near, far, proxy)


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    made = None if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=made) as runner:
        yield runner


async def found(cache: Cache) -> None:
    """Wait until the value is found. On a busy machine, the first connection may take longer than the time limit."""
    async with asyncio.timeout(20):
        while await cache.aget("k") != "kept":
            await asyncio.sleep(0.05)


def test_who_asks_when_all_tasks_are_told_to_end_is_not_left_waiting(link: Link, runner: asyncio.Runner) -> None:
    """A program that shuts down may cancel all tasks and then use the cache. A call does not wait for a hung server for
    ever, although the task that watches its request was cancelled."""

    async def scenario(cache: Cache) -> None:
        await found(cache)
        link.proxy.hold()
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        async with asyncio.timeout(5):
            assert await cache.aget("k") is None

    with Cache(link.far) as cache:
        runner.run(scenario(cache))


def test_who_is_spared_when_all_tasks_are_told_to_end_is_not_cancelled(link: Link, runner: asyncio.Runner) -> None:
    """If all other tasks are cancelled while a connection is made, a call does not get their CancelledError."""

    async def scenario(cache: Cache) -> None:
        asked = asyncio.create_task(cache.aget("k"))
        await asyncio.sleep(0)  # it connects now
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        assert await cache.aget("k") in (None, "kept")
        assert asked.cancelled()

    with Cache(link.far) as cache:
        runner.run(scenario(cache))


def test_a_question_outlives_the_task_that_attends_to_it(link: Link, runner: asyncio.Runner) -> None:
    """If the program cancels all tasks except one, this one does not wait for a hung server for ever."""

    async def scenario(cache: Cache) -> None:
        await found(cache)
        loop, spared = asyncio.get_running_loop(), asyncio.current_task()

        def cancel() -> None:
            for other in asyncio.all_tasks(loop) - {spared}:
                other.cancel()

        link.proxy.at(b"", answered=0, silent=True, before=lambda: loop.call_soon_threadsafe(cancel))
        async with asyncio.timeout(5):
            assert await cache.aget("k") in (None, "kept")  # or the request was sent again, on another connection
        assert link.proxy.met == 1

    with Cache(link.far) as cache:
        runner.run(scenario(cache))


def test_all_tasks_of_a_loop_can_be_ended(link: Link, runner: asyncio.Runner) -> None:
    """A program that cancels tasks until none are left comes to an end: a cancelled task of ours has no successor."""

    async def scenario(cache: Cache) -> None:
        await found(cache)
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
