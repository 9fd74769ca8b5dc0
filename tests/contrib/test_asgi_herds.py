"""`ResponseCache` under herds: one run of the application, clients that leave, streams, and failures."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from asgi_client import Client, Reply, Shop, outdate, run
from herd import until_async

from stampede import Cache
from stampede.contrib.asgi import ResponseCache

HERD = 50


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Cache("memory://", early=0) as made:
        yield made


def asked(cache: Cache, shop: Any, work: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    """Run work with a client of the shop, which is behind the cache. No run of the application is left over."""
    app = ResponseCache(shop, cache=cache, **options)

    async def whole() -> None:
        await work(Client(app))
        await until_async(lambda: not app._runs)

    run(whole)
    gc.collect()  # an exception of a task that was never retrieved is logged now


async def start(client: Client, shop: Shop, count: int = HERD, **headers: str) -> list[asyncio.Task[Reply]]:
    """Start requests at the same time, and wait until the application has the first one."""
    tasks = [asyncio.create_task(client.ask(**headers)) for _ in range(count)]
    await shop.arrived.wait()
    for _ in range(10):  # each task comes to where it waits
        await asyncio.sleep(0)
    return tasks


def test_a_herd_gets_one_run(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        shop.hold = asyncio.Event()
        tasks = await start(client, shop)
        shop.hold.set()
        replies = await asyncio.gather(*tasks)
        assert shop.runs == 1
        assert {(reply.status, reply.body, reply.headers["etag"]) for reply in replies} == {
            (200, b"hello", replies[0].headers["etag"])
        }
        assert [reply.how for reply in replies].count("fwd=miss") == 1
        assert [reply.how for reply in replies].count("fwd=miss; collapsed") == HERD - 1

    asked(cache, shop, work)


@pytest.mark.redis
def test_a_herd_of_two_processes_gets_one_run() -> None:
    """Two caches on one server stand for two processes: their callers do not know of each other."""
    from servers import shared_redis

    shop = Shop(b"\x00\xff" * 1000, cache_control="max-age=60", etag='"v1"')

    async def work() -> None:
        shop.hold = asyncio.Event()
        with Cache(shared_redis().url, namespace="asgi") as one, Cache(shared_redis().url, namespace="asgi") as two:
            await one.aclear()
            clients = [Client(ResponseCache(shop, cache=each)) for each in (one, two)]
            tasks = [task for client in clients for task in await start(client, shop, 10)]
            shop.hold.set()
            replies = await asyncio.gather(*tasks)
            assert shop.runs == 1 and {reply.body for reply in replies} == {shop.body}
            assert (await clients[1].ask(if_none_match='"v1"')).status == 304
            await clients[0].ask(method="DELETE")
            shop.body = b"new"
            assert [(await client.ask()).body for client in clients] == [b"new", b"new"]

    run(work)


@pytest.mark.redis
@pytest.mark.parametrize("codec", ["sealed", "msgpack"])
def test_bytes_go_through_codecs(codec: Any) -> None:
    """A response is stored whatever codec the cache has, except json, which has no bytes."""
    pytest.importorskip("msgspec")
    from servers import shared_redis

    shop = Shop(b"\x00\xff", cache_control="max-age=60", vary="accept-language", x_name="\xe4", etag='"v1"')

    async def work() -> None:
        with Cache(shared_redis().url, namespace=f"asgi-{codec}", codec=codec) as cache:
            await cache.aclear()
            client = Client(ResponseCache(shop, cache=cache))
            target = "/?" + "a" * 5000
            for how in ("fwd=miss", "hit"):
                for language in ("de", "fr"):
                    reply = await client.ask(target, accept_language=language)
                    assert (reply.how, reply.body) == (how, b"\x00\xff")
            assert (await client.ask(target, accept_language="fr", if_none_match='"v1"')).status == 304

    run(work)


def test_a_leader_that_leaves_takes_nobody_along(cache: Cache) -> None:
    """If the first client's request is cancelled, the application goes on for the others."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        shop.hold = asyncio.Event()
        leader, *others = await start(client, shop, 5)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        shop.hold.set()
        assert {reply.body for reply in await asyncio.gather(*others)} == {b"hello"}
        assert shop.runs == 1 and (await client.ask()).how == "hit"

    asked(cache, shop, work)


def test_the_application_is_cancelled_if_no_client_is_left(cache: Cache) -> None:
    shop, ended = Shop(cache_control="max-age=60"), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await shop(scope, receive, send)
        finally:
            ended.append(True)

    async def work(client: Client) -> None:
        shop.hold = asyncio.Event()
        tasks = await start(client, shop, 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_async(lambda: ended)
        shop.hold.set()
        assert (await client.ask()).body == b"hello" and shop.runs == 2

    asked(cache, app, work)


def test_the_application_does_not_see_the_leader_disconnect(cache: Cache) -> None:
    """Servers tell of a closed connection by a message. The application would stop, and the others get nothing."""
    disconnected = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive()) == {"type": "http.request", "body": b"", "more_body": False}
        message = asyncio.create_task(receive())
        shop.arrived.set()
        assert shop.hold is not None
        await shop.hold.wait()
        assert not message.done()
        await shop(scope, receive, send)
        assert (await message)["type"] == "http.disconnect"  # after the response
        disconnected.set()

    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        shop.hold = asyncio.Event()
        tasks = await start(client, shop, 2)
        client.gone.set()
        await asyncio.sleep(0)
        shop.hold.set()
        assert {reply.body for reply in await asyncio.gather(*tasks)} == {b"hello"}
        assert disconnected.is_set()

    asked(cache, app, work)


