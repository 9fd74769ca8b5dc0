"""Promise 7: if an engine is down, calls still work. The tests use an engine whose verbs can be switched off."""

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
    """Decides what happens to an engine's verbs: pulled verbs raise, and all verbs that were asked are recorded."""

    def __init__(self) -> None:
        self.pulled: set[str] = set()
        self.asked: list[str] = []
        self.partly = self.full = False
        self.reason = ""

    def pull(self, *verbs: str, partly: bool = False, full: bool = False) -> None:
        """`partly`: one of several servers is down. `full`: the engine answers, but takes nothing new."""
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
    """A memory engine of bytes behind a plug, like a shared engine behind a network."""

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
    """Return a function of x that returns the number of its computation."""
    calls: list[Any] = []

    def compute(x: int = 0) -> int:
        calls.append(x)
        return len(calls)

    async def suspending(x: int = 0) -> int:
        return compute(x)

    return compute if colour == "sync" else suspending


both = pytest.mark.parametrize("colour", ["sync", "async"])


def test_calls_go_on(colour: str, engine: Switched) -> None:
    """If the engine is down before the first call, calls still return values, and this process keeps the results."""
    f = Cache(engine=engine).cached(counting(colour))
    engine.plug.pull()
    assert [had(f(1)) for _ in range(5)] == [1] * 5
    assert [had(f(2)) for _ in range(5)] == [2] * 5


@pytest.mark.parametrize("verb", ["claim", "fill", "reply of claim", "reply of fill", "look_too"])
def test_whichever_verb_fails(colour: str, verb: str, engine: Switched, clock: FakeClock) -> None:
    """If a verb fails, the caller gets its value, later results are kept, and no key stays locked."""
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
    """During an outage results are kept for 5 seconds at most, because an invalidation may not reach this process."""
    f = Cache(engine=engine, ttl=3600).cached(counting())
    engine.plug.pull()
    f(1)
    claims = f.cache._core.outage.refuge.tier
    (resident,) = claims._residents.values()
    assert 0 < resident.keep - time.monotonic() <= 5


def test_a_dead_engine_is_asked_once_a_second(engine: Switched, clock: FakeClock) -> None:
    """A dead engine is asked once a second. Otherwise each call would wait for the time-out of a connection."""
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
    assert 3 <= len(engine.plug.asked) <= 6  # three probes, of one or two verbs each


def test_recovery_is_noticed_by_itself(colour: str, engine: Switched, clock: FakeClock) -> None:
    """When the engine works again, its values replace those of the outage, and one event reports the end."""
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
    """An outage sends two events, one at its start and one at its end. It does not send one per call."""
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
    """The log names the cache that is down, and values served during an outage do not count as found."""
    (tmp_path / "file").touch()
    url = f"disk://{tmp_path}/file/cache"  # cannot be created, because `file` is not a directory
    with isolated(caches={"default": {}, "orders": {"url": url}}), caplog.at_level("WARNING", "stampede"):
        price = cached(cache="orders")(lambda: 1)
        assert [price() for _ in range(3)] == [1, 1, 1]
        stats = price.stats()
    assert (stats.computations, stats.found, stats.served) == (1, 0, {"outage": 2})
    assert f"{url} (cache 'orders') is down, calls go on without it" in caplog.text


def test_a_lasting_outage_is_logged_again(engine: Switched, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """A lasting outage is logged again about once a minute, with its present reason instead of the first one."""
    cache = Cache(engine=engine)

    def lines(seconds: int) -> list[str]:
        caplog.clear()
        engine.plug.pull()
        for _ in range(seconds):
            clock.advance(1.01)
            cache.get_or_compute("k", lambda: 1)
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("switched is ")]

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
    """A full engine is reported once a minute, and not with each call."""
    told: list[events.Event] = []
    cache = Cache(engine=engine, observers=[told.append])
    engine.plug.pull("claim", full=True)
    for second in range(100):
        cache.get_or_compute(f"k{second}", lambda: 1)
        clock.advance(1)
    assert [type(event) for event in told].count(events.EngineDown) == 2
    assert not cache.down


def test_seconds_of_outages_are_counted(engine: Switched, clock: FakeClock) -> None:
    """The seconds of the present outage are counted, too. Otherwise a dashboard would show them only after its end."""
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


