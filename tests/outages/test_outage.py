"""Promise 7: an engine that is down is no outage. An engine that can be switched off, verb by verb, shows it."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from herd import Herd, Origin, had, until, until_async
from prometheus_client import CollectorRegistry

from stampede import Cache, EngineError, Lock, cached, events, try_lock
from stampede.engines.disk import DiskEngine
from stampede.engines.memory import MemoryEngine
from stampede.metrics import PrometheusObserver
from stampede.model.entry import Entry
from stampede.model.ports import Engine, Found, Side
from stampede.runtime.colour import run_blocking
from stampede.settings import Settings
from stampede.testing import FakeClock, isolated


class Plug:
    """What becomes of an engine's verbs: those that are pulled raise, and each that was asked is counted."""

    def __init__(self) -> None:
        self.pulled: set[str] = set()
        self.asked: list[str] = []
        self.partly = self.full = False
        self.reason = ""

    def pull(self, *verbs: str, partly: bool = False, full: bool = False) -> None:
        """`partly`: one of several servers is away. `full`: it answers, and takes nothing new."""
        self.pulled, self.partly, self.full = set(verbs) or {"*"}, partly or full, full

    def put_back(self) -> None:
        self.pulled = set()

    def pass_on(self, verb: str) -> None:
        self.asked.append(verb)
        if "*" in self.pulled or verb in self.pulled:
            error = EngineError(self.reason or f"{verb}: the plug is pulled")
            error.partial, error.refused = self.partly, self.full
            raise error


class Port:
    """A port behind the plug."""

    def __init__(self, plug: Plug, port: Any) -> None:
        self._plug, self._port = plug, port

    def __getattr__(self, verb: str) -> Any:
        async def act(*args: Any, **kwargs: Any) -> Any:
            self._plug.pass_on(verb)
            result = await getattr(self._port, verb)(*args, **kwargs)
            if f"reply of {verb}" in self._plug.pulled:
                raise EngineError(f"{verb}: the reply is lost")
            return result

        return act


class Switched(Engine):
    """A memory engine of bytes behind a plug, as shared engines are behind a network."""

    scheme = "switched"
    shared = pushes = True

    def __init__(self, inner: Engine | None = None) -> None:
        self.plug = Plug()
        self.inner = inner or MemoryEngine(sealed=True)
        self.blocking, self.suspending = self._side(self.inner.blocking), self._side(self.inner.suspending)

    def _side(self, side: Side) -> Side:
        claims, store, locks = (cast("Any", Port(self.plug, port)) for port in (side.claims, side.store, side.locks))
        return Side(claims, store, locks)

    def ping(self) -> float:
        self.plug.pass_on("ping")
        return 0.0

    def close(self) -> None: ...


@pytest.fixture
def engine() -> Switched:
    return Switched()


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The breaker's clock."""
    clock = FakeClock()
    monkeypatch.setattr("stampede.outages.outage.time", SimpleNamespace(monotonic=clock))
    return clock


def counting(colour: str = "sync") -> Any:
    """A function of x that answers with the number of its computation."""
    calls: list[Any] = []

    def compute(x: int = 0) -> int:
        calls.append(x)
        return len(calls)

    async def suspending(x: int = 0) -> int:
        return compute(x)

    return compute if colour == "sync" else suspending


both = pytest.mark.parametrize("colour", ["sync", "async"])


def test_calls_go_on(colour: str, engine: Switched) -> None:
    """Down before the first call, calls still answer, and results are kept a few seconds in this process."""
    f = Cache(engine=engine).cached(counting(colour))
    engine.plug.pull()
    assert [had(f(1)) for _ in range(5)] == [1] * 5
    assert [had(f(2)) for _ in range(5)] == [2] * 5


@pytest.mark.parametrize("verb", ["claim", "fill", "reply of claim", "reply of fill", "generation"])
def test_whichever_verb_fails(colour: str, verb: str, engine: Switched) -> None:
    """Down in the middle: the caller gets its value, what is begun from then on is kept, nothing stays locked."""
    f = Cache(engine=engine).cached(counting(colour))
    engine.plug.pull(verb)
    started = time.monotonic()
    assert [had(f(1)) for _ in range(3)] == ([1, 2, 2] if "fill" in verb else [1] * 3)
    assert time.monotonic() - started < 5


