"""Claims made of a store and another engine's locks: the order of the steps, and changes between two steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memcached_server import shared_memcached
from servers import shared_redis

from stampede.engines import open_engine
from stampede.engines.memory import MemoryEngine
from stampede.engines.null import NullEngine
from stampede.engines.paired import PAST, Paired
from stampede.errors import EngineError, OptionError
from stampede.model.entry import Entry, Verdict, new_id
from stampede.model.ports import Ask, Busy, Failed, Found, Granted
from stampede.runtime.colour import run_blocking
from stampede.testing.clock import FakeClock


def some(value: Any, fresh: float = 60.0, keep: float | None = None) -> Entry[Any]:
    return Entry(value, new_id(), ttl=fresh, fresh=fresh, keep=fresh if keep is None else keep)


class Steps:
    """The requests to the two engines, in order. `then` is called before the step whose number is `at`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.at = -1
        self.then: Callable[[], object] = lambda: None

    def take(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            self.then()


class WatchedStore:
    """The memory engine's store, which records each step."""

    def __init__(self, port: Any, steps: Steps) -> None:
        self.port, self.steps = port, steps

    async def get(self, keys: Any) -> Any:
        self.steps.take("get")
        return await self.port.get(keys)

    async def set(self, key: str, entry: Any) -> None:
        self.steps.take("set")
        await self.port.set(key, entry)

    async def replace(self, key: str, seen: Any, entry: Any) -> bool:
        self.steps.take("replace")
        replaced: bool = await self.port.replace(key, seen, entry)
        return replaced

    async def expire(self, key: str) -> bool:
        return bool(await self.port.expire(key))

    async def invalidate(self, key: str) -> bool:
        self.steps.take("invalidate")
        return bool(await self.port.invalidate(key))

    async def look_too(self, keys: Any, scopes: Any) -> Any:
        return await self.port.look_too(keys, scopes)

    async def generations(self, scope: str) -> Any:
        return await self.port.generations(scope)

    async def bump(self, scope: str) -> None:
        await self.port.bump(scope)


class WatchedLocks:
    """The memory engine's locks, which record each step."""

    def __init__(self, port: Any, steps: Steps) -> None:
        self.port, self.steps = port, steps
        self.wait = port.wait

    async def acquire(self, name: str, token: bytes, lease: float, *, waits: bool = False) -> Any:
        self.steps.take("acquire")
        return await self.port.acquire(name, token, lease)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        self.steps.take("renew")
        return bool(await self.port.renew(name, token, lease))

    async def release(self, name: str, token: bytes) -> bool:
        self.steps.take("release")
        return bool(await self.port.release(name, token))


class World:
    """The pairs of two processes over one store and one engine of locks. The steps of the first pair are recorded."""

    def __init__(self, max_hold: float = 3600.0) -> None:
        self.clock = FakeClock()
        self.steps = Steps()
        self.store, self.locks = MemoryEngine(clock=self.clock), MemoryEngine(clock=self.clock)
        watched = MemoryEngine(clock=self.clock)
        store: Any = WatchedStore(self.store.blocking.store, self.steps)
        locks: Any = WatchedLocks(self.locks.blocking.locks, self.steps)
        watched.blocking = replace(watched.blocking, store=store, locks=locks)
        self.here = Paired(watched, watched, clock=self.clock, max_hold=max_hold)
        self.there = Paired(self.store, self.locks, clock=self.clock, max_hold=max_hold)

    def claim(self, pair: Paired, token: bytes | None = None, lease: float = 30.0, **terms: Any) -> Any:
        return run_blocking(pair.blocking.claims.claim("k", token or new_id(), Ask(lease, **terms)))

    def granted(self, pair: Paired, lease: float = 30.0, **terms: Any) -> bytes:
        token = new_id()
        assert isinstance(self.claim(pair, token, lease, **terms), Granted)
        return token

    def fill(self, pair: Paired, token: bytes, value: str) -> bool:
        return run_blocking(pair.blocking.claims.fill("k", token, some(value)))

    def value(self) -> Any:
        (entry,) = run_blocking(self.there.blocking.store.get(["k"]))
        return None if entry is None else entry.value

    def compute_there(self, value: str, **terms: Any) -> None:
        """A computation of the other process, from its claim to its fill."""
        token = new_id()
        reply = self.claim(self.there, token, **terms)
        if isinstance(reply, Granted):
            self.fill(self.there, token, value)


# -- order --------------------------------------------------------------------------------------------------------


def test_a_miss_goes_the_classic_way() -> None:
    """A miss looks in the store again after it got the lock. Otherwise, all callers that waited would compute."""
    world = World()
    token = world.granted(world.here)
    assert world.steps.names == ["get", "acquire", "get"]
    assert world.fill(world.here, token, "v")
    assert world.steps.names[3:] == ["renew", "replace", "release"]


def test_a_hit_asks_the_store_once() -> None:
    """A hit sends one request to the store, and takes no lock."""
    world = World()
    run_blocking(world.there.blocking.store.set("k", some("v")))
    assert isinstance(world.claim(world.here), Found)
    assert world.steps.names == ["get"]


def test_who_finds_it_at_the_second_look_gives_the_lock_back() -> None:
    """A value that was stored between the look and the lock is found at the second look, and the lock is given back."""
    world = World()
    world.steps.at, world.steps.then = 1, lambda: world.compute_there("theirs")  # before acquire
    reply = world.claim(world.here)
    assert isinstance(reply, Found)
    assert reply.entry.value == "theirs"
    assert world.steps.names == ["get", "acquire", "get", "release"]
    world.granted(world.there, seen=reply.entry.id)


# -- changes between two steps ------------------------------------------------------------------------------------

CLAIM = 3  # steps of a claim; the computation begins with the last one
FILL = 3


@pytest.mark.parametrize("step", range(CLAIM, CLAIM + FILL))
@pytest.mark.parametrize("kept", [None, "fresh", "stale"])
def test_invalidate_in_between_wins(kept: str | None, step: int) -> None:
    """If a key is invalidated at any step of a fill, the value is not stored, or is removed again."""
    world = World()
    seen = None
    if kept is not None:
        entry = some("old", fresh=60.0 if kept == "fresh" else 0.0, keep=90.0)
        run_blocking(world.there.blocking.store.set("k", entry))
        seen = entry.id
    token = world.granted(world.here, seen=seen)
    world.steps.at, world.steps.then = step, lambda: run_blocking(world.there.blocking.store.invalidate("k"))
    stored = world.fill(world.here, token, "too old")
    assert len(world.steps.names) > step, "nobody came in between"
    assert world.value() is None
    assert stored == (step == CLAIM + FILL - 1)  # the value was stored before, and is removed again
    world.granted(world.there)


@pytest.mark.parametrize("step", range(CLAIM, CLAIM + FILL - 1))
def test_set_in_between_wins(step: int) -> None:
    """If a key is set at any step of a fill, the value that was set remains."""
    world = World()
    token = world.granted(world.here)
    world.steps.at, world.steps.then = step, lambda: run_blocking(world.there.blocking.store.set("k", some("set")))
    assert not world.fill(world.here, token, "too old")
    assert world.value() == "set"


@pytest.mark.parametrize("step", range(CLAIM, CLAIM + FILL - 1))
@pytest.mark.parametrize("kept", [False, True])
def test_a_refresh_in_between_wins(kept: bool, step: int) -> None:
    """If a `refresh` begins at any step of an older fill, only the value of the refresh is stored."""
    world = World()
    if kept:
        run_blocking(world.there.blocking.store.set("k", some("old", fresh=0.0, keep=60.0)))
    token = world.granted(world.here)
    refresh: list[bytes] = []
    world.steps.at = step
    world.steps.then = lambda: refresh.append(world.granted(world.there, force=True))
    assert not world.fill(world.here, token, "too old")
    assert world.value() == ("old" if kept else None)
    assert world.fill(world.there, refresh[0], "new")
    assert world.value() == "new"


@pytest.mark.parametrize("step", range(CLAIM, CLAIM + FILL - 1))
def test_frozen_past_the_lease_stores_nothing(step: int) -> None:
    """If a process is frozen beyond its lease at any step of a fill, its value is not stored."""
    world = World()
    token = world.granted(world.here, lease=5.0)

    def freeze() -> None:
        world.clock.advance(60.0)
        world.compute_there("in time")

    world.steps.at, world.steps.then = step, freeze
    assert not world.fill(world.here, token, "late")
    assert world.value() == "in time"


@pytest.mark.parametrize("step", range(CLAIM))
def test_a_claim_survives_an_invalidation_at_any_step(step: int) -> None:
    """If a key is invalidated at any step of a claim, it does not remain locked. The next computation works."""
    world = World()
    run_blocking(world.there.blocking.store.set("k", some("old", fresh=0.0, keep=60.0)))
    world.steps.at, world.steps.then = step, lambda: run_blocking(world.there.blocking.store.invalidate("k"))
    token = new_id()
    reply = world.claim(world.here, token)
    if isinstance(reply, Granted):
        world.fill(world.here, token, "v")
    assert world.value() in (None, "v")
    world.compute_there("next")
    assert world.value() in ("v", "next")


def test_two_refreshes_at_once_end_with_one_value() -> None:
    """If two refreshes run at the same time, one of them stores its value, and only one."""
    world = World()
    tokens: list[bytes] = []
    world.granted(world.there)
    world.steps.at, world.steps.then = 2, lambda: tokens.append(world.granted(world.there, force=True))
    mine = new_id()
    assert isinstance(world.claim(world.here, mine, force=True), Granted)
    assert [world.fill(world.there, tokens[0], "theirs"), world.fill(world.here, mine, "mine")] == [False, True]
    assert world.value() == "mine"


def test_a_lock_nobody_else_can_open_is_given_back_when_overruled() -> None:
    """If a key is set during a computation, the next renewal gives the lock back. No other process can release a lock
    of the kernel, and waiters would wait for a value that is refused."""
    world = World()
    token = world.granted(world.here)
    entry = some("set")
    run_blocking(world.store.blocking.store.set("k", entry))  # and the lock remains
    assert isinstance(world.claim(world.there, seen=entry.id), Busy)
    assert not run_blocking(world.here.blocking.claims.renew("k", token, 30.0))
    world.granted(world.there, seen=entry.id)
    assert not world.fill(world.here, token, "too old")
    assert world.value() == "set"


# -- failures -----------------------------------------------------------------------------------------------------


def down() -> None:
    raise EngineError("down")


def test_a_store_that_fails_under_the_lock_leaves_no_lock() -> None:
    """If the store fails while a claim holds the lock, the lock is given back. The key is not blocked for a lease."""
    world = World()
    world.steps.at, world.steps.then = 2, down
    with pytest.raises(EngineError):
        world.claim(world.here)
    world.granted(world.there)


@pytest.mark.parametrize("step", range(CLAIM, CLAIM + FILL))
def test_a_fill_that_fails_can_be_abandoned(step: int) -> None:
    """If a fill fails at any step, its lease can be given back. Then, another caller can claim the key."""
    world = World()
    token = world.granted(world.here)
    world.steps.at, world.steps.then = step, down
    with pytest.raises(EngineError):
        world.fill(world.here, token, "v")
    run_blocking(world.here.blocking.claims.abandon("k", token))
    assert isinstance(world.claim(world.there), Granted if step < CLAIM + FILL - 1 else Found)


def test_invalidate_raises_when_it_can_not_be_done() -> None:
    """If an invalidation fails at any step, it raises an error. Otherwise, the old value could come back unnoticed."""
    for step in range(4):
        world = World()
        world.steps.at, world.steps.then = step, down
        with pytest.raises(EngineError):
            run_blocking(world.here.blocking.store.invalidate("k"))


def test_too_long_a_computation_is_refused() -> None:
    """A computation longer than `max_hold` is refused. An invalidation during it may be forgotten by then."""
    world = World(max_hold=100.0)
    token = world.granted(world.here, lease=1_000.0)
    run_blocking(world.there.blocking.store.expire("k"))
    world.clock.advance(101.0)
    assert not run_blocking(world.here.blocking.claims.renew("k", token, 1_000.0))
    assert not world.fill(world.here, token, "late")
    assert world.value() is None
    world.granted(world.there)


def test_strange_news_is_no_news() -> None:
    """Foreign bytes in the place where failures are recorded do not break the claims of the key."""
    for junk in (b"", b"{", b"[1, 2]", b'["zz", "failed", "", ""]', b"\xff", b"[null, null, null, null]", 7, None):
        world = World()
        run_blocking(world.store.blocking.store.set(PAST + "k", some(junk)))
        world.granted(world.here, awaited=new_id())


def test_the_past_ends_with_a_fill() -> None:
    """A fill ends the rest of its key. Otherwise, the key would rest again as soon as the new value is stale."""
    world = World()
    token = world.granted(world.there)
    run_blocking(world.there.blocking.claims.abandon("k", token, Verdict("failed", "E"), rest=1_000.0))
    assert isinstance(world.claim(world.here), Failed)
    assert world.fill(world.here, world.granted(world.here, force=True), "v")
    world.clock.advance(61.5)
    assert isinstance(world.claim(world.there), Granted)


def test_a_late_verdict_is_not_told() -> None:
    """If a key is invalidated, the failure of an older computation is not reported to waiters of a newer one."""
    world = World()
    token = world.granted(world.here)
    run_blocking(world.there.blocking.store.invalidate("k"))
    run_blocking(world.here.blocking.claims.abandon("k", token, Verdict("failed"), rest=60.0))
    world.granted(world.there, awaited=token)


def test_computations_nobody_ended_are_forgotten() -> None:
    """Computations whose callers vanished are forgotten. Otherwise, each would stay in memory."""
    world = World(max_hold=10.0)
    for number in range(1_000):
        run_blocking(world.there.blocking.claims.claim(f"k{number}", new_id(), Ask(1.0)))
        world.clock.advance(0.1)
    assert len(world.there._computations) < 300


# -- what a pair is -----------------------------------------------------------------------------------------------


def test_a_pair_is_what_its_parts_are() -> None:
    """A pair has the scheme and the abilities of its parts. `stampede check` and the cache rely on them."""
    pair = Paired(MemoryEngine(sealed=True), NullEngine())
    assert (pair.scheme, pair.shared, pair.pushes) == ("memory+null", True, True)
    assert pair.ping() >= 0


@pytest.mark.parametrize("part", ["memory", "disk", "redis", "memcached"])
def test_any_store_keeps_a_pairs_tombstones(part: str, tmp_path: Path) -> None:
    """Promise 4: each store keeps a pair's tombstones, and takes none for damaged bytes. A late value is refused."""
    if part == "redis":
        url = shared_redis().url
    elif part == "memcached":
        url = shared_memcached().url
    else:
        url = "memory://?codec=sealed" if part == "memory" else f"disk://{tmp_path}/d"
    key, store = f"tombstone:{new_id().hex()}", open_engine(url)
    assert store.blocking.store is not None
    try:
        run_blocking(Paired(store, MemoryEngine()).blocking.store.invalidate(key))
        (tombstone,) = run_blocking(store.blocking.store.get([key]))
        assert tombstone is not None
        assert not run_blocking(store.blocking.store.replace(key, None, some(b"late")))
    finally:
        store.close()


def test_parts_must_have_what_they_are_for() -> None:
    """A part without a store, or without locks, is refused. Otherwise, the first call would be an AttributeError."""
    engine = MemoryEngine()
    engine.blocking = replace(engine.blocking, store=None)
    with pytest.raises(OptionError, match="store"):
        Paired(engine, MemoryEngine())
    engine.blocking = replace(engine.blocking, locks=None)
    with pytest.raises(OptionError, match="lock"):
        Paired(MemoryEngine(), engine)


def test_a_key_and_a_lock_of_one_name_are_two() -> None:
    """A key and a user's lock may have the same name. A computation does not wait for that lock."""
    world = World()
    assert isinstance(run_blocking(world.there.blocking.locks.acquire("k", new_id(), 60.0)), Granted)
    world.granted(world.there)
    assert isinstance(world.claim(world.there), Busy)


FORK = """
import os
from stampede.runtime.colour import run_blocking
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask

pair, token = Paired(MemoryEngine(), MemoryEngine()), new_id()
run_blocking(pair.blocking.claims.claim("k", token, Ask(60.0)))
child = os.fork()
if child == 0:
    os._exit(int(run_blocking(pair.blocking.claims.renew("k", token, 60.0)) or len(pair._computations)))
assert os.waitpid(child, 0)[1] == 0
assert run_blocking(pair.blocking.claims.fill("k", token, Entry("v", new_id())))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_nothing_of_its_parent() -> None:
    """A forked child has none of its parent's computations. Otherwise, parent and child would both fill."""
    subprocess.run([sys.executable, "-W", "error", "-c", FORK], check=True, timeout=30)