def test_raise_is_for_those_who_want_it(colour: str, engine: Switched, clock: FakeClock) -> None:
    """With `on_engine_error="raise"`, calls raise and do not compute. When the engine is back, they work again."""
    compute = counting(colour)
    f = Cache(engine=engine, on_engine_error="raise").cached(compute)
    engine.plug.pull()
    for _ in range(3):
        with pytest.raises(EngineError, match="plug is pulled") as caught:
            had(f(1))
        assert isinstance(caught.value, ConnectionError)
    engine.plug.put_back()
    clock.advance(1.01)
    assert had(f(1)) == 1


@pytest.mark.parametrize("verb", ["invalidate", "expire", "set"])
def test_changes_raise_and_yet_the_local_value_is_gone(colour: str, verb: str, engine: Switched) -> None:
    """A change that cannot reach the engine raises. The local value is removed even so."""
    f = Cache(engine=engine, local=True, ttl=60).cached(counting(colour))
    assert [had(f(1)) for _ in range(3)] == [1] * 3
    engine.plug.pull()
    with pytest.raises(EngineError):
        had(f.set("new", 1) if verb == "set" else getattr(f, verb)(1))
    assert had(f(1)) == 2


def test_invalidate_all_and_clear_raise_and_yet_local_values_are_gone(colour: str, engine: Switched) -> None:
    """If `invalidate_all` or `clear` cannot reach the engine, it raises. The local values are removed even so."""
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
    """A value that was cleared before an outage is not served after it, even if the function had no time to notice."""
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
    """If the server of the generations is down, and the server of the values is not, a cleared value is not served."""
    engine = Switched(DiskEngine(tmp_path))
    cache = Cache(engine=engine, ttl=60)
    f = cache.cached(counting(colour))
    assert had(f(1)) == 1
    cache.clear()
    engine.plug.pull("look_too", partly=True)
    assert had(f(1)) == 2


def test_invalidate_reaches_what_was_kept_meanwhile(colour: str, engine: Switched) -> None:
    """`invalidate` also removes a value that was computed during the outage."""
    f = Cache(engine=engine).cached(counting(colour))
    engine.plug.pull()
    assert [had(f(1)), had(f(1))] == [1, 1]
    with pytest.raises(EngineError):
        had(f.invalidate(1))
    assert had(f(1)) == 2


def test_invalidate_during_a_computation_without_an_engine(engine: Switched) -> None:
    """Without an engine, a call after `invalidate` does not get the result of a computation that began before."""
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
    """If the engine comes back during a computation, the callers get the value, and later calls find no stuck lease."""
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


def test_an_engine_that_goes_down_under_a_computation(clock: FakeClock) -> None:
    """If the engine goes down during a computation, the callers get the value, and later calls find no stuck lease."""
    origin, engine = Origin(), Switched(MemoryEngine(sealed=True, clock=clock))
    f = Cache(engine=engine, lease=10).cached(_named(origin, "sync"))
    leader = Herd(f)
    origin.has_begun()
    follower = Herd(f)
    until(lambda: sum(flight.callers for flight in list(f.cache._core.flights._flights.values())) == 2)
    engine.plug.pull()
    origin.let_on()
    assert leader.join() + follower.join() == [1, 2]  # the follower can't know whether its value is still valid
    assert f() == 2
    engine.plug.put_back()
    clock.advance(11)
    started = time.monotonic()
    assert f() in (2, 3)
    assert time.monotonic() - started < 5


def test_an_origin_that_fails_during_an_outage(engine: Switched) -> None:
    """If the function fails during an outage, its error reaches the caller, and the next call tries again."""
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
    """With a local tier, hits are served during an outage, and the engine is not asked."""
    f = Cache(engine=engine, local={"entries": 10, "ttl": 60}).cached(counting())
    assert [f(1) for _ in range(2)] == [1, 1]
    engine.plug.pull()
    engine.plug.asked.clear()
    assert [f(1) for _ in range(5)] == [1] * 5
    assert engine.plug.asked == []


