"""The memcached engine among dead holders, dead servers and a network that cuts, delays and halves."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("pymemcache")

from disk_world import Connection, other, others
from memcached_server import MemcachedServer, shared_memcached

from stampede import Cache
from stampede.colour import run_blocking
from stampede.engines.memcached import MemcachedEngine, items
from stampede.entry import Entry, new_id
from stampede.errors import EngineError, TooLarge
from stampede.ports import Ask, Asked, Busy, Found, Granted

LONG = 60.0


@pytest.fixture
def server() -> MemcachedServer:
    server = shared_memcached()
    server.empty()
    return server


@pytest.fixture
def own_server() -> Iterator[MemcachedServer]:
    server = MemcachedServer()
    yield server
    server.close()


class Proxy:
    """A wire to a server that can be cut, slowed down, and made to deliver in small pieces."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self.piece = 1 << 16
        self.delay = 0.0
        self.cut_replies_after: int | None = None  # bytes
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._open, daemon=True).start()

    def _open(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    client.close()
                    continue
                self._ends += [client, server]
                for source, target, back in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._carry, args=(source, target, back), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if back and self.cut_replies_after is not None:
                    target.sendall(data[: self.cut_replies_after])
                    break
                if self.delay:
                    time.sleep(self.delay)
                for start in range(0, len(data), self.piece):
                    target.sendall(data[start : start + self.piece])
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()
        self.cut()
        for end in self._ends:
            end.close()


@pytest.fixture
def proxy(server: MemcachedServer) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def some(value: bytes = b"value", fresh: float = LONG) -> Entry[bytes]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


# -- holders ------------------------------------------------------------------------------------------------------


def _hold(pipe: Connection, url: str) -> None:
    """Compute until told to go on."""
    cache = Cache(url)

    def compute() -> str:
        pipe.send("computing")
        pipe.recv()
        return "late"

    pipe.send(cache.get_or_compute("k", compute, ttl=LONG, lease=1))


def test_a_killed_holder_blocks_nobody_for_long(server: MemcachedServer) -> None:
    """A dead holder would block its key for ever."""
    cache = Cache(server.url)
    with other(_hold, server.url) as holder:
        assert holder.hear() == "computing"
        holder.kill()
        start = time.monotonic()
        assert cache.get_or_compute("k", lambda: "mine", lease=1) == "mine"
        assert time.monotonic() - start < 5
    cache.close()


def test_a_frozen_holder_stores_nothing_late(server: MemcachedServer) -> None:
    """SIGSTOP past the lease, then SIGCONT: what it computed is out of date by then."""
    cache = Cache(f"{server.url}?sign=0.05")
    with other(_hold, f"{server.url}?sign=0.05") as holder:
        assert holder.hear() == "computing"
        holder.freeze()
        assert cache.get_or_compute("k", lambda: "mine", lease=1) == "mine"
        holder.tell()
        holder.thaw()
        assert holder.hear() == "late"  # to its own caller
        assert cache.get("k") == "mine"
    cache.close()


# -- the wire -----------------------------------------------------------------------------------------------------


def test_halved_and_delayed_replies_are_whole(proxy: Proxy) -> None:
    """A reply in pieces would be misread."""
    proxy.piece = 7
    engine = MemcachedEngine(proxy.address)
    value = b"VA 5 t1\r\n" * 50
    run_blocking(engine.store.set("k", some(value)))
    proxy.delay = 0.01
    (entry,) = run_blocking(engine.store.get(["k"]))
    assert entry is not None and entry.value == value

    async def scenario() -> None:
        entries = await asyncio.gather(*(engine.astore.get(["k", "none"]) for _ in range(3)))
        for found, none in entries:
            assert found is not None and found.value == value and none is None

    asyncio.run(scenario())
    engine.close()


def test_a_reply_cut_in_the_middle_is_an_error(proxy: Proxy) -> None:
    """Half a value would be given out; or the other half to the next caller."""
    engine = MemcachedEngine(proxy.address)
    run_blocking(engine.store.set("k", some(b"x" * 1000)))
    proxy.cut_replies_after = 500
    with pytest.raises(EngineError):
        run_blocking(engine.store.get(["k"]))
    proxy.cut_replies_after = None
    (entry,) = run_blocking(engine.store.get(["k"]))
    assert entry is not None and len(entry.value) == 1000

    async def scenario() -> None:
        (entry,) = await engine.astore.get(["k"])
        assert entry is not None
        proxy.cut_replies_after = 500
        with pytest.raises(EngineError):
            await engine.astore.get(["k"])
        proxy.cut_replies_after = None
        (entry,) = await engine.astore.get(["k"])
        assert entry is not None and len(entry.value) == 1000

    asyncio.run(scenario())
    engine.close()


def test_a_cut_between_calls_is_not_noticed(proxy: Proxy) -> None:
    """Every connection that a firewall has forgotten would be an error of somebody's call."""
    engine = MemcachedEngine(proxy.address)
    run_blocking(engine.store.set("k", some()))
    for _ in range(3):
        proxy.cut()
        assert isinstance(run_blocking(engine.claims.claim("k", new_id(), Ask(LONG))), Found)
    engine.close()


def test_a_server_that_hangs_is_an_error_soon(own_server: MemcachedServer) -> None:
    """A frozen server would freeze every caller."""
    engine = MemcachedEngine(own_server.address, timeout=0.2, connect_timeout=0.2)
    run_blocking(engine.store.set("k", some()))

    async def scenario() -> None:
        await engine.astore.get(["k"])
        own_server.freeze()
        start = time.monotonic()
        with pytest.raises(EngineError):
            await engine.astore.get(["k"])
        with pytest.raises(EngineError):
            await engine.astore.get(["k"])
        assert time.monotonic() - start < 3

    try:
        asyncio.run(scenario())
        start = time.monotonic()
        with pytest.raises(EngineError):
            run_blocking(engine.store.get(["k"]))
        with pytest.raises(EngineError):
            run_blocking(engine.store.invalidate("k"))
        assert time.monotonic() - start < 3
    finally:
        own_server.thaw()
    engine.close()


def test_a_blocked_loop_is_no_server_that_hangs(server: MemcachedServer) -> None:
    """A loop that was blocked for longer than a server may take would give up its connection, and the value with it."""
    engine = MemcachedEngine(server.address, timeout=0.1)

    async def scenario() -> None:
        await engine.astore.set("k", some())
        for _ in range(3):
            time.sleep(0.15)
            (entry,) = await engine.astore.get(["k"])
            assert entry is not None
            asked = asyncio.ensure_future(engine.astore.get(["k"]))
            await asyncio.sleep(0)
            time.sleep(0.15)  # and now its answer has come
            (entry,) = await asked
            assert entry is not None

    asyncio.run(scenario())
    engine.close()


def test_a_cancelled_task_leaves_the_others_replies_alone(server: MemcachedServer) -> None:
    """Replies come in the order of the questions: the next caller would get the cancelled one's."""
    engine = MemcachedEngine(server.address)

    async def scenario() -> None:
        for number in range(50):
            await engine.astore.set(f"k{number}", some(b"%d" % number))
        tasks = [asyncio.ensure_future(engine.astore.get([f"k{number}"])) for number in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        for number, task in enumerate(tasks):
            if number % 2:
                (entry,) = await task
                assert entry is not None and entry.value == b"%d" % number
        await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(3):  # an event loop each
        asyncio.run(scenario())
    engine.close()


# -- the server ---------------------------------------------------------------------------------------------------


def test_calls_go_on_without_the_server(own_server: MemcachedServer) -> None:
    """An engine that is down would be an outage, or its recovery would go unnoticed."""
    cache = Cache(own_server.url, ttl=LONG)
    assert cache.get_or_compute("k", lambda: 1) == 1
    own_server.stop()
    assert [cache.get_or_compute("new", lambda: 2) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(EngineError):
        cache.invalidate("k")
    own_server.start()
    end = time.monotonic() + 10
    while Cache(own_server.url).get("k2") is None:
        assert time.monotonic() < end
        cache.get_or_compute("k2", lambda: 3)
        time.sleep(0.05)
    cache.close()


def test_a_restarted_server_is_only_empty(own_server: MemcachedServer) -> None:
    """Its clients would raise once for every connection they had."""
    engine = MemcachedEngine(own_server.address)
    for number in range(5):
        assert isinstance(run_blocking(engine.claims.claim(f"k{number}", new_id(), Ask(LONG))), Granted)
    own_server.restart()
    for number in range(5):
        token = new_id()
        assert isinstance(run_blocking(engine.claims.claim(f"k{number}", token, Ask(LONG))), Granted)
        assert run_blocking(engine.claims.fill(f"k{number}", token, some()))
    engine.close()


def test_a_full_server_forgets_and_lies_not() -> None:
    """Under memory pressure stubs are evicted too: a value of another key, or of an older lease, would come back."""
    server = MemcachedServer("-m", "1", "-I", "512k")
    try:
        engine = MemcachedEngine(server.address, sign=0)
        generator = random.Random(4)
        stored: dict[str, bytes] = {}
        found = lost = 0
        for _ in range(3000):
            key, token = f"k{generator.randrange(300)}", new_id()
            reply = run_blocking(engine.claims.claim(key, token, Ask(LONG)))
            if isinstance(reply, Found):
                assert reply.entry.value == stored[key]
                found += 1
            elif isinstance(reply, Granted):
                value = generator.randbytes(generator.randrange(100, 20_000))
                with suppress(TooLarge):  # no room in just this class of sizes
                    if run_blocking(engine.claims.fill(key, token, some(value))):
                        stored[key] = value
                    else:
                        lost += 1
        assert found > 100
        assert len(stored) == 300
        engine.close()
    finally:
        server.close()


def test_an_evicted_lease_is_lost(server: MemcachedServer) -> None:
    """Its late value would overwrite what the next holder has computed."""
    engine = MemcachedEngine(server.address, sign=LONG)
    for signed in (False, True):
        token, next_token = new_id(), new_id()
        assert isinstance(run_blocking(engine.claims.claim("k", token, Ask(LONG))), Granted)
        if signed:
            assert run_blocking(engine.claims.renew("k", token, LONG))
        server.say(b"md s:k\r\n")
        assert isinstance(run_blocking(engine.claims.claim("k", next_token, Ask(LONG))), Granted)
        assert not run_blocking(engine.claims.fill("k", token, some(b"late")))
        assert not run_blocking(engine.claims.renew("k", token, LONG))
        assert run_blocking(engine.claims.fill("k", next_token, some(b"new")))
        run_blocking(engine.store.invalidate("k"))
    engine.close()


# -- the ring -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[list[MemcachedServer]]:
    servers = [MemcachedServer() for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


def test_a_ring_of_three(ring: list[MemcachedServer]) -> None:
    """Two processes would look for a key on different servers, or one server have them all."""
    addresses = [server.address for server in ring]
    one, two = MemcachedEngine(*addresses), MemcachedEngine(*reversed(addresses))
    keys = [f"user:{number}" for number in range(300)]
    for key in keys:
        run_blocking(one.store.set(key, some(key.encode())))
    assert [entry and entry.value for entry in run_blocking(two.store.get(keys))] == [key.encode() for key in keys]
    replies = two.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in keys])
    assert all(isinstance(reply, Found) for reply in replies)
    for server in ring:
        stats = server.say(b"stats\r\n", b"END\r\n").split()
        assert 60 < int(stats[stats.index(b"curr_items") + 1]) < 140
    one.close()
    two.close()


def test_a_ring_with_one_dead(ring: list[MemcachedServer]) -> None:
    """Its keys would be kept elsewhere, and be out of date when it comes back; or all others be down too."""
    engine = MemcachedEngine(*(server.address for server in ring), connect_timeout=0.2)
    keys = [f"user:{number}" for number in range(30)]
    for key in keys:
        run_blocking(engine.store.set(key, some(key.encode())))
    ring[0].stop()
    failed = []
    for key in keys:
        try:
            reply = run_blocking(engine.claims.claim(key, new_id(), Ask(LONG)))
        except EngineError:
            failed.append(key)
        else:
            assert isinstance(reply, Found) and reply.entry.value == key.encode()
    assert 3 < len(failed) < 20
    answers = engine.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in keys])
    assert [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, EngineError)] == failed
    with pytest.raises(EngineError):
        run_blocking(engine.store.invalidate(failed[0]))
    ring[0].start()
    end = time.monotonic() + 10
    while engine._servers.of(items.name_of(failed[0])).breaker.open:
        assert time.monotonic() < end
        with suppress(EngineError):
            engine.ping()
        time.sleep(0.02)
    for key in failed:
        assert isinstance(run_blocking(engine.claims.claim(key, new_id(), Ask(LONG))), Granted)
    engine.close()