def test_one_computation_for_a_herd(colour: str, engine: Switched) -> None:
    """An outage must not become a stampede: one computation per key and process."""
    origin = Origin()
    f = Cache(engine=engine).cached(_named(origin, colour))
    engine.plug.pull()
    leader = Herd(lambda: had(f()))
    origin.has_begun()
    herd = Herd(*[lambda: had(f())] * 15)
    until(lambda: sum(flight.callers for flight in list(f.cache._core.flights._flights.values())) == 16)
    origin.let_on()
    assert leader.join() + herd.join() == [1] * 16
    assert had(f()) == 1
    assert origin.calls == 1


def _named(origin: Origin, colour: str) -> Any:
    def compute() -> int:
        return origin()

    async def suspending() -> int:
        return await origin.suspending()

    return compute if colour == "sync" else suspending


def test_results_are_kept_for_a_few_seconds_only(engine: Switched) -> None:
    """Kept for the ttl of an hour, they would be wrong for an hour after an invalidation that nobody could send."""
    f = Cache(engine=engine, ttl=3600).cached(counting())
    engine.plug.pull()
    f(1)
    claims = f.cache._core.outage.refuge.tier
    (resident,) = claims._residents.values()
    assert 0 < resident.keep - time.monotonic() <= 5


def test_a_dead_engine_is_asked_once_a_second(engine: Switched, clock: FakeClock) -> None:
    """Each call that waits for a connection's timeout would be an outage of its own."""
    f = Cache(engine=engine).cached(counting())
    f(0)
    engine.plug.pull()
    f(1)
    engine.plug.asked.clear()
    for n in range(2, 50):
        f(n)
    assert engine.plug.asked == []
    for _ in range(3):
        clock.advance(1.01)
        for n in range(50, 60):
            f(n)
    assert 3 <= len(engine.plug.asked) <= 6  # three probes, of a verb or two


def test_recovery_is_noticed_by_itself(colour: str, engine: Switched, clock: FakeClock) -> None:
    """And told; what was kept meanwhile gives way to what the engine has."""
    seen: list[events.Event] = []
    cache = Cache(engine=engine, observers=[seen.append])
    f = cache.cached(counting(colour))
    assert had(f(1)) == 1
    engine.plug.pull()
    assert had(f(2)) == 2
    assert had(f(1)) == 3
    engine.plug.put_back()
    assert had(f(1)) == 3
    clock.advance(1.01)
    assert had(f(1)) == 1
    assert had(f(2)) == 4
    assert had(f(2)) == 4
    assert [type(event) for event in seen if isinstance(event, (events.EngineDown, events.EngineUp))] == [
        events.EngineDown,
        events.EngineUp,
    ]


def test_down_and_up_are_told_once(engine: Switched, clock: FakeClock) -> None:
    """An outage is two lines in the log, not one per call."""
    seen: list[events.Event] = []
    f = Cache(engine=engine, observers=[seen.append]).cached(counting())
    for _ in range(3):
        engine.plug.pull()
        Herd(*[lambda n=n: f(n) for n in range(8)]).join()
        engine.plug.put_back()
        clock.advance(5)
        f(100)
        f(101)
    downs = [event for event in seen if isinstance(event, events.EngineDown)]
    ups = [event for event in seen if isinstance(event, events.EngineUp)]
    assert (len(downs), len(ups)) == (3, 3)
    assert f.cache.stats().engine_downs == 3
    assert ups[0].seconds == pytest.approx(5, abs=0.1)


