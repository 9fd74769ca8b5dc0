"""Hits on Redis by plain commands: a look finds what a claim would find, or leaves the decision to the claim."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from math import inf, nan
from typing import Any

import pytest

pytest.importorskip("redis")

from herd import until
from servers import RedisServer, free_port

from stampede import Cache
from stampede.engines.redis import RedisEngine, wire
from stampede.errors import EngineError, RecursiveComputation
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Asked, Found, Granted, Ticket
from stampede.runtime.colour import BLOCKING, SUSPENDING, run_blocking

LONG = 60.0
PATIENCE = 20.0

Open = Callable[..., RedisEngine]


@pytest.fixture
def open_(request: pytest.FixtureRequest) -> Open:
    def opened(*args: Any, **options: Any) -> RedisEngine:
        engine = RedisEngine(*args, **options)
        request.addfinalizer(engine.close)
        return engine

    return opened


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A function that runs coroutines of one colour."""
    with asyncio.Runner() as runner:
        yield run_blocking if request.param == "sync" else runner.run


def port_of(engine: RedisEngine, run: Any) -> Any:
    return engine.side(BLOCKING if run is run_blocking else SUSPENDING).claims


def some(value: bytes = b"value", **times: float) -> Entry[Any]:
    given = {"ttl": LONG, "fresh": LONG, "keep": LONG} | times
    return Entry(value, new_id(), **given)


def look(engine: RedisEngine, key: str = "k") -> Found | None:
    return run_blocking(engine.blocking.claims.look(key))


def counts(server: RedisServer) -> dict[str, int]:
    """How often each command has been called, by name."""
    lines = server.cli("INFO", "commandstats").splitlines()[1:]
    return {line[8 : line.index(":")]: int(line.split("calls=")[1].split(",")[0]) for line in lines}


def spent(server: RedisServer, ask: Callable[[], object]) -> dict[str, int]:
    """How often `ask` calls each command of the server."""
    before = counts(server)
    ask()
    after = {name: number - before.get(name, 0) for name, number in counts(server).items()}
    return {name: number for name, number in after.items() if number and name not in ("info", "ping")}


@pytest.mark.usefixtures("known")
def test_of_a_herd_two_look(own: RedisServer) -> None:
    """In a herd of tasks, at most two ask the server: the first, and one for all that come after it has asked."""
    with Cache(own.url, early=0) as cache:
        cache.set("k", 1)

        async def herd() -> list[Any]:
            return await asyncio.gather(*[cache.aget_or_compute("k", lambda: 2) for _ in range(20)])

        for _ in range(20):
            cache.get_or_compute("k", lambda: 2)  # so that a hit is likely
        asyncio.run(herd())
        assert spent(own, lambda: asyncio.run(herd())).get("getex", 0) <= 2


def test_who_computes_looks_in_no_flight_of_its_own(server: RedisServer) -> None:
    """A computation that asks for its own key is refused, even after an invalidation: it would call itself for ever."""
    met = []

    with Cache(server.url, early=0) as cache:
        for _ in range(20):
            cache.get_or_compute("k", lambda: 1)  # so that a hit is likely
        cache.invalidate("k")

        def origin() -> int:
            cache.invalidate("k")
            with pytest.raises(RecursiveComputation) as caught:
                cache.get_or_compute("k", lambda: met.append("computed"))
            met.append(caught.type)
            return 2

        assert cache.get_or_compute("k", origin) == 2
    assert met == [RecursiveComputation]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("local", [False, True])
def test_what_a_hit_costs_the_server(own: RedisServer, run: Any, local: bool) -> None:
    """A hit takes plain commands. A script would be six times the work of a GET."""
    with Cache(own.url, early=0) as writer, Cache(own.url, early=0, local=local) as cache:
        writer.set_many({f"k{number}": number for number in range(100)})

        async def hit(first: int) -> None:
            for number in range(first, first + 10):
                assert await cache.aget_or_compute(f"k{number}", lambda: -1) == number

        def ask(first: int) -> None:
            if run is not run_blocking:
                run(hit(first))
            else:
                for number in range(first, first + 10):
                    assert cache.get_or_compute(f"k{number}", lambda: -1) == number

        if local:  # the engine asks for the generations again when notifications begin
            ask(90)
            until(lambda: cache.engine._servers.news.reporter)
        ask(0)
        assert cache.engine.coherent
        # If the news are late just now, the engine is asked for the generations, too.
        costs = [spent(own, lambda first=first: ask(first)) for first in range(10, 90, 10)]
        assert {"pttl": 10, "get": 10, "getex": 10} in costs if local else costs == [{"pttl": 10, "getex": 10}] * 8
        if not local:
            assert spent(own, lambda: ask(10)) == {"getex": 10}


@pytest.mark.usefixtures("known")
def test_a_batch_of_hits_is_a_round_trip(own: RedisServer) -> None:
    """A batch of hits takes one plain command for each key, and no script."""
    with Cache(own.url, early=0) as cache:
        keys = [f"k{number}" for number in range(100)]
        cache.set_many(dict.fromkeys(keys, 1))
        for _ in range(2):
            assert cache.get_or_compute_many(keys, lambda missing: {}) == dict.fromkeys(keys, 1)
        commands = spent(own, lambda: cache.get_or_compute_many(keys, lambda missing: {}))
        assert commands == {"getex": 100}


