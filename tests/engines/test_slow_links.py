"""On slow links, the time-out applies to each piece of a value, not to the whole value."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from both_colours import Face
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from proxy import Proxy
from servers import RedisServer, shared_redis

from stampede import Cache, TooLarge, events
from stampede.engines.kit.hang_detector import HangDetector
from stampede.engines.kit.sock import Sock
from stampede.engines.kit.wire import Wire

RATE = 7e5
BLOB = os.urandom(500_000)

Slow = tuple[str, str, Proxy]


@pytest.fixture(params=["redis", "memcached", "postgres"])
def slow(request: pytest.FixtureRequest, before: Callable[[Any], Proxy]) -> Slow:
    """The URL of a server, the URL of the same server behind a slow link, and the link. A large value takes longer than
    the time-out."""
    servers = {"redis": shared_redis, "memcached": shared_memcached, "postgres": prepared_postgres}
    server: Any = servers[request.param]()
    proxy = before(server)
    proxy.rate = RATE
    if request.param == "redis":
        server.cli("FLUSHALL")
        return server.url, f"{proxy.url}?socket_timeout=1.0", proxy
    if request.param == "postgres":
        far = f"postgres://root@127.0.0.1:{proxy.port}/postgres?sslmode=disable&timeout=1.0"
        return server.postgres_url, far, proxy
    server.empty()
    return server.url, f"memcached://127.0.0.1:{proxy.port}?timeout=1.0", proxy


def test_each_piece_that_is_sent_has_the_time_out() -> None:
    """The time-out applies to each piece of a large value that a thread sends, not to all pieces together."""
    sent: list[bytes] = []

    def send(data: bytes) -> int:
        sent.append(data[:20_000])
        return len(sent[-1])

    sock = Sock(HangDetector())
    sock.stand(SimpleNamespace(settimeout=lambda patience: None, pending=lambda: 0, send=send), 0.3)
    sock.send(BLOB)
    assert b"".join(sent) == BLOB


def test_what_an_event_loop_sends_has_the_time_out_for_each_piece() -> None:
    """The time-out applies to each piece of a large value that an event loop sends, not to all pieces together."""
    transport = SimpleNamespace(unsent=500_000, write=lambda data: None, is_closing=lambda: False)
    transport.get_write_buffer_size = lambda: transport.unsent
    transport.get_extra_info = {"sslcontext": "some"}.get
    wire = Wire(cast(Any, SimpleNamespace(hang_detector=HangDetector())), cast(Any, None))
    wire.connection_made(transport)
    wire.stand()
    wire.send(b"", idle=True)
    assert 0.0 < wire.left(5.0) <= 5.0
    wire.since -= 10.0
    assert wire.left(5.0) < 0.0
    transport.unsent -= 1
    assert wire.left(5.0) > 0.0


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_server_that_hangs_in_the_middle_of_a_value_is_noticed(
    slow: Slow, face: Callable[..., Face], colour: str
) -> None:
    """If the server hangs in the middle of a value, the caller computes. It does not wait for the other half."""
    near, far, link = slow
    with Cache(near) as cache:
        cache.set("big", BLOB)
    slowly = face(far, colour)
    slowly.run("set", "small", 1)
    link.rate = None
    link.at(b"", answered=100_000, silent=True, times=1000)  # at each request, as some carry a hash of the key
    began = time.monotonic()
    assert slowly("big", lambda: "computed") == "computed"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_value_that_the_server_does_not_take_is_no_outage(
    request: pytest.FixtureRequest, face: Callable[..., Face], colour: str
) -> None:
    """A value that is too large for the server is not stored. The engine is not considered down for all others."""
    server = RedisServer("--proto-max-bulk-len", "1mb")
    request.addfinalizer(server.close)
    asked = face(server.url, colour)
    blob = bytes(3_000_000)
    assert asked("big", lambda: blob) == blob
    assert asked("small", lambda: 1) == 1
    assert [type(event) for event in asked.told if isinstance(event, (events.EngineDown, events.Unkept))] == [
        events.Unkept
    ]
    with pytest.raises(TooLarge):
        asked.run("set", "big", blob)


@pytest.mark.parametrize("engine", ["redis", "memcached"])
def test_a_loop_that_is_blocked_while_it_connects(engine: str) -> None:
    """If the event loop is blocked while it connects, for example by an application's start, that is no outage."""
    with Cache((shared_redis() if engine == "redis" else shared_memcached()).url) as cache:

        async def use() -> None:
            asking = asyncio.ensure_future(cache.aset("k", 1))
            for _ in range(5):
                await asyncio.sleep(0)
            time.sleep(1.2)
            await asking

        asyncio.run(use())
        assert cache.get("k") == 1