# -- background tasks ---------------------------------------------------------------------------------------------


def test_background_tasks_delay_no_client(cache: Cache) -> None:
    """All clients have their responses before the background task ends. The leader's server waits for it."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        done = asyncio.Event()
        shop.after = lambda: done.wait()  # type: ignore[assignment, return-value]
        reply = Reply()
        leader = asyncio.create_task(client.ask(reply=reply))
        others = await start(client, shop, 5)
        assert {each.body for each in await asyncio.gather(*others)} == {b"hello"}
        assert reply.complete and not leader.done()
        assert (await client.ask()).how == "hit"
        done.set()
        await leader

    asked(cache, shop, work)


def test_an_error_of_a_background_task_is_the_leaders(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def fail() -> None:
        raise ZeroDivisionError

    async def work(client: Client) -> None:
        shop.after = fail
        reply = Reply()
        with pytest.raises(ZeroDivisionError):
            await client.ask(reply=reply)
        assert reply.complete and (await client.ask()).how == "hit"

    asked(cache, shop, work)


def test_an_error_of_a_background_task_of_a_refresh_is_logged(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """No request waits for the run of a refresh in the background."""
    shop = Shop(cache_control="max-age=60, stale-while-revalidate=600")

    async def fail() -> None:
        raise ZeroDivisionError("after")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.after = fail
        await client.ask()
        await until_async(lambda: "failed after its response" in caplog.text)

    with caplog.at_level(logging.ERROR):
        asked(cache, shop, work)


# -- what may not be stored ---------------------------------------------------------------------------------------


def test_a_herd_for_what_is_not_stored_runs_side_by_side(cache: Cache) -> None:
    """The first response shows by its headers that it may not be shared. Then the others run at once, and see only
    their own responses. Later requests do not wait for each other at all."""
    together = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal together
        user = dict(scope["headers"])[b"x-user"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"set-cookie", b"user=" + user)]})
        together += 1
        await until_async(lambda: together >= 5)
        await send({"type": "http.response.body", "body": user})

    async def work(client: Client) -> None:
        nonlocal together
        for _ in range(2):
            together = 0
            replies = await asyncio.gather(*(client.ask(x_user=str(user)) for user in range(5)))
            assert [reply.body for reply in replies] == [b"0", b"1", b"2", b"3", b"4"]
            assert [reply.headers["set-cookie"] for reply in replies] == [f"user={user}" for user in range(5)]

    asked(cache, app, work, ttl=60)


@pytest.mark.parametrize("length", [True, False])
def test_a_long_response_streams(cache: Cache, length: bool) -> None:
    """Beyond `max_bytes` it is passed as it streams, also to the client that led. Each request has its own run."""
    chunks, runs = [b"%d" % i * 100 for i in range(10)], 0

    async def work(client: Client) -> None:
        nonlocal runs
        more = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1
            headers = [(b"cache-control", b"max-age=60")] + [(b"content-length", b"1000")] * length
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for i, chunk in enumerate(chunks):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if i == 4:
                    await more.wait()
            await send({"type": "http.response.body"})

        client.app.app = app
        replies = [Reply() for _ in range(3)]
        tasks = [asyncio.create_task(client.ask(reply=reply)) for reply in replies]
        await until_async(lambda: all(reply.body == b"".join(chunks[:5]) for reply in replies))
        more.set()
        assert {reply.body for reply in await asyncio.gather(*tasks)} == {b"".join(chunks)}
        assert runs == 3 and [key async for key in cache.akeys()] == []

    asked(cache, None, work, max_bytes=300)


@pytest.mark.parametrize("kind", ["long", "events"])
def test_head_ends_a_stream(cache: Cache, kind: str) -> None:
    """A client that asked with HEAD takes no body. The application is told so, else it would stream for ever."""
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-shop", b"tea")]})
        if kind == "events":
            told.append((await receive())["type"])
        try:
            while kind == "long":
                await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
                await asyncio.sleep(0)
        except OSError:
            told.append("OSError")

    async def work(client: Client) -> None:
        head = await client.ask(method="HEAD")
        assert (head.headers["x-shop"], head.body, head.complete) == ("tea", b"", True)
        assert told == ["OSError" if kind == "long" else "http.disconnect"]

    asked(cache, app, work)


def test_events_stream_at_once(cache: Cache) -> None:
    """Server-sent events are not buffered under a default ttl, and the application sees that the client leaves."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"

    async def work(client: Client) -> None:
        for _ in range(2):
            client.gone.clear()
            reply = Reply()
            task = asyncio.create_task(client.ask(reply=reply))
            await until_async(lambda reply=reply: reply.body)
            assert not task.done()
            client.gone.set()
            await task

    asked(cache, app, work, ttl=60)


