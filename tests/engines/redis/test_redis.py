"""The Redis engine beyond its ports: servers that lose data, break and refuse; notifications; forks and loops."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

import redis
import redis.asyncio
from known_generation import generation_of
from proxy import Proxy
from redis.crc import key_slot
from servers import PATIENCE, RedisServer, free_port, is_redis_6, missing, need, need_tls

from stampede import Cache, Lock
from stampede.engines import open_engine
from stampede.engines.kit.stamps import SOON as SOON_LOST
from stampede.engines.kit.stamps import NewsStamps
from stampede.engines.redis import RedisEngine, blocking, wire
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.news import RedisNews, slot_of
from stampede.errors import EngineError, OptionError
from stampede.model.entry import UNREADABLE, Entry, Verdict, new_id
from stampede.model.ports import Ask, Asked, Busy, Found, Granted, Ticket
from stampede.runtime.colour import run_blocking as run

LONG = 60.0
SOON = 10.0  # a waiter that is not woken takes longer


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., RedisEngine]:
    """Open engines that are closed at the end."""

    def opened(*args: Any, **options: Any) -> RedisEngine:
        engine = RedisEngine(*args, **options)
        engine.follow()  # as a cache with a local tier does
        request.addfinalizer(engine.close)
        return engine

    return opened


Open = Callable[..., RedisEngine]
Hurry = Callable[[Any], None]


def some(value: bytes = b"value", fresh: float = LONG) -> Entry[Any]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


def claim(engine: RedisEngine, key: str = "k", token: bytes | None = None, **terms: Any) -> Any:
    return run(engine.blocking.claims.claim(key, token or new_id(), Ask(LONG, **terms)))


def granted(engine: RedisEngine, key: str = "k") -> bytes:
    token = new_id()
    assert isinstance(claim(engine, key, token), Granted)
    return token


def until(good: Callable[[], Any]) -> Any:
    """Wait for a true answer and return it. A change on a server can only be polled for."""
    end = time.monotonic() + PATIENCE
    while not (answer := good()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
    return answer


def calls(server: RedisServer) -> int:
    """How many scripts the server has run so far."""
    lines = server.cli("INFO", "commandstats").split()
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines if "cmdstat_evalsha:" in line)


def stats(server: RedisServer, *names: str) -> list[int]:
    """Numbers of the server's statistics."""
    told = server.cli("INFO")
    return [int(told.split(f"{name}:")[1].split()[0]) for name in names]


# -- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "}", "}a", "{", "{}", "{a}b", "}{", ":l", "l", "\x00", "é" * 100])
def test_all_names_of_a_key_are_in_one_slot(key: str) -> None:
    """All names of a key are in one slot, so that a cluster runs its scripts, and no two names are equal."""
    names = wire.names(key)
    strings = [*names[:4], names.channel]
    assert len({key_slot(name) for name in strings}) == 1
    assert len(set(strings)) == 5
    assert slot_of(names.entry) == names.slot
    assert [slot_of(name) for name in strings[1:]] == [None] * 4


def test_what_is_no_entry_is_a_miss(server: RedisServer, open_: Open) -> None:
    """Foreign bytes in the place of an entry are a miss. They are neither an error for ever nor read as numbers."""
    engine = open_(server.url)
    for bytes_ in (b"", b"short", b"\x02" + bytes(100)):
        server.cli("SET", wire.names("k").entry, bytes_.replace(b"\x00", b"0"))
        assert isinstance(claim(engine, force=True), Granted)
        token = new_id()
        assert claim(engine, token=token, force=True).entry == UNREADABLE  # the codec reports a miss, and an event
        assert run(engine.blocking.claims.fill("k", token, some()))
        assert isinstance(claim(engine), Found)
    for foreign in ("RPUSH", "SADD"):
        server.cli("DEL", wire.names("k").entry)
        server.cli(foreign, wire.names("k").entry, "x")
        assert run(engine.blocking.store.get(["k"])) == [UNREADABLE]
        assert not run(engine.blocking.store.expire("k"))
        token = granted(engine)
        assert run(engine.blocking.claims.fill("k", token, some()))
        assert isinstance(claim(engine), Found)


def test_for_ever_is_a_key_without_end(server: RedisServer, open_: Open) -> None:
    """An entry to be kept for ever has no expiry on the server, and an entry with an end has one."""
    engine = open_(server.url)
    name = wire.names("k").entry
    run(engine.blocking.store.set("k", some(fresh=inf)))
    assert server.cli("PTTL", name) == "-1"
    run(engine.blocking.store.set("k", Entry(b"", new_id(), ttl=5.0, fresh=5.0, keep=inf)))
    (kept,) = run(engine.blocking.store.get(["k"]))
    assert kept is not None
    assert 0 < kept.fresh <= 5.0
    assert kept.keep == inf
    run(engine.blocking.store.set("k", some(fresh=5.0)))
    assert wire.expiry(some(fresh=5.0)) == 6_000  # a second longer, for waiters
    assert 0 < int(server.cli("PTTL", name)) <= 6_000


def test_the_due_are_granted_in_the_same_question(server: RedisServer, open_: Open) -> None:
    """A claim grants an early refresh in the round trip that finds the entry. It needs no second one."""
    engine = open_(server.url)
    entry = Entry(b"v", new_id(), cost=1.0, margin=2.0, ttl=LONG, fresh=10.0, keep=LONG)
    run(engine.blocking.store.set("k", entry))
    assert isinstance(claim(engine, draw=5.0), Found)
    reply = claim(engine, draw=20.0)
    assert isinstance(reply, Granted)
    assert reply.entry is not None
    assert reply.entry.fresh > 0
    entry.fresh = 45.0  # there is no early refresh before half of ttl
    run(engine.blocking.store.set("k", entry))
    assert isinstance(claim(engine, draw=1e9), Found)


# -- servers that lose their scripts, and replies that are lost ---------------------------------------------------


@pytest.mark.parametrize("forget", ["SCRIPT FLUSH", "restart"])
def test_scripts_are_sent_again(own: RedisServer, open_: Open, forget: str) -> None:
    """Scripts that the server has lost, by a flush or a restart, are sent again."""
    engine = open_(own.url)
    granted(engine)
    if forget == "restart":
        own.restart()
    else:
        own.cli(*forget.split())
    token = granted(engine, "l")
    assert run(engine.blocking.claims.fill("l", token, some()))
    assert isinstance(claim(engine, "l"), Found)


def test_scripts_are_sent_again_in_pipelines(server: RedisServer, open_: Open) -> None:
    """Lost scripts are sent again for batches, and for tasks that share a pipeline."""
    engine = open_(server.url)
    server.cli("SCRIPT", "FLUSH")
    assert run(engine.blocking.store.get(["a", "b", "c"])) == [None] * 3

    async def tasks() -> None:
        await engine.suspending.claims.claim("k", b"12345678", Ask(LONG))
        server.cli("SCRIPT", "FLUSH")
        replies = await asyncio.gather(*[engine.suspending.claims.claim("k", new_id(), Ask(LONG)) for _ in range(10)])
        assert all(isinstance(reply, Busy) and reply.token == b"12345678" for reply in replies)
        server.cli("SCRIPT", "FLUSH")
        assert await engine.suspending.store.get(["a", "b", "c"]) == [None] * 3

    asyncio.run(tasks())


def test_a_server_that_comes_back_is_used_again(own: RedisServer, open_: Open) -> None:
    """A server that comes back after an outage is used again. During the outage, each error is an EngineError."""
    engine = open_(own.url)
    granted(engine)

    async def tasks() -> None:
        await engine.suspending.store.get(["k"])
        own.stop()
        for _ in range(2):
            with pytest.raises(EngineError) as caught:
                await engine.suspending.store.get(["k"])
            assert caught.value.__cause__ is not None
        with pytest.raises(EngineError):
            granted(engine)
        own.start()
        assert await engine.suspending.store.get(["k"]) == [None]

    asyncio.run(tasks())
    granted(engine)


def test_a_connection_that_broke_while_idle_is_nobodys_error(server: RedisServer, open_: Open) -> None:
    """A connection that ended while it was idle causes no error."""
    engine = open_(server.url)

    async def tasks() -> None:
        for _ in range(3):
            granted(engine, new_id().hex())
            await engine.suspending.store.set("k", some())
            server.cli("CLIENT", "KILL", "TYPE", "normal")
            (kept,) = await engine.suspending.store.get(["k"])
            assert kept is not None

    asyncio.run(tasks())