def test_an_outage_names_the_cache_and_is_no_finding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two caches on one server nobody would know which is down; and its hit ratio would look well meanwhile."""
    (tmp_path / "file").touch()
    url = f"disk://{tmp_path}/file/cache"  # which can't be made
    with isolated(caches={"default": {}, "orders": {"url": url}}), caplog.at_level("WARNING", "stampede"):
        price = cached(cache="orders")(lambda: 1)
        assert [price() for _ in range(3)] == [1, 1, 1]
        stats = price.stats()
    assert (stats.computations, stats.found, stats.served) == (1, 0, {"outage": 2})
    assert f"{url} (cache 'orders') is down, calls go on without it" in caplog.text


def test_a_lasting_outage_is_logged_again(engine: Switched, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """A server that comes back with a password would be "refused" in the log for hours, by its first reason."""
    cache = Cache(engine=engine)

    def lines(seconds: int) -> list[str]:
        caplog.clear()
        engine.plug.pull()
        for _ in range(seconds):
            clock.advance(1.01)
            cache.get_or_compute("k", lambda: 1)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with caplog.at_level("WARNING", "stampede"):
        engine.plug.reason = "connection refused"
        (first,) = lines(20)
        assert "is down, calls go on without it" in first
        (reminder,) = lines(45)
        assert re.search(r"is still down after 6\d s: EngineError: connection refused", reminder)
        engine.plug.reason = "wrong password"
        (changed,) = lines(60)
        assert "is still down after" in changed and "wrong password" in changed
        assert lines(5) == []


def test_a_full_engine_is_told_of_once_a_minute(engine: Switched, clock: FakeClock) -> None:
    """It would be told with each call; or never again, while it goes on for hours."""
    told: list[events.Event] = []
    cache = Cache(engine=engine, observers=[told.append])
    engine.plug.pull("claim", full=True)
    for second in range(100):
        cache.get_or_compute(f"k{second}", lambda: 1)
        clock.advance(1)
    assert [type(event) for event in told].count(events.EngineDown) == 2
    assert not cache.down


def test_seconds_of_outages_are_counted(engine: Switched, clock: FakeClock) -> None:
    """Those of the present one, too, or the worst outage is on no dashboard until it is over."""
    registry = CollectorRegistry()
    PrometheusObserver(registry)
    settings = replace(Settings().cache("default"), name="with a plug")
    cache = Cache.of(settings, engine)

    def sample(name: str) -> float | None:
        return registry.get_sample_value(f"stampede_{name}", {"cache": "with a plug", "engine": cache.name})

    assert (sample("engine_up"), sample("engine_outages_total"), sample("engine_down_seconds_total")) == (1, 0, 0)
    engine.plug.pull()
    cache.get_or_compute("k", lambda: 1)
    clock.advance(5)
    assert (sample("engine_up"), sample("engine_outages_total"), sample("engine_down_seconds_total")) == (0, 1, 5)
    engine.plug.put_back()
    cache.get_or_compute("other", lambda: 1)
    clock.advance(5)
    assert (sample("engine_up"), sample("engine_outages_total"), sample("engine_down_seconds_total")) == (1, 1, 5)
    assert cache.stats().engine_down_seconds == cache.stats_of("other").engine_down_seconds == 5


def test_raise_is_for_those_who_want_it(colour: str, engine: Switched) -> None:
    """`on_engine_error="raise"`: the error, an origin that is not asked, and calls that work when it is back."""
    compute = counting(colour)
    f = Cache(engine=engine, on_engine_error="raise").cached(compute)
    engine.plug.pull()
    for _ in range(3):
        with pytest.raises(EngineError, match="plug is pulled") as caught:
            had(f(1))
        assert isinstance(caught.value, ConnectionError)
    engine.plug.put_back()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            assert had(f(1)) == 1
            return
        except EngineError:
            time.sleep(0.01)
    pytest.fail("it never came back")


@pytest.mark.parametrize("verb", ["invalidate", "expire", "set"])
def test_changes_raise_and_yet_the_local_value_is_gone(colour: str, verb: str, engine: Switched) -> None:
    """Swallowed, the old value would come back after the outage; kept here, it would go on in this very process."""
    f = Cache(engine=engine, local=True, ttl=60).cached(counting(colour))
    assert [had(f(1)) for _ in range(3)] == [1] * 3
    engine.plug.pull()
    with pytest.raises(EngineError):
        had(f.set("new", 1) if verb == "set" else getattr(f, verb)(1))
    assert had(f(1)) == 2


def test_invalidate_all_and_clear_raise_and_yet_local_values_are_gone(colour: str, engine: Switched) -> None:
    """The same for all keys."""
    cache = Cache(engine=engine, local=True, ttl=60)
    f = cache.cached(counting(colour))
    assert [had(f(1)) for _ in range(3)] == [1] * 3
    engine.plug.pull()
    with pytest.raises(EngineError):
        had(f.invalidate_all())
    assert [had(f(1)) for _ in range(3)] == [2] * 3
    with pytest.raises(EngineError):
        cache.clear()
    assert had(f(1)) == 3


def test_what_was_cleared_before_an_outage_stays_so(colour: str, clock: FakeClock, tmp_path: Path) -> None:
    """A function that hasn't asked for its new generation in time would ask for values of the old one after it."""
    engine = Switched(DiskEngine(tmp_path))
    cache = Cache(engine=engine, ttl=60)
    f = cache.cached(counting(colour))
    assert had(f(1)) == 1
    cache.clear()
    engine.plug.pull()
    assert [had(f(2)), had(f(2))] == [2, 2]
    engine.plug.put_back()
    assert had(f.peek(1)) is None
    clock.advance(2)
    assert had(f(1)) == 3