@pytest.mark.usefixtures("known")
def test_equal_keys_are_read_once(own: RedisServer, run: Any) -> None:
    """`get_many` of a key that is given twice returns its value, and reports nothing wrong with it."""
    told: list[Any] = []
    with Cache(own.url, early=0, observers=[told.append]) as cache:
        cache.set_many({"k": 1, "l": 2})
        for _ in range(2):
            found = cache.get_many("klk") if run is run_blocking else run(cache.aget_many("klk"))
            assert found == {"k": 1, "l": 2}
    assert not [event for event in told if type(event).__name__ == "BadBytes"]


def test_many_hits_of_a_function_are_read_together(own: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`f.many` reads all of its hits in one round trip."""
    with Cache(own.url, early=0) as cache:
        trips = []
        monkeypatch.setattr(cache.engine.many, "ask_many", counting(cache.engine.many.ask_many, trips))

        @cache.cached
        def square(n: int) -> int:
            return n * n

        calls = [(n,) for n in range(100)]
        assert square.many(calls) == square.many(calls) == [n * n for n in range(100)]
        assert trips == [100, 100]
        assert spent(own, lambda: square.many(calls)) == {"getex": 100}
        assert trips == [100, 100, 100]


def counting(ask_many: Any, trips: list[int]) -> Any:
    def ask(asked: Any) -> Any:
        trips.append(len(asked))
        return ask_many(asked)

    return ask


@pytest.mark.parametrize("tracking", [False, True])
def test_a_demoted_master_is_not_believed(own: RedisServer, open_: Open, run: Any, *, tracking: bool) -> None:
    """A master that has become a replica is not used: it would serve values invalidated at its successor."""
    engine = open_(own.url, tracking=tracking)
    run_blocking(engine.blocking.store.set("k", some()))
    assert look(engine) is not None
    own.cli("REPLICAOF", "127.0.0.1", str(free_port()))
    with pytest.raises(EngineError) as caught:
        run(port_of(engine, run).look("k"))
    assert not caught.value.partial
    own.cli("REPLICAOF", "NO", "ONE")
    assert look(engine) is not None


@pytest.mark.parametrize("refusal", ["NOREPLICAS", "NOPERM"])
def test_where_looks_are_refused_hits_go_on(own: RedisServer, run: Any, refusal: str) -> None:
    """If a server refuses looks, because it writes nothing at present, hits still work. It does not count as down."""
    url = own.url
    with Cache(url, early=0) as writer:
        writer.set_many(dict.fromkeys("abcdef", 1))
    if refusal == "NOPERM":
        own.cli("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-getex")
        url = url.replace("redis://", "redis://app:secret@")
    seen: list[Any] = []
    with Cache(url, early=0, observers=[seen.append]) as cache:

        def ask(key: str) -> Any:
            if run is run_blocking:
                return cache.get_or_compute(key, lambda: 2)
            return run(cache.aget_or_compute(key, lambda: 2))

        assert ask("a") == 1
        if refusal == "NOREPLICAS":
            own.cli("CONFIG", "SET", "min-replicas-to-write", "1")
        assert ask("b") == 1
        assert [ask(key) for key in "cdef"] == [1] * 4
        assert cache.get_or_compute_many("abcdef", lambda missing: {}) == dict.fromkeys("abcdef", 1)
        assert not [event for event in seen if type(event).__name__ == "EngineDown"]


def test_of_a_batch_no_look_is_missed_where_they_are_refused(own: RedisServer, open_: Open) -> None:
    """If the looks of a batch are refused, its claims are still answered."""
    engine = open_(own.url)
    run_blocking(engine.blocking.store.set("k", some()))
    own.cli("CONFIG", "SET", "min-replicas-to-write", "1")
    asked = [Asked("look", ("k",)), Asked("claim", ("k", new_id(), Ask(LONG)))]
    nothing, found = engine.many.ask_many(asked)
    assert nothing is None
    assert isinstance(found, Found)


def test_what_only_a_script_can_judge(server: RedisServer, open_: Open) -> None:
    """A look leaves damaged entries to the claim. It neither serves them nor raises an error."""
    engine, name = open_(server.url), wire.names("k").entry
    for bytes_ in (b"", b"short", b"\x02" + bytes(100)):
        server.cli("SET", name, bytes_.replace(b"\x00", b"0"))
        assert look(engine) is None
    server.cli("DEL", name)
    server.cli("RPUSH", name, "x")
    assert look(engine) is None
    assert isinstance(run_blocking(engine.blocking.claims.claim("k", new_id(), Ask(LONG))), Granted)
    for damage in ({"cost": nan}, {"margin": nan}, {"ttl": nan}, {"fresh": nan}, {"keep": nan}, {"margin": -1.0}):
        entry = some(**damage)
        string = wire.pack(entry, 50_000)
        assert wire.fresh_of(50_000, string) is None
    assert wire.fresh_of(50_000, wire.pack(some(), 50_000)) is not None


@pytest.mark.parametrize("left", ["3600000", "-1"])
def test_a_key_with_more_time_than_it_was_given(server: RedisServer, open_: Open, left: str) -> None:
    """An entry with more time left than it was given, as after a clock was set back, is left to the claim to cut."""
    engine, name = open_(server.url), wire.names("k").entry
    run_blocking(engine.blocking.store.set("k", some()))
    server.cli(*(("PERSIST", name) if left == "-1" else ("PEXPIRE", name, left)))
    assert look(engine) is None
    run_blocking(engine.blocking.claims.claim("k", new_id(), Ask(LONG)))
    assert int(server.cli("PTTL", name)) <= 1000 * (LONG + 1)
    found = look(engine)
    assert found is not None
    assert found.entry.fresh <= LONG


def test_what_came_between_the_two_is_no_longer_fresh_than_it_is(server: RedisServer, open_: Open) -> None:
    """If an entry is replaced between the two commands of a look, it gets no more time than it was given."""
    older = some()
    newer = some(ttl=5.0, fresh=5.0, keep=5.0)
    assert wire.fresh_of(int(1000 * older.fresh), wire.pack(newer, wire.expiry(newer))) is None  # more than its own
    newer = some(ttl=90.0, fresh=90.0, keep=90.0)
    found = wire.fresh_of(int(1000 * older.fresh), wire.pack(newer, wire.expiry(newer)))
    assert found is not None  # less than its own is safe
    assert found.fresh <= 90.0
    its = wire.names("k")
    for tracking in (False, True):
        verbs: Any = open_(server.url, tracking=tracking).blocking.claims
        commands = [command[0] for command in verbs._looking(its, None)]
        assert commands[:2] == [b"PTTL", b"GET" if tracking else b"GETEX"]


def test_an_end_that_is_known_is_of_that_entry_only(own: RedisServer, open_: Open, run: Any) -> None:
    """The end that is known of an entry is not used for another entry that was stored since."""
    engine, other = open_(own.url), open_(own.url)
    looking = port_of(engine, run)
    run_blocking(other.blocking.store.set("k", some()))

    def look() -> Any:
        found = run(looking.look("k"))
        return found and found.entry

    assert look().value == b"value"
    assert spent(own, look) == {"getex": 1}
    first = look().fresh
    assert look().fresh < first <= LONG
    run_blocking(other.blocking.store.set("k", some(b"other", ttl=5.0, fresh=5.0, keep=5.0)))
    assert look().value == b"other"
    assert look().fresh <= 5.0
    run_blocking(other.blocking.store.expire("k"))
    assert look() is None
    run_blocking(other.blocking.store.set("k", some()))
    assert look().fresh > 5.0
    run_blocking(other.blocking.store.invalidate("k"))
    assert look() is None
    run_blocking(other.blocking.store.set("k", some(ttl=inf, fresh=inf, keep=inf)))
    assert [look().fresh, look().fresh] == [inf, inf]
    run_blocking(other.blocking.store.expire("k"))
    assert look() is None


@pytest.mark.parametrize("change", ["set", "expire", "invalidate", "DEL"])
def test_a_change_voids_the_ticket_of_a_look(server: RedisServer, open_: Open, run: Any, change: str) -> None:
    """A change ends the ticket of a look. Otherwise a local tier would serve the old value until it expires."""
    engine, other = open_(server.url, tracking=True), open_(server.url)
    run_blocking(other.blocking.store.set("k", some()))
    end = time.monotonic() + PATIENCE

    async def ticket() -> Ticket:
        while True:
            found = await port_of(engine, run).look("k")
            assert found is not None
            if found.ticket is not None:
                return found.ticket
            assert time.monotonic() < end
            await asyncio.sleep(0) if run is not run_blocking else time.sleep(0.002)

    held = run(ticket())
    assert held.stamps[held.slot] == held.stamp
    if change == "DEL":
        server.cli("DEL", wire.names("k").entry)
    else:
        run_blocking(getattr(other.blocking.store, change)(*(("k", some()) if change == "set" else ("k",))))
    while held.stamps[held.slot] == held.stamp:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_due_are_refreshed(server: RedisServer) -> None:
    """An entry that a look finds is refreshed early if it is due. Otherwise a caller would wait when it expires."""
    with Cache(server.url) as cache:
        for _ in range(5):
            cache.get_or_compute("warm", lambda: 0)
        entry = Entry(1, new_id(), cost=50.0, margin=1000.0, ttl=100.0, fresh=40.0, keep=100.0)
        run_blocking(cache._root.store.set(cache._root.prefix + "k", entry))
        assert cache.get_or_compute("k", lambda: 2) == 2


def test_what_was_made_stale_as_a_whole_is_no_hit(server: RedisServer) -> None:
    """A look does not serve a value that `expire_all` has made stale."""
    with Cache(server.url, stale=LONG, early=0) as cache:
        numbers = iter(range(100))

        @cache.cached
        def number(x: int) -> int:
            return next(numbers)

        assert [number(1) for _ in range(5)] == [0] * 5
        number.expire_all()
        assert [number(1) for _ in range(5)] == [1] * 5