def test_a_question_of_a_loop_whose_reply_is_lost_is_asked_once_more(
    server: RedisServer, open_: Open, before: Callable[[RedisServer], Proxy]
) -> None:
    """If a connection breaks before the reply, a loop's question is asked once more and its calls do not fail."""
    proxy = before(server)
    engine = open_(proxy.url)

    async def tasks() -> None:
        await engine.suspending.store.set("lost", some())
        proxy.at(b"lost", answered=0)
        (kept,) = await engine.suspending.store.get(["lost"])
        assert (kept is not None, proxy.met) == (True, 1)

    asyncio.run(tasks())


def test_verbs_may_be_sent_twice(server: RedisServer, open_: Open) -> None:
    """Each verb can be sent twice, as after a lost reply, and still gives the right result."""
    engine = open_(server.url)
    line = engine._servers.line
    asked: list[Any] = []
    ask_all = line.ask_all

    async def twice(commands: Any, **options: Any) -> Any:
        asked.append(await ask_all(commands, **options))
        return await ask_all(commands, **options)

    line.ask_all = twice  # type: ignore[method-assign]
    token = granted(engine)
    assert run(engine.blocking.claims.renew("k", token, LONG))
    entry = some()
    assert run(engine.blocking.claims.fill("k", token, entry))
    newer = some()
    assert run(engine.blocking.store.replace("k", entry.id, newer))
    assert claim(engine).entry.id == newer.id
    token = new_id()
    claim(engine, token=token, force=True)
    run(engine.blocking.claims.abandon("k", token, Verdict("failed"), rest=LONG))
    assert claim(engine, seen=newer.id).rest > LONG - 10
    holder = new_id()
    first = run(engine.blocking.locks.acquire("l", holder, LONG))
    assert isinstance(first, Granted)
    assert run(engine.blocking.locks.release("l", holder)) is True
    assert not run(engine.blocking.locks.release("l", holder))
    assert len(asked) > 5


REFUSALS = {"full": ("maxmemory", "1kb"), "without replicas": ("min-replicas-to-write", "1")}


@pytest.mark.parametrize("refusal", list(REFUSALS))
def test_a_server_that_reads_and_does_not_write(own: RedisServer, open_: Open, refusal: str) -> None:
    """If a server reads but does not write, its values are still found, and no lease is granted in vain."""
    if refusal == "without replicas" and is_redis_6():
        missing("a script is not refused by a Redis 6 that is without replicas")
    engine = open_(own.url)
    run(engine.blocking.store.set("there", some()))
    run(engine.blocking.store.set("due", Entry(b"", new_id(), cost=1.0, margin=1.0, ttl=100.0, fresh=20.0, keep=LONG)))
    token, entry = granted(engine, "taken"), some()
    own.cli("CONFIG", "SET", *REFUSALS[refusal])
    assert isinstance(claim(engine, "there"), Found)
    assert isinstance(claim(engine, "due", draw=30.0), Found)
    assert claim(engine, "taken").token == token
    for terms in ({}, {"force": True}):
        with pytest.raises(EngineError) as caught:
            claim(engine, "missing", **terms)
        assert caught.value.partial
    asked = [Asked("claim", (key, new_id(), Ask(LONG))) for key in ("there", "missing", "taken")]
    found, refused, busy = engine.many.ask_many(asked)
    assert (type(found), type(refused), type(busy)) == (Found, EngineError, Busy)
    with pytest.raises(EngineError):
        run(engine.blocking.store.set("other", entry))
    with pytest.raises(EngineError):
        run(engine.blocking.locks.acquire("l", new_id(), LONG))
    own.cli("CONFIG", "SET", REFUSALS[refusal][0], "0")
    granted(engine, "missing")


def test_a_full_server_ends_what_it_began(own: RedisServer, open_: Open) -> None:
    """A server that is out of memory still lets computations end: with a fill or an abandon, which remove the lease."""
    engine = open_(own.url)
    run(engine.blocking.store.set("there", some()))
    filled, abandoned = granted(engine, "filled"), granted(engine, "abandoned")
    own.cli("CONFIG", "SET", "maxmemory", "1kb")
    assert run(engine.blocking.claims.renew("filled", filled, LONG))
    assert isinstance(claim(engine, "filled", filled), Granted)  # asked again, as after a lost reply
    assert run(engine.blocking.claims.fill("filled", filled, some(b"x" * 1000)))
    assert isinstance(claim(engine, "filled"), Found)
    run(engine.blocking.claims.abandon("abandoned", abandoned, Verdict("failed"), rest=LONG))
    assert claim(engine, "abandoned").rest > LONG - 10  # the deleted lease leaves room for the verdict
    assert generation_of(engine, "new")
    assert run(engine.blocking.store.expire("there"))
    assert run(engine.blocking.store.invalidate("there"))
    assert own.cli("KEYS", "{*}l") == ""


def test_a_replica_is_not_believed(own: RedisServer, open_: Open) -> None:
    """A server that has become a replica is not used: it would serve values that are invalidated at the new master."""
    engine = open_(own.url)
    run(engine.blocking.store.set("k", some()))
    ticket = ticket_of(engine)
    own.cli("REPLICAOF", "127.0.0.1", str(free_port()))
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            claim(engine)
        assert not caught.value.partial
    with pytest.raises(EngineError):
        asyncio.run(engine.suspending.claims.claim("k", new_id(), Ask(LONG)))
    assert not holds(ticket)
    own.cli("REPLICAOF", "NO", "ONE")
    assert isinstance(claim(engine), Found)


def test_a_hung_server_is_an_error_soon(own: RedisServer, open_: Open, hurry: Hurry) -> None:
    """If a server hangs, calls in both colours fail soon, and they work again when the server does."""
    engine = open_(own.url)

    async def tasks() -> None:
        await engine.suspending.store.get(["k"])
        run(engine.blocking.store.get(["k"]))
        own.freeze()
        hurry(engine._servers)
        try:
            with pytest.raises(EngineError):
                run(engine.blocking.store.get(["k"]))
            results = await asyncio.gather(
                *[engine.suspending.store.get(["k"]) for _ in range(5)], return_exceptions=True
            )
            assert [type(result) for result in results] == [EngineError] * 5
        finally:
            own.thaw()
        engine._servers.aline._pipes.to(None)._patience = PATIENCE
        assert await engine.suspending.store.get(["k"]) == [None]
        assert run(engine.blocking.store.get(["k"])) == [None]

    asyncio.run(tasks())