def test_what_was_cleared_is_not_asked_for_where_nobody_says_which_generation_it_is(
    colour: str, tmp_path: Path
) -> None:
    """Where one server knows the generations, and another has the values, the first one's end would undo a `clear`."""
    engine = Switched(DiskEngine(tmp_path))
    cache = Cache(engine=engine, ttl=60)
    f = cache.cached(counting(colour))
    assert had(f(1)) == 1
    cache.clear()
    engine.plug.pull("generation", partly=True)
    assert had(f(1)) == 2


def test_invalidate_reaches_what_was_kept_meanwhile(colour: str, engine: Switched) -> None:
    """Also a value that was computed during the outage."""
    f = Cache(engine=engine).cached(counting(colour))
    engine.plug.pull()
    assert [had(f(1)), had(f(1))] == [1, 1]
    with pytest.raises(EngineError):
        had(f.invalidate(1))
    assert had(f(1)) == 2


def test_invalidate_during_a_computation_without_an_engine(engine: Switched) -> None:
    """Who calls afterwards gets none of the computation that began before."""
    origin = Origin()
    f = Cache(engine=engine).cached(_named(origin, "sync"))
    engine.plug.pull()
    leader = Herd(f)
    origin.has_begun()
    with pytest.raises(EngineError):
        f.invalidate()
    later = Herd(f)
    origin.has_begun()
    origin.let_on()
    assert leader.join() == [1]
    assert later.join() == [2]
    assert f() == 2


def test_an_engine_that_comes_back_under_a_computation(engine: Switched, clock: FakeClock) -> None:
    """A lease of the refuge is no lease of the engine: the value is not stored there, and nobody is locked out."""
    origin = Origin()
    f = Cache(engine=engine).cached(_named(origin, "sync"))
    engine.plug.pull()
    leader = Herd(f)
    origin.has_begun()
    engine.plug.put_back()
    clock.advance(2)
    origin.let_on()
    assert leader.join() == [1]
    started = time.monotonic()
    assert f() in (1, 2)
    assert time.monotonic() - started < 5


def test_an_engine_that_goes_down_under_a_computation(engine: Switched, clock: FakeClock) -> None:
    """The value goes to its callers, and after recovery nobody waits for a lease that nobody holds."""
    origin = Origin()
    f = Cache(engine=engine, lease=0.5).cached(_named(origin, "sync"))
    leader = Herd(f)
    origin.has_begun()
    follower = Herd(f)
    until(lambda: sum(flight.callers for flight in list(f.cache._core.flights._flights.values())) == 2)
    engine.plug.pull()
    origin.let_on()
    assert leader.join() + follower.join() == [1, 2]  # who came when it was computed can't know what happened since
    assert f() == 2
    engine.plug.put_back()
    clock.advance(2)
    started = time.monotonic()
    assert f() in (2, 3)
    assert time.monotonic() - started < 5


def test_an_origin_that_fails_during_an_outage(engine: Switched) -> None:
    """Its error reaches the caller, and the next call tries again."""
    answers: list[Any] = [ValueError("origin"), 2]

    def compute() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    f = Cache(engine=engine).cached(compute)
    engine.plug.pull()
    with pytest.raises(ValueError, match="origin"):
        f()
    assert f() == 2