def test_a_client_that_leaves_ends_its_stream(cache: Cache) -> None:
    """A server that cancels the request of a client that has left also ends the application's run."""
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def work(client: Client) -> None:
        reply = Reply()
        task = asyncio.create_task(client.ask(reply=reply))
        await reply.begun.wait()
        task.cancel()
        await ended.wait()

    asked(cache, app, work)


@pytest.mark.parametrize("endless", [True, False])
def test_a_refresh_whose_response_is_not_stored_ends(cache: Cache, endless: bool) -> None:
    """No client takes such a response: the application is told so by `http.disconnect`, or by an OSError."""
    shop = Shop(cache_control="max-age=60, stale-while-revalidate=600")
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if shop.runs == 0:
            return await shop(scope, receive, send)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"no-store")]})
        if not endless:
            told.append((await receive())["type"])
        try:
            while endless:
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        except OSError:
            told.append("OSError")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        assert (await client.ask()).body == b"hello"
        await until_async(lambda: told)
        assert told == ["OSError" if endless else "http.disconnect"]

    asked(cache, app, work)


def test_a_304_that_may_not_be_shared(cache: Cache) -> None:
    """An application may confirm a stored response with a cookie for one client. The others do not get it."""
    shop = Shop(cache_control="max-age=60", etag='"v1"')

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.headers["set-cookie"] = "session=1"
        shop.arrived.clear()
        shop.hold = asyncio.Event()
        tasks = await start(client, shop, 5)
        shop.headers["set-cookie"] = "session=1"
        shop.hold.set()
        replies = await asyncio.gather(*tasks)
        assert {reply.body for reply in replies} == {b"hello"}
        assert [reply.headers["set-cookie"] for reply in replies] == ["session=1"] * 5
        assert shop.runs == 1 + 5

    asked(cache, shop, work)


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="Python 3.12 has eager tasks")
def test_eager_tasks(cache: Cache) -> None:
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        assert [(await client.ask()).how for _ in range(2)] == ["fwd=miss", "hit"]
        shop.headers = {}
        assert (await client.ask("/other")).body == b"hello"

    asked(cache, shop, work)


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_herd_gets_one_failure(cache: Cache) -> None:
    """An exception of the application is raised for all requests that waited, after one run."""
    shop = Shop(cache_control="max-age=60")

    async def work(client: Client) -> None:
        shop.hold, shop.error = asyncio.Event(), ZeroDivisionError("no")
        tasks = await start(client, shop, 10)
        shop.hold.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {ZeroDivisionError} and shop.runs == 1
        shop.error = None
        assert (await client.ask()).body == b"hello"

    asked(cache, shop, work)


@pytest.mark.parametrize("control", ["stale-if-error=900", "stale-while-revalidate=900"])
def test_an_application_that_answers_503_is_spared(cache: Cache, control: str) -> None:
    """A herd that can have the stale response costs one run."""
    shop = Shop(cache_control=f"max-age=60, {control}")

    async def work(client: Client) -> None:
        await client.ask()
        await outdate(cache)
        shop.runs, shop.hold = 0, asyncio.Event()
        shop.arrived.clear()
        tasks = await start(client, shop)
        shop.status, shop.headers = 503, {}
        shop.hold.set()
        replies = await asyncio.gather(*tasks)
        assert {(reply.status, reply.body) for reply in replies} == {(200, b"hello")}
        assert shop.runs <= 3

    asked(cache, shop, work)


def test_an_application_that_ends_too_soon(cache: Cache) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"max-age=60")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def work(client: Client) -> None:
        with pytest.raises(RuntimeError, match="without a complete response"):
            await client.ask()

    asked(cache, app, work)


@pytest.mark.parametrize("declared", ["4", "8", "x"])
def test_a_body_of_another_length_than_declared(cache: Cache, declared: str) -> None:
    """A truncated response must not be stored as if it were whole. Servers refuse it, too."""
    shop = Shop(cache_control="max-age=60", content_length=declared)

    async def work(client: Client) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="sent 5"):
                await client.ask()
        shop.headers["content-length"] = "5"
        while (await client.ask()).how != "hit":
            pass

    asked(cache, shop, work)


def test_what_comes_after_the_end(cache: Cache) -> None:
    """The response that is complete is stored and sent. The application, or the server's log, gets the error."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"max-age=60")]})
        await send({"type": "http.response.body", "body": b"whole"})
        await send({"type": "http.response.body", "body": b"more", "more_body": True})

    async def work(client: Client) -> None:
        reply = Reply()
        with pytest.raises(RuntimeError, match="after its response was complete"):
            await client.ask(reply=reply)
        assert reply.complete and reply.body == b"whole"
        again = await client.ask()
        assert (again.body, again.how) == (b"whole", "hit")

    asked(cache, app, work)