@pytest.mark.parametrize("retry_after", [0, 60])
def test_engine_and_origin_both_down(colour: str, retry_after: float, engine: Switched) -> None:
    """If engine and origin are down, this process serves its stale value, unless the value was invalidated."""
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
    """During an outage a read raises nothing: it returns its default, or a value that was computed meanwhile."""
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
    assert _asked(cache, colour, "get", "k") == 5  # it was computed here during the outage
    assert _asked(cache, colour, "get_many", ["k", "l"]) == {"k": 5}
    with pytest.raises(EngineError):
        _asked(cache, colour, "invalidate", "k")
    assert _asked(cache, colour, "get", "k") is None


def _asked(cache: Cache, colour: str, verb: str, *args: Any, **options: Any) -> Any:
    return had(getattr(cache, verb if colour == "sync" else "a" + verb)(*args, **options))


CHANGES: list[tuple[Any, ...]] = [
    ("set", "k", 1),
    ("expire", "k"),
    ("invalidate", "k"),
    ("invalidate_all",),
    ("clear",),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
def test_a_change_asks_once(colour: str, change: tuple[Any, ...], engine: Switched, clock: FakeClock) -> None:
    """A change asks a dead engine once. With a second question, an engine that hangs would cost two time-outs."""
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
        clock.advance(1.01)  # the next call may ask the engine
        engine.plug.asked.clear()
        with pytest.raises(EngineError):
            made()
        assert len(engine.plug.asked) == 1
    engine.plug.put_back()
    made()


def test_reads_raise_where_that_is_wanted(colour: str, engine: Switched) -> None:
    """With `on_engine_error="raise"`, reads raise. Otherwise an unknown value would be taken for an absent one."""
    cache = Cache(engine=engine, on_engine_error="raise")
    engine.plug.pull()
    for verb, *args in ("get", "k"), ("get_many", ["k"]), ("peek", "k"):
        for _ in range(2):
            with pytest.raises(EngineError, match="plug is pulled"):
                _asked(cache, colour, verb, *args)


def test_a_read_that_a_part_of_the_engine_refuses_says_why(colour: str, engine: Switched) -> None:
    """With `on_engine_error="raise"`, a read that one of several servers refuses raises that server's error."""
    cache = Cache(engine=engine, on_engine_error="raise")
    _asked(cache, colour, "set", "k", 1, tags=["unknown to readers"])  # so that the first look does not suffice
    engine.plug.pull("get", partly=True)
    with pytest.raises(EngineError, match="plug is pulled"):
        _asked(cache, colour, "get_many", ["k", "m"])


def test_a_read_notices_that_it_is_over(colour: str, engine: Switched, clock: FakeClock) -> None:
    """A read notices that the engine works again. Otherwise a process that only reads would not use it any more."""
    cache = Cache(engine=engine)
    _asked(cache, colour, "set", "k", 1)
    engine.plug.pull()
    assert _asked(cache, colour, "get", "k") is None
    engine.plug.put_back()
    assert _asked(cache, colour, "get", "k") is None
    clock.advance(1.01)
    assert [_asked(cache, colour, "get", "k") for _ in range(2)] == [1, 1]


def test_who_probes_asks_which_generation_stands(colour: str, clock: FakeClock) -> None:
    """The call that probes an engine reads the generation first, because another process may have cleared the cache."""
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
    """If the generation is known and the read itself fails, it finds nothing, and the outage is noticed."""
    cache = Cache(engine=engine)
    _asked(cache, colour, "set", "k", 1, tags=["unknown to readers"])  # so that the first look does not suffice
    engine.plug.pull("get")
    assert _asked(cache, colour, "get_many", ["k", "m"]) == {}
    assert cache.stats().engine_downs == 1


def test_many_goes_on(colour: str, engine: Switched) -> None:
    """Batches are computed during an outage, too."""
    cache = Cache(engine=engine)
    f = cache.cached(counting(colour))
    engine.plug.pull()
    assert sorted(had(f.many([(1,), (2,), (1,)]))) in ([1, 1, 2], [1, 2, 2])
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {key: key for key in keys}) == {"a": "a", "b": "b"}


