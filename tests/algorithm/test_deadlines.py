"""`patience` and `deadline`: no caller waits longer than they allow. The computation continues without its caller."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from bare_cache import LONG, Gate, Room, never, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from proxy import Proxy
from servers import shared_redis

from stampede import Cache, ComputationFailed, OptionError, RecursiveComputation, WaitTimeout, events, refreshing
from stampede.algorithm import background
from stampede.algorithm.background import Workers
from stampede.algorithm.flight import Flights
from stampede.algorithm.scope import ScopeSide
from stampede.model.ports import Busy

ENGINES = ["memory", "disk", "redis", "memcached", "postgres"]
BRIEF = 0.05
"""A patience in seconds: short for a caller that must wait, long enough for one that need not."""


class Asked:
    """One cache, called from a thread or from a task of an event loop."""

    def __init__(self, cache: Cache, colour: str, room: Room) -> None:
        self.cache = cache
        self.colour = colour
        self.room = room
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        if colour == "async":
            self._thread.start()

    def begin(self, key: str, origin: Any, **terms: Any) -> Any:
        """Begin a call and return its future."""
        if self.colour == "sync":
            return self.room.run(lambda: self.cache.get_or_compute(key, origin, **terms))
        return asyncio.run_coroutine_threadsafe(self.task(key, origin, **terms), self._loop)

    def task(self, key: str, origin: Any, **terms: Any) -> Awaitable[Any]:
        return self.cache.aget_or_compute(key, getattr(origin, "suspending", origin), **terms)

    def __call__(self, key: str, origin: Any, **terms: Any) -> Any:
        return self.begin(key, origin, **terms).result(LONG)

    def many(self, keys: list[str], loader: Any, **terms: Any) -> Any:
        if self.colour == "sync":
            return self.room.run(lambda: self.cache.get_or_compute_many(keys, loader, **terms)).result(LONG)
        work = self.cache.aget_or_compute_many(keys, getattr(loader, "suspending", loader), **terms)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONG)

    def is_followed(self) -> bool:
        return any(flight.callers == 2 for flight in list(self.cache._core.flights._flights.values()))

    def end_the_loop(self) -> None:
        """End the loop as `asyncio.run` does: cancel its remaining tasks."""

        async def rest() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(rest(), self._loop).result(LONG)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def stale(self, key: str, value: Any = "old") -> None:
        self.cache.set(key, value)
        self.cache.expire(key)


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "memory": lambda: "memory://",
        "disk": lambda: f"disk://{tmp_path}",
        "redis": lambda: shared_redis().url,
        "memcached": lambda: f"memcached://127.0.0.1:{shared_memcached().port}",
        "postgres": lambda: prepared_postgres().postgres_url,
    }[request.param]()


@pytest.fixture
def told() -> list[events.Event]:
    return []


@pytest.fixture
def cache(url: str, told: list[events.Event]) -> Iterator[Cache]:
    terms: dict[str, Any] = {"ttl": 60, "stale": 60, "early": 0, "namespace": uuid4().hex}
    with Cache(url, observers=[told.append], **terms) as cache:
        yield cache


@pytest.fixture
def asked(request: pytest.FixtureRequest, cache: Cache, colour: str) -> Iterator[Asked]:
    with Room() as room:
        asked = Asked(cache, getattr(request, "param", colour), room)
        yield asked
        asked.end_the_loop()


@pytest.fixture
def gates() -> Iterator[Callable[..., Gate]]:
    """Create origins that wait at a gate. All gates open at the end of the test."""
    made: list[Gate] = []

    def gate(result: Any = "value") -> Gate:
        made.append(Gate(result))
        return made[-1]

    yield gate
    for each in made:
        each.open.set()


Gates = Callable[..., Gate]


def test_the_leader_has_a_patience_too(asked: Asked, gates: Gates) -> None:
    """A leader waits no longer than its patience if a stale value can be served."""
    asked.stale("k")
    slow = gates("new")
    began = time.monotonic()
    assert asked("k", slow, patience=BRIEF) == "old"
    assert BRIEF <= time.monotonic() - began < LONG / 2
    assert asked("k", never, patience=BRIEF) == "old"  # the key is still being computed
    slow.open.set()
    until(lambda: asked("k", never, patience=LONG) == "new")
    assert slow.calls == 1


def test_nobody_is_given_what_is_stale_where_the_new_one_comes_in_time(asked: Asked, gates: Gates) -> None:
    """If the new value comes within the patience, the leader, its followers and later callers all get it."""
    asked.stale("k")
    slow = gates("new")
    calls = [asked.begin("k", slow, patience=LONG) for _ in range(3)]
    assert slow.begun.wait(LONG)
    calls += [asked.begin("k", slow, patience=LONG) for _ in range(3)]
    slow.open.set()
    assert [call.result(LONG) for call in calls] == ["new"] * 6
    assert slow.calls == 1


def test_what_was_made_stale_with_all_others_is_stale(asked: Asked, gates: Gates) -> None:
    """After `expire_all`, callers with patience wait for the new value, although the stored entry looks fresh."""
    asked.cache.set("k", "old")
    asked.cache.expire_all()
    slow = gates("new")
    began = time.monotonic()
    assert asked("k", slow, patience=BRIEF) == "old"
    assert time.monotonic() - began >= BRIEF
    waits = asked.begin("k", never, patience=LONG)
    slow.open.set()
    assert waits.result(LONG) == "new"


def test_each_has_a_patience_of_its_own(asked: Asked, gates: Gates) -> None:
    """Each caller has its own patience. A caller with little patience does not wait for one with much."""
    asked.stale("k")
    slow = gates("new")
    with Cache(asked.cache.name, namespace=asked.cache.namespace) as there, Room() as room:
        if asked.cache.engine.shared:
            first = room.run(lambda: there.get_or_compute("k", slow, stale=60))
        else:
            first = asked.begin("k", slow)
        assert slow.begun.wait(LONG)
        much = [asked.begin("k", never, patience=LONG) for _ in range(2)]
        assert asked("k", never, patience=BRIEF) == "old"
        assert asked("k", never) == "old"
        slow.open.set()
        assert [each.result(LONG) for each in (first, *much)] == ["new"] * 3


def test_a_deadline_is_one_where_nothing_is_kept(asked: Asked, gates: Gates) -> None:
    """Even a leader waits no longer than its deadline. Its computation continues, and the value is stored."""
    slow = gates()
    with pytest.raises(WaitTimeout, match=r"k' has been computed for .* deadline ran out: the computation goes on"):
        asked("k", slow, deadline=BRIEF)
    with pytest.raises(WaitTimeout, match=r"another caller has been computing .*k' for .* deadline ran out"):
        asked("k", never, deadline=BRIEF)
    waits = asked.begin("k", never, deadline=LONG)
    slow.open.set()
    assert waits.result(LONG) == "value"
    assert asked("k", never) == "value"


def test_a_computation_in_time_is_nothing_special(asked: Asked, told: list[events.Event]) -> None:
    """If a computation ends in time, its value, its error and its events are the same as without a deadline."""
    assert asked("k", lambda: "value", deadline=LONG, patience=LONG) == "value"
    assert asked("k", never, deadline=LONG) == "value"

    def fails() -> Any:
        raise LookupError("no row")

    with pytest.raises(LookupError, match="no row"):
        asked("other", fails, deadline=LONG)
    asked.stale("k")
    assert asked("k", fails, patience=LONG) == "old"
    asked.stale("late", "newer")
    assert asked("late", lambda: "newest", deadline=LONG) == "newest"
    assert [event.why for event in told if isinstance(event, events.Computed)] == ["missing", "stale"]


def test_what_is_stale_is_served_when_the_deadline_has_passed(asked: Asked, gates: Gates) -> None:
    """If the deadline passes and there is a stale value, the caller gets it and no error."""
    asked.stale("k")
    assert asked("k", gates(), deadline=10 * BRIEF) == "old"  # longer than any engine takes to reply


def test_the_error_of_what_goes_on_is_told_to_those_who_wait(asked: Asked, gates: Gates) -> None:
    """If a computation fails after its caller has left, its waiters get the error. They do not wait for the lease."""
    slow = gates(LookupError("no row"))
    with pytest.raises(WaitTimeout):
        asked("k", slow, deadline=BRIEF)
    here = asked.begin("k", never)
    with Cache(asked.cache.name, namespace=asked.cache.namespace) as there, Room() as room:
        elsewhere = room.run(there.get_or_compute, "k", never) if asked.cache.engine.shared else None
        time.sleep(0.01)  # if it does not wait yet, it is told all the same, or computes on its own
        slow.open.set()
        if elsewhere is not None:
            assert isinstance(elsewhere.exception(LONG), ComputationFailed | AssertionError)
    assert isinstance(here.exception(LONG), LookupError | AssertionError)


def test_a_hung_origin_keeps_nobody_longer_than_his_patience(asked: Asked, gates: Gates) -> None:
    """If an origin hangs, callers wait no longer than their patience or deadline. Otherwise, all threads would hang."""
    hung = gates()
    for n in range(20):
        asked.stale(f"k{n}")
    calls = [asked.begin(f"k{n % 20}", hung, patience=BRIEF) for n in range(40)]
    assert [call.result(LONG) for call in calls] == ["old"] * 40
    calls = [asked.begin(f"missing {n}", hung, deadline=BRIEF) for n in range(5)]
    assert all(isinstance(call.exception(LONG), WaitTimeout) for call in calls)


def test_where_nothing_stale_may_be_served_the_deadline_holds(asked: Asked, gates: Gates) -> None:
    """With `stale=0`, patience does not serve the stale value, and the deadline applies."""
    asked.stale("k")
    slow = gates("new")
    with pytest.raises(WaitTimeout):
        asked("k", slow, stale=0, patience=BRIEF, deadline=2 * BRIEF)
    slow.open.set()
    assert asked("k", never, stale=0, patience=BRIEF) == "new"


def test_an_invalidation_ends_what_goes_on(asked: Asked, gates: Gates) -> None:
    """If the key is invalidated after the caller has left, the value of the continuing computation is not stored."""
    slow = gates("older than the invalidation")
    with pytest.raises(WaitTimeout):
        asked("k", slow, deadline=BRIEF)
    asked.cache.invalidate("k")
    slow.open.set()
    assert asked("k", lambda: "newer", deadline=LONG) == "newer"
    assert asked("k", never) == "newer"


def test_a_refresh_waits_for_its_own_value(asked: Asked, gates: Gates) -> None:
    """`refresh` waits for the new value however long the computation takes, even with `patience=0` and `deadline=0`."""
    slow = gates("new")

    def compute() -> Any:
        return slow()

    async def suspending() -> Any:
        return await slow.suspending()

    f: Any = asked.cache.cached(patience=0, deadline=0, key="k")(compute if asked.colour == "sync" else suspending)
    if asked.colour == "sync":
        call = asked.room.run(f.refresh)
    else:
        call = asyncio.run_coroutine_threadsafe(f.refresh(), asked._loop)
    assert slow.begun.wait(LONG)
    slow.open.set()
    assert call.result(LONG) == "new"


# -- many ---------------------------------------------------------------------------------------------------------


class Load:
    """A loader of many keys that waits at a gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.asked: list[list[str]] = []

    def __call__(self, keys: list[str]) -> dict[str, Any]:
        self.asked.append(keys)
        return dict.fromkeys(keys, self.gate())

    async def suspending(self, keys: list[str]) -> dict[str, Any]:
        self.asked.append(keys)
        return dict.fromkeys(keys, await self.gate.suspending())


