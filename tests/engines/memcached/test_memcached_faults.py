"""The memcached engine with dead holders, dead servers, and a network that cuts, delays and splits replies."""

from __future__ import annotations

import asyncio
import itertools
import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("pymemcache")

from both_colours import Face
from herd import Herd, until
from known_generation import generation_of
from memcached_server import MemcachedServer, shared_memcached
from proxy import Proxy
from servers import free_port

from stampede import Cache, current
from stampede.engines.memcached import MemcachedEngine, items
from stampede.engines.memcached.blocking import BlockingLine
from stampede.errors import EngineError, TooLarge
from stampede.model.breaker import Breaker
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Asked, Busy, Found, Granted
from stampede.model.tags import key_of_tag, name_of_tag
from stampede.runtime.colour import run_blocking

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


@pytest.fixture
def proxy(server: MemcachedServer) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def at(proxy: Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


def some(value: bytes = b"value", fresh: float = LONG) -> Entry[bytes]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


# -- the wire -----------------------------------------------------------------------------------------------------


def test_halved_and_delayed_replies_are_whole(proxy: Proxy) -> None:
    """A reply that arrives late and in pieces is read correctly."""
    proxy.piece = 7
    engine = MemcachedEngine(at(proxy))
    value = b"VA 5 t1\r\n" * 50
    run_blocking(engine.blocking.store.set("k", some(value)))
    proxy.piece, proxy.delay = 100, 0.01
    (entry,) = run_blocking(engine.blocking.store.get(["k"]))
    assert entry is not None and entry.value == value

    async def scenario() -> None:
        entries = await asyncio.gather(*(engine.suspending.store.get(["k", "none"]) for _ in range(3)))
        for found, none in entries:
            assert found is not None and found.value == value and none is None

    asyncio.run(scenario())
    engine.close()


def test_a_reply_cut_in_the_middle_is_an_error(proxy: Proxy) -> None:
    """A reply that is cut in the middle is an error. No caller, not even a later one, gets a part of a value."""
    engine = MemcachedEngine(at(proxy))
    run_blocking(engine.blocking.store.set("k", some(b"x" * 1000)))
    proxy.at(b"s:k", answered=500, times=2)  # the engine asks again, once
    with pytest.raises(EngineError):
        run_blocking(engine.blocking.store.get(["k"]))
    run_blocking(engine.blocking.store.get(["k"]))  # the engine asks again only over a connection that was open
    proxy.at(b"s:k", answered=500)
    (entry,) = run_blocking(engine.blocking.store.get(["k"]))
    assert entry is not None and len(entry.value) == 1000

    async def scenario() -> None:
        proxy.at(b"s:k", answered=500, times=2)
        with pytest.raises(EngineError):
            await engine.suspending.store.get(["k"])
        proxy.at(b"s:k", answered=500)
        (entry,) = await engine.suspending.store.get(["k"])
        assert entry is not None and len(entry.value) == 1000

    asyncio.run(scenario())
    engine.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_fill_cut_at_every_byte_says_what_it_did(server: MemcachedServer, proxy: Proxy, colour: str) -> None:
    """If a fill is cut at any byte, its caller gets an error, and can repeat the fill or give back the lease."""
    runner = asyncio.Runner() if colour == "async" else None
    had: Callable[[Any], Any] = run_blocking if runner is None else runner.run
    near, engine = MemcachedEngine(server.address), MemcachedEngine(at(proxy))
    claims: Any = engine.blocking.claims if runner is None else engine.suspending.claims
    cuts = [("answered", byte) for byte in range(6)] + [("sent", byte) for byte in range(0, 90, 9)]
    for where, byte in cuts:
        key, token, entry = f"{where}-{byte}", new_id(), some()
        assert isinstance(had(claims.claim(key, token, Ask(LONG))), Granted)
        proxy.at(b"ms s:%b " % key.encode(), **{where: byte})  # type: ignore[arg-type]
        with pytest.raises(EngineError):
            had(claims.fill(key, token, entry))
        reply = run_blocking(near.blocking.claims.claim(key, new_id(), Ask(LONG)))
        if where == "answered":
            assert isinstance(reply, Found) and reply.entry.id == entry.id
            assert had(claims.fill(key, token, entry))  # it is stored already
            assert not had(claims.fill(key, token, some(b"again")))
        else:
            assert isinstance(reply, Busy)
            assert had(claims.abandon(key, token))
            assert isinstance(run_blocking(near.blocking.claims.claim(key, new_id(), Ask(LONG))), Granted)
    assert proxy.met == len(cuts)
    engine.close()
    near.close()
    if runner is not None:
        runner.close()


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_fill_between_the_steps_of_a_renewal(proxy: Proxy, server: MemcachedServer, step: str) -> None:
    """A fill during a renewal succeeds. The renewal does not extend the value or put the lease back over it."""
    engine, token = MemcachedEngine(at(proxy)), new_id()
    for number in range(2):  # the second time a value is stored already
        entry, filled = some(b"%d" % number, 20.0), []
        assert isinstance(run_blocking(engine.blocking.claims.claim("k", token, Ask(LONG, force=True))), Granted)
        assert run_blocking(engine.blocking.claims.renew("k", token, LONG))
        proxy.at(
            b"ms s:k",
            **{step: lambda entry=entry: filled.append(run_blocking(engine.blocking.claims.fill("k", token, entry)))},
        )
        assert run_blocking(engine.blocking.claims.renew("k", token, LONG)) == (step == "after")
        assert filled == [True]
        (found,) = run_blocking(engine.blocking.store.get(["k"]))
        assert found is not None and found.id == entry.id and found.fresh <= 20
        reply = run_blocking(engine.blocking.claims.claim("k", new_id(), Ask(LONG)))
        assert isinstance(reply, Found) and reply.entry.id == entry.id
    engine.close()


def test_a_change_between_the_steps_of_a_late_fill(proxy: Proxy, server: MemcachedServer) -> None:
    """Promise 4: a late fill does not overwrite a value that was set between its two steps."""
    engine, near, token = MemcachedEngine(at(proxy)), MemcachedEngine(server.address), new_id()
    assert isinstance(run_blocking(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
    assert run_blocking(engine.blocking.claims.renew("k", token, LONG))
    engine._numbers.clear()  # as if the engine had no CAS number of the lease: it looks for its token in the item
    new = some(b"new")
    proxy.at(b"ms s:k", before=lambda: run_blocking(near.blocking.store.set("k", new)))
    assert not run_blocking(engine.blocking.claims.fill("k", token, some(b"late")))
    (entry,) = run_blocking(near.blocking.store.get(["k"]))
    assert proxy.met == 1 and entry is not None and entry.id == new.id
    engine.close()
    near.close()


@pytest.mark.parametrize("renewed", [False, True])
def test_a_lock_that_is_taken_between_the_steps_of_a_release(
    proxy: Proxy, server: MemcachedServer, renewed: bool
) -> None:
    """If another caller takes the lock during a release, the release frees it neither by number nor after a look."""
    engine, near, mine, theirs = MemcachedEngine(at(proxy)), MemcachedEngine(server.address), new_id(), new_id()

    def taken() -> None:
        server.empty()  # as if it had ended
        assert isinstance(run_blocking(near.blocking.locks.acquire("nightly", theirs, LONG)), Granted)

    assert isinstance(run_blocking(engine.blocking.locks.acquire("nightly", mine, LONG)), Granted)
    if renewed:
        assert run_blocking(engine.blocking.locks.renew("nightly", mine, LONG))
    proxy.at(b"md l:nightly", before=taken)
    assert not run_blocking(engine.blocking.locks.release("nightly", mine))
    assert proxy.met == 1
    assert run_blocking(near.blocking.locks.renew("nightly", theirs, LONG))
    engine.close()
    near.close()


def test_a_lock_whose_end_was_not_heard(proxy: Proxy) -> None:
    """If the reply to a release is lost, the caller gets an EngineError, because the outcome is not known."""
    engine, token = MemcachedEngine(at(proxy)), new_id()
    assert isinstance(run_blocking(engine.blocking.locks.acquire("nightly", token, LONG)), Granted)
    proxy.at(b"md l:nightly", answered=0)
    with pytest.raises(EngineError, match="Connection"):
        run_blocking(engine.blocking.locks.release("nightly", token))
    assert proxy.met == 1
    assert isinstance(run_blocking(engine.blocking.locks.acquire("nightly", new_id(), LONG)), Granted)
    engine.close()


def test_a_lock_of_a_server_that_is_a_new_one(own_server: MemcachedServer) -> None:
    """After a restart, numbers start again. A release must not free another's lock that has the same number."""
    engine, mine, theirs = MemcachedEngine(own_server.address), new_id(), new_id()
    assert isinstance(run_blocking(engine.blocking.locks.acquire("nightly", mine, LONG)), Granted)
    own_server.restart()
    other = MemcachedEngine(own_server.address)
    assert isinstance(run_blocking(other.blocking.locks.acquire("nightly", theirs, LONG)), Granted)
    assert run_blocking(engine.blocking.locks.holder("nightly"))  # so that a connection is open
    assert not run_blocking(engine.blocking.locks.release("nightly", mine))
    assert run_blocking(other.blocking.locks.renew("nightly", theirs, LONG))
    engine.close()
    other.close()


def test_a_cut_between_calls_is_not_noticed(proxy: Proxy) -> None:
    """A connection that breaks between two calls causes no error, as when a firewall has forgotten it."""
    engine = MemcachedEngine(at(proxy))
    tokens = {key: new_id() for key in ("fill", "renew", "abandon", "async")}
    for key, token in tokens.items():
        assert isinstance(run_blocking(engine.blocking.claims.claim(key, token, Ask(LONG))), Granted)
    steps: list[tuple[Callable[..., Any], Any, Any]] = [
        (engine.blocking.store.set, ("k", some()), None),
        (engine.blocking.claims.renew, ("renew", tokens["renew"], LONG), True),
        (engine.blocking.claims.fill, ("fill", tokens["fill"], some()), True),
        (engine.blocking.claims.abandon, ("abandon", tokens["abandon"]), True),
        (engine.blocking.store.expire, ("k",), True),
        (engine.blocking.store.invalidate, ("fill",), True),
        (engine.blocking.locks.release, ("l", b"token"), False),
    ]
    for verb, given, expected in steps:
        proxy.cut()
        assert run_blocking(verb(*given)) == expected
        proxy.cut()
        assert isinstance(run_blocking(engine.blocking.claims.claim(new_id().hex(), new_id(), Ask(LONG))), Granted)
        proxy.cut()
        assert isinstance(run_blocking(engine.blocking.locks.acquire("m", b"token", LONG)), Granted)
    proxy.cut()
    assert run_blocking(engine.blocking.locks.release("m", b"token"))

    async def scenario() -> None:
        for number in range(3):
            entry = some()
            await engine.suspending.store.set("k", entry)
            proxy.cut()  # and the loop has not checked its sockets since
            reply = await engine.suspending.claims.claim("k", new_id(), Ask(LONG))
            assert isinstance(reply, Found) and reply.entry.id == entry.id
            proxy.cut()
            assert isinstance(await engine.suspending.claims.claim(f"new{number}", new_id(), Ask(LONG)), Granted)
            proxy.cut()
            assert isinstance(await engine.suspending.locks.acquire("m", b"token", LONG), Granted)
        proxy.cut()
        assert await engine.suspending.locks.release("m", b"token")
        proxy.cut()
        assert await engine.suspending.claims.fill("async", tokens["async"], some())

    asyncio.run(scenario())
    engine.close()


def test_a_server_that_hangs_is_an_error_soon(own_server: MemcachedServer) -> None:
    """If the server hangs, calls of both colours fail soon with an EngineError."""
    engine = MemcachedEngine(own_server.address, timeout=0.2, connect_timeout=0.2)

    async def scenario() -> None:
        while True:  # until it is connected: also a server that is well may need longer for that
            with suppress(EngineError):
                await engine.suspending.store.get(["k"])
                run_blocking(engine.blocking.store.get(["k"]))
                break
        own_server.freeze()
        for work in (
            engine.suspending.store.get(["k"]),
            engine.suspending.store.get(["k"]),
            engine.suspending.claims.claim("l", new_id(), Ask(LONG)),
        ):
            with pytest.raises(EngineError):
                await asyncio.wait_for(work, LONG / 4)

    def blocked() -> None:
        for verb in (engine.blocking.store.get(["k"]), engine.blocking.store.invalidate("k")):
            with pytest.raises(EngineError):
                run_blocking(verb)

    try:
        asyncio.run(scenario())
        assert Herd(blocked).join() == [None]
    finally:
        own_server.thaw()
    engine.close()


@pytest.mark.usefixtures("default_timeouts")
def test_by_default_a_server_that_hangs_costs_a_second(proxy: Proxy) -> None:
    """By default, a call to a server that hangs fails after about a second. pymemcache alone would wait for ever."""
    engine = MemcachedEngine(at(proxy))

    def seconds() -> float:
        """How long a call took that failed; 0 if it did not."""
        start = time.monotonic()
        with suppress(EngineError):
            run_blocking(engine.blocking.store.get(["k"]))
            return 0.0
        return time.monotonic() - start

    until(lambda: not seconds())
    proxy.hold()
    assert 0.9 < seconds() < 10
    engine.close()


def test_a_blocked_loop_is_no_server_that_hangs(server: MemcachedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the event loop was blocked for longer than the timeout, a reply that has arrived is still used."""
    monkeypatch.setattr("stampede.engines.kit.pipe.LOOK", 0.0)  # then the timeout is checked before the reply
    engine = MemcachedEngine(server.address)

    async def scenario() -> None:
        await engine.suspending.store.set("k", some())
        wire: Any = engine._aline._pipes.to(engine._servers.all[0]).wire
        for _ in range(2):
            asked = asyncio.ensure_future(engine.suspending.store.get(["k"]))
            while not wire.flying:
                await asyncio.sleep(0)
            assert select.select([wire.socket], [], [], LONG)[0]  # now its answer has come
            wire.since -= LONG  # as if the loop had been blocked for so long
            (entry,) = await asked
            assert entry is not None

    asyncio.run(scenario())
    engine.close()


def test_a_cancelled_task_leaves_the_others_replies_alone(server: MemcachedServer) -> None:
    """If a task is cancelled, the others still get their own replies, which come in the order of the requests."""
    engine = MemcachedEngine(server.address)

    async def scenario() -> None:
        for number in range(50):
            await engine.suspending.store.set(f"k{number}", some(b"%d" % number))
        tasks = [asyncio.ensure_future(engine.suspending.store.get([f"k{number}"])) for number in range(50)]
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


def test_a_cancelled_first_task_leaves_the_connection_to_the_others(server: MemcachedServer) -> None:
    """Promise 11: if the task that opens a loop's first connection is cancelled, tasks that wait for it go on."""
    engine = MemcachedEngine(server.address)

    async def scenario() -> None:
        first, second = (asyncio.ensure_future(engine.suspending.store.get(["k"])) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == [None]
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(scenario())
    engine.close()


# -- the server ---------------------------------------------------------------------------------------------------


def test_a_restarted_server_is_only_empty(own_server: MemcachedServer) -> None:
    """A restarted server is only empty: the broken connections of its clients cause no errors."""
    engine = MemcachedEngine(own_server.address)
    for number in range(5):
        assert isinstance(run_blocking(engine.blocking.claims.claim(f"k{number}", new_id(), Ask(LONG))), Granted)
    own_server.restart()
    for number in range(5):
        token = new_id()
        assert isinstance(run_blocking(engine.blocking.claims.claim(f"k{number}", token, Ask(LONG))), Granted)
        assert run_blocking(engine.blocking.claims.fill(f"k{number}", token, some()))
    engine.close()


SMALL = "-m", "1", "-I", "512k"


def test_a_full_server_forgets_and_lies_not() -> None:
    """A full server evicts values and leases, but never returns the value of another key or of an older lease."""
    server = MemcachedServer(*SMALL)
    try:
        engine = MemcachedEngine(server.address)
        generator = random.Random(4)
        stored: dict[str, bytes] = {}
        found = lost = 0
        for _ in range(3000):
            key, token = f"k{generator.randrange(300)}", new_id()
            reply = run_blocking(engine.blocking.claims.claim(key, token, Ask(LONG)))
            if isinstance(reply, Found):
                assert reply.entry.value == stored[key]
                found += 1
            elif isinstance(reply, Granted):
                value = generator.randbytes(generator.randrange(9_000, 11_000))
                with suppress(TooLarge):  # no room in just this class of sizes
                    if run_blocking(engine.blocking.claims.fill(key, token, some(value))):
                        stored[key] = value
                    else:
                        lost += 1
        assert found > 100
        assert len(stored) > 250
        told = server.say(b"stats\r\n", b"END\r\n").split()
        assert int(told[told.index(b"evictions") + 1]) > 100
        engine.close()
    finally:
        server.close()


def test_a_lease_is_evicted_too() -> None:
    """If a lease is evicted from a full server, its late value does not overwrite the next holder's value."""
    server = MemcachedServer(*SMALL)
    try:
        engine, other = MemcachedEngine(server.address), MemcachedEngine(server.address)
        token, next_token = new_id(), new_id()
        assert isinstance(run_blocking(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
        for start in itertools.count(0, 1000):
            names = range(start, start + 1000)
            server.say(b"".join(b"ms f:%d 0 q\r\n\r\n" % name for name in names) + b"mn\r\n", b"MN\r\n")
            if server.say(b"me s:k\r\n") == b"EN\r\n":  # unlike `mg`, it keeps nothing alive
                break
            assert start < 100_000
        assert isinstance(run_blocking(other.blocking.claims.claim("k", next_token, Ask(LONG))), Granted)
        assert not run_blocking(engine.blocking.claims.renew("k", token, LONG))
        assert not run_blocking(engine.blocking.claims.fill("k", token, some(b"late")))
        assert run_blocking(other.blocking.claims.fill("k", next_token, some(b"new")))
        engine.close()
        other.close()
    finally:
        server.close()


def test_an_evicted_lease_is_lost(server: MemcachedServer) -> None:
    """The late value of an evicted lease does not overwrite the value of the next holder."""
    engine = MemcachedEngine(server.address)
    for renewed in (False, True):
        token, next_token = new_id(), new_id()
        assert isinstance(run_blocking(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
        if renewed:
            assert run_blocking(engine.blocking.claims.renew("k", token, LONG))
        server.say(b"md s:k\r\n")
        assert isinstance(run_blocking(engine.blocking.claims.claim("k", next_token, Ask(LONG))), Granted)
        assert not run_blocking(engine.blocking.claims.fill("k", token, some(b"late")))
        assert not run_blocking(engine.blocking.claims.renew("k", token, LONG))
        assert run_blocking(engine.blocking.claims.fill("k", next_token, some(b"new")))
        run_blocking(engine.blocking.store.invalidate("k"))
    engine.close()


# -- the ring -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[list[MemcachedServer]]:
    servers = [MemcachedServer() for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


def has(engine: MemcachedEngine, name: bytes) -> str:
    """The name of the server of the ring that this name belongs to."""
    return engine._servers.of(name).name


def test_a_ring_of_three(ring: list[MemcachedServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find each key on the same server, in any order of the addresses, and each server gets its share."""
    addresses = [server.address for server in ring]
    one, two = MemcachedEngine(*addresses), MemcachedEngine(*reversed(addresses))
    keys = [f"user:{number}" for number in range(300)]
    for key in keys:
        run_blocking(one.blocking.store.set(key, some(key.encode())))
    assert [entry and entry.value for entry in run_blocking(two.blocking.store.get(keys))] == [
        key.encode() for key in keys
    ]
    replies = two.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in keys])
    assert all(isinstance(reply, Found) for reply in replies)
    sent: list[int] = []
    send = BlockingLine.send

    def counted(self: Any, server: Any, commands: Any, since: float | None) -> Any:
        sent.append(len(commands))
        return send(self, server, commands, since)

    monkeypatch.setattr(BlockingLine, "send", counted)
    tokens = [new_id() for _ in keys]
    new = [Asked("claim", (f"new {key}", token, Ask(LONG))) for key, token in zip(keys, tokens, strict=True)]
    assert all(isinstance(reply, Granted) for reply in two.many.ask_many(new))
    fills = [Asked("fill", (f"new {key}", token, some())) for key, token in zip(keys, tokens, strict=True)]
    assert two.many.ask_many(fills) == [True] * len(keys)
    assert len(sent) == 6  # twice to each server
    monkeypatch.undo()
    for key in keys:
        run_blocking(two.blocking.store.invalidate(f"new {key}"))
    for server in ring:
        stats = server.say(b"stats\r\n", b"END\r\n").split()
        assert 60 < int(stats[stats.index(b"curr_items") + 1]) < 140
    one.close()
    two.close()


def test_a_ring_with_one_dead(ring: list[MemcachedServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """If one server of a ring is down, only its keys fail. They are not stored on the other servers."""
    monkeypatch.setattr("stampede.engines.memcached.servers.Breaker", lambda: Breaker(0.1))
    engine = MemcachedEngine(*(server.address for server in ring))
    keys = [f"user:{number}" for number in range(30)]
    for key in keys:
        run_blocking(engine.blocking.store.set(key, some(key.encode())))
    ring[0].stop()
    failed = []
    for key in keys:
        try:
            reply = run_blocking(engine.blocking.claims.claim(key, new_id(), Ask(LONG)))
        except EngineError:
            failed.append(key)
        else:
            assert isinstance(reply, Found) and reply.entry.value == key.encode()
    assert failed == [key for key in keys if has(engine, items.name_of(key)) == ring[0].address] != []
    answers = engine.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in keys])
    assert [key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, EngineError)] == failed
    with pytest.raises(EngineError):
        run_blocking(engine.blocking.store.invalidate(failed[0]))
    ring[0].start()

    def answers() -> bool:
        with suppress(EngineError):
            return engine.ping() > 0
        return False

    until(answers)
    for key in failed:
        assert isinstance(run_blocking(engine.blocking.claims.claim(key, new_id(), Ask(LONG))), Granted)
    engine.close()


def test_what_can_be_cleared_is_where_one_is_dead(ring: list[MemcachedServer]) -> None:
    """If one server of a ring is down, a `clear` takes effect on the others, and raises because of the dead one."""
    one, two = (MemcachedEngine(*(server.address for server in ring)) for _ in range(2))
    scopes = [f"f{number}" for number in range(30)]
    old = [generation_of(one, scope) for scope in scopes]
    ring[0].stop()
    with pytest.raises(EngineError):
        run_blocking(one.blocking.store.bump(""))
    new = [generation_of(two, scope) for scope in scopes]
    assert not set(old) & set(new)
    again = [generation_of(one, scope) for scope in scopes]
    own = [scope for scope, mine, theirs in zip(scopes, again, new, strict=True) if mine != theirs]
    assert own == [scope for scope in scopes if one._servers.of(items.name_of(scope, b"g")) is one._servers.all[0]]
    for scope in own:
        with pytest.raises(EngineError):
            run_blocking(one.blocking.store.bump(scope))
    one.close()
    two.close()


def test_what_comes_back_with_its_values_is_asked_again(ring: list[MemcachedServer]) -> None:
    """While a server can't be reached, its keys do not move to others. Otherwise two values would exist afterwards."""
    proxy = Proxy(ring[0].port)
    addresses = [at(proxy), *(server.address for server in ring[1:])]
    engine = MemcachedEngine(*addresses)
    keys = [f"user:{number}" for number in range(30)]
    lost = [key for key in keys if engine._servers.of(items.name_of(key)) is engine._servers.all[0]]
    for key in keys:
        run_blocking(engine.blocking.store.set(key, some(b"old")))
    proxy.target = free_port()
    proxy.cut()

    async def without_it() -> None:
        for key in keys:
            if key in lost:
                with pytest.raises(EngineError) as failure:
                    await engine.suspending.claims.claim(key, new_id(), Ask(LONG))
                assert failure.value.partial
            else:
                assert isinstance(await engine.suspending.claims.claim(key, new_id(), Ask(LONG)), Found)
                await engine.suspending.store.set(key, some(b"new"))

    asyncio.run(without_it())
    for key in lost:
        with pytest.raises(EngineError):
            run_blocking(engine.blocking.store.invalidate(key))
        with pytest.raises(EngineError):
            run_blocking(engine.blocking.store.set(key, some(b"new")))
    proxy.target = ring[0].port
    other = MemcachedEngine(*addresses)
    for key, entry in zip(keys, run_blocking(other.blocking.store.get(keys)), strict=True):
        assert entry is not None and entry.value == (b"old" if key in lost else b"new")
    engine.close()
    other.close()
    proxy.close()


def test_tags_of_a_dead_server_are_no_invalidation(
    ring: list[MemcachedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server of a tag is down, a value is computed once and kept here. Its tags do not count as invalidated:
    then each call would compute."""
    monkeypatch.setattr("stampede.outages.outage.REFUGE_TTL", LONG)
    engine = MemcachedEngine(*(server.address for server in ring))
    computed: list[str] = []

    async def compute() -> str:
        computed.append("once more")
        current().tag(tag)
        return "value"

    with Cache(engine=engine, ttl=600, early=0) as cache, asyncio.Runner() as runner:
        tags = map(str, itertools.count())
        runner.run(cache.aset("another", 1))
        known: Any = engine.recalls
        scopes = {has(engine, items.name_of(scope, b"g")) for scope in known._generations._known}
        dead = next(server for server in ring if server.address not in scopes)
        tag = next(tag for tag in tags if _server_of_tag(engine, tag) == dead.address)
        keys = [f"k{number}" for number in range(20)]
        for key in keys:
            assert runner.run(cache.aget_or_compute(key, compute)) == "value"
        dead.stop()
        computed.clear()
        for _ in range(5):
            for key in keys:
                assert runner.run(cache.aget_or_compute(key, compute)) == "value"
        assert len(computed) <= 2 * len(keys)


def _server_of_tag(engine: MemcachedEngine, tag: str) -> str:
    return has(engine, items.name_of(key_of_tag(name_of_tag("", tag))))


def test_a_change_that_cant_learn_the_generation_raises(ring: list[MemcachedServer]) -> None:
    """Promise 4: a change raises if the generation can't be read. It would change a key that only this process uses."""
    engine = MemcachedEngine(*(server.address for server in ring))
    scopes = map(str, itertools.count())
    scope = next(scope for scope in scopes if has(engine, items.name_of(scope, b"g")) == ring[0].address)
    ring[0].stop()
    assert generation_of(engine, scope)
    with pytest.raises(EngineError):
        run_blocking(engine.blocking.store.generations(scope))
    engine.close()


def test_a_hung_server_of_a_ring_is_asked_once_a_second(
    ring: list[MemcachedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a server of a ring hangs, only one call in a second (here in a minute) waits for it."""
    monkeypatch.setattr("stampede.engines.memcached.servers.Breaker", lambda: Breaker(LONG))
    proxy = Proxy(ring[0].port)
    engine = MemcachedEngine(at(proxy), *(server.address for server in ring[1:]), timeout=0.3, connect_timeout=0.3)
    lost = next(key for key in map(str, itertools.count()) if has(engine, items.name_of(key)) == at(proxy))

    told: list[str] = []

    async def ten() -> None:
        for _ in range(10):
            with pytest.raises(EngineError) as failure:
                await engine.suspending.store.get([lost])
            told.append(str(failure.value))

    proxy.hold()
    for _ in range(10):
        with pytest.raises(EngineError) as failure:
            run_blocking(engine.blocking.store.get([lost]))
        told.append(str(failure.value))
    asyncio.run(ten())
    assert ["down a moment ago" in each for each in told] == [False] + 19 * [True]
    engine.close()
    proxy.close()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_the_rest_of_a_ring_goes_on(
    ring: list[MemcachedServer], face: Callable[..., Face], colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one server of a ring is down, its keys are computed once in this process, and other keys are still read."""
    # The server that has the generation's number may be the dead one.
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", LONG)
    monkeypatch.setattr("stampede.outages.outage.REFUGE_TTL", LONG)
    url = "memcached://" + ",".join(server.address for server in ring)
    asked = face(url, colour, breakers=["stampede.engines.memcached.servers"], ttl=LONG)
    keys = [f"user:{number}" for number in range(30)]

    def stored(key: str) -> bool:
        """Sets the key. Returns False if its server still counts as down."""
        with suppress(EngineError):
            asked.run("set", key, key)
            return True
        return False

    for dead in ring:
        until(lambda: all(stored(key) for key in keys))
        dead.stop()
        computed: list[str] = []
        for _ in range(5):
            for key in keys:
                assert asked(key, lambda key=key: computed.append(key) or key) == key
        assert 0 < len(set(computed)) == len(computed) < len(keys)
        dead.start()