def test_a_hung_server_is_found_out_once(own: RedisServer, open_: Open) -> None:
    """If a server hangs, callers that wait for a connection fail together, and not one timeout after the other."""
    engine = open_(own.url, socket_timeout=2.0, max_connections=1)
    run(engine.blocking.store.get(["k"]))
    errors: list[str] = []

    def live() -> None:
        try:
            run(engine.blocking.store.get(["k"]))
        except EngineError as error:
            errors.append(str(error))

    own.freeze()
    try:
        threads = [threading.Thread(target=live) for _ in range(12)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert time.monotonic() - start < 12  # twelve, one after the other, would take longer
    finally:
        own.thaw()
    assert len(errors) == 12
    assert run(engine.blocking.store.get(["k"])) == [None]


# -- connections --------------------------------------------------------------------------------------------------


def test_more_callers_than_connections_wait(server: RedisServer, open_: Open) -> None:
    """If all connections are in use, further callers wait for one. They are not refused."""
    engine = open_(server.url, max_connections=2)
    errors: list[BaseException] = []

    def live() -> None:
        try:
            for _ in range(20):
                run(engine.blocking.store.get(["k"]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []


def test_as_many_connections_as_can_be_counted_are_not_made_room_for(server: RedisServer, open_: Open) -> None:
    """A very large `max_connections`, as in a cluster's client, reserves no memory for so many connections."""
    before = len(gc.get_objects())
    assert open_(server.url, max_connections=2**20).ping() < 5
    assert len(gc.get_objects()) - before < 2**16


def test_one_turn_of_a_loop_is_one_pipeline(server: RedisServer, open_: Open) -> None:
    """The questions of many tasks share one connection and a few packets."""
    engine = open_(server.url, tracking=False)

    async def tasks() -> None:
        await engine.suspending.store.set("k", some())
        before = stats(server, "total_connections_received", "total_reads_processed")
        found = await asyncio.gather(*[engine.suspending.claims.claim("k", new_id(), Ask(LONG)) for _ in range(1000)])
        assert all(isinstance(reply, Found) for reply in found)
        after = stats(server, "total_connections_received", "total_reads_processed")
        assert after[0] - before[0] == 1  # by this INFO command
        assert after[1] - before[1] < 200

    asyncio.run(tasks())


def test_cancelling_one_caller_cancels_only_it(server: RedisServer, open_: Open) -> None:
    """If some tasks are cancelled, each other task still gets its own reply."""
    engine = open_(server.url)

    async def tasks() -> None:
        for number in range(50):
            await engine.suspending.store.set(str(number), some(b"%d" % number))
        for _ in range(20):
            reads = [asyncio.ensure_future(engine.suspending.store.get([str(number)])) for number in range(50)]
            await asyncio.sleep(0)
            for read in reads[::3]:
                read.cancel()
            await asyncio.sleep(0)
            for read in reads[1::3]:
                read.cancel()
            for number, read in enumerate(reads):
                if number % 3 == 2:
                    (kept,) = await read
                    assert kept is not None
                    assert kept.value == b"%d" % number

    asyncio.run(tasks())


def test_loops_one_after_the_other(server: RedisServer, open_: Open) -> None:
    """Each loop has a connection of its own, and connections of ended loops do not pile up."""
    engine = open_(server.url)
    (before,) = stats(server, "connected_clients")
    for number in range(5):
        asyncio.run(engine.suspending.store.set("k", some(b"%d" % number)))
        loop = asyncio.new_event_loop()  # a loop that is closed without a shutdown
        (kept,) = loop.run_until_complete(engine.suspending.store.get(["k"]))
        loop.close()
        assert kept is not None
        assert kept.value == b"%d" % number
    del loop
    asyncio.run(engine.suspending.store.get(["k"]))
    gc.collect()
    assert engine._servers.aline._pipes.take_all() == []
    until(lambda: stats(server, "connected_clients")[0] <= before + 2)


def test_a_loop_that_is_closed_with_a_question_in_it_is_no_matter_of_the_next(server: RedisServer, open_: Open) -> None:
    """If a loop is closed while a question is under way, calls in the next loop still work."""
    engine = open_(server.url)

    async def leave() -> asyncio.Task[Any]:
        await engine.suspending.store.get(["k"])
        pending = asyncio.ensure_future(engine.suspending.claims.claim("left", new_id(), Ask(LONG)))
        pending._log_destroy_pending = False  # type: ignore[attr-defined]
        await asyncio.sleep(0)  # the claim has begun
        return pending

    loop = asyncio.new_event_loop()
    pending = loop.run_until_complete(leave())
    loop.close()
    for _ in range(2):
        asyncio.run(engine.suspending.store.get(["k"]))
    assert not pending.done() or pending.exception() is not None


def test_a_claim_that_is_closed_before_it_was_sent_is_not_sent(server: RedisServer, open_: Open) -> None:
    """A claim that is closed before it was sent is not sent. It could arrive after its abandon, and leave a lease."""
    engine = open_(server.url)

    async def story() -> None:
        await engine.suspending.claims.claim("known", new_id(), Ask(LONG))  # sends the script to the server
        claim = engine.suspending.claims.claim("closed", new_id(), Ask(LONG))
        claim.send(None)
        claim.close()
        await engine.suspending.store.get(["k"])

    asyncio.run(story())
    assert server.cli("EXISTS", wire.names("closed").lease) == "0"


def test_a_connection_that_could_not_even_hang_up_is_not_asked(
    server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a reply can't be read, nor its connection closed, as with a full stack, that connection is not reused."""
    engine = open_(server.url)
    run(engine.blocking.store.set("k", some(b"right")))

    def too_deep(*args: Any, **options: Any) -> Any:
        raise RecursionError

    with monkeypatch.context() as patch:
        patch.setattr("stampede.engines.redis.blocking._Wire.received", too_deep)
        patch.setattr(redis.connection.AbstractConnection, "disconnect", too_deep)
        with pytest.raises(RecursionError):
            run(engine.blocking.store.expire("left unread"))
    (kept,) = run(engine.blocking.store.get(["k"]))
    assert kept.value == b"right"


def test_loops_in_several_threads(server: RedisServer, open_: Open) -> None:
    """Loops in several threads do not share a connection."""
    engine = open_(server.url)
    errors: list[BaseException] = []

    async def tasks(name: str) -> None:
        for number in range(50):
            await engine.suspending.store.set(name, some(b"%d" % number))
            (kept,) = await engine.suspending.store.get([name])
            assert kept is not None
            assert kept.value == b"%d" % number

    def live(name: str) -> None:
        try:
            asyncio.run(tasks(name))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []


@pytest.mark.usefixtures("steady")
def test_a_forked_child_makes_its_own_connections(server: RedisServer, open_: Open) -> None:
    """A forked child makes its own connections. Otherwise parent and child would read each other's replies."""
    engine = open_(server.url)
    run(engine.blocking.store.set("k", some(b"parent")))
    found = ticket_of(engine)

    async def tasks() -> None:
        await engine.suspending.store.get(["k"])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if not holds(found):
                    token = new_id()
                    claim(engine, "child", token)
                    run(engine.blocking.claims.fill("child", token, some()))
                    ticket_of(engine, "child")
                    asyncio.run(engine.suspending.store.get(["child"]))
                    gc.collect()  # collects objects of the parent
                    code = 0
            finally:
                os._exit(code)
        for _ in range(50):
            assert isinstance(claim(engine), Found)
            assert (await engine.suspending.store.get(["k"]))[0] is not None
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert (await engine.suspending.store.get(["k"]))[0] is not None
        assert holds(found)  # the end of the child does not end the parent's tickets

    asyncio.run(tasks())


def test_what_a_url_can_say(own: RedisServer, open_: Open) -> None:
    """Options in a URL reach the client, and wrong ones are refused when the engine is made."""
    own.cli("ACL", "SETUSER", "ann", "on", ">p w", "~*", "&*", "+@all")
    for url in (
        own.url.replace("redis://", "redis://ann:p%20w@") + "?socket_timeout=9.5&client_name=shop&tracking=no",
        f"unix://ann:p%20w@{own.socket}?db=0&max_connections=3",
    ):
        engine = open_engine(url)
        assert engine.ping() > 0
        assert ("name=shop" in own.cli("CLIENT", "LIST")) == ("shop" in url)
        engine.close()
    with pytest.raises(EngineError):
        open_(own.url.replace("redis://", "redis://ann:wrong@")).ping()
    for wrong in ("?sockettimeout=1", "?socket_timeout=soon", "?tracking=maybe"):
        with pytest.raises(OptionError):
            open_engine(own.url + wrong)
    with pytest.raises(OptionError):
        RedisEngine()


def test_tls(open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `rediss://` URL works with TLS, and a server whose certificate is not trusted is refused."""
    need_tls()
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)  # otherwise each connection reads all certificates of the machine
    certificate, key, port = tmp_path / "server.crt", tmp_path / "server.key", free_port()
    subprocess.run(
        [need("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    secured = RedisServer(
        "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
        "--tls-auth-clients", "no", "--tls-ca-cert-file", str(certificate),
    )  # fmt: skip
    try:
        engine = open_(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}", socket_connect_timeout=5.0)
        entry = some(b"\x00\xff" * 100_000)

        async def tasks() -> None:
            token = new_id()
            assert isinstance(await engine.suspending.claims.claim("k", token, Ask(LONG)), Granted)
            thread, result = waiting(engine, claim(engine))
            until(lambda: secured.cli("PUBSUB", "NUMSUB", wire.names("k").channel).split()[-1] == "1")
            assert await engine.suspending.claims.fill("k", token, entry)
            await asyncio.to_thread(thread.join, PATIENCE)
            assert result == [None]
            replies = await asyncio.gather(
                *[engine.suspending.claims.claim("k", new_id(), Ask(LONG)) for _ in range(20)]
            )
            assert all(reply.entry.value == entry.value for reply in replies)

        asyncio.run(tasks())
        ticket = ticket_of(engine)
        secured.cli("DEL", wire.names("k").entry)
        until(lambda: not holds(ticket))
        with pytest.raises(EngineError):
            open_(f"rediss://127.0.0.1:{port}", socket_connect_timeout=5.0).ping()  # its certificate is not trusted
    finally:
        secured.close()


@pytest.mark.parametrize("decode", [False, True])
def test_a_client_may_be_handed_over(server: RedisServer, open_: Open, decode: bool) -> None:
    """A configured client can replace the URL, even one that decodes its responses."""
    for client in (
        redis.Redis(port=server.port, decode_responses=decode),
        redis.asyncio.Redis(port=server.port, decode_responses=decode),
        redis.Redis.from_url(server.unix_url, decode_responses=decode),
    ):
        engine = open_(client=client)
        run(engine.blocking.store.set("k", some(b"\xff")))
        (kept,) = asyncio.run(engine.suspending.store.get(["k"]))
        assert kept is not None
        assert kept.value == b"\xff"
        engine.close()
    with pytest.raises(OptionError):
        open_(client=object())


def test_a_cache_of_a_client(server: RedisServer) -> None:
    """A cache can be made of a client, and the client still works afterwards."""
    with redis.Redis(port=server.port, client_name="theirs") as client:
        client.ping()
        with Cache(client, local=True) as cache:
            assert cache.get_or_compute("k", lambda: 1) == 1
            assert asyncio.run(cache.aget_or_compute("k", lambda: 2)) == 1
            with cache.lock("l", wait=0) as lock:
                assert lock.held
        assert client.ping()


@pytest.mark.parametrize("rights", ["-client", "-subscribe", "-publish", "-client -subscribe -publish resetchannels"])
def test_without_rights(own: RedisServer, rights: str) -> None:
    """If a user lacks rights for notifications, calls get no error, and neither old values nor long waits."""
    own.cli("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", *rights.split())
    url = own.url.replace("redis://", "redis://app:secret@")
    with Cache(url, local=True, early=0) as near, Cache(url, local=True, early=0) as far:
        for number in range(3):
            near.set("k", number)
            until(lambda number=number: far.get_or_compute("k", lambda: None) == number)
            assert asyncio.run(far.aget_or_compute("k", lambda: None)) == number
        assert far.stats().computations == 0
        begun, done = threading.Event(), threading.Event()

        def compute() -> int:
            begun.set()
            assert done.wait(PATIENCE)
            return 1

        holder = threading.Thread(target=lambda: near.get_or_compute("l", compute))
        holder.start()
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, done.set).start()
        start = time.monotonic()
        assert far.get_or_compute("l", lambda: 2) == 1
        assert time.monotonic() - start < SOON  # without notifications, the safety poll finds the value
        holder.join(PATIENCE)


@pytest.mark.usefixtures("steady")
def test_many_claims_are_one_round_trip(server: RedisServer, open_: Open) -> None:
    """A batch of claims gets a reply for each key, and each granted key has its own lease."""
    engine, other = open_(server.url), open_(server.url)
    run(engine.blocking.store.set("there", some()))
    ticket_of(engine, "there")
    taken = granted(other, "taken")
    questions = [(key, new_id(), Ask(LONG)) for key in ("there", "taken", *map(str, range(700)))]
    found, busy, *rest = engine.many.ask_many([Asked("claim", question) for question in questions])
    assert isinstance(found, Found)
    assert found.ticket is not None
    assert busy.token == taken
    assert all(isinstance(reply, Granted) for reply in rest)
    assert engine.many.ask_many([]) == []
    assert isinstance(claim(other, "699"), Busy)


def sent(server: RedisServer, act: Callable[[], object]) -> list[str]:
    """The commands that clients send while `act` runs."""
    with redis.Redis(port=server.port) as client, client.monitor() as monitor:
        act()
        server.cli("ECHO", "the end")
        commands = []
        while "the end" not in (heard := monitor.next_command())["command"]:
            if heard["client_type"] != "lua":
                commands.append(heard["command"].split()[0].upper())
    return commands


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("suspending", [False, True])
def test_a_hit_is_one_command_and_a_miss_two(own: RedisServer, suspending: bool) -> None:
    """A hit sends one command and a miss two: round trips are the cost of a cache on a server."""
    with Cache(own.url, early=0) as cache, asyncio.Runner() as runner:

        def ask(key: str) -> None:
            if suspending:
                runner.run(cache.aget_or_compute(key, lambda: 1))
            else:
                cache.get_or_compute(key, lambda: 1)

        ask("warm")
        assert sent(own, lambda: ask("k")) == ["EVALSHA"] * 2
        for _ in range(5):
            ask("k")  # until then the engine does not know that the key mostly hits, and for how long
        assert sent(own, lambda: ask("k")) == ["GETEX"]


@pytest.mark.usefixtures("known", "steady")
@pytest.mark.parametrize("suspending", [False, True])
def test_a_batch_is_a_round_trip(own: RedisServer, suspending: bool) -> None:
    """A batch takes a few packets, leaves no lease if it fails, and does not deadlock with another batch."""
    near, far = Cache(own.url, early=0), Cache(own.url, early=0)
    loads: list[list[str]] = []
    begun, done = threading.Event(), threading.Event()

    def load(keys: list[str]) -> dict[str, int]:
        loads.append(sorted(keys))
        return dict.fromkeys(keys, 1)

    def slow(keys: list[str]) -> dict[str, int]:
        begun.set()
        assert done.wait(PATIENCE)
        return dict.fromkeys(keys, 2)

    def fails(keys: list[str]) -> dict[str, int]:
        raise ZeroDivisionError

    with near, far, asyncio.Runner() as runner:

        def ask(cache: Cache, keys: list[str], function: Any) -> dict[str, Any]:
            if suspending:
                return runner.run(cache.aget_or_compute_many(keys, function))
            return cache.get_or_compute_many(keys, function)

        ask(near, ["warm"], load)
        ask(far, ["warm"], load)
        keys = [f"k{number}" for number in range(100)]
        (before,) = stats(own, "total_reads_processed")
        assert ask(near, keys, load) == dict.fromkeys(keys, 1)
        assert ask(far, keys, load) == dict.fromkeys(keys, 1)
        (after,) = stats(own, "total_reads_processed")
        assert after - before <= 3 + 6  # claim, fill, claim; the rest is INFO and large packets
        assert loads[1:] == [sorted(keys)]
        with pytest.raises(ZeroDivisionError):
            ask(near, ["x", "y"], fails)
        assert own.cli("KEYS", "{*}l") == ""  # no lease is left
        assert ask(far, ["y", "x"], lambda keys: {"x": 3}) == {"x": 3}
        assert ask(near, ["x", "y"], load) == {"x": 3, "y": 1}
        # Two batches with common keys, in opposite order.
        other = threading.Thread(target=lambda: far.get_or_compute_many(["a", "b"], slow))
        other.start()
        assert begun.wait(PATIENCE)
        threading.Timer(0.1, done.set).start()
        assert ask(near, ["c", "b", "a"], load) == {"a": 2, "b": 2, "c": 1}
        other.join(PATIENCE)
        assert loads[-1] == ["c"]


def test_batches_in_opposite_order(server: RedisServer) -> None:
    """Batches in opposite order do not wait for each other until a lease ends."""
    caches = [Cache(server.url, early=0, lease=LONG) for _ in range(4)]
    loads: list[str] = []

    def load(keys: list[str]) -> dict[str, int]:
        loads.extend(keys)
        time.sleep(0.005)
        return dict.fromkeys(keys, 1)

    def live(number: int) -> None:
        for turn in range(10):
            keys = [f"{turn} {key}" for key in range(8)]
            order = keys[number:] + keys[:number] if number % 2 else keys[::-1]
            if number < 2:
                assert caches[number].get_or_compute_many(order, load) == dict.fromkeys(keys, 1)
            else:
                assert asyncio.run(caches[number].aget_or_compute_many(order, load)) == dict.fromkeys(keys, 1)

    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            live(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for cache in caches:
        cache.close()
    assert errors == []
    assert sorted(loads) == sorted(set(loads))


_CLOCKS = """
import sys, time
off = float(sys.argv[2])
real, monotonic, counter = time.time, time.monotonic, time.perf_counter
time.time, time.monotonic = lambda: real() + off, lambda: monotonic() + abs(off)
time.time_ns = lambda: int(time.time() * 1e9)
from stampede import Cache
cache = Cache(sys.argv[1] + "?socket_timeout=20", early=0, lease=30)
if off > 0:
    cache.set("k", 1, ttl=300)
    assert cache.get_or_compute("l", lambda: 2, ttl=300) == 2
else:
    kept = cache.peek("k")
    assert 200 < kept.fresh <= 300, kept
    assert cache.get_or_compute("k", lambda: 0) == 1
    assert cache.get_or_compute("l", lambda: 0) == 2
cache.close()
"""


def test_clocks_are_never_compared(server: RedisServer) -> None:
    """Promise 14: clocks of machines are never compared. If one is years off, entries still expire in time."""
    for off in ("1e8", "-1e8"):
        done = subprocess.run(
            [sys.executable, "-c", _CLOCKS, server.url, off], capture_output=True, text=True, timeout=PATIENCE
        )
        assert (done.returncode, done.stderr) == (0, "")


# -- waking -------------------------------------------------------------------------------------------------------


def waiting(engine: RedisEngine, busy: Busy) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(
        target=lambda: result.append(run(engine.blocking.claims.wait("k", busy, LONG))), daemon=True
    )
    thread.start()
    return thread, result


@pytest.mark.usefixtures("unaided")
def test_a_waiter_is_pushed_the_value(server: RedisServer, open_: Open) -> None:
    """A waiter is notified with the value. It neither waits for the safety poll nor asks again."""
    engine, other = open_(server.url), open_(server.url)
    token, entry = granted(engine), some(b"news")
    busy = claim(other)
    thread, result = waiting(other, busy)
    until(lambda: server.cli("PUBSUB", "NUMSUB", wire.names("k").channel).split()[-1] == "1")
    start = time.monotonic()
    assert run(engine.blocking.claims.fill("k", token, entry))
    thread.join(PATIENCE)
    assert time.monotonic() - start < SOON
    (found,) = result
    if found is not None:  # None: the fill came before the waiter listened
        assert (found.entry.id, found.entry.value) == (entry.id, b"news")
        assert 0 < found.entry.fresh <= LONG


@pytest.mark.usefixtures("unaided")
def test_what_was_told_before_anybody_listened_is_seen_at_once(server: RedisServer, open_: Open) -> None:
    """Promise 2: a change between a waiter's claim and its subscription is seen at once, not at the safety poll."""
    engine = open_(server.url)
    token = granted(engine)
    busy = claim(engine)
    run(engine.blocking.claims.fill("k", token, some()))
    start = time.monotonic()
    run(engine.blocking.claims.wait("k", busy, LONG))
    assert time.monotonic() - start < SOON


def test_news_of_an_older_lease_bring_no_value(server: RedisServer, open_: Open) -> None:
    """A message of an older lease brings no value: a late one would give an invalidated value to a later call."""
    entry = Entry(b"value", b"12345678", ttl=LONG, fresh=LONG, keep=LONG)
    message = b"12345678" + bytes(8) + wire.pack(entry, 60_000)
    assert wire.news_of(message, b"12345678") is not None
    assert wire.news_of(message, b"87654321") is None
    assert wire.news_of(b"87654321" + message[8:], b"87654321") is None  # any client can publish this
    assert wire.news_of(message[:20], b"12345678") is None


def asked(monitor: Any) -> list[str]:
    """The verbs that clients have sent since the monitor began, without those of the test and of the feed."""
    verbs = []
    while "the end" not in (heard := monitor.next_command())["command"]:
        verb = heard["command"].split()[0].upper()
        if heard["client_type"] != "lua" and verb in ("EVALSHA", "EVAL", "SUBSCRIBE", "GETEX"):
            verbs.append(verb)
    return sorted(verbs)


@pytest.mark.usefixtures("unaided")
@pytest.mark.parametrize("size", [100, 100_000])
def test_waiting_is_cheap(own: RedisServer, open_: Open, size: int) -> None:
    """The cost of waiting does not grow with time, and a waiter does not ask for a value that came with the message."""
    engine, other = open_(own.url), open_(own.url, tracking=False)
    assert run(engine.blocking.claims.fill("warm", granted(engine, "warm"), some()))  # the server knows the scripts
    token = granted(engine)
    with redis.Redis(port=own.port) as client, client.monitor() as monitor:
        busy = claim(other)
        thread, result = waiting(other, busy)
        until(lambda: "cmd=getex" in own.cli("CLIENT", "LIST"))  # the waiter has looked, and sleeps
        run(engine.blocking.claims.fill("k", token, Entry(bytes(size), token, ttl=LONG, fresh=LONG, keep=LONG)))
        thread.join(PATIENCE)
        (found,) = result
        if size > 4096:  # too large for a message
            assert found is None
            found = claim(other, awaited=busy.token)
        assert found.entry.value == bytes(size)
        own.cli("ECHO", "the end")
        # One engine claims, listens and looks; the other one fills.
        assert asked(monitor) == ["EVALSHA", "EVALSHA", *["EVALSHA"] * (size > 4096), "GETEX", "SUBSCRIBE"]


def test_without_channel_rights(own: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a user may not publish, a fill still ends its lease, and its waiters still see the value soon."""
    monkeypatch.setattr("stampede.engines.redis.verbs.SAFETY", LONG)  # they must not rely on messages
    own.cli("ACL", "SETUSER", "mute", "on", "nopass", "~*", "resetchannels", "+@all")
    url = own.url.replace("redis://", "redis://mute:x@")
    engine, other = open_(url), open_(url)
    token, entry = granted(engine), some()
    thread, _ = waiting(other, claim(other))
    assert run(engine.blocking.claims.fill("k", token, entry))
    assert own.cli("EXISTS", wire.names("k").lease) == "0"
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert ticket_of(other)  # tickets need no channel


WAKING: dict[str, Callable[[RedisEngine, bytes], Any]] = {
    "fill": lambda engine, token: engine.blocking.claims.fill("k", token, some()),
    "large fill": lambda engine, token: engine.blocking.claims.fill("k", token, some(bytes(10_000))),
    "abandon": lambda engine, token: engine.blocking.claims.abandon("k", token),
    "invalidate": lambda engine, _: engine.blocking.store.invalidate("k"),
    "expire": lambda engine, _: engine.blocking.store.expire("k"),
    "set": lambda engine, _: engine.blocking.store.set("k", some()),
    "replace": lambda engine, _: engine.blocking.store.replace("k", None, some()),
    "force": lambda engine, _: engine.blocking.claims.claim("k", new_id(), Ask(LONG, force=True)),
}


@pytest.mark.usefixtures("unaided")
@pytest.mark.parametrize("change", list(WAKING))
def test_each_change_wakes_at_once(server: RedisServer, open_: Open, change: str) -> None:
    """Promise 2: each change wakes the waiters at once, not only at the safety poll."""
    engine, other = open_(server.url), open_(server.url)
    token = granted(other)
    busy = claim(engine)
    thread, _ = waiting(engine, busy)
    loop = threading.Thread(target=lambda: asyncio.run(asleep(engine, busy)), daemon=True)
    loop.start()
    until(lambda: ears(engine) == 2)
    run(WAKING[change](other, token))
    for each in (thread, loop):
        each.join(PATIENCE)
        assert not each.is_alive()


async def asleep(engine: RedisEngine, busy: Busy) -> None:
    await engine.suspending.claims.wait("k", busy, LONG)


def ears(engine: RedisEngine) -> int:
    """How many waiters listen to a channel that is subscribed."""
    return sum(
        len(channel.listeners) for channel in list(engine._servers.news._channels.values()) if channel.subscribed
    )


@pytest.mark.usefixtures("unaided")
def test_a_released_lock_wakes_at_once(server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release of a lock wakes its waiter at once."""
    monkeypatch.setattr("stampede.engines.redis.locks.TURN", LONG)  # otherwise the waiter would look again soon
    engine, other = open_(server.url), open_(server.url)
    holder, token = new_id(), new_id()
    run(other.blocking.locks.acquire("l", holder, LONG))
    busy = run(engine.blocking.locks.acquire("l", token, LONG))
    assert isinstance(busy, Busy)
    thread = threading.Thread(target=lambda: run(engine.blocking.locks.wait("l", busy, LONG)), daemon=True)
    thread.start()
    until(lambda: ears(engine) == 1)
    start = time.monotonic()
    assert run(other.blocking.locks.release("l", holder))
    thread.join(PATIENCE)
    assert time.monotonic() - start < SOON


@pytest.mark.usefixtures("unaided")
def test_cancelled_waiters_leave_nothing(server: RedisServer, open_: Open) -> None:
    """Promise 12: cancelled waiters leave no listener, and other waiters are still woken."""
    engine, other = open_(server.url), open_(server.url)
    token = granted(other)
    busy = claim(engine)

    async def tasks() -> None:
        for doze in (0.0, 0.001, 0.02):
            waiters = [asyncio.ensure_future(asleep(engine, busy)) for _ in range(50)]
            await asyncio.sleep(doze)  # while they subscribe, look, or park
            for waiter in waiters[:-1]:
                waiter.cancel()
            await asyncio.gather(*waiters[:-1], return_exceptions=True)
            assert sum(len(channel.listeners) for channel in list(engine._servers.news._channels.values())) <= 1
            waiters[-1].cancel()
        last = asyncio.ensure_future(asleep(engine, busy))
        while not ears(engine):
            await asyncio.sleep(0.001)
        start = time.monotonic()
        await other.suspending.claims.abandon("k", token)
        await last
        assert time.monotonic() - start < SOON

    asyncio.run(tasks())
    assert ears(engine) == 0


@pytest.mark.usefixtures("unaided")
def test_a_process_listens_once(server: RedisServer, open_: Open) -> None:
    """All waiters of a process, in both colours, share one subscription."""
    engine, other = open_(server.url), open_(server.url)
    token = granted(other)
    busy = claim(engine)
    threads = [waiting(engine, busy)[0] for _ in range(4)]

    async def tasks() -> None:
        await asyncio.gather(*[engine.suspending.claims.wait("k", busy, LONG) for _ in range(20)])

    loop = threading.Thread(target=lambda: asyncio.run(tasks()), daemon=True)
    loop.start()
    until(lambda: ears(engine) == 24)
    until(lambda: server.cli("PUBSUB", "NUMSUB", wire.names("k").channel).split()[-1] == "1")  # an earlier test's ends
    assert run(other.blocking.claims.fill("k", token, some()))
    for thread in (*threads, loop):
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_message_that_never_came(server: RedisServer, open_: Open) -> None:
    """If a notification is lost, the safety poll wakes the waiters. They do not sleep until the lease ends."""
    engine, other = open_(server.url), open_(server.url)
    granted(other)
    busy = claim(engine)
    thread, _ = waiting(engine, busy)
    loop = threading.Thread(target=lambda: asyncio.run(asleep(engine, busy)), daemon=True)
    loop.start()
    until(lambda: ears(engine) == 2 or not (thread.is_alive() and loop.is_alive()))  # it may have polled already
    server.cli("DEL", wire.names("k").lease)  # this sends no notification
    start = time.monotonic()
    for each in (thread, loop):
        each.join(PATIENCE)
    assert time.monotonic() - start < SOON
    assert isinstance(claim(engine), Granted)


@pytest.mark.usefixtures("unaided")
def test_waiters_are_woken_when_the_news_break(own: RedisServer, open_: Open) -> None:
    """If the connection for notifications ends, waiters are woken, because they may have missed one."""
    engine = open_(own.url)
    token = granted(engine)
    busy = claim(engine)
    thread, _ = waiting(engine, busy)
    until(lambda: own.cli("PUBSUB", "NUMSUB", wire.names("k").channel).split()[-1] == "1")
    start = time.monotonic()
    own.cli("CLIENT", "KILL", "TYPE", "pubsub")
    thread.join(PATIENCE)
    assert time.monotonic() - start < SOON
    until(lambda: engine._servers.news.reporter)
    thread, _ = waiting(engine, busy)  # waiters listen again
    until(lambda: own.cli("PUBSUB", "NUMSUB", wire.names("k").channel).split()[-1] == "1")
    run(engine.blocking.claims.abandon("k", token))
    thread.join(PATIENCE)
    assert not thread.is_alive()


# -- tickets ------------------------------------------------------------------------------------------------------


def holds(ticket: Ticket) -> bool:
    return ticket.stamps[ticket.slot] == ticket.stamp


def ticket_of(engine: RedisEngine, key: str = "k") -> Ticket:
    """Wait for a valid ticket: the feed may not listen yet, or an earlier change may end the first ones."""

    def found() -> Ticket | None:
        reply = claim(engine, key)
        return reply.ticket if isinstance(reply, Found) and reply.ticket and holds(reply.ticket) else None

    ticket: Ticket = until(found)
    return ticket


async def ticket_of_a_loop(engine: RedisEngine) -> Ticket:
    while True:
        reply = await engine.suspending.claims.claim("k", new_id(), Ask(LONG))
        assert isinstance(reply, Found)
        if reply.ticket is not None and holds(reply.ticket):
            return reply.ticket
        await asyncio.sleep(0.002)


CHANGES: dict[str, Callable[[RedisServer, RedisEngine], object]] = {
    "DEL": lambda server, _: server.cli("DEL", wire.names("k").entry),
    "FLUSHALL": lambda server, _: server.cli("FLUSHALL"),
    "end": lambda server, _: server.cli("PEXPIRE", wire.names("k").entry, "1"),
    "set": lambda _, other: run(other.blocking.store.set("k", some())),
    "expire": lambda _, other: run(other.blocking.store.expire("k")),
    "invalidate": lambda _, other: run(other.blocking.store.invalidate("k")),
    "fill": lambda _, other: run(other.blocking.claims.fill("k", _forced(other), some())),
}


def _forced(engine: RedisEngine) -> bytes:
    token = new_id()
    claim(engine, token=token, force=True)
    return token


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("suspending", [False, True])
def test_a_change_voids_the_ticket(server: RedisServer, open_: Open, change: str, suspending: bool) -> None:
    """A change ends the ticket. Otherwise a local tier would serve the old value until it expires."""
    engine, other = open_(server.url), open_(server.url)
    run(engine.blocking.store.set("k", some()))

    async def scenario() -> None:
        ticket = await ticket_of_a_loop(engine) if suspending else ticket_of(engine)
        time.sleep(0.05)
        assert holds(ticket)  # nothing else ends it
        CHANGES[change](server, other)
        until(lambda: not holds(ticket))

    asyncio.run(scenario())


@pytest.mark.usefixtures("steady")
def test_a_fill_has_a_ticket_until_the_next_change(server: RedisServer, open_: Open) -> None:
    """A filled value has a ticket until its next change, so that the local tier can keep it without a new read."""
    engine, other = open_(server.url), open_(server.url)
    run(engine.blocking.store.set("k", some()))
    ticket_of(engine)
    # Also if another connection has claimed: then the server tracks only the fill.
    for change, claimed in product(("DEL", "invalidate", "fill"), (engine, other)):
        ticket = run(engine.blocking.claims.fill("k", _forced(claimed), some()))
        assert isinstance(ticket, Ticket)
        until(lambda ticket=ticket: holds(ticket))
        CHANGES[change](server, other)
        until(lambda ticket=ticket: not holds(ticket))


@pytest.mark.usefixtures("steady")
def test_a_miss_sends_two_commands(server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss sends two commands. The ticket of its fill needs no further round trip."""
    engine, sent = open_(server.url), [0]
    run(engine.blocking.store.set("followed", some()))
    ticket_of(engine, "followed")
    exchange = blocking._Wires.exchange

    def counted(wires: Any, wire: Any, commands: Any) -> Any:
        sent[0] += len(commands)
        return exchange(wires, wire, commands)

    monkeypatch.setattr(blocking._Wires, "exchange", counted)
    assert isinstance(run(engine.blocking.claims.fill("k", granted(engine), some())), Ticket)
    assert sent == [2]


@pytest.mark.parametrize("early", [True, False])
def test_only_the_first_news_begin_the_ticket_of_a_fill(*, early: bool) -> None:
    """Only the first notification after a fill starts its ticket; later ones end it. Otherwise a local tier would serve
    a removed value. With `early`, the first one comes before the reply."""
    news = RedisNews(RedisConnector("redis://", "Connection", {}))

    def told(slot: int) -> None:
        news.changed(wire.names("k").entry)

    slot = wire.names("k").slot
    for void in (None, told, news.void, lambda slot: news.void_all()):
        sample = news.stamps[slot]
        if early:
            told(slot)
        ticket = news.stored(slot, sample)
        assert ticket is not None
        assert holds(ticket) == early
        if void is not None:
            void(slot)
            if not early and void == told:
                assert holds(ticket)  # this may be an older change; then the fill's own notification follows
                void(slot)
            assert not holds(ticket)
        if not early:
            told(slot)
            assert holds(ticket) == (void is None)
    sample = news.stamps[slot]
    told(slot)
    told(slot)
    assert news.stored(slot, sample) is None


def test_what_was_read_while_a_fill_was_under_way_has_no_ticket() -> None:
    """A value that was read while a fill was under way has no valid ticket: it may be older than the filled one."""
    news = RedisNews(RedisConnector("redis://", "Connection", {}))
    sample = news.stamps[7]
    older = news.ticket(7, sample)
    assert news.stored(7, sample) is not None
    assert not holds(older)


def test_eviction_voids_the_ticket(open_: Open) -> None:
    """If a full server evicts an entry, its ticket ends."""
    small = RedisServer("--maxmemory-policy", "allkeys-random")
    try:
        engine = open_(small.url)
        run(engine.blocking.store.set("k", some()))
        ticket = ticket_of(engine)
        small.cli("CONFIG", "SET", "maxmemory", "1")
        until(lambda: small.cli("DBSIZE") == "0")
        until(lambda: not holds(ticket))
    finally:
        small.close()


@pytest.mark.usefixtures("steady")
def test_one_key_s_news_are_no_other_s(server: RedisServer, open_: Open) -> None:
    """Writes to other keys do not end a ticket. Otherwise each of them would empty the local tiers."""
    engine, other = open_(server.url), open_(server.url)
    run(engine.blocking.store.set("k", some()))
    ticket = ticket_of(engine)
    before = list(engine._servers.news.stamps)
    for number in range(100):
        run(other.blocking.store.set(f"other {number}", some()))
    token = granted(engine, "mine")
    run(engine.blocking.claims.renew("mine", token, LONG))
    run(engine.blocking.claims.abandon("mine", token))
    run(engine.blocking.store.set("mine", some()))  # no reader has found it yet
    engine.ping()
    assert holds(ticket)
    changed = [slot for slot, stamp in enumerate(before) if engine._servers.news.stamps[slot] != stamp]
    assert changed in ([], [wire.names("mine").slot])


def test_losing_the_news_voids_all(own: RedisServer, open_: Open) -> None:
    """If the connection for notifications is lost, all tickets end, because changes are missed meanwhile."""
    engine = open_(own.url)
    run(engine.blocking.store.set("k", some()))
    ticket, told = ticket_of(engine), engine._servers.news.reporter
    own.cli("CLIENT", "KILL", "ID", str(told))
    until(lambda: not holds(ticket))
    again = ticket_of(engine)
    assert engine._servers.news.reporter not in (0, told)
    run(open_(own.url).blocking.store.set("k", some()))
    until(lambda: not holds(again))


@pytest.mark.parametrize(
    "reader", ["asked again", "left alone", "of a loop", "of a loop at rest", "of an uvloop at rest"]
)
def test_losing_a_reader_voids_all(server: RedisServer, open_: Open, reader: str) -> None:
    """If a connection that has read values ends, its tickets end: the server no longer notifies their changes."""
    engine = open_(server.url)
    run(engine.blocking.store.set("k", some()))

    def cut() -> None:
        for line in server.cli("CLIENT", "LIST").splitlines():
            fields = dict(field.partition("=")[::2] for field in line.split())
            if "t" in fields["flags"]:  # the server tracks its reads
                server.cli("CLIENT", "KILL", "ID", fields["id"])

    async def of_a_loop() -> None:
        ticket = await ticket_of_a_loop(engine)
        cut()
        await engine.suspending.store.get(["other"])
        assert not holds(ticket)

    if reader == "of a loop":
        asyncio.run(of_a_loop())
        return
    if reader.endswith("at rest"):
        factory = pytest.importorskip("uvloop").new_event_loop if "uvloop" in reader else None
        with asyncio.Runner(loop_factory=factory) as runner:
            ticket = runner.run(ticket_of_a_loop(engine))
            cut()
            until(lambda: not holds(ticket))
        return
    ticket = ticket_of(engine)
    cut()
    if reader == "asked again":
        run(engine.blocking.store.get(["other"]))
        assert not holds(ticket)
    else:
        until(lambda: not holds(ticket))


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_leaving_a_reader_voids_all(
    server: RedisServer, open_: Open, before: Callable[[RedisServer], Proxy], colour: str, hurry: Hurry
) -> None:
    """If a reader is given up after a timeout, its tickets end: the server may close that connection unnoticed."""
    proxy = before(server)
    engine = open_(proxy.url)
    engine._servers.news._readers.ended = lambda: False  # the thread that watches readers is late
    run(engine.blocking.store.set("k", some()))

    async def of_a_loop() -> None:
        ticket = await ticket_of_a_loop(engine)
        proxy.at(b"hung", answered=0, silent=True)
        hurry(engine._servers)
        with pytest.raises(EngineError):
            await engine.suspending.store.get(["hung"])
        assert not holds(ticket)  # already before the loop ends

    if colour == "async":
        asyncio.run(of_a_loop())
    else:
        ticket = ticket_of(engine)
        proxy.at(b"hung", answered=0, silent=True)
        hurry(engine._servers)
        with pytest.raises(EngineError):
            run(engine.blocking.store.get(["hung"]))
        assert not holds(ticket)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_only_entries_are_followed(own: RedisServer, open_: Open, colour: str) -> None:
    """The server tracks only entries and generations. It must not track each lease, and four keys for each entry."""

    def followed() -> int:
        return int(own.cli("INFO", "stats").split("tracking_total_keys:")[1].split()[0])

    with Cache(own.url) as writer, Cache(own.url, local=True) as reader:
        writer.set_many({f"one{number}": 1 for number in range(20)})
        writer.set_many({f"many{number}": 1 for number in range(20)})

        async def asked() -> None:
            for number in range(20):
                await reader.aget_or_compute(f"one{number}", lambda: 0)
                await reader.aget_or_compute(f"none{number}", lambda: 0)

        def hit() -> bool:
            reader.get_or_compute("warm", lambda: 1)
            return reader.stats().hits > 0

        until(hit)  # from now on changes are notified
        before = followed()
        if colour == "async":
            asyncio.run(asked())
        else:
            for number in range(20):
                reader.get_or_compute(f"one{number}", lambda: 0)
                reader.get_or_compute(f"none{number}", lambda: 0)
        reader.get_or_compute_many([f"many{number}" for number in range(20)], lambda missing: {})
        assert 20 < followed() - before <= 62  # the generations of functions, too


def test_an_own_change_voids_the_ticket_before_its_news(server: RedisServer, open_: Open) -> None:
    """The process that changes a key ends its own ticket at once, before the notification arrives."""
    engine = open_(server.url)
    engine._servers.news.changed = lambda key: None  # notifications are late
    for change in (lambda: engine.blocking.store.set("k", some()), lambda: engine.blocking.store.invalidate("k")):
        run(engine.blocking.store.set("k", some()))
        ticket = ticket_of(engine)
        run(change())
        assert not holds(ticket)


def test_a_bump_voids_all_tickets(server: RedisServer, open_: Open) -> None:
    """A bump of all scopes ends all tickets. That of one scope ends the ticket of its generation, and no other."""
    engine, other = open_(server.url), open_(server.url)
    run(engine.blocking.store.set("k", some()))

    def ends_only_its_own() -> bool:
        ticket = ticket_of(engine)
        for scope in ("f", "g"):
            run(engine.blocking.store.generations(scope))  # from now on the next bump is notified
        own, others = (engine.recalls.ticket_of_generation(scope) for scope in ("f", "g"))
        if own is None or others is None:
            return False
        run(other.blocking.store.bump("f"))
        until(lambda: not holds(own))
        return holds(ticket) and holds(others)

    until(ends_only_its_own)  # the first time, the news begin just now, which ends all tickets
    ticket = ticket_of(engine)
    run(other.blocking.store.bump(""))
    until(lambda: not holds(ticket))


def test_silent_news_void_all(own: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server is silent, all tickets end: a server that hangs, or a cut cable, closes no connection."""
    monkeypatch.setattr("stampede.engines.kit.feed.TICK", 0.2)
    engine = open_(own.url)
    run(engine.blocking.store.set("k", some()))
    ticket = ticket_of(engine)
    own.freeze()
    try:
        until(lambda: not holds(ticket) and engine._servers.news.reporter == 0)
    finally:
        own.thaw()
    assert ticket_of(engine)


@pytest.mark.usefixtures("steady")
def test_what_was_true_when_the_server_hung_is_served_as_stale(own: RedisServer, hurry: Hurry) -> None:
    """If server and origin both fail, a value that was valid when the server hung is served as stale."""

    def fail() -> int:
        raise LookupError("the origin is down, too")

    with Cache(own.url, ttl=0.3, stale=60, early=0, local=True) as cache:
        until(lambda: cache.get_or_compute("k", lambda: 42) and cache.stats().hits)
        until(lambda: cache.peek("k").fresh <= 0)  # type: ignore[union-attr]
        own.freeze()
        hurry(cache.engine._servers)  # type: ignore[attr-defined]
        try:
            assert [cache.get_or_compute("k", fail) for _ in range(3)] == [42] * 3
        finally:
            own.thaw()


def test_what_has_changed_since_a_reader_was_lost_is_not_remembered_as_true() -> None:
    """A value that has changed since its reader was lost is not served as stale in an outage."""
    stamps = NewsStamps.of(2)
    stamps.find()
    stamps.lose()
    stamps.void_all()
    stamps.void(1)
    assert [stamps.stood(slot, 0) for slot in range(2)] == [True, False]
    stamps.heard = time.monotonic() + 2 * SOON_LOST
    assert not stamps.stood(0, 0)


def test_a_connection_that_we_have_closed_is_no_loss_of_the_server() -> None:
    """If the engine closes a connection, values read over it are not served as stale: they may have changed since."""
    stamps = NewsStamps.of(1)
    stamps.find()
    stamps.lose()  # another connection has ended
    stamps.forget()
    assert not stamps.stood(0, 0)
    stamps.void_all()
    later = stamps[0]
    stamps.lose()
    assert not stamps.stood(0, 0)
    assert stamps.stood(0, later)


def test_news_that_overtake_the_reply_void_its_ticket(server: RedisServer, open_: Open) -> None:
    """If a notification arrives before the reply that it concerns, the reply has no valid ticket."""
    engine = open_(server.url)
    run(engine.blocking.store.set("k", some()))
    ticket_of(engine)
    ask_all = engine._servers.line.ask_all

    async def slow(commands: Any, **options: Any) -> Any:
        reply = await ask_all(commands, **options)
        before = engine._servers.news.stamps[wire.names("k").slot]
        server.cli("DEL", wire.names("k").entry)
        until(lambda: engine._servers.news.stamps[wire.names("k").slot] != before)
        return reply

    engine._servers.line.ask_all = slow  # type: ignore[method-assign]
    reply = claim(engine)
    assert isinstance(reply, Found)
    assert reply.ticket is None or not holds(reply.ticket)


@pytest.mark.usefixtures("steady")
def test_a_loop_s_first_answer_has_a_ticket(server: RedisServer, open_: Open) -> None:
    """The first answer in a new loop has a ticket. Otherwise a program with a loop per request would keep nothing."""
    engine = open_(server.url)
    run(engine.blocking.store.set("k", some()))
    ticket_of(engine)  # from now on this process is notified
    for _ in range(3):
        reply = asyncio.run(engine.suspending.claims.claim("k", new_id(), Ask(LONG)))
        assert isinstance(reply, Found) and reply.ticket is not None


def test_no_tickets_where_nothing_is_tracked(server: RedisServer, open_: Open) -> None:
    """With `tracking=False` there are no tickets, because changes are not notified."""
    engine = open_(server.url, tracking=False)
    assert not engine.coherent
    run(engine.blocking.store.set("k", some()))
    for _ in range(3):
        assert claim(engine).ticket is None
    assert engine._servers.news._thread is None


def test_a_bump_is_pushed(server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bump is pushed to other processes. They do not ask for the generation at every call."""
    for belief in ("KNOWN", "BRIEFLY"):  # only a notification ends it
        monkeypatch.setattr(f"stampede.engines.kit.generations.{belief}", inf)
    engine, other = open_(server.url), open_(server.url)

    def pushed() -> bool:
        generation_of(other, "f")
        known = other._servers.generations._known["f"]
        if known[1] is None:
            other._servers.generations.forget("")
        return known[1] is not None

    until(pushed)
    before = generation_of(other, "f")
    line, asked = other._servers.line, list[Any]()  # only this engine's questions, not those of other tests
    ask_all = line.ask_all
    monkeypatch.setattr(line, "ask_all", lambda *args, **options: (asked.append(args), ask_all(*args, **options))[1])

    def believed() -> bool:
        """Whether none of a hundred calls asks. The news may be late just now, and then each of them does."""
        asked.clear()
        assert {generation_of(other, "f") for _ in range(100)} == {before}
        return not asked

    until(believed)
    run(engine.blocking.store.bump("f"))
    until(lambda: generation_of(other, "f") != before)
    assert asked


@pytest.mark.parametrize("lost", ["all", "evicted"])
def test_a_generation_that_was_lost_is_a_new_one(server: RedisServer, open_: Open, lost: str) -> None:
    """If the server loses a generation, a new one is made. Otherwise invalidated values would be found again."""
    before = generation_of(open_(server.url), "f")
    for key in server.cli("KEYS", "*").split():
        if lost == "all" or "@" not in server.cli("GET", key):  # the note of the server's run stays
            server.cli("DEL", key)
    assert generation_of(open_(server.url), "f") != before


def test_a_local_tier_follows(server: RedisServer) -> None:
    """A cache with a local tier serves a value from memory until another cache changes it."""
    near, far = Cache(server.url, local=True), Cache(server.url, local=True)
    try:
        assert near.get_or_compute("k", lambda: 1) == 1

        def served_from_memory() -> bool:
            before = calls(server)
            return far.get_or_compute("k", lambda: 2) == 1 and calls(server) == before

        until(served_from_memory)
        near.set("k", 3)
        until(lambda: far.get_or_compute("k", lambda: 4) == 3)
    finally:
        near.close()
        far.close()


# -- locks --------------------------------------------------------------------------------------------------------


def test_nobody_starves(server: RedisServer) -> None:
    """A holder that takes its lock again at once does not keep the other waiters out."""
    entered: dict[str, int] = {"greedy": 0, "a": 0, "b": 0}
    done = threading.Event()

    def visit(name: str, times: int) -> None:
        lock = Lock("l", on=server.url, wait=PATIENCE)
        while not done.is_set() and entered[name] < times:
            with lock:
                entered[name] += 1
        if name != "greedy" and min(entered["a"], entered["b"]) >= times:
            done.set()

    threads = [threading.Thread(target=visit, args=args) for args in (("greedy", 10**9), ("a", 20), ("b", 20))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(PATIENCE)
    done.set()
    threads[0].join(PATIENCE)
    assert entered["a"] == entered["b"] == 20


def test_fences_grow_over_a_flush(server: RedisServer, open_: Open) -> None:
    """Fences grow even if the server loses its counter. Otherwise a resource would accept an old holder."""
    engine = open_(server.url)
    fences = []
    for _ in range(3):
        reply = run(engine.blocking.locks.acquire("l", new_id(), LONG))
        assert isinstance(reply, Granted)
        fences.append(reply.fence)
        time.sleep(0.002)  # the server's clock counts ms
        server.cli("FLUSHALL")
    assert fences == sorted(set(fences))


def test_a_lease_is_not_older_than_it_is(server: RedisServer, open_: Open) -> None:
    """A new lease is not idle. Otherwise a server that evicts idle keys could evict it at once."""
    engine = open_(server.url)
    first, second = (f"idle {new_id().hex()}" for _ in range(2))

    def idle(key: str) -> int:
        return int(server.cli("OBJECT", "IDLETIME", wire.names(key).lease))

    for _ in range(2):
        claim(engine, first)  # the second is refused, and its token is kept for reuse
    until(lambda: idle(first) >= 2)
    granted(engine, second)
    assert idle(second) + 2 <= idle(first)


def test_a_closed_cache_leaves_nothing_open(server: RedisServer) -> None:
    """A closed cache leaves no descriptors open."""

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with Cache(server.url, local=True) as cache:
        assert cache.get_or_compute("k", lambda: 1) == 1
        assert asyncio.run(cache.aget_or_compute("k", lambda: 2)) == 1
    until(lambda: descriptors() <= before)  # a thread of another test may still have one


def test_who_waits_for_a_connection_waits_as_long_as_it_goes_from_hand_to_hand(
    server: RedisServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a connection is not limited by `timeout` as long as other callers keep using it in turn."""
    engine = open_(server.url, max_connections=1, timeout=2.0)
    exchange = blocking._Wires.exchange

    def slow(wires: Any, wire: Any, commands: Any) -> Any:
        time.sleep(0.1)
        return exchange(wires, wire, commands)

    monkeypatch.setattr(blocking._Wires, "exchange", slow)
    with ThreadPoolExecutor(30) as threads:  # the last one waits for longer than `timeout`
        assert list(threads.map(lambda _: run(engine.blocking.store.get(["k"])), range(30))) == [[None]] * 30