@both
def test_background_refreshes_go_on(colour: str, engine: Switched, clock: FakeClock) -> None:
    """If the engine goes down between claim and fill of a background refresh, callers get values and no error."""
    f = Cache(engine=engine, stale=60, background=True).cached(counting(colour))

    def ended() -> bool:
        return f.stats().computations == 2 and not f.cache._core.flights._flights

    async def main() -> None:
        assert await f(1) == 1
        await f.expire(1)
        engine.plug.pull("fill")
        assert await f(1) == 1
        await until_async(ended)
        assert [await f(1), await f(1)] == [3, 3]

    if colour == "async":
        asyncio.run(main())
    else:
        assert f(1) == 1
        f.expire(1)
        engine.plug.pull("fill")
        assert f(1) == 1
        until(ended)
        assert [f(1), f(1)] == [3, 3]


def test_locks_are_never_open(engine: Switched) -> None:
    """If the engine is down, a lock raises, in blocking and in async code, and its block does not run."""
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
    """If the reply to a granted lock is lost, the lock is given back. Otherwise it would stay held without a holder."""
    engine.plug.pull("reply of acquire")
    with pytest.raises(EngineError):
        Lock("a", on=engine).acquire()
    engine.plug.put_back()
    with Lock("a", on=engine, wait=5):  # a thread gives the lock back, long before its lease of 30 seconds ends
        pass


def test_a_claim_whose_reply_is_lost_locks_nobody_out(colour: str, engine: Switched, clock: FakeClock) -> None:
    """If the reply to a claim is lost, its lease is given back. The caller chose the token, so it can do this."""
    f = Cache(engine=engine, lease=60).cached(counting(colour))
    engine.plug.pull("reply of claim")
    assert had(f(1)) == 1
    engine.plug.put_back()
    clock.advance(2)
    started = time.monotonic()
    assert had(f(1)) in (1, 2)
    assert time.monotonic() - started < 5


def test_a_directory_that_disappears(tmp_path: Path) -> None:
    """Calls still work if the directory of a disk cache is removed, or replaced by a file, while it is in use."""
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
    """If a directory cannot be used at the start, calls still work, and the directory is used as soon as possible."""
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
    """A memory engine cannot be down, so its cache has no breaker and no refuge."""
    f = cached(counting())
    f(1)
    assert f.cache._core.outage is None


class Part(EngineError):
    """One of several servers is down."""

    partial = True


def test_a_part_that_is_down_is_no_matter_of_the_other_parts(colour: str, clock: FakeClock) -> None:
    """If one server of several is down, only its keys are kept here. Calls for other keys do not ask it."""
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
    assert set(tries) <= {"abandon"}  # leases that it may have granted are given back in the background
    other = Cache(engine=engine).cached(counting(colour))
    assert had(other(7)) == had(f(7)) == 10  # both caches get it from the engine
    assert other.stats().computations == 0


@pytest.mark.parametrize("reads", [False, True])
def test_a_part_that_is_still_down_ends_the_outage_of_the_rest(clock: FakeClock, reads: bool) -> None:
    """If one server remains down, an error from it still ends the outage for the keys of the other servers."""
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
    """A value computed in one outage is not served in the next. It may have been invalidated between them."""

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
    """The error of an engine that answers, but takes nothing new."""

    partial = refused = True


def test_what_a_full_engine_refuses_is_kept_for_a_moment_only(engine: Switched) -> None:
    """A value that a full engine refuses is kept for one second at most, because an invalidation does not reach it."""

    class Refusing(Port):
        def __getattr__(self, verb: str) -> Any:
            async def act(*args: Any) -> Any:
                self._plug.asked.append(verb)
                raise Full("no room")

            return act if verb == "claim" else super().__getattr__(verb)

    engine.blocking = replace(engine.blocking, claims=Refusing(engine.plug, engine.inner.blocking.claims))
    f = Cache(engine=engine, ttl=3600).cached(counting())
    began = time.monotonic()
    assert f(1) == 1
    (resident,) = f.cache._core.outage.refuge.tier._residents.values()
    assert began < resident.keep <= time.monotonic() + 1
    assert "abandon" not in engine.plug.asked  # a lease that was refused need not be given back


def test_one_key_that_is_never_readable_is_no_outage(engine: Switched) -> None:
    """One key that is never readable is no outage. Otherwise one bad key could switch off the engine for all."""

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
    """A slow answer to a question from before the outage does not end it. Otherwise the refuge would be emptied."""
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