def test_stale_values_of_a_dead_engine_are_not_asked_for(engine: Switched) -> None:
    """With a local tier, hits go on as if nothing had happened."""
    f = Cache(engine=engine, local={"entries": 10, "ttl": 60}).cached(counting())
    assert [f(1) for _ in range(2)] == [1, 1]
    engine.plug.pull()
    engine.plug.asked.clear()
    assert [f(1) for _ in range(5)] == [1] * 5
    assert engine.plug.asked == []


@pytest.mark.parametrize("retry_after", [0, 60])
def test_engine_and_origin_both_down(colour: str, retry_after: float, engine: Switched) -> None:
    """What this process has, and `stale` allows, would be there to be served; but not what it has invalidated."""
    answers: list[Any] = [1, OSError("the origin is down")]

    def compute() -> Any:
        answer = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cache = Cache(engine=engine, ttl=0.02, stale=60, retry_after=retry_after, local={"entries": 10, "ttl": 60})
    assert _asked(cache, colour, "get_or_compute", "k", compute) == 1
    assert _asked(cache, colour, "get_or_compute", "k", compute) == 1
    engine.plug.pull()
    until(lambda: cache._root.hit("k") is None)
    for _ in range(3):
        assert _asked(cache, colour, "get_or_compute", "k", compute) == 1
    with pytest.raises(EngineError):
        _asked(cache, colour, "invalidate", "k")
    with pytest.raises(OSError, match="origin is down"):
        _asked(cache, colour, "get_or_compute", "k", compute)


def test_reads_go_on(colour: str, engine: Switched) -> None:
    """Who asks for what is there, and can do without, would get an error in place of its default."""
    seen: list[events.Event] = []
    cache = Cache(engine=engine, observers=[seen.append])
    f = cache.cached(counting(colour))
    had(f(1))
    engine.plug.pull()
    assert had(f.peek(1)) is None
    assert [type(event) for event in seen if isinstance(event, events.EngineDown)] == [events.EngineDown]
    assert _asked(cache, colour, "get", "k", "default") == "default"
    assert _asked(cache, colour, "get_many", ["k", "l"]) == {}
    assert _asked(cache, colour, "peek", "k") is None
    assert _asked(cache, colour, "get_or_compute", "k", lambda: 5) == 5
    assert _asked(cache, colour, "get", "k") == 5  # which was computed here meanwhile
    assert _asked(cache, colour, "get_many", ["k", "l"]) == {"k": 5}
    with pytest.raises(EngineError):
        _asked(cache, colour, "invalidate", "k")
    assert _asked(cache, colour, "get", "k") is None


def _asked(cache: Cache, colour: str, verb: str, *args: Any) -> Any:
    return had(getattr(cache, verb if colour == "sync" else "a" + verb)(*args))


