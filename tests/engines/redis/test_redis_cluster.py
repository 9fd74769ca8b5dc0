"""The Redis engine over a cluster: the suites for every engine, and slots that move and masters that die."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import pytest

pytest.importorskip("redis")

import redis
import redis.asyncio
from child import Child
from known_generation import generation_of
from redis.crc import key_slot
from servers import PATIENCE, RedisCluster, RedisServer, free_port, is_redis_6, missing, shared_cluster, wait_until

from stampede import Cache, Lock
from stampede.engines import open_engine
from stampede.engines.kit import generations
from stampede.engines.redis import RedisEngine, wire
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.events import EngineDown, EngineUp, Event
from stampede.model.breaker import Breaker
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Asked, Busy, Engine, Found, Granted, Ticket
from stampede.runtime.colour import run_blocking as run
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite

LONG = 60.0


@cache
def _engines() -> tuple[Engine, Engine]:
    return RedisEngine(shared_cluster().url), RedisEngine(shared_cluster().url)


class TestRedisCluster(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1

    def make_engine(self) -> Engine:
        shared_cluster().flush()
        return _engines()[0]

    def make_peer(self, engine: Engine) -> Engine:
        return _engines()[1]

    def drop_engine(self, engine: Engine) -> None:
        """Leave the engine open: to learn where the slots are takes longer than most cases."""


class TestRedisClusterAsync(StoreSuite):  # leases and locks in this colour are tested with one server
    suspending, short = True, TestRedisCluster.short

    make_engine, make_peer = TestRedisCluster.make_engine, TestRedisCluster.make_peer
    drop_engine = TestRedisCluster.drop_engine


@pytest.fixture
def cluster() -> RedisCluster:
    """The session's cluster, emptied."""
    shared = shared_cluster()
    shared.flush()
    return shared


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Callable[..., RedisEngine]:
    """Open engines that are closed at the end."""

    def opened(url: str, **options: Any) -> RedisEngine:
        engine = RedisEngine(url, **{"tracking": True, **options})
        request.addfinalizer(engine.close)
        return engine

    return opened


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs follow a slot that is being moved for as long as that takes."""
    monkeypatch.setattr("stampede.engines.redis.cluster.PATIENCE", PATIENCE)


@pytest.fixture
def move(cluster: RedisCluster, following: None) -> Iterator[Move]:
    """A move of the slot of the key `k` to the next server. The slot is moved back at the end."""
    mine = Move(cluster, "k")
    yield mine
    if cluster.owner(mine.slot) is not mine.source:
        Move(cluster, "k", to=mine.source).whole()


class Move:
    def __init__(self, cluster: RedisCluster, key: str, to: RedisServer | None = None) -> None:
        self._cluster = cluster
        self.slot = key_slot(wire.names(key).entry)
        self.source = cluster.owner(self.slot)
        self.target = to or cluster.nodes[(cluster.nodes.index(self.source) + 1) % len(cluster.nodes)]

    def begin(self) -> None:
        self._cluster.begin_move(self.slot, self.source, self.target)

    def end(self) -> None:
        self._cluster.end_move(self.slot, self.source, self.target)

    def whole(self) -> None:
        self.begin()
        self.end()


Open = Callable[..., RedisEngine]
Hurry = Callable[[Any], None]


def some(value: bytes = b"value", fresh: float = LONG) -> Entry[Any]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh)


def claim(engine: RedisEngine, key: str = "k", token: bytes | None = None, **terms: Any) -> Any:
    return run(engine.blocking.claims.claim(key, token or new_id(), Ask(LONG, **terms)))


def holds(ticket: Ticket) -> bool:
    return ticket.stamps[ticket.slot] == ticket.stamp


def ticket_of(engine: RedisEngine, key: str = "k") -> Ticket:
    """Wait for a valid ticket: the first ones may come before the feed listens."""
    found: list[Ticket] = []

    def look() -> bool:
        reply = claim(engine, key)
        found[:] = [reply.ticket] if isinstance(reply, Found) and reply.ticket and holds(reply.ticket) else []
        return bool(found)

    wait_until(look)
    return found[0]


class Aside:
    """A function that runs in a thread. `join` returns its result, or raises its error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def join(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result


def listens(engine: RedisEngine) -> bool:
    """Whether a waiter listens to a channel that is subscribed."""
    channels = [
        each for shard in list(engine._servers._shards.values()) for each in list(shard.news._channels.values())
    ]
    return any(channel.subscribed and channel.listeners for channel in channels)


# -- addresses ----------------------------------------------------------------------------------------------------


def test_one_server_is_enough_to_find_all(cluster: RedisCluster, open_: Open) -> None:
    """One server of the URL that answers is enough to find the whole cluster."""
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.nodes[1].port}"
    engine = open_(url)
    for number in range(20):
        key, token = f"k{number}", new_id()
        assert isinstance(claim(engine, key, token), Granted)
        assert run(engine.blocking.claims.fill(key, token, some()))
    assert all(int(node.cli("DBSIZE")) > 0 for node in cluster.nodes)
    assert 0 < engine.ping() < PATIENCE