def test_the_rest_of_a_ring_goes_on(ring: list[MemcachedServer]) -> None:
    """One dead server of three would send all keys of all functions to this process's refuge."""
    url = "memcached://" + ",".join(server.address for server in ring)
    cache, other = Cache(url, ttl=LONG), Cache(url, ttl=LONG)
    keys = [f"user:{number}" for number in range(30)]
    for dead in ring:
        for key in keys:
            assert cache.get_or_compute(key, lambda key=key: key) == key
        dead.stop()
        computed: list[str] = []
        for _ in range(20):
            for key in keys:
                assert cache.get_or_compute(key, lambda key=key: computed.append(key) or key) == key
        assert len(computed) <= len(keys)
        dead.start()
    for key in keys:
        assert cache.get_or_compute(key, lambda key=key: key) == key
    other.close()
    cache.close()


# -- all together -------------------------------------------------------------------------------------------------


def _mix(pipe: Connection, url: str, seed: int, rounds: int) -> None:
    """Compute, read and invalidate at random; what a call returns must not be older than its beginning allows."""
    engine = MemcachedEngine(url.removeprefix("memcached://"), sign=(0.0, 0.002, LONG)[seed % 3])
    generator = random.Random(seed)
    stale = stored = 0
    for turn in range(rounds):
        if generator.random() < 0.2:  # each process changes the truth of one key
            key, truth = f"mix{seed}", some(b"%020d" % turn)
            run_blocking(engine.store.set(f"truth:{key}", truth))
            run_blocking(engine.store.invalidate(key))
            run_blocking(engine.store.set(f"told:{key}", truth))
            continue
        key, token = f"mix{generator.randrange(4)}", new_id()
        (told,) = run_blocking(engine.store.get([f"told:{key}"]))
        reply: Any = run_blocking(engine.claims.claim(key, token, Ask(1.0)))
        if isinstance(reply, Found):
            stale += told is not None and reply.entry.value < told.value
        elif isinstance(reply, Granted):
            (now,) = run_blocking(engine.store.get([f"truth:{key}"]))
            value = now.value if now is not None else b""
            if generator.random() < 0.3:
                time.sleep(generator.random() * 0.003)
            if generator.random() < 0.1:
                run_blocking(engine.claims.abandon(key, token))
            else:
                stored += run_blocking(engine.claims.fill(key, token, some(value)))
        elif isinstance(reply, Busy):
            run_blocking(engine.claims.wait(key, reply, 0.002))
    pipe.send((stale, stored))
    engine.close()


def test_random_interleavings_of_four_processes_store_nothing_stale(server: MemcachedServer) -> None:
    """A value whose computation began before the last invalidation would stay."""
    with others(4, _start_mix) as processes:
        for number, process in enumerate(processes):
            process.tell((server.url, number, 2500))
        totals = [process.hear() for process in processes]
    assert sum(stale for stale, _ in totals) == 0
    assert sum(stored for _, stored in totals) > 200
    engine = MemcachedEngine(server.address)
    for number in range(4):
        value, truth = run_blocking(engine.store.get([f"mix{number}", f"truth:mix{number}"]))
        if value is not None and truth is not None:
            assert value.value == truth.value
    engine.close()


def _start_mix(pipe: Connection) -> None:
    _mix(pipe, *pipe.recv())
