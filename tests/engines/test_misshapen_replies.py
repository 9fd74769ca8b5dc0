"""If a server sends too many, too few or wrong replies, its connection is closed. No call gets another's reply."""

from __future__ import annotations

import asyncio
import random
import time
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

import both_colours
from both_colours import BRIEF, never
from herd import until
from memcached_server import MemcachedServer, shared_memcached
from proxy import Proxy
from servers import PATIENCE, RedisServer, shared_redis

from stampede import Cache, EngineError, LockLost, WaitTimeout, events
from stampede.testing import isolated

engines = pytest.mark.parametrize("engine", ["redis", "memcached"])


class Face(both_colours.Face):
    """A cache on one of the servers, with short time limits."""

    def __init__(
        self, server: RedisServer | MemcachedServer, proxy: Proxy, colour: str, timeout: float = BRIEF, **options: Any
    ) -> None:
        redis = isinstance(server, RedisServer)
        url = f"redis://127.0.0.1:{proxy.port}/0" if redis else f"memcached://127.0.0.1:{proxy.port}"
        terms = ("socket_timeout", "socket_connect_timeout") if redis else ("timeout", "connect_timeout")
        super().__init__(f"{url}?{'&'.join(f'{term}={timeout}' for term in terms)}", colour, **options)

    def turn(self, name: str) -> None:
        """Take a lock, and give it back."""
        lock = self.cache.lock(name, lease=1)
        if self._runner is None:
            if lock.acquire(0):
                lock.release()
        elif self._runner.run(lock.aacquire(0)):
            self._runner.run(lock.arelease())


Faces = Callable[..., Face]
Before = Callable[[Any], Proxy]


def server_of(engine: str) -> RedisServer | MemcachedServer:
    if engine == "redis":
        redis = shared_redis()
        redis.cli("FLUSHALL")
        return redis
    memcached = shared_memcached()
    memcached.empty()
    return memcached


