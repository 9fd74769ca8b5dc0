"""The traps of memcached's protocol, each solved and tested on a real server."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pymemcache")

from herd import Herd, until
from known_generation import generation_of
from memcached_server import MemcachedServer, shared_memcached

from stampede import Cache
from stampede.engines import open_engine
from stampede.engines.kit.polling import pause
from stampede.engines.kit.replies import MORE, OutOfStep
from stampede.engines.memcached import MemcachedEngine, from_url, items, meta
from stampede.engines.memcached.blocking import BlockingLine
from stampede.errors import EngineError, LockLost, MissingExtra, OptionError, TooLarge
from stampede.locks.lock import Lock
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.ports import Ask, Asked, Busy, Failed, Found, Granted
from stampede.model.record import Kept, Lease, Past, Record
from stampede.runtime.colour import run_blocking

LONG = 60.0


@pytest.fixture
def server() -> MemcachedServer:
    server = shared_memcached()
    server.empty()
    return server


@pytest.fixture
def engine(server: MemcachedServer) -> Iterator[MemcachedEngine]:
    engine = MemcachedEngine(server.address)
    yield engine
    engine.close()


def some(value: bytes = b"value", fresh: float = LONG, **more: Any) -> Entry[bytes]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=more.pop("keep", fresh), **more)


def claim(engine: MemcachedEngine, token: bytes | None = None, key: str = "k", **terms: Any) -> Any:
    assert engine.blocking.claims is not None
    return run_blocking(engine.blocking.claims.claim(key, token or new_id(), Ask(terms.pop("lease", LONG), **terms)))


def granted(engine: MemcachedEngine, **terms: Any) -> bytes:
    token = new_id()
    assert isinstance(claim(engine, token, **terms), Granted)
    return token


def fill(engine: MemcachedEngine, token: bytes, entry: Entry[bytes] | None = None, key: str = "k") -> bool:
    return run_blocking(engine.blocking.claims.fill(key, token, entry or some()))


def renew(engine: MemcachedEngine, token: bytes, lease: float = LONG) -> bool:
    return run_blocking(engine.blocking.claims.renew("k", token, lease))


def put(engine: MemcachedEngine, entry: Entry[bytes], key: str = "k") -> None:
    run_blocking(engine.blocking.store.set(key, entry))


def kept(engine: MemcachedEngine, key: str = "k") -> Entry[bytes] | None:
    return run_blocking(engine.blocking.store.get([key]))[0]


# -- what it costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [False, True])
def test_a_hit_is_one_command_and_a_miss_three(server: MemcachedServer, engine: MemcachedEngine, looks: bool) -> None:
    """A hit takes one command, and a miss takes three. Each additional one would slow down every call."""
    granted(engine, key="warm")
    before = server.commands()
    if looks:
        assert run_blocking(engine.blocking.claims.look("k")) is None
    assert fill(engine, granted(engine))
    assert server.commands() - before == 3
    for _ in range(5):
        assert isinstance(run_blocking(engine.blocking.claims.look("k")), Found)
    assert server.commands() - before == 8


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many commands each round trip of the blocking side had."""
    counts: list[int] = []
    send = BlockingLine.send

    def counted(self: Any, server: Any, commands: Any, since: float | None) -> Any:
        counts.append(len(commands))
        return send(self, server, commands, since)

    monkeypatch.setattr(BlockingLine, "send", counted)
    return counts


def test_many_claims_are_few_round_trips(engine: MemcachedEngine, asked: list[int]) -> None:
    """A batch claims its keys in a few round trips, and fills them in one."""
    put(engine, some(b"there"), "there")
    put(engine, some(b"stale", fresh=0.0, keep=LONG), "stale")
    busy = granted(engine, key="busy")
    asked.clear()
    tokens = {key: new_id() for key in ("new", "there", "busy", "stale", "other")}
    claims = [Asked("claim", (key, token, Ask(LONG))) for key, token in tokens.items()]
    new, there, other_busy, kept_stale, other = engine.many.ask_many(claims)
    assert asked == [10, 1]
    fills = [Asked("fill", (key, tokens[key], some())) for key in ("new", "stale", "other")]
    assert engine.many.ask_many(fills) == [True] * 3
    assert asked == [10, 1, 3]
    assert isinstance(new, Granted) and isinstance(other, Granted)
    assert isinstance(there, Found) and there.entry.value == b"there"
    assert isinstance(other_busy, Busy)
    assert isinstance(kept_stale, Granted) and kept_stale.entry is not None
    assert fill(engine, busy, key="busy")
    assert engine.many.ask_many([]) == []