@pytest.mark.parametrize(
    "url, says",
    [
        ("redis+cluster://", "host:port,host:port"),
        ("redis+cluster://h:1,,g:2", "host:port,host:port"),
        ("redis+cluster://u:secret@h:http", "'http' is not a port"),
        ("redis+cluster://h:70000", "'70000' is not a port"),
        ("redis+cluster://u:secret@h:1/3", "only database 0"),
        ("redis+cluster://h:1?db=3", "only database 0"),
        ("redis+cluster://h:1?socket_timeout=soon", "socket_timeout"),
        ("redis+cluster://h:1?sokket_timeout=1", "sokket_timeout"),
        ("redis+cluster://h:1?ssl=maybe", "ssl"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(url: str, says: str) -> None:
    """A wrong address is refused when the engine is made, and the message shows no password."""
    with pytest.raises(OptionError, match=says) as wrong:
        open_engine(url)
    assert "secret" not in str(wrong.value)


def test_nobody_there_is_an_engine_error(open_: Open) -> None:
    """If no server can be reached, each call fails with an EngineError, so that it counts as an outage."""
    engine = open_(f"redis+cluster://127.0.0.1:{free_port()}")
    with pytest.raises(EngineError, match="which slot"):
        claim(engine)
    with pytest.raises(EngineError, match="which slot"):
        engine.ping()
    assert engine.many is not None
    (answer,) = engine.many.ask_many([Asked("claim", ("k", new_id(), Ask(LONG)))])
    assert isinstance(answer, EngineError)


def test_a_server_without_cluster_says_so(open_: Open) -> None:
    """If a server has no cluster support, the error says so. It does not look like an outage."""
    server = RedisServer()
    try:
        with pytest.raises(EngineError, match="cluster support disabled"):
            claim(open_(f"redis+cluster://127.0.0.1:{server.port}"))
    finally:
        server.close()


def test_a_client_leads_to_its_cluster(cluster: RedisCluster) -> None:
    """A client of a cluster leads the engine to all its servers, and remains open when the engine is closed."""
    port = cluster.nodes[0].port
    client = redis.RedisCluster(host="127.0.0.1", port=port, socket_timeout=3)
    suspending = redis.asyncio.RedisCluster(host="127.0.0.1", port=port)
    for each in (client, suspending):
        cluster.flush()
        engine = RedisEngine(client=each)
        assert all(isinstance(claim(engine, f"k{number}"), Granted) for number in range(20))
        assert all(int(node.cli("DBSIZE")) > 0 for node in cluster.nodes)
        engine.close()
    assert client.ping(target_nodes="primaries")  # the engine has not closed it
    client.close()


# -- many keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_many_claims_are_one_question_to_each_shard(cluster: RedisCluster, open_: Open, colour: str) -> None:
    """A batch over several shards returns the right answer for each key."""
    engine = open_(cluster.url)
    keys = [f"k{number}" for number in range(60)]
    for key in keys[::2]:
        run(engine.blocking.store.set(key, some(key.encode())))
    replies = engine.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in keys])
    kept = asyncio.run(engine.suspending.store.get(keys)) if colour == "async" else run(engine.blocking.store.get(keys))
    assert [reply.entry and reply.entry.value for reply in replies[::2]] == [key.encode() for key in keys[::2]]
    assert all(isinstance(reply, Granted) for reply in replies[1::2])
    assert [entry and entry.value for entry in kept[::2]] == [key.encode() for key in keys[::2]]


def test_a_batch_with_a_key_that_has_moved(cluster: RedisCluster, open_: Open, move: Move) -> None:
    """A batch with a key that has moved returns the answers of all its keys."""
    engine = open_(cluster.url)
    keys = ["k", *(f"k{number}" for number in range(20))]
    for key in keys:
        run(engine.blocking.store.set(key, some(key.encode())))
    move.whole()
    replies = engine.many.ask_many([Asked("claim", (key, new_id(), Ask(LONG))) for key in keys])
    assert [reply.entry.value for reply in replies] == [key.encode() for key in keys]


# -- slots that move ----------------------------------------------------------------------------------------------


def test_a_moved_key_is_found_where_it_is(cluster: RedisCluster, open_: Open, move: Move) -> None:
    """After a slot has moved, its keys are found at the new server."""
    engine = open_(cluster.url)
    token = new_id()
    assert isinstance(claim(engine, token=token), Granted)
    move.whole()
    assert isinstance(claim(engine), Busy)  # the lease has moved too
    assert run(engine.blocking.claims.fill("k", token, some()))
    assert isinstance(claim(engine), Found)
    assert run(engine.blocking.store.invalidate("k"))


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_verbs_follow_a_slot_on_its_way(cluster: RedisCluster, open_: Open, move: Move, colour: str) -> None:
    """While a slot moves, a fill is redirected or tried again until it is stored."""
    engine, token = open_(cluster.url), new_id()
    assert isinstance(claim(engine, token=token), Granted)
    before = int(stat(move.source, "total_error_replies"))
    move.begin()

    async def suspending() -> bool:
        return await engine.suspending.claims.fill("k", token, some())

    asked = Aside(
        lambda: asyncio.run(suspending()) if colour == "async" else run(engine.blocking.claims.fill("k", token, some()))
    )
    wait_until(lambda: int(stat(move.source, "total_error_replies")) > before)  # it was redirected, or refused for now
    move.end()
    assert asked.join() is True
    assert isinstance(claim(open_(cluster.url)), Found)


def stat(server: RedisServer, name: str) -> str:
    return next(line for line in server.cli("INFO", "stats").split() if line.startswith(name + ":")).split(":")[1]


def test_a_slot_that_is_stuck_is_no_answer(
    cluster: RedisCluster, open_: Open, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the move of a slot does not end, a call for its key fails soon. It does not wait for the move."""
    engine = open_(cluster.url)
    claim(engine)
    move.begin()
    with monkeypatch.context() as patch:
        patch.setattr("stampede.engines.redis.cluster.PATIENCE", BRIEF)
        with pytest.raises(EngineError):
            claim(engine, force=True)
    move.end()
    assert isinstance(claim(engine, force=True), Granted)


@pytest.mark.usefixtures("unaided")
def test_waiters_hear_of_a_move(cluster: RedisCluster, open_: Open, move: Move) -> None:
    """If a slot moves, its waiters are woken, and they listen at the new shard when they wait again."""
    if is_redis_6():
        missing("Redis 6 has no channels of a shard")
    engine, other, token = open_(cluster.url), open_(cluster.url), new_id()
    assert isinstance(claim(engine, token=token), Granted)
    busy = claim(other)
    waiter = Aside(lambda: run(other.blocking.claims.wait("k", busy, LONG)))
    wait_until(lambda: listens(other))
    move.whole()
    waiter.join()
    busy = claim(other)
    waiter = Aside(lambda: run(other.blocking.claims.wait("k", busy, LONG)))
    wait_until(lambda: listens(other))
    assert run(engine.blocking.claims.fill("k", token, Entry(b"value", token, ttl=LONG, fresh=LONG, keep=LONG)))
    assert waiter.join().entry.value == b"value"  # it came with the message


def test_a_shard_that_leaves_is_not_the_end_of_the_cache(cluster: RedisCluster) -> None:
    """If a shard leaves the cluster while it is asked, the question goes to another one, and later calls work."""
    with Cache(cluster.url) as cache:
        cache.set("k", 1)
        servers: Any = cache.engine._servers  # type: ignore[attr-defined]

        def leave(address: Any, shard: Any) -> None:
            ask = shard.ask

            async def leaving(*args: Any, **terms: Any) -> Any:
                if servers._shards.pop(address, None) is None:
                    return await ask(*args, **terms)
                shard.close()  # as when the cluster says that another server has its slots
                raise EngineClosed("this shard")  # as for questions under way

            shard.ask = leaving

        for address, shard in list(servers._shards.items()):
            leave(address, shard)
        assert cache.get("k") == 1
        assert cache.get_or_compute("k", lambda: 2) == 1


@pytest.mark.usefixtures("following")
def test_a_computation_survives_a_move(cluster: RedisCluster) -> None:
    """If its slot moves during a computation, a key is still computed once, and all callers get the value."""
    a, b = Cache(cluster.url, early=0), Cache(cluster.url, early=0)
    moving, moved, computed = threading.Event(), threading.Event(), []

    def origin() -> str:
        computed.append(1)
        moving.set()
        assert moved.wait(PATIENCE)
        return "value"

    callers = [Aside(lambda cache=cache: cache.get_or_compute("key", origin)) for cache in (a, b) * 4]
    assert moving.wait(PATIENCE)
    lease = next(key for node in cluster.nodes for key in node.cli("KEYS", "*}l").split())
    slot = key_slot(lease.encode())
    home = cluster.owner(slot)
    away = next(node for node in cluster.nodes if node is not home)
    for source, target in ((home, away), (away, home)):
        cluster.begin_move(slot, source, target)
        cluster.end_move(slot, source, target)
    moved.set()
    assert {caller.join() for caller in callers} == {"value"}
    assert len(computed) == 1
    a.close(), b.close()


# -- tickets ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steady")
def test_each_shard_tells_of_its_changes(cluster: RedisCluster, open_: Open) -> None:
    """Each shard notifies its changes, so that a local tier keeps no value that was invalidated on any of them."""
    engine, other = open_(cluster.url), open_(cluster.url)
    keys = [f"k{number}" for number in range(12)]
    for key in keys:
        run(engine.blocking.store.set(key, some()))
    tickets = [ticket_of(engine, key) for key in keys]
    assert len({id(ticket.stamps) for ticket in tickets}) == len(cluster.nodes)
    for key, ticket in zip(keys, tickets, strict=True):
        assert holds(ticket)
        run(other.blocking.store.invalidate(key))
        wait_until(lambda ticket=ticket: not holds(ticket))  # type: ignore[misc]


def test_a_move_voids_tickets(cluster: RedisCluster, open_: Open, move: Move) -> None:
    """If a slot moves, its tickets end: the old shard does not notify changes at the new one."""
    engine, other = open_(cluster.url), open_(cluster.url)
    run(engine.blocking.store.set("k", some()))
    ticket = ticket_of(engine)
    move.whole()
    wait_until(lambda: not holds(ticket))
    ticket = ticket_of(engine)
    run(other.blocking.store.set("k", some()))
    wait_until(lambda: not holds(ticket))


def test_generations_are_known_to_all(cluster: RedisCluster, open_: Open) -> None:
    """A bump reaches every process, whatever shards it uses."""
    engine, other = open_(cluster.url), open_(cluster.url)
    first = generation_of(engine, "f")
    assert generation_of(other, "f") == first
    run(other.blocking.store.bump("f"))
    wait_until(lambda: generation_of(engine, "f") != first)
    assert generation_of(engine, "f") == generation_of(other, "f")


@pytest.mark.usefixtures("steady")
def test_a_new_generation_voids_the_tickets_of_all_shards(cluster: RedisCluster, open_: Open) -> None:
    """A new generation of all scopes ends the tickets of all shards, not only of the shard that stores it."""
    engine, other, home = open_(cluster.url), open_(cluster.url), home_of(cluster)
    keys = {node: key_of(cluster, node) for node in cluster.nodes}
    for key in keys.values():
        run(engine.blocking.store.set(key, some()))
    ticket_of(engine, keys[home])  # from now on its feed listens
    first = run(engine.blocking.store.generations("f"))[0]  # this creates it, which is notified as a change
    wait_until(
        lambda: run(engine.blocking.store.generations("f"))[0] == first == engine.recalls.generation_at_hand("f")
    )
    tickets = [ticket_of(engine, key) for key in keys.values()]
    assert all(map(holds, tickets))
    run(other.blocking.store.bump("f"))
    wait_until(lambda: engine.recalls.generation_at_hand("f") is None)
    assert all(map(holds, tickets))
    run(other.blocking.store.bump(""))
    wait_until(lambda: not any(map(holds, tickets)))


# -- masters that die ---------------------------------------------------------------------------------------------


def test_a_dead_master_takes_only_its_keys_along(cluster: RedisCluster, open_: Open) -> None:
    """If a master dies, only its keys can't be reached, and they can be used again after its restart."""
    engine = open_(cluster.url)
    dead = cluster.nodes[2]
    keys = {node: key_of(cluster, node) for node in cluster.nodes}
    for key in keys.values():
        run(engine.blocking.store.set(key, some()))
    ticket = ticket_of(engine, keys[dead])
    dead.stop()
    try:
        with pytest.raises(EngineError):
            claim(engine, keys[dead])
        for node in cluster.nodes[:2]:
            assert isinstance(claim(engine, keys[node]), Found)
        wait_until(lambda: not holds(ticket))
    finally:
        dead.start()
        wait_until(cluster.is_whole)
    token = new_id()
    assert isinstance(claim(engine, keys[dead], token), Granted)
    assert run(engine.blocking.claims.fill(keys[dead], token, some()))
    ticket_of(engine, keys[dead])


def key_of(cluster: RedisCluster, node: RedisServer, number: int = 0) -> str:
    its = (key for key in map(str, range(10_000)) if cluster.node_of(key_slot(wire.names(key).entry)) is node)
    return next(islice(its, number, None))


@contextmanager
def dead(cluster: RedisCluster, node: RedisServer) -> Iterator[None]:
    """Kill a master that has no replica. Afterwards it is started again, empty."""
    node.stop()
    try:
        yield
    finally:
        node.start()
        wait_until(cluster.is_whole)


def home_of(cluster: RedisCluster) -> RedisServer:
    """The server that stores the generations."""
    return cluster.owner(key_slot(b"{stampede}g"))


def others_of(cluster: RedisCluster) -> list[RedisServer]:
    return [node for node in cluster.nodes if node is not home_of(cluster)]


BRIEF = 0.1
"""Seconds between two questions to a dead server, and for which a generation is known, in these tests."""


class Calls:
    """Two caches, as of two processes, with the computations they make and the engine's events."""

    def __init__(self, cluster: RedisCluster, colour: str) -> None:
        self._cluster, self._suspending = cluster, colour == "async"
        self._runner = asyncio.Runner()
        self.computed: Counter[str] = Counter()
        self.told: list[type[Event]] = []
        self.mine = Cache(cluster.url, early=0, observers=[self._see])
        self.theirs = Cache(cluster.url, early=0)

    def _see(self, event: Event) -> None:
        if isinstance(event, (EngineDown, EngineUp)):
            self.told.append(type(event))

    def keys(self, node: RedisServer, count: int) -> list[str]:
        """Keys of this shard. They belong to it until there is a new generation."""
        self.mine.get("which generation it is")
        prefix, found = self.mine._root.prefix, []
        for key in map(str, range(10_000)):
            physical = prefix + self.mine._key(key)
            if len(found) < count and self._cluster.node_of(key_slot(wire.names(physical).entry)) is node:
                found.append(key)
        return found

    def __call__(self, key: str, cache: Cache | None = None) -> str:
        def origin() -> str:
            self.computed[key] += 1
            return key

        cache = cache or self.mine
        return self._run(cache.aget_or_compute(key, origin)) if self._suspending else cache.get_or_compute(key, origin)

    def many(self, keys: list[str]) -> dict[str, str]:
        def origin(missing: list[str]) -> dict[str, str]:
            self.computed.update(missing)
            return {key: key for key in missing}

        if self._suspending:
            return self._run(self.mine.aget_or_compute_many(keys, origin))
        return self.mine.get_or_compute_many(keys, origin)

    def get_many(self, keys: list[str]) -> dict[str, str]:
        return self._run(self.mine.aget_many(keys)) if self._suspending else self.mine.get_many(keys)

    def invalidate(self, key: str) -> bool:
        return self._run(self.mine.ainvalidate(key)) if self._suspending else self.mine.invalidate(key)

    def _run(self, call: Any) -> Any:
        async def awaited() -> Any:
            return await call

        return self._runner.run(awaited())

    def close(self) -> None:
        self.mine.close(), self.theirs.close()
        self._runner.close()


@pytest.fixture(params=["sync", "async"])
def calls(cluster: RedisCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    for module in ("stampede.outages.outage", "stampede.engines.redis.cluster"):
        monkeypatch.setattr(f"{module}.Breaker", lambda: Breaker(BRIEF))
    monkeypatch.setattr(generations, "KNOWN", BRIEF)
    monkeypatch.setattr("stampede.outages.outage.REFUGE_TTL", LONG)
    made = Calls(cluster, request.param)
    yield made
    made.close()


def test_the_rest_of_a_cluster_goes_on(cluster: RedisCluster, calls: Calls) -> None:
    """If one of three shards dies, keys of the others are still stored, and its own keys are computed only once."""
    gone, node = others_of(cluster)
    lost, kept = calls.keys(gone, 5), calls.keys(node, 5) + calls.keys(home_of(cluster), 5)
    assert [calls(key) for key in lost + kept[::2]] == lost + kept[::2]
    calls.computed.clear()
    with dead(cluster, gone):
        for _ in range(3):
            assert [calls(key) for key in lost + kept] == lost + kept
        assert calls.computed == Counter(lost + kept[1::2])
        assert [calls(key, calls.theirs) for key in kept] == kept
        assert calls.computed == Counter(lost + kept[1::2])  # the other cache has found them in the engine
        assert calls.told == [EngineDown]
        with pytest.raises(EngineError):
            calls.invalidate(lost[0])
        assert calls.invalidate(kept[0]) is True
        assert calls(kept[0], calls.theirs) == kept[0]
        assert calls.computed[kept[0]] == 1

    def stored() -> bool:
        """Whether a value that one cache computes is found by the other."""
        try:
            calls.invalidate(lost[1])
        except EngineError:
            return False  # the shard is asked now and then
        calls.computed.clear()
        calls(lost[1]), calls(lost[1], calls.theirs)
        return calls.computed == Counter(lost[1:2])

    wait_until(stored)
    assert calls.invalidate(lost[1]) is True


def test_batches_keep_what_the_rest_of_a_cluster_has(cluster: RedisCluster, calls: Calls) -> None:
    """If one shard dies, a batch keeps the values of the others, and computes those of the dead shard only once."""
    gone, node = others_of(cluster)
    lost, kept = calls.keys(gone, 50), calls.keys(node, 5) + calls.keys(home_of(cluster), 5)
    calls.many(lost + kept)
    calls.computed.clear()
    with dead(cluster, gone):
        assert calls.many(lost + kept) == {key: key for key in lost + kept}
        assert calls.computed == Counter(lost)
        assert calls.many(lost + kept) == {key: key for key in lost + kept}
        assert calls.computed == Counter(lost)
        assert calls.get_many(lost + kept) == {key: key for key in lost + kept}  # the lost ones were computed here


def test_all_are_down_with_the_generations(cluster: RedisCluster, calls: Calls) -> None:
    """If the shard of the generations dies, the whole engine counts as down: a known generation may be an old one."""
    home, node = home_of(cluster), others_of(cluster)[0]
    keys = calls.keys(node, 2) + calls.keys(home, 2)
    assert [calls(key) for key in keys] == keys
    with dead(cluster, home):
        wait_until(lambda: calls(keys[0]) == keys[0] and bool(calls.told))  # its generation is known for a while
        calls.computed.clear()
        end = time.monotonic() + 2.5 * BRIEF  # long enough for two checks whether it is back
        while time.monotonic() < end:
            assert [calls(key) for key in keys] == keys
            time.sleep(0.01)
        assert set(calls.computed.values()) <= {1}
        for key in keys:
            with pytest.raises(EngineError):
                calls.invalidate(key)
        assert calls.told == [EngineDown]
    wait_until(lambda: calls(keys[0]) == keys[0] and calls.told == [EngineDown, EngineUp])


def test_no_key_is_asked_for_without_its_generation(cluster: RedisCluster, open_: Open) -> None:
    """If the shard of the generations dies, claims on other shards fail, too. Otherwise a key could be served that
    another process has just cleared."""
    engine, home = open_(cluster.url), home_of(cluster)
    keys = [key_of(cluster, node) for node in (home, others_of(cluster)[0])]
    for key in keys:
        run(engine.blocking.store.set(key, some()))
    with dead(cluster, home):
        for key in keys:
            with pytest.raises(EngineError) as failure:
                claim(engine, key)
            assert not failure.value.partial


@pytest.mark.usefixtures("steady")
def test_a_dead_shard_voids_no_tickets_of_others(
    cluster: RedisCluster, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead shard does not end tickets of other shards, although the feed tries to reach it again and again."""
    monkeypatch.setattr("stampede.engines.kit.feed.AGAIN", BRIEF)
    engine, (gone, node) = open_(cluster.url), others_of(cluster)
    keys = {each: key_of(cluster, each) for each in (gone, node)}
    for key in keys.values():
        run(engine.blocking.store.set(key, some()))
    lost = ticket_of(engine, keys[gone])
    with dead(cluster, gone):
        wait_until(lambda: not holds(lost))
        ticket = ticket_of(engine, keys[node])
        with socket.create_server(("127.0.0.1", gone.port)) as nobody:
            for _ in range(3):
                nobody.accept()[0].close()  # the feed tries to reach its server
        assert holds(ticket)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_hung_shard_is_asked_once_a_second(
    cluster: RedisCluster, open_: Open, colour: str, monkeypatch: pytest.MonkeyPatch, hurry: Hurry
) -> None:
    """A hung shard is asked once a second (here once a minute). The other calls for its keys fail at once."""
    monkeypatch.setattr("stampede.engines.redis.cluster.Breaker", lambda: Breaker(LONG))
    engine, hung = open_(cluster.url, tracking=False), others_of(cluster)[0]
    keys, other = [key_of(cluster, hung, number) for number in range(5)], key_of(cluster, home_of(cluster))
    run(engine.blocking.store.set(other, some()))

    async def ask(key: str) -> Any:
        if colour == "async":
            return await engine.suspending.claims.claim(key, new_id(), Ask(LONG))
        return claim(engine, key)

    async def all_of_them() -> None:
        assert isinstance(await ask(keys[0]), Granted)
        hung.freeze()
        hurry(shard_of(engine, hung))
        asked = 0
        for key in keys:
            with pytest.raises(EngineError) as failure:
                await ask(key)
            assert failure.value.partial
            asked += "it was down a moment ago" not in str(failure.value)
        assert asked == 1
        assert isinstance(await ask(other), Found)

    try:
        asyncio.run(all_of_them())
    finally:
        hung.thaw()


def shard_of(engine: RedisEngine, server: RedisServer) -> Any:
    return next(shard for address, shard in engine._servers._shards.items() if address.port == server.port)


def test_what_was_computed_is_stored_after_a_moments_silence(cluster: RedisCluster, open_: Open, hurry: Hurry) -> None:
    """If a shard did not answer a question in time, a later fill is still stored. No computed value is lost."""
    engine, hung = open_(cluster.url, tracking=False), others_of(cluster)[0]
    one, two = (key_of(cluster, hung, number) for number in range(2))
    token = new_id()
    assert isinstance(claim(engine, one, token), Granted)
    hung.freeze()
    hurry(shard_of(engine, hung))
    try:
        with pytest.raises(EngineError):
            claim(engine, two)
    finally:
        hung.thaw()
    assert run(engine.blocking.claims.fill(one, token, some())) is True
    assert isinstance(claim(engine, one), Found)


def test_what_was_computed_is_stored_without_the_generations(cluster: RedisCluster, open_: Open) -> None:
    """If the shard of the generations is dead, a fill on another shard is still stored and reaches its waiters."""
    engine, home, token = open_(cluster.url, tracking=False), home_of(cluster), new_id()
    key = key_of(cluster, others_of(cluster)[0])
    assert isinstance(claim(engine, key, token), Granted)
    with dead(cluster, home):
        for each in (key_of(cluster, home), key):
            with pytest.raises(EngineError) as failure:
                claim(engine, each)
            assert not failure.value.partial
        assert run(engine.blocking.claims.fill(key, token, some())) is True


@pytest.mark.parametrize("refusal", [("maxmemory", "1"), ("min-replicas-to-write", "1")], ids=["full", "alone"])
def test_a_shard_that_does_not_write_is_a_part(cluster: RedisCluster, open_: Open, refusal: tuple[str, str]) -> None:
    """A shard that refuses writes affects only its own keys, and no generation is used that it could not create."""
    if is_redis_6() and refusal[0] == "min-replicas-to-write":
        missing("a script is not refused by a Redis 6 that is without replicas")
    engine, home, other = open_(cluster.url, tracking=False), home_of(cluster), others_of(cluster)[0]
    here, there = key_of(cluster, home), key_of(cluster, other)
    run(engine.blocking.store.set(key_of(cluster, home, 1), some()))
    home.cli("CONFIG", "SET", *refusal)
    try:
        asked = [Asked("claim", (key, new_id(), Ask(LONG))) for key in (here, there, key_of(cluster, home, 1))]
        assert engine.many is not None
        refused, granted, found = engine.many.ask_many(asked)
        assert isinstance(refused, EngineError) and refused.partial
        assert isinstance(granted, Granted) and isinstance(found, Found)
        with pytest.raises(EngineError):
            run(engine.blocking.store.set(here, some()))
        if refusal[0] != "maxmemory":  # a full server still has room for it
            with pytest.raises(EngineError) as failure:
                generation_of(engine, "f")
            assert not failure.value.partial
    finally:
        home.cli("CONFIG", "SET", refusal[0], "0")


@pytest.mark.usefixtures("following")
def test_a_replica_takes_over(open_: Open) -> None:
    """After a failover inside the cluster, keys are found at the new master, and tickets of the old one end."""
    mine = RedisCluster(replicas=1, silence=600)
    try:
        engine = open_(mine.url)
        run(engine.blocking.store.set("k", some()))
        master = mine.owner(key_slot(wire.names("k").entry))
        replica = mine.replica_of(master)
        ticket = ticket_of(engine)
        replica.cli("CLUSTER", "FAILOVER")
        wait_until(lambda: "role:master" in replica.cli("INFO", "replication").split())
        wait_until(lambda: "role:slave" in master.cli("INFO", "replication").split())
        token = new_id()
        assert isinstance(claim(engine, token=token, force=True), Granted)
        assert run(engine.blocking.claims.fill("k", token, some(b"new")))
        wait_until(lambda: not holds(ticket))
        assert claim(engine).entry.value == b"new"
        ticket_of(engine)
    finally:
        mine.close()


# -- locks, forks and colours -------------------------------------------------------------------------------------


def test_locks_are_handed_over(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock's release wakes its waiter through the channel of its shard, before the lease ends."""
    monkeypatch.setattr("stampede.engines.redis.locks.SAFETY", LONG)  # otherwise they would look by themselves
    lock, inside = Lock("name", on=cluster.url, lease=LONG), threading.Event()

    def second() -> float:
        inside.set()
        with lock:
            return time.monotonic()

    with lock:
        waiter = Aside(second)
        assert inside.wait(PATIENCE)
        wait_until(lambda: any(node.cli("PUBSUB", "SHARDCHANNELS") for node in cluster.nodes))
        released = time.monotonic()
    assert waiter.join() - released < LONG / 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_shards_of_its_own(cluster: RedisCluster, open_: Open) -> None:
    """A forked child connects to the shards itself. Otherwise parent and child would read each other's replies."""
    engine = open_(cluster.url)
    keys = [f"k{number}" for number in range(9)]
    for key in keys:
        run(engine.blocking.store.set(key, some(key.encode())))

    def right() -> None:
        assert all(claim(engine, key).entry.value == key.encode() for key in keys for _ in range(20))

    child = Child(right)
    right()
    child.join()


def test_a_function_in_both_colours(cluster: RedisCluster) -> None:
    """Sync and async callers over a cluster share one value."""
    cache, computed = Cache(cluster.url, local=True), []

    def origin() -> str:
        computed.append(1)
        return "value"

    async def suspending() -> list[str]:
        return list(await asyncio.gather(*(cache.aget_or_compute("key", origin) for _ in range(50))))

    assert asyncio.run(suspending()) == ["value"] * 50
    assert cache.get_or_compute("key", origin) == "value"
    cache.invalidate("key")
    assert cache.get_or_compute("key", origin) == "value"
    assert len(computed) == 2
    cache.close()