def test_a_batch_has_one_patience(asked: Asked, gates: Gates) -> None:
    """A batch waits for its patience only once, both for keys it loads and for keys that others compute."""
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        asked.stale(key)
    slow = Load(gates("new"))
    alone = asked.begin("k0", gates(), patience=0)
    assert alone.result(LONG) == "old"
    began = time.monotonic()
    assert asked.many(keys, slow, patience=0.1) == dict.fromkeys(keys, "old")
    assert slow.gate.begun.wait(LONG)  # all keys are being computed
    assert asked.many(keys, never, patience=0.1) == dict.fromkeys(keys, "old")
    assert 0.2 <= time.monotonic() - began < 3.5  # waiting for each key in turn would take 4 s
    assert slow.asked == [keys[1:]]
    slow.gate.open.set()
    until(lambda: asked.many(keys[1:], never, patience=LONG) == dict.fromkeys(keys[1:], "new"))


@pytest.mark.parametrize("url", ["memory://"])
def test_a_batch_has_no_second_patience_for_what_others_compute(
    asked: Asked, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If loading has used up the patience of a batch, it does not wait again for keys that others compute."""
    for key in ("a", "b"):
        asked.stale(key)
    assert asked("a", gates(), patience=0) == "old"
    left, fetch = [], ScopeSide.fetch

    def noted(side: ScopeSide, key: str, origin: Any, policy: Any, **terms: Any) -> Any:
        left.append((key.rpartition("/")[2], policy.patience))
        return fetch(side, key, origin, policy, **terms)

    monkeypatch.setattr(ScopeSide, "fetch", noted)
    assert asked.many(["a", "b"], Load(gates()), patience=BRIEF) == {"a": "old", "b": "old"}
    assert left == [("a", 0.0)]


def test_a_batch_has_one_deadline(asked: Asked, gates: Gates) -> None:
    """A batch stops waiting at its deadline. The loader continues, and its values are stored."""
    asked.stale("a")
    slow = Load(gates("new"))
    with pytest.raises(WaitTimeout, match="b' has been computed"):
        asked.many(["a", "b"], slow, patience=BRIEF, deadline=10 * BRIEF)
    assert slow.gate.begun.wait(LONG)
    slow.gate.open.set()
    until(lambda: asked.many(["a", "b"], never, patience=LONG) == {"a": "new", "b": "new"})
    assert slow.asked == [["a", "b"]]


def test_a_batch_in_time(asked: Asked, gates: Gates) -> None:
    """If the loader ends in time, its values, its error and the missing keys are the same as without a deadline."""
    asked.stale("a")
    terms: dict[str, Any] = {"patience": LONG, "deadline": LONG}
    assert asked.many(["a", "b", "c"], lambda keys: {"a": 1, "b": 2}, **terms) == {"a": 1, "b": 2}
    assert asked.many(["a", "b"], never, **terms) == {"a": 1, "b": 2}

    def fails(keys: list[str]) -> dict[str, int]:
        raise LookupError("no rows")

    with pytest.raises(LookupError, match="no rows"):
        asked.many(["d", "e"], fails, **terms)
    asked.stale("a")
    held: list[list[str]] = []

    def load(keys: list[str]) -> dict[str, int]:
        held.append(keys)
        return dict.fromkeys(keys, 3)

    assert asked.many(["a", "f"], load, patience=LONG) == {"a": 3, "f": 3}
    assert [sorted(keys) for keys in held] == [["a", "f"]]


@pytest.mark.parametrize("url", ["memory://"])
@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_a_batch_that_is_cancelled_while_it_waits_cancels_its_computation(asked: Asked, gates: Gates) -> None:
    """If a waiting batch is cancelled, its computation is cancelled and its leases are given back."""
    slow = Load(gates())
    work = asked.cache.aget_or_compute_many(["a", "b"], slow.suspending, deadline=LONG)
    call = asyncio.run_coroutine_threadsafe(work, asked._loop)
    assert slow.gate.begun.wait(LONG)
    call.cancel()
    assert asked.many(["a", "b"], lambda keys: dict.fromkeys(keys, "again"), deadline=LONG) == {
        "a": "again",
        "b": "again",
    }


@pytest.mark.parametrize("url", ["memory://"])
@pytest.mark.parametrize("asked", ["sync"], indirect=True)
def test_a_block_that_refreshes_waits_for_its_values(asked: Asked) -> None:
    """In a `refreshing()` block, callers wait for their values even with `deadline=0`."""

    def load(keys: list[str]) -> dict[str, int]:
        time.sleep(BRIEF)
        return dict.fromkeys(keys, 1)

    with refreshing():
        assert asked.cache.get_or_compute_many(["a"], load, deadline=0) == {"a": 1}
        assert asked.cache.get_or_compute("b", lambda: load(["b"]), deadline=0) == {"b": 1}


# -- one process: how it works -----------------------------------------------------------------------------------------


memory = pytest.mark.parametrize("url", ["memory://"])


@memory
def test_a_fresh_value_is_never_waited_for(cache: Cache, asked: Asked, gates: Gates) -> None:
    """A caller that finds a fresh value gets it at once. An early refresh does not keep it waiting for its patience."""
    slow = gates("new")
    terms: dict[str, Any] = {"patience": LONG, "deadline": LONG, "ttl": 60, "early": 1e6}
    asked.cache.set("k", "fresh", ttl=60, early=1e6)

    def refreshed() -> bool:
        assert asked("k", slow, **terms) == "fresh"
        return slow.begun.is_set()

    tier = cache._core.local_tier.residents
    assert tier is not None
    (resident,) = tier._residents.values()
    resident.end = time.monotonic() - 0.001  # the moment of its early refresh has come
    until(refreshed)


@memory
@pytest.mark.parametrize("asked", ["sync"], indirect=True)
def test_where_there_is_no_place_the_caller_computes(
    cache: Cache, asked: Asked, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no background thread is free, the caller computes the value itself."""
    monkeypatch.setattr(background, "_beside", Workers(1, "stampede-beside"))
    hung = gates()
    with pytest.raises(WaitTimeout):
        asked("hung", hung, deadline=BRIEF)
    here = threading.get_ident()
    assert cache.get_or_compute("k", threading.get_ident, deadline=LONG) == here
    cache.set("stale", "old")
    cache.expire("stale")
    assert cache.get_or_compute("stale", threading.get_ident, patience=0) == here
    hung.open.set()
    until(lambda: background._beside.taken == {})
    assert cache.get_or_compute("again", threading.get_ident, deadline=LONG) != here


@memory
@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_a_caller_that_is_cancelled_while_it_waits_cancels_its_computation(asked: Asked, gates: Gates) -> None:
    """A cancelled caller cancels its computation, unless others wait for it or a caller has left it at a deadline."""
    slow, ended = gates(), threading.Event()

    async def origin() -> Any:
        try:
            return await slow.suspending()
        except asyncio.CancelledError:
            ended.set()
            raise

    call = asked.begin("k", origin, deadline=LONG)
    assert slow.begun.wait(LONG)
    call.cancel()
    assert ended.wait(LONG)
    assert asked("k", lambda: "again", deadline=LONG) == "again"

    ended.clear()
    slow.begun.clear()
    leader = asked.begin("followed", origin, deadline=LONG)
    assert slow.begun.wait(LONG)
    follower = asked.begin("followed", never, deadline=LONG)
    until(asked.is_followed)
    leader.cancel()
    slow.open.set()
    assert follower.result(LONG) == "value"
    slow.open.clear()
    slow.begun.clear()

    async def in_time() -> str:
        try:
            async with asyncio.timeout(LONG):
                return str(await asked.task("late", origin, deadline=BRIEF))
        except WaitTimeout:
            return "handed over"

    assert asyncio.run_coroutine_threadsafe(in_time(), asked._loop).result(LONG) == "handed over"
    follower = asked.begin("late", never, deadline=LONG)
    until(asked.is_followed)
    follower.cancel()
    slow.open.set()
    until(lambda: asked.cache.get("late") == "value")
    assert not ended.is_set()


@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_who_has_no_more_time_cancels_nothing(asked: Asked, gates: Gates) -> None:
    """If the leader is cancelled and the last follower leaves at its deadline, the computation continues."""
    slow = gates()
    leader = asked.begin("k", slow, deadline=LONG)
    assert slow.begun.wait(LONG)
    follower = asked.begin("k", never, deadline=5 * BRIEF)
    until(lambda: asked.is_followed() or follower.done())
    leader.cancel()
    with pytest.raises(WaitTimeout):
        follower.result(LONG)
    slow.open.set()
    until(lambda: asked.cache.get("k") == "value")


@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_nor_does_he_for_who_leaves_after_him(asked: Asked, gates: Gates) -> None:
    """If a follower has left at its deadline, cancelling the leader does not end the computation."""
    slow = gates()
    leader = asked.begin("k", slow)
    assert slow.begun.wait(LONG)
    with pytest.raises(WaitTimeout):
        asked("k", never, deadline=BRIEF)
    leader.cancel()
    slow.open.set()
    until(lambda: asked.cache.get("k") == "value")


@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_a_call_that_is_cancelled_ends_when_its_lease_is_given_back(asked: Asked, gates: Gates) -> None:
    """A cancelled call ends only after its lease is given back, so that the next caller can compute at once."""
    slow = gates()

    async def cancelled() -> int:
        task = asyncio.ensure_future(asked.task("k", slow, deadline=LONG))
        while not slow.begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asked.cache.aget_or_compute("k", lambda: 2, wait=0)

    assert asyncio.run_coroutine_threadsafe(cancelled(), asked._loop).result(LONG) == 2


@pytest.mark.parametrize("url", ["redis"], indirect=True)
@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_who_waits_with_patience_asks_once(asked: Asked, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that wait with patience do not ask the engine again one after the other."""
    asked.stale("k")
    slow, joined = gates("new"), Counter[Any]()
    join = Flights.join

    def counted(flights: Flights, *args: Any, **terms: Any) -> Any:
        joined[asyncio.current_task()] += 1
        return join(flights, *args, **terms)

    monkeypatch.setattr(Flights, "join", counted)

    async def herd() -> list[Any]:
        calls = [asyncio.ensure_future(asked.task("k", slow, patience=LONG)) for _ in range(6)]
        while not slow.begun.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        slow.open.set()
        return await asyncio.gather(*calls)

    assert asyncio.run_coroutine_threadsafe(herd(), asked._loop).result(LONG) == ["new"] * 6
    # Callers that began after the leader's claim join a second flight, all together. None joins a third.
    assert len(joined) >= 5
    assert max(joined.values()) == 2


@pytest.mark.parametrize("url", ["redis"], indirect=True)
@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_who_follows_one_of_little_patience_keeps_his_own(asked: Asked, gates: Gates) -> None:
    """A follower keeps its own patience. If its leader's patience ends first, only the leader gets the stale value."""
    asked.stale("k")
    slow = gates("new")
    with Cache(asked.cache.name, namespace=asked.cache.namespace) as there, Room() as room:
        computes = room.run(lambda: there.get_or_compute("k", slow, stale=60))
        assert slow.begun.wait(LONG)

        async def herd() -> list[Any]:
            patience = [LONG, BRIEF, LONG]  # the second leads after the first, and the third follows the second
            calls = [asyncio.ensure_future(asked.task("k", never, patience=each)) for each in patience]
            await calls[1]
            slow.open.set()
            return await asyncio.gather(*calls)

        assert asyncio.run_coroutine_threadsafe(herd(), asked._loop).result(LONG) == ["new", "old", "new"]
        assert computes.result(LONG) == "new"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_an_engine_that_hangs_keeps_nobody_longer_than_his_patience(
    before: Callable[[Any], Proxy], gates: Gates, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine hangs, a caller gets the stale value when its patience ends. It does not ask the engine again."""
    slow, name, looked = gates(), uuid4().hex, threading.Event()
    proxy = before(shared_redis())
    terms: dict[str, Any] = {"namespace": name, "early": 0, "stale": 60}
    patient = f"{proxy.url}?socket_timeout=20"
    with Room() as room, Cache(shared_redis().url, **terms) as there, Cache(patient, **terms) as here:
        asked = Asked(here, colour, room)
        asked("warm", lambda: 1)
        there.set("k", "old")
        there.expire("k")
        computes = room.run(there.get_or_compute, "k", slow)
        assert slow.begun.wait(LONG)
        claims = here.engine.blocking.claims if colour == "sync" else here.engine.suspending.claims
        assert claims is not None
        wait = claims.wait

        async def watched(*terms: Any) -> Any:
            proxy.at(b"GETEX", after=looked.set)  # the last reply before the call waits passes from here on
            return await wait(*terms)

        monkeypatch.setattr(claims, "wait", watched)
        waits = asked.begin("k", never, patience=0.2)
        until(lambda: looked.is_set() or waits.done())
        proxy.hold()
        began = time.monotonic()
        assert waits.result(LONG) == "old"
        assert time.monotonic() - began < 5
        slow.open.set()
        assert computes.result(LONG) == "value"
        proxy.cut()
        asked.end_the_loop()


@memory
@pytest.mark.parametrize("asked", ["async"], indirect=True)
def test_a_loop_that_ends_takes_what_goes_on_with_it(asked: Asked, gates: Gates) -> None:
    """If an event loop ends, a computation that continues in it gives back its lease."""
    with pytest.raises(WaitTimeout):
        asked("k", gates(), deadline=BRIEF)
    asked.end_the_loop()
    assert asked.cache.get_or_compute("k", lambda: "again", wait=LONG) == "again"


def test_a_process_that_ends_gives_the_lease_back(cache: Cache, tmp_path: Path) -> None:
    """A process that ends gives back the lease of a computation that continues in it."""
    if not cache.engine.shared:
        pytest.skip("nobody else is there")
    script = f"""
import sys, threading
from stampede import Cache, WaitTimeout
sys.modules["stampede.leases.keeper"].AT_EXIT = 20
cache = Cache({cache.settings.url!r}, namespace={cache.namespace!r}, lease=60)
try:
    cache.get_or_compute("k", threading.Event().wait, deadline=0.05)
except WaitTimeout:
    print("left")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "left\n", done.stderr
    assert cache.get_or_compute("k", lambda: "again", wait=LONG) == "again"


@memory
def test_a_computation_that_asks_for_its_own_key_is_told(asked: Asked) -> None:
    """A computation in a background thread that asks for its own key is refused: it would wait for itself."""
    cache = asked.cache

    def asks() -> Any:
        return cache.get_or_compute("k", never, deadline=LONG)

    async def asks_in_a_loop() -> Any:
        return await cache.aget_or_compute("k", never, deadline=LONG)

    with pytest.raises(RecursiveComputation):
        asked("k", asks if asked.colour == "sync" else asks_in_a_loop, deadline=LONG)

    def between() -> Any:
        return cache.get_or_compute("between", asks, deadline=LONG)

    async def between_in_a_loop() -> Any:
        return await cache.aget_or_compute("between", asks_in_a_loop, deadline=LONG)

    with pytest.raises(RecursiveComputation):  # raised at once, not after a deadline
        asked("k", between if asked.colour == "sync" else between_in_a_loop)


def test_who_computes_for_himself_alone_has_a_deadline_too(
    asked: Asked, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that is told that the value is not stored computes it itself. Its deadline applies to that, too."""
    engine = asked.cache.engine
    if not engine.shared:
        pytest.skip("nobody else is there")
    claims = engine.blocking.claims if asked.colour == "sync" else engine.suspending.claims
    assert claims is not None
    wait, there_too = claims.wait, threading.Event()

    async def noted(key: str, busy: Busy, timeout: float) -> None:
        there_too.set()
        await wait(key, busy, timeout)

    monkeypatch.setattr(claims, "wait", noted)
    theirs, ours, fails = gates(), gates(), gates(LookupError("no row"))
    for mine, error in ((ours, WaitTimeout), (fails, LookupError)):
        theirs.begun.clear()
        theirs.open.clear()
        with Cache(asked.cache.name, namespace=asked.cache.namespace) as there, Room() as room:
            unkept = room.run(lambda: there.get_or_compute("k", theirs, cache_if=lambda value: False))
            assert theirs.begun.wait(LONG)
            waits = asked.begin("k", mine, deadline=8 * BRIEF if mine is ours else LONG)
            # It waits, or its deadline has passed. If it claimed the key only later, it would get the lease.
            until(lambda: there_too.is_set() or waits.done())
            there_too.clear()
            theirs.open.set()
            if mine is fails:
                assert fails.begun.wait(LONG)
                fails.open.set()
            assert isinstance(waits.exception(LONG), error)
            assert unkept.result(LONG) == "value"


@memory
def test_a_context_is_the_callers(asked: Asked) -> None:
    """A computation in a background thread runs in the context of its caller."""
    from contextvars import ContextVar

    tenant: ContextVar[str] = ContextVar("tenant")

    def call() -> Any:
        tenant.set("acme")
        if asked.colour == "sync":
            return asked.cache.get_or_compute("k", tenant.get, deadline=LONG)
        return asyncio.run(asked.cache.aget_or_compute("k", tenant.get, deadline=LONG))

    assert asked.room.run(call).result(LONG) == "acme"


@pytest.mark.parametrize("terms", [{"patience": -1}, {"deadline": -1}, {"patience": "forever"}, {"patience": True}])
def test_what_is_no_duration_is_refused(terms: dict[str, Any]) -> None:
    """A `patience` or `deadline` that is not a duration is refused when the function is decorated."""
    with Cache("memory://") as cache, pytest.raises(OptionError, match=r"patience|deadline"):
        cache.cached(**terms)