SURPLUS = {
    "redis": [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*2\r\n:1\r\n:2\r\n", b"-ERR no\r\n", b"$1\r\na\r\n"],
    "memcached": [b"HD\r\n", b"EN\r\n", b"VA 1 s30 t9 c9 f1\r\nx\r\n", b"MN\r\n", b"ERROR\r\n", b"NF\r\n"],
}  # fmt: skip


@pytest.mark.parametrize("engine, frame", [(engine, frame) for engine, all in SURPLUS.items() for frame in all])
@pytest.mark.parametrize("where", ["before", "behind", "idle"])
def test_a_reply_too_many(face: Faces, before: Before, engine: str, frame: bytes, where: str, colour: str) -> None:
    """After a reply too many, no call gets the reply of the call before it."""
    server = server_of(engine)
    proxy = before(server)
    asked = face(server, proxy, colour, timeout=PATIENCE)
    for number in range(3):
        assert asked(f"k{number}", lambda number=number: number) == number
    once = [frame]

    def alter(data: bytes) -> bytes:
        return data if not once else once.pop() + data if where == "before" else data + once.pop()

    if where == "idle":
        _say(proxy, frame)
    else:
        proxy.alter = alter
    for number in range(3):
        assert asked(f"k{number}", lambda number=number: number, wait=1) == number
        assert asked.run("get", f"k{number}") in (number, None) if not asked.down else True
    proxy.alter = None
    until(lambda: asked("other", lambda: 1) and not asked.down)
    for number in range(3):
        asked.run("set", f"k{number}", number)
        assert asked(f"k{number}", never) == number


@engines
def test_a_fitting_reply_too_many(face: Faces, before: Before, engine: str, colour: str) -> None:
    """A connection on which a surplus reply has arrived is not used, since the reply could fit the next request."""
    proxy = before(server_of(engine))
    asked = face(shared_redis() if engine == "redis" else shared_memcached(), proxy, colour, timeout=PATIENCE)
    asked.run("set", "k", 1)
    _say(proxy, b":0\r\n" if engine == "redis" else b"EN\r\n")
    assert asked.run("invalidate", "k") is True
    asked.run("set", "k", 2)
    _say(proxy, b"$-1\r\n" if engine == "redis" else b"EN\r\n")
    assert asked.run("get", "k") == 2


def _say(proxy: Proxy, surplus: bytes) -> None:
    """Send these bytes to each connected client."""
    for pair in list(proxy._pairs):
        with suppress(OSError):  # the client has just disconnected
            pair._client.sendall(surplus)


@pytest.mark.parametrize("reply", [b"MN\r\n", b"HD c1\r\n", b"NF\r\n", b"VA 1 s30 t9 f1\r\nx\r\n"], ids=repr)
def test_the_reply_to_another_command(face: Faces, before: Before, reply: bytes, colour: str) -> None:
    """A reply to another command is not accepted: the request is sent again. After a second one, the engine is down."""
    proxy = before(server_of("memcached"))
    asked = face(shared_memcached(), proxy, colour, timeout=PATIENCE)
    asked.run("set", "k", 1)
    once = [reply]
    proxy.alter = lambda data: once.pop() if once else data
    assert asked.run("get", "k") == 1  # the request was sent again, on another connection
    assert not once
    proxy.alter = lambda data: reply
    asked.run("get", "k")
    assert asked.down and asked.count(events.EngineDown) == 1


@engines
def test_bytes_that_a_loop_took_and_never_told_of(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C interrupts an event loop while it reads, as in a notebook, bytes are lost. Later calls of this loop
    still get their own replies."""
    armed: list[bool] = []
    real = _SelectorSocketTransport._read_ready__get_buffer

    def read(transport: Any) -> None:
        if armed:
            armed.pop()
            transport._sock.recv_into(transport._protocol.get_buffer(-1))
            raise KeyboardInterrupt
        real(transport)

    monkeypatch.setattr(_SelectorSocketTransport, "_read_ready__get_buffer", read)
    keys, wrong = [f"k{number}" for number in range(4)], list[tuple[str, Any]]()

    async def ask(cache: Cache) -> None:
        for key in keys:
            if (got := await cache.aget(key)) != key:
                wrong.append((key, got))

    with closing(asyncio.new_event_loop()) as loop, Cache(server_of(engine).url) as cache:
        for key in keys:
            cache.set(key, key)
        loop.run_until_complete(ask(cache))
        armed.append(True)
        asking = [loop.create_task(ask(cache))]
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asking[0])
        loop.run_until_complete(asyncio.gather(*asking, ask(cache)))
        loop.run_until_complete(loop.shutdown_asyncgens())
    assert wrong == []


def test_a_text_where_a_number_belongs(face: Faces, before: Before, colour: str) -> None:
    """If the connection for news gets a text instead of its id, there are no news, and calls still return soon."""
    server = server_of("redis")
    proxy = before(server)
    asking: set[Any] = set()

    def alter(data: bytes) -> bytes:
        if data.startswith(b":") and data.count(b"\r\n") == 1 and data[1:-2].isdigit():
            asking.add(data)
            return b"$%d\r\n%s" % (len(data) - 3, data[1:])
        return data

    proxy.alter = alter
    asked = face(server, proxy, colour, local=True)
    began = time.monotonic()
    for number in range(5):
        assert asked(f"k{number}", lambda number=number: number, wait=1) == number
    assert time.monotonic() - began < 5


@engines
@pytest.mark.parametrize("seed", range(2))
def test_altered_replies(face: Faces, before: Before, engine: str, seed: int, colour: str) -> None:
    """Whatever a server replies, each call soon gets a value of its own key or an EngineError. Later, all calls work
    again.

    (Or a WaitTimeout: the reply that granted the lease may have been changed into one that says that another caller has
    it.)
    """
    server = server_of(engine)
    proxy = before(server)
    chance, choice = random.Random(seed), random.Random(seed)  # of the proxy's threads, and of this one

    def alter(data: bytes) -> bytes:
        if chance.random() > 0.15:
            return data
        at = chance.randrange(len(data))
        frame = chance.choice(SURPLUS[engine])
        return chance.choice([
            frame + data, data + frame, data + data, data[:at], data[at:], frame,
            data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
            chance.choice([b"+", b":", b"$", b"*", b"-"]) + data[1:],
        ])  # fmt: skip

    proxy.alter = alter
    asked = face(server, proxy, colour, lease=1, local=seed % 2 == 1)
    end, slowest = time.monotonic() + 4, 0.0
    for _ in range(120):
        key = f"k{choice.randrange(6)}"
        began = time.monotonic()
        try:
            verb = choice.choice(["get_or_compute", "get", "set", "invalidate", "peek", "many", "lock"])
            if verb == "get_or_compute":
                assert asked(key, lambda key=key: key, wait=0.3) == key
            elif verb == "many":
                assert asked.many([key, "k1"], lambda keys: {key: key for key in keys}) == {key: key, "k1": "k1"}
            elif verb == "lock":
                asked.turn("lock")
            elif verb == "peek":
                entry = asked.run("peek", key)
                assert entry is None or entry.value == key
            else:
                found = asked.run(verb, key, key) if verb == "set" else asked.run(verb, key)
                assert verb != "get" or found in (key, None)
        except (EngineError, LockLost, WaitTimeout):
            pass
        slowest = max(slowest, time.monotonic() - began)
        if time.monotonic() > end:
            break
    assert slowest < 5
    proxy.heal()

    def works(number: int) -> bool:
        with suppress(EngineError):
            asked.run("set", f"k{number}", number)
            return bool(asked(f"k{number}", lambda: "computed") == number)
        return False

    for number in range(6):
        until(lambda number=number: works(number))


def test_a_server_that_answers_nothing_right_is_down(before: Before, face: Faces) -> None:
    """If all replies of a server are wrong, the engine is down. Callers get an EngineError and not a TypeError."""
    server = server_of("redis")
    proxy = before(server)
    asked = face(server, proxy, "sync", timeout=PATIENCE)
    asked("k", lambda: 1)
    proxy.alter = lambda data: b"+OK\r\n"
    with pytest.raises(EngineError):
        asked.run("invalidate", "k")
    assert asked("k", lambda: 2) == 2
    assert asked.count(events.EngineDown) == 1
    with isolated(), pytest.raises(EngineError):
        asyncio.run(asked.cache.ainvalidate("k"))
