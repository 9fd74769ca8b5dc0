"""Redis keeps the ends of values, leases and rests as times of its wall clock. These tests change that clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("redis")

from servers import SteppedServer, wait_until

from stampede import Cache, Lock
from stampede.engines.redis import RedisEngine
from stampede.engines.redis.wire import RedisNames, names
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.runtime.colour import run_blocking as run

LONG = 60.0
HOUR = 3600


@pytest.fixture(scope="module")
def _stepped() -> Iterator[SteppedServer]:
    server = SteppedServer()
    yield server
    server.close()


@pytest.fixture
def server(_stepped: SteppedServer) -> SteppedServer:
    _stepped.step(0)
    _stepped.cli("FLUSHALL")
    return _stepped


@pytest.fixture
def engine(server: SteppedServer) -> Iterator[RedisEngine]:
    engine = RedisEngine(server.url)
    yield engine
    engine.close()


def set_back(server: SteppedServer, key: bytes) -> None:
    """Set the clock back by an hour, and wait until this key's time left shows it."""
    server.step(-HOUR)
    wait_until(lambda: int(server.cli("PTTL", key)) > 1000 * (HOUR - 60))


def claim(engine: RedisEngine, lease: float = LONG, token: bytes | None = None, **terms: Any) -> Any:
    return run(engine.blocking.claims.claim("k", token or new_id(), Ask(lease, **terms)))


def some(fresh: float, keep: float = 0.0) -> Entry[bytes]:
    return Entry(b"value", new_id(), ttl=fresh, fresh=fresh, keep=max(fresh, keep))


def of(key: str) -> RedisNames:
    return names(key)


def test_a_dead_holders_lease_is_no_longer_than_it_was(server: SteppedServer) -> None:
    """Promise 3: if the clock is set back, the lease of a dead holder does not block its key for longer."""
    with Cache(server.url, lease=2.0) as cache:
        cache.get("k")  # from now on the cache knows its prefix
        its = of(cache._root.prefix + "k")
        run(cache._root.core.engine.blocking.claims.claim(cache._root.prefix + "k", new_id(), Ask(2.0)))  # ... and dies
        set_back(server, its.lease)
        assert cache.get_or_compute("k", lambda: "second", wait=20) == "second"


def test_a_lease_is_cut_to_what_it_was_given(server: SteppedServer, engine: RedisEngine) -> None:
    """If the clock is set back, a lease is cut to what its holder was given, whatever the next caller asks for."""
    token = new_id()
    assert isinstance(claim(engine, 20.0, token), Granted)
    assert run(engine.blocking.claims.renew("k", token, 30.0))
    set_back(server, of("k").lease)
    busy = claim(engine, 1.0)
    assert isinstance(busy, Busy) and (busy.token, busy.lease) == (token, 30.0)
    assert 0 < int(server.cli("PTTL", of("k").lease)) <= 30_000
    assert run(engine.blocking.claims.renew("k", token, 10.0))
    assert 0 < int(server.cli("PTTL", of("k").lease)) <= 10_000
    assert run(engine.blocking.claims.fill("k", token, some(LONG)))


def test_a_lease_without_an_end_gets_one(server: SteppedServer, engine: RedisEngine) -> None:
    """A lease without an end gets one. Otherwise waiters would ask for it without a pause, for ever."""
    token = new_id()
    claim(engine, 20.0, token)
    server.cli("PERSIST", of("k").lease)
    busy = claim(engine)
    assert isinstance(busy, Busy) and (busy.token, busy.lease) == (token, 20.0)
    server.cli("SET", of("k").lease, "foreign")
    busy = claim(engine, 10.0)
    assert isinstance(busy, Busy) and (busy.token, busy.lease) == (b"foreign", 10.0)
    assert 0 < int(server.cli("PTTL", of("k").lease)) <= 10_000


READS: dict[str, Callable[[RedisEngine], Entry[Any]]] = {
    "claim": lambda engine: claim(engine).entry,
    "get": lambda engine: run(engine.blocking.store.get(["k"]))[0],
}


@pytest.mark.parametrize("read", list(READS))
def test_an_entry_is_kept_no_longer_than_it_was_given(server: SteppedServer, engine: RedisEngine, read: str) -> None:
    """If the clock is set back, an entry is kept no longer than it was given."""
    run(engine.blocking.store.set("k", some(fresh=30.0, keep=40.0)))
    set_back(server, of("k").entry)
    for _ in range(2):
        entry = READS[read](engine)
        assert 20 < entry.fresh <= 30 and 30 < entry.keep <= 40
    assert 0 < int(server.cli("PTTL", of("k").entry)) <= 40_000


def test_what_has_no_end_keeps_none(server: SteppedServer, engine: RedisEngine) -> None:
    """If the clock is set back, an entry without an end still has none."""
    run(engine.blocking.store.set("k", Entry(b"value", new_id())))
    server.step(-HOUR)
    assert isinstance(claim(engine), Found)
    assert server.cli("PTTL", of("k").entry) == "-1"
    run(engine.blocking.store.expire("k"))
    assert isinstance(claim(engine), Granted)
    assert server.cli("PTTL", of("k").entry) != "-1"


def test_an_entry_that_somebody_persists_has_an_end(server: SteppedServer, engine: RedisEngine) -> None:
    """An entry still ends if another client has removed its expiry with PERSIST."""
    run(engine.blocking.store.set("k", some(fresh=10.0)))
    server.cli("PERSIST", of("k").entry)
    assert 9 < claim(engine).entry.fresh <= 10
    assert server.cli("PTTL", of("k").entry) != "-1"


def test_a_rest_is_no_longer_than_it_was(server: SteppedServer, engine: RedisEngine) -> None:
    """If the clock is set back, a key whose origin failed rests no longer than it was given."""
    token = new_id()
    claim(engine, token=token)
    run(engine.blocking.claims.abandon("k", token, Verdict("failed", "Error", "why"), 5.0))
    set_back(server, of("k").rest)
    failed = claim(engine)
    assert isinstance(failed, Failed) and failed.verdict == Verdict("failed", "Error", "why")
    assert 4 < failed.rest <= 5
    assert 0 < int(server.cli("PTTL", of("k").rest)) <= 5_000


def test_a_clock_that_is_set_forward_costs_no_second_value(server: SteppedServer) -> None:
    """Promise 5: if the clock is set forward, a lease ends early and is lost: its holder's result is not stored."""
    with Cache(server.url, lease=LONG) as cache, Cache(server.url, lease=LONG) as other:
        got: list[str] = []

        def compute() -> str:
            lease = of(cache._root.prefix + "k").lease
            server.step(HOUR)
            wait_until(lambda: server.cli("EXISTS", lease) == "0")
            assert other.get_or_compute("k", lambda: "second") == "second"
            return "first"

        thread = Thread(target=lambda: got.append(cache.get_or_compute("k", compute)))
        thread.start()
        thread.join(20)
        assert got == ["first"]
        assert cache.get("k") == "second"


def test_a_fence_is_above_all_that_its_process_has_seen(server: SteppedServer, engine: RedisEngine) -> None:
    """If the clock is set back, a new fence is still higher than all that its process has seen."""
    with Lock("l", on=engine) as lock:
        first = lock.fence
    server.cli("FLUSHALL")  # the server remembers a fence for ten seconds only
    server.step(-HOUR)
    with Lock("l", on=engine) as lock, Lock("other", on=engine) as other:
        assert first < lock.fence < other.fence
