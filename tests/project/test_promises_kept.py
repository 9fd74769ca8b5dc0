"""Tests of promises whose lines in the code no other test covers. See PROMISES.md."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from herd import Herd, Origin, until

from stampede import Cache, CodecError, ComputationFailed, EngineError, Lock, events, try_lock
from stampede.algorithm import generations, scope
from stampede.engines.disk import rows
from stampede.engines.memory import MemoryEngine
from stampede.local_tier import tier
from stampede.model.entry import new_id
from stampede.model.ports import Ask, Busy, Engine, Failed, Found, Side
from stampede.runtime.colour import run_blocking
from stampede.testing import FakeClock


class Breakable:
    """A port of a real engine that can be cut off. Then its verbs raise, like those of a server that is gone."""

    def __init__(self, port: Any, world: World) -> None:
        self._port = port
        self._world = world

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._port, name)

        async def asked(*args: Any, **kwargs: Any) -> Any:
            self._world.asked.append(name)
            self._world.before.pop(name, int)()
            if self._world.cut:
                raise EngineError("there is nobody at the other end")
            return await verb(*args, **kwargs)

        return asked


class World(Engine):
    """An engine that stores bytes, like a server, behind a cable that can be cut."""

    scheme, shared, pushes, coherent = "breakable", True, True, False

    def __init__(self) -> None:
        inner = MemoryEngine(sealed=True)
        self.cut = False
        self.asked: list[str] = []
        self.before: dict[str, Any] = {}  # what is done once, just before a verb reaches the engine
        self.blocking, self.suspending = self._side(inner.blocking), self._side(inner.suspending)

    def _side(self, side: Side) -> Side:
        claims, store, locks = (cast("Any", Breakable(port, self)) for port in (side.claims, side.store, side.locks))
        return Side(claims, store, locks)

    def die(self) -> None:
        self.cut = True

    def ping(self) -> float:
        return 0.0

    def close(self) -> None: ...


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def cache(world: World) -> Iterator[Cache]:
    with Cache(engine=world, ttl=600, early=0) as cache:  # type: ignore[arg-type]
        yield cache


# -- 4: invalidation wins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["invalidate", "set", "expire", "clear"])
def test_a_change_that_can_not_be_made_raises(world: World, cache: Cache, verb: str) -> None:
    """A change that cannot be made raises. Otherwise the old value would come back after the outage."""
    cache.set("k", "old")
    world.cut = True
    with pytest.raises(EngineError):
        getattr(cache, verb)(*{"set": ("k", "new"), "clear": ()}.get(verb, ("k",)))


def test_who_reads_during_an_invalidation_keeps_nothing(world: World) -> None:
    """The local tier does not keep a value that was read while its key was invalidated."""
    with Cache(engine=world, local={"ttl": 600}, ttl=600, early=0) as cache:  # type: ignore[arg-type]
        cache.set("k", "old")
        world.before = {"invalidate": lambda: cache.get_or_compute("k", lambda: "not yet")}
        assert cache.invalidate("k")
        assert cache.get_or_compute("k", lambda: "new") == "new"


@pytest.mark.parametrize("kept", ["found", "stale", "busy", "news"])
def test_who_calls_after_an_invalidation_elsewhere_is_given_nothing_older(world: World, kept: str) -> None:
    """A call that begins after an invalidation elsewhere gets nothing older from the flight that it joins."""
    later: list[Herd] = []

    def meanwhile() -> None:
        elsewhere.invalidate("k")
        later.append(Herd(lambda: cache.get_or_compute("k", lambda: "new")))
        until(lambda: any(flight.callers == 2 for flight in cache._core.flights._flights.values()))

    terms: dict[str, Any] = {"ttl": 600, "stale": 600, "early": 0}
    with Cache(engine=world, **terms) as elsewhere:
        if kept != "news":
            elsewhere.set("k", "old")
        if kept in ("stale", "busy"):
            elsewhere.expire("k")
        origin = Origin()
        holder = Herd(lambda: elsewhere.get_or_compute("k", origin)) if kept in ("busy", "news") else None
        if holder is not None:
            origin.has_begun()
        world.blocking = replace(
            world.blocking, claims=(_Told if kept == "news" else _Overtaken)(world, meanwhile, origin.let_on)
        )
        with Cache(engine=world, **terms) as cache:
            cache.get_or_compute("k", lambda: "new" if later else "computed from before")
            assert later[0].join() == ["new"]
        origin.let_on()
        assert holder is None or holder.join() == [1]


class _Overtaken:
    """Something happens while the first reply is under way."""

    def __init__(self, world: World, meanwhile: Callable[[], object], let_on: Callable[[], object]) -> None:
        self._port: Any = world.blocking.claims
        self._store = world.blocking.store
        self._meanwhile = [meanwhile]
        self._let_on = let_on

    async def claim(self, *args: Any) -> Any:
        reply = await self._port.claim(*args)
        self._overtake()
        return reply

    def _overtake(self) -> None:
        while self._meanwhile:
            self._meanwhile.pop()()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


@pytest.mark.parametrize("asked", ["claim", "renew"])
def test_nor_an_error_of_what_was_computed_before(world: World, asked: str) -> None:
    """A call that begins after an invalidation does not get the failure of a computation that began before it."""
    later: list[Herd] = []

    def meanwhile() -> None:
        before = max(flight.callers for flight in cache._core.flights._flights.values())
        elsewhere.invalidate("k")
        later.append(Herd(lambda: cache.get_or_compute("k", lambda: "new")))
        until(lambda: any(flight.callers == before + 1 for flight in cache._core.flights._flights.values()))

    def fails() -> None:
        origin()
        raise LookupError

    with Cache(engine=world) as elsewhere:
        origin = Origin()
        world.blocking = replace(world.blocking, claims=_Failing(world, meanwhile, origin.let_on, asked))
        with Cache(engine=world) as cache:
            holder = cache if asked == "renew" else elsewhere
            first = Herd(lambda: holder.get_or_compute("k", fails))
            origin.has_begun()
            second = Herd(lambda: cache.get_or_compute("k", lambda: "computed from before"))
            if asked == "renew":  # as the leader fails, it asks whether its lease was valid
                until(lambda: any(flight.callers == 2 for flight in cache._core.flights._flights.values()))
                origin.let_on()
            kinds = [type(end) for end in (*first.join(), *second.join())]
            assert kinds == [LookupError, LookupError if asked == "renew" else ComputationFailed]
            assert later[0].join() == ["new"]


class _Failing(_Overtaken):
    """A computation has failed, and something happens while its failure is reported."""

    def __init__(self, world: World, meanwhile: Callable[[], object], let_on: Callable[[], object], at: str) -> None:
        super().__init__(world, meanwhile, let_on)
        self._at = at

    async def claim(self, *args: Any) -> Any:
        reply = await self._port.claim(*args)
        if isinstance(reply, Failed) and self._at == "claim":
            self._overtake()
        return reply

    async def renew(self, *args: Any) -> Any:
        stood = await self._port.renew(*args)
        if self._at == "renew":
            self._overtake()
        return stood

    async def wait(self, *args: Any) -> Any:
        if self._at == "claim":
            self._let_on()
        return await self._port.wait(*args)


class _Told(_Overtaken):
    """A wake-up brings the value along, and something happens before the waiter reads it."""

    async def claim(self, *args: Any) -> Any:
        return await self._port.claim(*args)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        self._let_on()
        await self._port.wait(key, busy, timeout)
        [entry] = await self._store.get([key])
        self._overtake()
        return None if entry is None else Found(entry)


def test_a_refresh_joins_no_older_computation(cache: Cache) -> None:
    """A refresh joins no older computation, which may be based on data from before a change."""
    origin = Origin()
    report = cache.cached(lambda: origin())
    older = Herd(report)
    origin.has_begun()
    refresh = Herd(report.refresh)
    origin.has_begun()
    origin.let_on()
    assert older.join() + refresh.join() == [1, 2]
    assert report() == 2


# -- 7: an engine that is down is not an outage ---------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["look_too", "claim"])
def test_an_engine_that_is_down_is_no_outage(world: World, cache: Cache, verb: str) -> None:
    """If the engine is down, calls still return values. They compute once, and rarely ask the dead engine."""
    world.before = {verb: world.die}
    origin = Origin()
    herd = Herd(*[lambda: cache.get_or_compute("k", origin)] * 8)
    origin.has_begun()
    origin.let_on()
    assert herd.join() == [1] * 8
    asked = len(world.asked)
    assert [cache.get_or_compute("k", origin) for _ in range(20)] == [1] * 20
    assert len(world.asked) - asked <= 4  # an occasional probe
    assert origin.calls == 1


def test_a_fill_that_can_not_be_made_is_no_error(world: World, cache: Cache) -> None:
    """If the engine dies in the middle of a computation, the caller gets the value and no error."""

    def compute() -> str:
        world.cut = True
        return "value"

    assert cache.get_or_compute("k", compute) == "value"
    assert cache.get_or_compute("k", lambda: "of the outage") == "of the outage"
    assert cache.get_or_compute("k", lambda: "computed twice") == "of the outage"


def test_recovery_is_noticed(world: World) -> None:
    """When the engine works again, the cache uses it again."""
    heard: list[events.Event] = []
    with Cache(engine=world, ttl=600, observers=[heard.append]) as cache:  # type: ignore[arg-type]
        world.cut = True
        cache.get_or_compute("k", lambda: 1)
        world.cut = False
        until(lambda: cache.get_or_compute("k", lambda: 2) and any(isinstance(e, events.EngineUp) for e in heard))
        cache.set("k", 3)
        assert cache.get("k") == 3


def test_recovery_is_noticed_by_who_asks_once_more(world: World) -> None:
    """A waiter that claims again asks for no generation. Its successful claim ends the outage, too."""
    with Cache(engine=world, ttl=600) as cache:  # type: ignore[arg-type]
        world.cut = True
        cache.get_or_compute("k", lambda: 1)
        world.cut = False
        core, claims = cache._core, cache._root.claims
        until(lambda: run_blocking(claims.claim(new_id().hex(), new_id(), Ask(60.0, since=1.0))) and not core.is_down())


def test_who_knows_no_generation_asks_for_nothing_by_an_older_one(world: World) -> None:
    """A claim by a generation from before the outage finds no value, because other processes may have cleared it."""
    with Cache(engine=world, ttl=600) as cache:  # type: ignore[arg-type]
        cache.set("k", "old")
        physical = cache._root.prefix + "k"
        world.cut = True
        cache.get_or_compute("other", lambda: 1)
        world.cut = False
        core, claims = cache._core, cache._root.claims
        assert core.outage is not None
        until(lambda: core.outage.breaker.since is None or core.outage.breaker._due < time.monotonic())
        reply = run_blocking(claims.claim(physical, new_id(), Ask(60.0)))
        assert core.is_down() and not isinstance(reply, Found)


def test_what_was_set_after_an_outage_is_there(world: World) -> None:
    """After an outage, a `set` that has returned is seen by its own process, even if no probe is due yet."""
    with Cache(engine=world, ttl=600) as cache:  # type: ignore[arg-type]
        for change in (lambda: cache.set("k", 3), lambda: cache.clear() or cache.set("k", 3)):
            world.cut = True
            cache.get_or_compute("k", lambda: 1)
            cache.get_or_compute("other", lambda: 1)
            world.cut = False
            change()
            assert cache.get("k") == 3
            assert cache.get_or_compute("k", lambda: 2) == 3


def test_who_wants_the_error_gets_it(world: World) -> None:
    """With `on_engine_error="raise"`, a call raises the error of the engine."""
    with Cache(engine=world, on_engine_error="raise") as cache:  # type: ignore[arg-type]
        world.cut = True
        with pytest.raises(EngineError):
            cache.get_or_compute("k", lambda: 1)


def test_locks_are_never_open(world: World) -> None:
    """If the engine is down, locks raise. Otherwise two callers could be inside."""
    world.cut = True
    with pytest.raises(EngineError), Lock("l", on=world):  # type: ignore[arg-type]
        pytest.fail("let in")
    with pytest.raises(EngineError), try_lock("l", on=world):  # type: ignore[arg-type]
        pytest.fail("let in, with nothing said")


# -- 8: bytes from an engine ------------------------------------------------------------------------------------------


def test_bytes_that_are_not_believed_are_a_miss_and_an_event(tmp_path: Path) -> None:
    """Bytes that are refused are a miss and send an event. An error would reach every caller of the key."""
    heard: list[events.Event] = []
    with Cache(f"disk://{tmp_path}", signing_key="another") as other:
        other.set("k", "theirs")
    with Cache(f"disk://{tmp_path}", observers=[heard.append]) as cache:
        assert cache.get_or_compute("k", lambda: "ours") == "ours"
        assert cache.get("k") == "ours"
    assert any(isinstance(each, events.BadBytes) for each in heard)


def test_a_value_the_codec_can_not_hold_is_served_and_told(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """A value that the codec cannot encode is returned, with a warning in the log. Only `set` raises."""
    cache.set("k", "kept", stale=600)
    cache.expire("k")
    assert cache.get_or_compute("k", lambda: sys.implementation, stale=600) is sys.implementation
    assert "but not stored" in caplog.text and "dataclass" in caplog.text
    with pytest.raises(CodecError, match="dataclass"):
        cache.set("k", sys.implementation)


# -- 9: None is a value -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, False, 0, ""])
def test_nothing_is_something(cache: Cache, value: object) -> None:
    """None, False, 0 and "" are values: they are stored, and not computed at every call."""
    assert cache.get_or_compute("k", lambda: value) is value
    assert cache.get_or_compute("k", lambda: "computed twice") is value
    assert cache.get("k", "default") is value
    assert cache.get_many(["k", "l"]) == {"k": value}
    assert cache.get_or_compute_many(["k"], lambda missing: dict.fromkeys(missing, "computed twice")) == {"k": value}


# -- 14: clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("background", [False, True])  # these claim and look in different parts of the code
def test_time_left_counts_from_before_the_request(
    monkeypatch: pytest.MonkeyPatch, background: bool, looks: bool
) -> None:
    """The time left counts from before the request. Otherwise a slow reply would lengthen the life of a value."""
    clock = FakeClock()
    for module in (scope, generations, tier):
        monkeypatch.setattr(module, "_clock", clock)
    world = World()
    inner = MemoryEngine(sealed=True, clock=clock)
    claims, store = inner.blocking.claims, inner.blocking.store
    slow: tuple[Any, Any] = _Slow(claims, clock, store), _Slow(store, clock, store)
    world.blocking = replace(world.blocking, claims=slow[0], store=slow[1])
    world.looks = looks
    terms: dict[str, Any] = {"ttl": 10, "early": 0, "background": background}
    with Cache(engine=world, local={"ttl": 600}, **terms) as cache:  # type: ignore[arg-type]
        inner_cache = Cache(engine=world, ttl=10, early=0)  # type: ignore[arg-type]
        inner_cache.set("hit", "old")
        assert cache.get_or_compute("hit", lambda: "new") == "old"  # from now on the cache looks before it claims
        inner_cache.set("k", "old")
        clock.advance(3.0)
        assert cache.get_or_compute("k", lambda: "new") == "old"  # the reply takes 4 s, and 7 s were left before it
        clock.advance(2.9)
        assert cache.get_or_compute("k", lambda: "new") == "old"  # a hit
        clock.advance(0.2)
        assert cache.get_or_compute("k", lambda: "new") == "new"


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="needs Linux's clock")
def test_the_clock_on_disk_is_none_that_people_set() -> None:
    """`disk://` does not use the time of day. Setting that clock would end leases or keep values for years."""
    assert abs(rows.clock() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60 < abs(rows.clock() - time.time())


class _Slow:
    """A claim or a look acts at once, and its reply takes four seconds. Other verbs take no time."""

    def __init__(self, port: Any, clock: FakeClock, store: Any) -> None:
        self._port = port
        self._clock = clock
        self._store = store

    async def claim(self, *args: Any) -> Any:
        reply = await self._port.claim(*args)
        self._clock.advance(4.0)
        return reply

    async def look(self, key: str) -> Any:
        (entry,) = await self._store.get([key])
        self._clock.advance(4.0)
        return None if entry is None else Found(entry)

    async def look_too(self, keys: Any, scopes: Any) -> Any:
        reply = await self._store.look_too(keys, scopes)
        self._clock.advance(4.0 if keys else 0.0)
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


# -- 12: no leak ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_exit_gives_the_lease_back(cache: Cache, world: World, error: type[BaseException]) -> None:
    """Every exception gives the lease back. Otherwise the next caller would wait until the lease ends."""

    def leave() -> None:
        raise error

    with pytest.raises(error):
        cache.get_or_compute("k", leave, lease=60)
    done = threading.Thread(target=lambda: cache.get_or_compute("k", lambda: 1), daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()


def test_a_cancellation_does_not_cut_a_fill_in_two(world: World, cache: Cache) -> None:
    """If a caller is cancelled during its fill, the value is stored all the same, and no lease stays behind."""

    async def main() -> None:
        filling, go = asyncio.Event(), asyncio.Event()
        claims: Any = world.suspending.claims
        fill = claims.fill

        async def slow_fill(*args: Any) -> Any:
            filling.set()
            await go.wait()
            return await fill(*args)

        claims.fill = slow_fill
        call = asyncio.create_task(cache.aget_or_compute("k", lambda: "value", lease=60))
        await filling.wait()
        call.cancel()
        asyncio.get_running_loop().call_soon(go.set)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.wait_for(cache.aget_or_compute("k", lambda: "computed twice"), 10) == "value"

    asyncio.run(main())