CHANGES: list[tuple[Any, ...]] = [
    ("set", "k", 1),
    ("expire", "k"),
    ("invalidate", "k"),
    ("invalidate_all",),
    ("clear",),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
def test_a_change_asks_once(colour: str, change: tuple[Any, ...], engine: Switched, clock: FakeClock) -> None:
    """An engine that hangs would cost it twice its time-out: once to see whether it is up, and once for itself."""
    cache = Cache(engine=engine)
    f = cache.cached(counting(colour))
    assert had(f()) == 1

    def made() -> None:
        if change[0] == "invalidate_all":
            had(f.invalidate_all())
        else:
            _asked(cache, colour, *change)

    engine.plug.pull()
    for _ in range(2):
        clock.advance(1.01)  # the next one may ask
        engine.plug.asked.clear()
        with pytest.raises(EngineError):
            made()
        assert len(engine.plug.asked) == 1
    engine.plug.put_back()
    made()


def test_reads_raise_where_that_is_wanted(colour: str, engine: Switched) -> None:
    """`on_engine_error="raise"`: nothing in place of a value would be taken for its absence."""
    cache = Cache(engine=engine, on_engine_error="raise")
    engine.plug.pull()
    for verb, *args in ("get", "k"), ("get_many", ["k"]), ("peek", "k"):
        for _ in range(2):
            with pytest.raises(EngineError, match="plug is pulled"):
                _asked(cache, colour, verb, *args)


def test_a_read_that_a_part_of_the_engine_refuses_says_why(colour: str, engine: Switched) -> None:
    """`on_engine_error="raise"` where one of several servers is away: "can't be asked" alone helps nobody."""
    cache = Cache(engine=engine, on_engine_error="raise")
    _asked(cache, colour, "set", "k", 1)
    engine.plug.pull("get", partly=True)
    with pytest.raises(EngineError, match="plug is pulled"):
        _asked(cache, colour, "get", "k")


def test_a_read_notices_that_it_is_over(colour: str, engine: Switched, clock: FakeClock) -> None:
    """A process that only reads would never find its engine again."""
    cache = Cache(engine=engine)
    _asked(cache, colour, "set", "k", 1)
    engine.plug.pull()
    assert _asked(cache, colour, "get", "k") is None
    engine.plug.put_back()
    assert _asked(cache, colour, "get", "k") is None
    clock.advance(1.01)
    assert [_asked(cache, colour, "get", "k") for _ in range(2)] == [1, 1]


def test_who_probes_asks_which_generation_stands(colour: str, clock: FakeClock) -> None:
    """The first answer of an engine that is back would be of a generation that others have ended meanwhile."""
    engine = Switched()
    cache, other = Cache(engine=engine), Cache(engine=engine.inner)
    _asked(cache, colour, "set", "k", "old")
    engine.plug.pull()
    assert _asked(cache, colour, "get", "k") is None
    old = cache._root.prefix + "k"
    other.clear()
    engine.plug.put_back()
    assert cache._root._coded is not None
    run_blocking(cache._root._coded.set(old, Entry("old", b"late", ttl=60.0, fresh=60.0, keep=60.0)))  # in the old one
    clock.advance(1.01)
    assert _asked(cache, colour, "get_or_compute", "k", lambda: "new") == "new"


def test_a_read_that_fails_is_no_error(colour: str, engine: Switched) -> None:
    """Where the generation is known, the read itself is the first to meet the trouble."""
    cache = Cache(engine=engine)
    _asked(cache, colour, "set", "k", 1)
    engine.plug.pull("get")
    assert _asked(cache, colour, "get", "k", "default") == "default"
    assert _asked(cache, colour, "get_many", ["k"]) == {}
    assert cache.stats().engine_downs == 1


def test_many_goes_on(colour: str, engine: Switched) -> None:
    """Batches too."""
    cache = Cache(engine=engine)
    f = cache.cached(counting(colour))
    engine.plug.pull()
    assert sorted(had(f.many([(1,), (2,), (1,)]))) in ([1, 1, 2], [1, 2, 2])
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {key: key for key in keys}) == {"a": "a", "b": "b"}


@both
def test_background_refreshes_go_on(colour: str, engine: Switched) -> None:
    """An engine that goes down between claim and fill, beside the caller: nobody hears of it, nothing breaks."""
    f = Cache(engine=engine, stale=60, background=True).cached(counting(colour))

    async def main() -> None:
        assert await f(1) == 1
        await f.expire(1)
        engine.plug.pull("fill")
        assert await f(1) == 1
        await until_async(lambda: f.stats().computations == 2)
        assert [await f(1), await f(1)] == [3, 3]

    if colour == "async":
        asyncio.run(main())
    else:
        assert f(1) == 1
        f.expire(1)
        engine.plug.pull("fill")
        assert f(1) == 1
        until(lambda: f.stats().computations == 2)
        assert [f(1), f(1)] == [3, 3]


def test_locks_are_never_open(engine: Switched) -> None:
    """A lock that can't be asked for is nobody's: both raise, in both colours, and the block doesn't run."""
    engine.plug.pull()
    for make in (Lock, try_lock):
        with pytest.raises(EngineError), make("a", on=engine):
            pytest.fail("inside, without a lock")

        async def main(make: Any = make) -> None:
            async with make("a", on=engine):
                pytest.fail("inside, without a lock")

        with pytest.raises(EngineError):
            asyncio.run(main())


def test_a_lost_reply_locks_nobody_out(engine: Switched) -> None:
    """A lock that was granted, unknown to its caller, is given back; else it would be held by nobody."""
    engine.plug.pull("reply of acquire")
    with pytest.raises(EngineError):
        Lock("a", on=engine).acquire()
    engine.plug.put_back()
    with Lock("a", on=engine, wait=5):  # a thread gives it back; its lease is of 30 seconds
        pass