def test_a_batchs_leases_are_its_own_over_any_connection(engine: MemcachedEngine) -> None:
    """A batch can fill its keys over another connection than the one that claimed them."""
    tokens = {str(number): new_id() for number in range(3)}
    claims = [Asked("claim", (key, token, Ask(LONG))) for key, token in tokens.items()]
    assert all(isinstance(reply, Granted) for reply in engine.many.ask_many(claims))
    engine._line.close()  # so the next connection is younger than the leases
    fills = [Asked("fill", (key, token, some())) for key, token in tokens.items()]
    assert engine.many.ask_many(fills) == [True] * 3


def test_what_one_turn_of_the_loop_asks_goes_out_together(
    server: MemcachedServer, engine: MemcachedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one turn of the event loop are sent in one write, and not one after another."""
    sent: list[bytes] = []

    async def scenario() -> None:
        await engine.suspending.store.set("k", some())
        wire: Any = engine._aline._pipes.to(engine._servers.all[0]).wire
        write = wire.transport.write
        monkeypatch.setattr(wire.transport, "write", lambda data: (sent.append(data), write(data)))
        for found in await asyncio.gather(*[engine.suspending.claims.look("k") for _ in range(100)]):
            assert isinstance(found, Found)

    asyncio.run(scenario())
    assert sent == [meta.look(b"s:k") * 100]


# -- the traps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"\r\n", b"END\r\n", b"MN\r\n", b"VA 5 t1 c1\r\nhello\r\n", b"HD\r\nEN\r\n", b""])
def test_replies_are_read_by_length(engine: MemcachedEngine, value: bytes) -> None:
    """A value that looks like a reply is read by its length. Otherwise later replies would go to the wrong callers."""
    names = [f"k{number}" for number in range(3)]
    for name in names:
        assert fill(engine, granted(engine, key=name), some(value), name)
    assert [entry and entry.value for entry in run_blocking(engine.blocking.store.get(names))] == [value] * 3

    async def scenario() -> list[Any]:
        return await engine.suspending.store.get(names)

    assert [entry.value for entry in asyncio.run(scenario())] == [value] * 3


def test_a_reply_may_come_in_any_pieces() -> None:
    """A reply is read correctly, wherever it is split."""
    whole = b"VA 9 t5 c77 f1470758913\r\na\r\nEND\r\nb\r\nEN\r\n"
    for stop in range(len(whole)):
        parser = meta.MetaParser()
        parser.feed(whole[:stop])
        reply = parser.gets()
        parser.feed(memoryview(whole)[stop:])
        if reply is MORE:
            reply = parser.gets()
        assert (reply.value, reply.left, reply.cas, reply.flags) == (b"a\r\nEND\r\nb", 5, b"77", items.PLAIN)
        assert parser.gets().code == b"EN"
        assert parser.gets() is MORE
    for wrong in (b"HTTP/1.1 400 Bad Request\r\n", b"VA 1 f0\r\nab\r\n"):
        parser = meta.MetaParser()
        parser.feed(wrong)
        with pytest.raises(OutOfStep):
            parser.gets()


def test_a_lease_is_never_a_value(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """While a key is computed, its lease is not returned as a value. Its flags tell foreign readers apart."""
    token = granted(engine)
    for _ in range(2):
        assert kept(engine) is None
        assert isinstance(claim(engine), Busy)
        assert items.STATE in server.say(b"mg s:k f\r\n")
        assert renew(engine, token)


FOREIGN = {
    "short": (b"5", b"abc"),
    "like an entry": (b"5", b"\1" * 100),
    "like a lease": (b"5", bytes(100)),
    "no entry": (items.PLAIN, b"abc"),
    "of another version": (items.PLAIN, b"\2" * 100),
    "no lease": (items.STATE, b"abc"),
    "without flags": (b"0", b"abc"),
}


@pytest.mark.parametrize("flags, value", FOREIGN.values(), ids=FOREIGN)
def test_foreign_bytes_are_a_miss(server: MemcachedServer, engine: MemcachedEngine, flags: bytes, value: bytes) -> None:
    """Bytes that another program stored under our name are a miss, and the key can be claimed and filled."""
    server.say(b"ms s:k %d F%b T60\r\n%b\r\n" % (len(value), flags, value))
    token = new_id()
    assert isinstance(claim(engine, token), Granted)
    assert fill(engine, token)
    assert isinstance(claim(engine), Found)


def test_renewal_touches_only_the_own_lease(engine: MemcachedEngine) -> None:
    """A renewal extends only the caller's own lease. `mg T` would extend whatever is stored under the key."""
    token = granted(engine)
    run_blocking(engine.blocking.store.invalidate("k"))
    put(engine, some(b"set", fresh=20.0))
    assert not renew(engine, token)
    entry = kept(engine)
    assert entry is not None and entry.value == b"set" and entry.fresh <= 20


def test_a_loops_lease_can_be_given_back_by_others(engine: MemcachedEngine) -> None:
    """A lease that was claimed in an event loop can be given back outside of it, for example after the loop."""
    token = new_id()
    assert isinstance(asyncio.run(engine.suspending.claims.claim("k", token, Ask(LONG))), Granted)  # type: ignore[arg-type]
    assert run_blocking(engine.blocking.claims.abandon("k", token))
    granted(engine)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_late_fill_after_a_restart_is_refused(colour: str) -> None:
    """A lease from before a restart is lost. CAS numbers start again, so a new lease may have the same number."""
    server = MemcachedServer()
    engine, other = MemcachedEngine(server.address), MemcachedEngine(server.address)
    try:
        with asyncio.Runner() as runner:
            side = engine.blocking if colour == "sync" else engine.suspending
            had: Any = run_blocking if colour == "sync" else runner.run
            claim(other, key="other")  # a connection with the server, and a CAS number
            token = new_id()
            assert isinstance(had(side.claims.claim("k", token, Ask(LONG))), Granted)
            number = engine._numbers.get((b"s:k", token))
            assert number is not None
            server.restart()
            while True:  # until the new server gives the same number
                claimed = granted(other)
                found = other._numbers.get((b"s:k", claimed))
                assert found is not None
                if int(found.cas) >= int(number.cas):
                    break
                run_blocking(other.blocking.claims.abandon("k", claimed))
            assert found.cas == number.cas
            assert had(side.store.get(["k"])) == [None]  # now there is a connection with the new server
            assert not had(side.claims.fill("k", token, some(b"late")))
            assert isinstance(claim(engine), Busy)
            assert fill(other, claimed, some(b"in time"))
            engine.close()
            other.close()
    finally:
        server.close()


@pytest.mark.parametrize("renewed", [False, True])
def test_a_lease_outlives_its_connection(engine: MemcachedEngine, renewed: bool) -> None:
    """A lease remains valid when its connection breaks, so the value of a long computation can be stored."""
    token = granted(engine)
    if renewed:
        engine._line.close()
        assert renew(engine, token)
    engine._line.close()
    assert fill(engine, token, some(b"kept"))
    entry = kept(engine)
    assert entry is not None and entry.value == b"kept"


def test_the_refresher_of_a_value_may_die(engine: MemcachedEngine) -> None:
    """If the caller that refreshes a value dies, another one refreshes it. The server's own mark is given only once."""
    early, stale = some(b"early"), some(b"stale", keep=2 * LONG)
    put(engine, early, "early")
    put(engine, stale, "stale")
    run_blocking(engine.blocking.store.expire("stale"))
    asked: list[tuple[str, Entry[bytes], dict[str, Any]]] = [("early", early, {"seen": early.id}), ("stale", stale, {})]
    for key, _, terms in asked:
        granted(engine, key=key, lease=1, **terms)
    for key, entry, terms in asked:
        until(lambda key=key, terms=terms: isinstance(claim(engine, key=key, **terms), Granted))
        assert isinstance(busy := claim(engine, key=key, **terms), Busy) and busy.entry is not None
        assert (busy.entry.id, busy.entry.value) == (entry.id, entry.value)
    assert isinstance(claim(engine, key="early"), Found)


@pytest.mark.parametrize("ttl", [0.001, 0.4, 1, 2.5, 86_400 * 30, 86_400 * 30 + 1, 86_400 * 365, 1e12])
def test_times_are_whole_and_never_for_ever(server: MemcachedServer, engine: MemcachedEngine, ttl: float) -> None:
    """Times are whole seconds, from 1 second to 30 days: T0 means for ever, and a larger number means a date."""
    reply = meta.MetaReply(b"VA")
    reply.value, reply.flags, reply.left = items.plain(some(fresh=ttl))
    assert 1 <= reply.left <= meta.MONTH and 1 <= items.whole_seconds(ttl) <= meta.MONTH
    assert ttl <= items.read_plain(reply).fresh <= ttl + 1
    if ttl > LONG:
        put(engine, some(fresh=ttl))
        assert meta.MONTH - LONG < int(server.say(b"mg s:k t\r\n").split()[1][1:]) <= meta.MONTH
        entry = kept(engine)
        assert entry is not None and ttl - LONG < entry.fresh <= ttl + 1
        token = granted(engine, lease=ttl, force=True)
        assert renew(engine, token, ttl)
        run_blocking(engine.blocking.store.invalidate("k"))
        assert renew(engine, granted(engine, lease=ttl), ttl)
    assert items.plain(some(fresh=-ttl - 10, keep=0.0)).ttl == 1


def test_clocks_are_never_compared(engine: MemcachedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 14: the age of a value does not depend on the clock of the machine, which may be years off."""
    put(engine, some(fresh=20.0))
    for now in (1e8, 1e10):
        monkeypatch.setattr(time, "time", partial(float, now))
        reply = claim(engine)
        assert isinstance(reply, Found) and 15 <= reply.entry.fresh <= 20


def test_for_ever_is_for_ever_while_it_is_refreshed(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """A refresh that fails does not give an end to a value that has none."""
    put(engine, some(fresh=float("inf")))
    token = granted(engine, force=True)
    run_blocking(engine.blocking.claims.abandon("k", token))
    assert b"t-1" in server.say(b"mg s:k t\r\n")


def test_damaged_items_are_none_of_ours() -> None:
    """NaN or infinity in an item causes no ValueError, and no lease without an end."""
    entry = Entry(b"v", new_id(), 1.0, 1.0, 60.0, 60.0, 90.0)
    kept, lease = Kept(entry, entry.fresh, entry.keep), Lease(b"t" * 8, 10.0)
    past = Past().with_failure(b"t" * 8, Verdict("failed", "E", "m"), 5.0, 0.0)
    for item in (Record(kept), Record(kept, lease), Record(kept, lease, past)):
        data, flags, ttl = items.write(item)
        for at in range(len(data)):
            for number in (nan, inf, -inf):
                reply = meta.MetaReply(b"VA")
                reply.flags, reply.left = flags, ttl
                reply.value = data[:at] + struct.pack(">d", number) + data[at + 8 :]
                found = items.read(reply)
                assert found.lease is None or found.lease.end < inf
                items.write(found)
                items.answer(found, b"x" * 8, Ask(LONG))


def test_keys_that_the_protocol_cannot_hold_are_hashed() -> None:
    """Keys with special characters are hashed: a blank would end the key, a line break would begin a command."""
    odd = ["", " ", "a b", "a\r\nflush_all", "\x00", "ä", "k" * 201, "\ud800"]
    names = [items.name_of(key) for key in odd]
    assert len(set(names)) == len(odd)
    for name in names[1:]:
        assert len(name) <= 250 and name.isascii() and name.decode().isprintable() and b" " not in name
    assert items.name_of("user:7") == b"s:user:7"


def test_too_large_is_told_and_nobody_waits(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """If a value is too large, its waiters learn it. Otherwise they would compute one after another."""
    large = some(b"x" * (1 << 20))
    other = MemcachedEngine(server.address)
    token = granted(engine)
    busy = claim(other)
    with pytest.raises(TooLarge):
        fill(engine, token, large)
    run_blocking(engine.blocking.claims.abandon("k", token, Verdict("unkept", message="too large")))
    reply = claim(other, awaited=busy.token)
    assert isinstance(reply, Failed) and reply.verdict.kind == "unkept"
    with pytest.raises(TooLarge):
        put(engine, large)
    other.close()


def test_too_large_in_the_servers_words(engine: MemcachedEngine) -> None:
    """If only the server knows that a value is too large, TooLarge is raised, too, and the lease is lost."""
    token = granted(engine)
    engine._servers.all[0].longest = 1 << 30
    with pytest.raises(TooLarge):
        fill(engine, token, some(b"x" * (1 << 20)))
    assert not run_blocking(engine.blocking.claims.abandon("k", token, Verdict("unkept", message="too large")))
    granted(engine)


def test_generations_are_asked_for_once_a_second(
    server: MemcachedServer, engine: MemcachedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation is read once a second (here once a minute). Otherwise every hit would take two commands."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", LONG)
    generation_of(engine, "f")
    before = server.commands()
    for _ in range(100):
        generation_of(engine, "f")
    assert server.commands() - before <= 2


def test_a_generation_is_believed_for_a_second(
    server: MemcachedServer, engine: MemcachedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process learns of a new generation. Otherwise it would serve values that another process has cleared."""
    monkeypatch.setattr("stampede.engines.kit.generations.KNOWN", 0.1)
    other = MemcachedEngine(server.address)
    old = generation_of(engine, "f")
    run_blocking(other.blocking.store.bump("f"))
    until(lambda: generation_of(engine, "f") != old)
    other.close()


def test_an_evicted_generation_is_a_new_one(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """A generation that was evicted gets a new number. With the first number, invalidated values would come back."""
    met = set()
    for _ in range(3):
        met.add(generation_of(engine, "f"))
        server.empty()
        engine._line.close()
        engine.blocking.claims._generations.clear()  # type: ignore[attr-defined]
    assert len(met) == 3


# -- waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.01, 0.2, 3.0, 100.0])
def test_pauses_are_never_long_and_never_a_spin(cost: float, chance: float) -> None:
    """The pauses of a waiter are short enough to see a value soon, and long enough to send few requests."""
    waited, looks = 0.0, 0
    while waited < 20:
        step = pause(waited, cost, chance)
        assert 0.003 <= step <= max(0.05, 0.1 * waited)
        waited += step
        looks += 1
        assert looks <= 18 or waited > 0.2
    assert looks < 200


@pytest.mark.parametrize("cost", [0.02, 0.2, 1.0])
def test_a_look_is_aimed_at_the_known_end(cost: float) -> None:
    """If the cost is known, a waiter looks when the computation should end, and not a whole pause later."""
    waited = 0.0
    while waited < cost:
        waited += pause(waited, cost, 0.5)
    assert waited - cost < 0.01


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("late", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("share", [0.8, 1.0, 1.2])
def test_a_known_end_may_be_missed_a_little(share: float, late: float, chance: float) -> None:
    """If a computation takes a little more or less time than expected, a waiter still looks soon after its end."""
    cost, waited, looks = 0.2, late * 0.2, 0
    while waited < share * cost:
        waited += pause(waited - late * cost, cost, chance)
        looks += 1
    assert waited - share * cost < 0.035
    assert looks <= 18


def test_the_cost_is_the_entrys_own(server: MemcachedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter plans its looks by the cost of the last entry of this key that its engine has seen."""
    costs: list[float] = []

    def told(waited: float, cost: float, chance: float) -> float:
        costs.append(cost)
        return pause(waited, cost, chance)

    monkeypatch.setattr("stampede.engines.memcached.verbs.pause", told)
    filler, finder, waiter = (MemcachedEngine(server.address) for _ in range(3))
    assert fill(filler, granted(filler), some(cost=0.5))
    assert isinstance(claim(finder), Found)
    run_blocking(filler.blocking.store.invalidate("k"))
    token = granted(filler)

    def planned(engine: MemcachedEngine) -> set[float]:
        """The costs by which a waiter plans its looks."""
        costs.clear()
        until(lambda: run_blocking(engine.blocking.claims.wait("k", claim(engine), 0.02)) is None and costs)
        return set(costs)

    assert [planned(engine) for engine in (filler, finder, waiter)] == [{0.5}, {0.5}, {0.0}]
    busy = claim(waiter)
    threading.Timer(0.05, lambda: fill(filler, token, some(cost=0.7))).start()
    assert isinstance(run_blocking(waiter.blocking.claims.wait("k", busy, LONG)), Found)
    run_blocking(filler.blocking.store.invalidate("k"))
    granted(filler)
    assert planned(waiter) == {0.7}
    for engine in (filler, finder, waiter):
        engine.close()


def test_a_renewal_wakes_nobody(engine: MemcachedEngine, server: MemcachedServer) -> None:
    """The renewal of a lease does not wake the waiters."""
    other = MemcachedEngine(server.address)
    token = granted(engine)
    busy = claim(other)

    def waited() -> float:
        start = time.monotonic()
        assert run_blocking(other.blocking.claims.wait("k", busy, 0.5)) is None
        return time.monotonic() - start

    herd = Herd(waited)
    assert renew(engine, token)
    (seconds,) = herd.join()
    assert seconds > 0.4
    other.close()


# -- locks --------------------------------------------------------------------------------------------------------


def test_a_lock_is_released_only_by_its_owner(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """Only the holder's release frees a lock. A bare delete would free the lock of a later holder."""
    lock, other = Lock("nightly", engine), Lock("nightly", engine)
    assert lock.acquire()
    server.empty()  # as if it had been evicted
    assert other.acquire()
    with pytest.raises(LockLost):
        lock.release()
    assert not lock.acquire(wait=0)
    other.release()


def test_a_free_lock_is_two_commands(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """Taking and releasing a lock takes two commands: the release does not first read whose lock it is."""
    token = new_id()
    for _ in range(2):  # the first one connects
        before = server.commands()
        assert isinstance(run_blocking(engine.blocking.locks.acquire("nightly", token, LONG)), Granted)
        assert run_blocking(engine.blocking.locks.release("nightly", token))
    assert server.commands() - before == 2
    other = MemcachedEngine(server.address)
    for renewer in (engine, other):  # a renewal gives it another number
        assert isinstance(run_blocking(engine.blocking.locks.acquire("nightly", token, LONG)), Granted)
        assert run_blocking(renewer.blocking.locks.renew("nightly", token, LONG))
        assert run_blocking(engine.blocking.locks.release("nightly", token))
    other.close()


def test_a_lock_outlasts_a_second_that_the_server_skips(server: MemcachedServer, engine: MemcachedEngine) -> None:
    """A lock lasts for its whole lease, although the server's clock skips a second now and then. Otherwise two holders
    could be inside at once."""
    for number in range(20):
        name, began = f"l{number}", server.say(b"stats\r\n", b"END\r\n")
        assert isinstance(run_blocking(engine.blocking.locks.acquire(name, b"token", 1.0)), Granted)
        told = server.say(b"mg l:%s t\r\n" % name.encode())
        if uptime(began) == uptime(server.say(b"stats\r\n", b"END\r\n")):
            break  # there was no tick meanwhile
    # The next tick may come a moment after the lock was taken, and skip a second: one second must then be left.
    assert int(told.split()[1].removeprefix(b"t")) - 2 >= 1


def uptime(stats: bytes) -> bytes:
    """The line with the uptime in seconds, by the clock that items end by."""
    return next(line for line in stats.splitlines() if line.startswith(b"STAT uptime"))


# -- URLs and connections ------------------------------------------------------------------------------------------


def test_urls() -> None:
    """The servers and options of a URL are used, and a wrong URL is refused at once."""
    engine = from_url("memcached://h1:1234,h2,[::1]:5?timeout=0.5", connect_timeout=2)
    assert [server.address for server in engine._servers.all] == [("h1", 1234), ("h2", 11211), ("::1", 5)]
    options = engine._servers.all[0].options
    assert (options["timeout"], options["connect_timeout"], options["no_delay"]) == (0.5, 2, True)
    assert [each.address for each in from_url("memcached:///run/m.sock")._servers.all] == ["/run/m.sock"]
    for wrong in ("memcached://", "memcached://h:port", "memcached://h?timout=1"):
        with pytest.raises(OptionError):
            from_url(wrong)


def test_without_pymemcache_there_is_a_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pymemcache, the error names the pip command that installs it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pymemcache"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pymemcache", None)
    with pytest.raises(MissingExtra, match=r"pip install 'stampede-guard\[memcached\]'"):
        open_engine("memcached://h")


def test_a_connection_is_one_threads_at_a_time(server: MemcachedServer) -> None:
    """Threads do not share a connection. Otherwise two threads would read each other's replies."""
    engine = MemcachedEngine(server.address)

    def work(number: int) -> None:
        for turn in range(300):
            key, value = f"{number}.{turn}", b"%d.%d" % (number, turn)
            assert fill(engine, granted(engine, key=key), some(value), key)
            entry = kept(engine, key)
            assert entry is not None and entry.value == value

    herd = Herd(*(partial(work, number) for number in range(6)))
    assert herd.join() == [None] * 6
    engine.close()


def test_each_loop_has_connections_of_its_own(engine: MemcachedEngine) -> None:
    """Each event loop has its own connections, because a connection belongs to one loop."""
    with asyncio.Runner() as one, asyncio.Runner() as two:
        one.run(engine.suspending.store.set("k", some()))  # type: ignore[union-attr,arg-type]
        for runner in (two, one):
            (entry,) = runner.run(engine.suspending.store.get(["k"]))  # type: ignore[union-attr,arg-type]
            assert entry is not None and entry.value == b"value"


def test_a_unix_socket(tmp_path: Path) -> None:
    """A server on a Unix socket can be used."""
    path = tmp_path / "memcached.sock"
    program = shutil.which("memcached")
    if program is None:
        pytest.skip("memcached is not installed")
    process = subprocess.Popen([program, "-u", "root" if os.getuid() == 0 else getpass.getuser(), "-s", str(path)])
    try:
        engine = from_url(f"memcached://{path}")

        def answers() -> bool:
            with suppress(EngineError):
                return engine.ping() > 0
            return False

        until(answers)
        put(engine, some(b"there"))

        async def scenario() -> Any:
            return (await engine.suspending.store.get(["k"]))[0]

        entry = asyncio.run(scenario())
        assert entry.value == b"there"
        engine.close()
    finally:
        process.kill()
        process.wait()


def test_a_forked_child_has_connections_of_its_own(engine: MemcachedEngine) -> None:
    """A forked child has connections of its own, and does not hold the leases of its parent."""
    token = granted(engine)
    assert renew(engine, token)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it warns of forks beside threads, which are tested here
        pid = os.fork()
    if pid == 0:
        try:
            put(engine, some(b"child"), "child")
            told = b"lost" if engine._numbers.get((b"s:k", token)) is None else b"kept"
            os.write(writer, told if isinstance(claim(engine), Busy) else b"not busy")
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"lost"
    os.waitpid(pid, 0)
    os.close(reader)
    assert fill(engine, token, some(b"parent"))
    child = kept(engine, "child")
    assert child is not None and child.value == b"child"


def test_an_old_server_is_named() -> None:
    """A server without the needed commands is refused, and the error names the version that is needed."""
    from stampede.engines.memcached.servers import MemcachedNode, checked

    server = MemcachedNode(("h", 1), {})
    for version in (b"1.5.22", b"1.6.12", b"1.4.5_4_gaa7839e"):
        with pytest.raises(EngineError, match=r"1\.6\.13 or newer"):
            checked(server, version)
    checked(server, b"1.6.13")
    checked(server, b"VERSION 1.7.0")


def test_what_the_server_has_confirmed_is_believed_again(server: MemcachedServer) -> None:
    """An entry that the server has confirmed is served by the local tier again, each time for its ttl."""
    with Cache(server.url, local={"entries": 10, "ttl": LONG}, early=0) as cache:
        for _ in range(3):
            assert cache.get_or_compute("k", lambda: 1) == 1
            (resident,) = cache._core.local_tier.residents.residents()
            assert cache._core.local_tier.hit(resident.key) is resident
            resident.fresh = resident.end = time.monotonic()  # its ttl has ended
            assert cache._core.local_tier.hit(resident.key) is None


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_value_that_was_refused_is_not_believed(server: MemcachedServer, colour: str) -> None:
    """A value that was invalidated while it was computed is not kept in the local tier."""
    with Cache(server.url, local=True, early=0) as cache, Cache(server.url) as other:

        def compute() -> int:
            other.invalidate("k")
            return 1

        async def both() -> list[int]:
            return [await cache.aget_or_compute("k", compute), await cache.aget_or_compute("k", lambda: 2)]

        if colour == "async":
            assert asyncio.run(both()) == [1, 2]
        else:
            assert [cache.get_or_compute("k", compute), cache.get_or_compute("k", lambda: 2)] == [1, 2]