def test_a_claim_whose_reply_is_lost_locks_nobody_out(colour: str, engine: Switched, clock: FakeClock) -> None:
    """The claimant chose the token, and abandons what it may have been granted."""
    f = Cache(engine=engine, lease=60).cached(counting(colour))
    engine.plug.pull("reply of claim")
    assert had(f(1)) == 1
    engine.plug.put_back()
    clock.advance(2)
    started = time.monotonic()
    assert had(f(1)) in (1, 2)
    assert time.monotonic() - started < 5


def test_a_directory_that_disappears(tmp_path: Path) -> None:
    """The same with a real engine: `rm -rf` under a running process, and the directory made unusable."""
    import shutil

    directory = tmp_path / "cache"
    cache = Cache(f"disk://{directory}")
    f = cache.cached(counting())
    assert [f(1), f(1)] == [1, 1]
    shutil.rmtree(directory)
    directory.write_text("no directory")
    assert f(1) in (1, 2)
    assert f(2) in (2, 3)
    directory.unlink()
    until(lambda: _works(f))
    assert cache.get_or_compute("k", lambda: "v") == "v"
    cache.close()


def test_a_directory_that_cannot_be_used_at_the_start(tmp_path: Path) -> None:
    """Every worker that begins while the disk is full would answer each call with an error, and those before not."""
    directory = tmp_path / "cache"
    directory.write_text("no directory")
    with Cache(f"disk://{directory}") as cache:
        f = cache.cached(counting())
        assert [f(1), f(1)] == [1, 1]
        directory.unlink()
        until(lambda: _works(f))


def _works(f: Any) -> bool:
    try:
        f.invalidate(1)
    except EngineError:
        return False
    return f(1) is not None


def test_cached_functions_without_settings_know_nothing_of_it() -> None:
    """Memory can't be down: no breaker, no refuge, no cost."""
    f = cached(counting())
    f(1)
    assert f.cache._core.outage is None


class Part(EngineError):
    """One of several servers is down."""

    partial = True


def test_a_part_that_is_down_is_no_matter_of_the_other_parts(colour: str, clock: FakeClock) -> None:
    """One dead server of three would send every key into the refuge; or each call would wait for it once more."""
    engine = Switched()
    tries: list[str] = []

    def broken(port: Any) -> Any:
        async def act(verb: str, key: str, *args: Any) -> Any:
            if "dead" in key:
                tries.append(verb)
                raise Part(f"{verb}: the server of {key} is down")
            return await getattr(port, verb)(key, *args)

        return type("Ring", (), {"__getattr__": lambda self, verb: lambda *args: act(verb, *args)})()

    engine.blocking = replace(engine.blocking, claims=broken(engine.inner.blocking.claims))
    engine.suspending = replace(engine.suspending, claims=broken(engine.inner.suspending.claims))
    cache = Cache(engine=engine)
    f = cache.cached(counting(colour))
    assert [had(f("dead 1")), had(f("dead 1")), had(f("dead 2"))] == [1, 1, 2]
    tries.clear()
    clock.advance(2)
    for n in range(20):
        had(f(n))
    assert set(tries) <= {"abandon"}  # what may be ours there is to be given back, beside all callers
    other = Cache(engine=engine).cached(counting(colour))
    assert had(other(7)) == had(f(7)) == 10  # the engine has it, for everybody
    assert other.stats().computations == 0


@pytest.mark.parametrize("reads", [False, True])
def test_a_part_that_is_still_down_ends_the_outage_of_the_rest(clock: FakeClock, reads: bool) -> None:
    """Where everybody asks for a key of that part, the others' keys would stay in the refuge."""
    engine = Switched()

    class Ring(Port):
        async def claim(self, key: str, *args: Any) -> Any:
            self._plug.pass_on("claim")
            if "dead" in key:
                raise Part(f"the server of {key} is down")
            return await self._port.claim(key, *args)

        async def get(self, keys: list[str]) -> Any:
            self._plug.pass_on("get")
            if "dead" in keys[0]:
                raise Part(f"the server of {keys[0]} is down")
            return await self._port.get(keys)

    claims, store = engine.inner.blocking.claims, engine.inner.blocking.store
    engine.blocking = replace(engine.blocking, claims=Ring(engine.plug, claims), store=Ring(engine.plug, store))
    cache = Cache(engine=engine)
    assert cache.get("k") is None
    engine.plug.pull()
    assert cache.get_or_compute("k", lambda: 1) == 1
    assert cache._core.outage is not None
    assert cache._core.outage.down
    engine.plug.put_back()
    clock.advance(1.01)
    assert cache.get("dead") is None if reads else cache.get_or_compute("dead", lambda: 2) == 2
    assert not cache._core.outage.down
    assert reads or cache.get_or_compute("dead", lambda: 3) == 2


def test_a_part_that_was_back_meanwhile(engine: Switched) -> None:
    """What was computed without it may have been invalidated there since: the next time it is down it is too old."""

    class Ring(Port):
        async def claim(self, *args: Any) -> Any:
            if dead:
                raise Part("its server is down")
            return await self._port.claim(*args)

    dead = [True]
    engine.blocking = replace(engine.blocking, claims=Ring(engine.plug, engine.inner.blocking.claims))
    asked, other = Cache(engine=engine), Cache(engine=engine)
    assert asked.get_or_compute("k", lambda: 1) == 1
    assert asked.get_or_compute("k", lambda: 2) == 1
    dead.clear()
    assert asked.get_or_compute("k", lambda: 2) == 2
    assert other.invalidate("k")
    dead.append(True)
    assert asked.get_or_compute("k", lambda: 3) == 3


class Full(EngineError):
    """Of one that answers, and takes nothing new."""

    partial = refused = True


def test_what_a_full_engine_refuses_is_kept_for_a_moment_only(engine: Switched) -> None:
    """Others may invalidate it there all the time, and nobody would tell us."""

    class Refusing(Port):
        def __getattr__(self, verb: str) -> Any:
            async def act(*args: Any) -> Any:
                self._plug.asked.append(verb)
                raise Full("no room")

            return act if verb == "claim" else super().__getattr__(verb)

    engine.blocking = replace(engine.blocking, claims=Refusing(engine.plug, engine.inner.blocking.claims))
    f = Cache(engine=engine, ttl=3600).cached(counting())
    assert [f(1), f(1)] == [1, 1]
    (resident,) = f.cache._core.outage.refuge.tier._residents.values()
    assert 0 < resident.keep - time.monotonic() <= 1
    assert "abandon" not in engine.plug.asked  # a lease that was refused needn't be given back


def test_one_key_that_is_never_readable_is_no_outage(engine: Switched) -> None:
    """Whoever can write there could have everybody do without the engine: one key would do."""

    class Restless(Port):
        async def claim(self, key: str, *args: Any) -> Any:
            if key.endswith("foreign"):
                return Found(Entry(os.urandom(40), os.urandom(8), fresh=10.0, keep=10.0))
            return await self.__getattr__("claim")(key, *args)

    engine.blocking = replace(engine.blocking, claims=Restless(engine.plug, engine.inner.blocking.claims))
    cache = Cache(engine=engine)
    assert cache.get_or_compute("foreign", lambda: 1) == 1
    assert cache.get_or_compute("k", lambda: 2) == 2
    assert cache.get("k") == 2
    assert not cache._core.is_down()


def test_an_answer_from_before_the_trouble_ends_no_outage(engine: Switched) -> None:
    """The refuge would be emptied, and its keys computed once more, by every slow answer."""
    sent, answered = asyncio.Event(), asyncio.Event()

    class Slow(Port):
        async def claim(self, key: str, *args: Any) -> Any:
            if key.endswith("slow"):
                sent.set()
                await answered.wait()
                return await self._port.claim(key, *args)
            return await self.__getattr__("claim")(key, *args)

    async def story() -> None:
        f = counting("async")
        waiting = asyncio.create_task(cache.aget_or_compute("slow", lambda: 0))
        await sent.wait()
        engine.plug.pull()
        assert await cache.aget_or_compute("k", f) == 1
        answered.set()
        assert await waiting == 0
        assert cache._core.outage is not None
        assert cache._core.outage.down
        assert await cache.aget_or_compute("k", f) == 1

    slow: Any = Slow(engine.plug, engine.inner.suspending.claims)
    engine.suspending = replace(engine.suspending, claims=slow)
    cache = Cache(engine=engine)
    asyncio.run(story())
