"""The caps of an origin: it never runs more computations at once than it may."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from bare_cache import Gate, until
from servers import RedisServer, shared_redis, to_empty, wait_until
from watched_limits import Watched, pairwise_by

from stampede import Cache, EngineError, OriginFull, SettingsError, WaitTimeout
from stampede.engines.memory import MemoryEngine
from stampede.limits import origins
from stampede.limits.origins import OriginGate
from stampede.runtime.colour import BLOCKING, run_blocking
from stampede.settings import OriginSettings
from stampede.testing import isolated

ENGINES = ["memory", "disk", "redis"]


class Origin:
    """Counts the computations that run, and the most that ran at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.calls = 0
        self.seconds = seconds

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.calls += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1

    def row(self, key: object = None) -> str:
        with self:
            time.sleep(self.seconds)
            return f"row {key}"

    async def arow(self, key: object = None) -> str:
        with self:
            await asyncio.sleep(self.seconds)
            return f"row {key}"


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server = shared_redis()
        server.cli("FLUSHALL")
        to_empty["redis"] = lambda: server.cli("FLUSHALL")
        return server.url
    return "memory://" if request.param == "memory" else f"disk://{tmp_path}?timeout=20"


Open = Callable[..., Cache]


@pytest.fixture
def open_() -> Iterator[Open]:
    """Open caches with one origin, `db`, with these caps."""
    opened: list[Cache] = []

    def made(url: str = "memory://", options: dict[str, Any] | None = None, **caps: Any) -> Cache:
        opened.append(Cache(url, origins={"db": caps}, early=0, **(options or {})))
        return opened[-1]

    yield made
    for cache in opened:
        cache.close()


def ask(cache: Cache, origin: Origin, keys: range, threads: int = 16, **options: Any) -> list[str]:
    with ThreadPoolExecutor(threads) as pool:
        return list(
            pool.map(lambda key: cache.get_or_compute(str(key), lambda: origin.row(key), origin="db", **options), keys)
        )


def test_a_flush_never_shows_more_than_the_cap(url: str, open_: Open) -> None:
    """If many keys are missing at once, all caches together run no more computations than the cap allows."""
    origin, caches = Origin(0.002), [open_(url, concurrency=3) for _ in range(1 if url == "memory://" else 3)]
    keys = range(60)
    with ThreadPoolExecutor(len(caches)) as pool:
        for values in pool.map(lambda cache: ask(cache, origin, keys, 8), caches):
            assert values == [f"row {key}" for key in keys]
    assert origin.most <= 3
    assert origin.calls == len(keys)


def test_the_same_for_tasks(url: str, open_: Open) -> None:
    origin, cache = Origin(0.002), open_(url, concurrency=3)

    async def herd() -> list[str]:
        asked = [cache.aget_or_compute(str(key), lambda k=key: origin.arow(k), origin="db") for key in range(40)]
        return await asyncio.gather(*asked)

    assert asyncio.run(herd()) == [f"row {key}" for key in range(40)]
    assert 1 <= origin.most <= 3


def test_a_decorated_function_and_a_batch(open_: Open) -> None:
    """A call of a function of many keys is one computation of its origin."""
    origin, cache = Origin(), open_(concurrency=1)

    @cache.cached(origin="db")
    def row(key: int) -> str:
        return origin.row(key)

    @cache.cached.many(origin="db", chunk=2)
    def rows(keys: list[int]) -> dict[int, str]:
        with origin:
            time.sleep(0.002)
            return {key: f"row {key}" for key in keys}

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(rows, [key, key + 1, key + 2]) for key in range(0, 30, 3)]
        asked += [pool.submit(row, key) for key in range(10)]
        assert all(each.result(20) for each in asked)
    assert origin.most == 1
    assert cache.get_or_compute_many(["a", "b"], lambda keys: {key: key for key in keys}, origin="db") == {
        "a": "a",
        "b": "b",
    }


def test_the_place_is_given_back_whatever_happens(open_: Open) -> None:
    """A place is given back after an error or a cancellation. Otherwise a cap of one would stay full for ever."""
    cache = open_(concurrency=1, when_full="raise")

    def fails() -> str:
        raise LookupError("no row")

    for number in range(3):
        with pytest.raises(LookupError):
            cache.get_or_compute(f"k{number}", fails, origin="db")
    assert cache.get_or_compute("k", lambda: "row", origin="db") == "row"

    async def cancelled() -> None:
        asked = asyncio.ensure_future(cache.aget_or_compute("l", lambda: asyncio.sleep(60), origin="db"))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(cancelled())
    assert cache.get_or_compute("m", lambda: "row", origin="db") == "row"


def test_what_a_computation_calls_needs_no_other_place(open_: Open) -> None:
    """A computation inside another one needs no place of its own. Otherwise a cap of one would be a deadlock."""
    cache = open_(concurrency=1)
    value = cache.get_or_compute(
        "outer", lambda: cache.get_or_compute("inner", lambda: "row", origin="db") + "s", origin="db"
    )
    assert value == "rows"


def test_what_a_computation_leaves_running_needs_places_when_it_has_ended(open_: Open) -> None:
    """A task that outlives the computation in whose context it runs needs places of its own."""
    origin, cache, ended = Origin(0.01), open_(concurrency=1), asyncio.Event()

    async def asks_later() -> None:
        await ended.wait()
        keys = [str(number) for number in range(6)]
        await asyncio.gather(*(cache.aget_or_compute(key, origin.arow, origin="db") for key in keys))

    async def main() -> None:
        async def begun() -> Any:
            tasks.append(asyncio.create_task(asks_later()))
            return await cache.aget_or_compute("inner", origin.arow, origin="db")

        tasks: list[asyncio.Task[None]] = []
        assert await cache.aget_or_compute("outer", begun, origin="db") == "row None"
        ended.set()
        await tasks[0]

    asyncio.run(main())
    assert (origin.calls, origin.most) == (7, 1)


@pytest.fixture
def busy(open_: Open) -> Iterator[Callable[..., tuple[Cache, Gate]]]:
    """Make caches whose origin is full until the gate opens."""
    pool, gates = ThreadPoolExecutor(1), []

    def made(**caps: Any) -> tuple[Cache, Gate]:
        cache, gate = open_(concurrency=1, **caps), Gate()
        cache.set("stale", "old", ttl=0.001, stale=600)
        gates.append((gate, pool.submit(cache.get_or_compute, "slow", gate, origin="db")))
        until(lambda: gate.calls == 1)
        time.sleep(0.002)
        return cache, gate

    yield made
    for gate, asked in gates:
        gate.open.set()
        asked.result(20)
    pool.shutdown()


def test_when_full_raise(busy: Callable[..., tuple[Cache, Gate]]) -> None:
    cache, _ = busy(when_full="raise")
    with pytest.raises(OriginFull, match="the origin 'db' is full: at most 1 may run at once"):
        cache.get_or_compute("k", lambda: "row", origin="db")
    with pytest.raises(OriginFull):
        cache.get_or_compute("stale", lambda: "row", origin="db", stale=600)


def test_when_full_stale(busy: Callable[..., tuple[Cache, Gate]]) -> None:
    """If the origin is full, a stale value is served. Without one, the caller waits."""
    cache, gate = busy(when_full="stale")
    assert cache.get_or_compute("stale", lambda: "row", origin="db", stale=600) == "old"
    with pytest.raises(OriginFull, match=r"at most 1 may run at once(; no place was free within \S+ s)?$"):
        cache.get_or_compute("k", lambda: "row", origin="db", wait=0.05)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cache.get_or_compute, "k", lambda: "row", origin="db")
        gate.open.set()
        assert asked.result(20) == "row"


def test_when_full_wait(busy: Callable[..., tuple[Cache, Gate]]) -> None:
    """If no place comes free within `wait`, a stale value is served. Without one, OriginFull is raised."""
    cache, gate = busy(when_full="wait")
    with pytest.raises(OriginFull):
        cache.get_or_compute("k", lambda: "row", origin="db", wait=0.05)
    assert cache.get_or_compute("stale", lambda: "row", origin="db", stale=600, wait=0.05) == "old"
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(cache.get_or_compute, key, lambda: "row", origin="db") for key in ("k", "l")]
        gate.open.set()
        assert [each.result(20) for each in asked] == ["row", "row"]


def test_who_waits_for_a_key_waits_for_its_leader_only(busy: Callable[..., tuple[Cache, Gate]]) -> None:
    """The callers of one key take only one place in the origin's queue, that of their leader."""
    cache, gate = busy(when_full="wait")
    origin = Origin()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(cache.get_or_compute, "k", origin.row, origin="db") for _ in range(8)]
        with pytest.raises((WaitTimeout, OriginFull)):
            cache.get_or_compute("k", origin.row, origin="db", wait=0.02)
        gate.open.set()
        assert {each.result(20) for each in asked} == {"row None"}
    assert origin.calls == 1


def test_an_early_refresh_gives_way(busy: Callable[..., tuple[Cache, Gate]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An early refresh does not wait for a place: callers that need a value come first."""
    cache, gate = busy(url="memory://?codec=sealed", when_full="wait")  # with it, each call draws its early moment
    cache.set("k", "fresh", ttl=600)
    monkeypatch.setattr("stampede.model.early.due", lambda *_: True)
    due: dict[str, Any] = {"origin": "db", "early": 1.0, "ttl": 600}
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cache.get_or_compute, "k", lambda: "newer", **due).result(10) == "fresh"
    gate.open.set()
    until(lambda: cache.get_or_compute("k", lambda: "newer", **due) == "newer")


def test_a_rate_holds_over_all_keys(url: str, open_: Open) -> None:
    cache = open_(url, rate="5/0.5s")
    limits = Watched(cache._core.gates.gate_of("db")._fleet._rate)  # type: ignore[arg-type, union-attr]
    ask(cache, Origin(), range(15), 15)
    starts = sorted(limits.starts)
    assert len(starts) == 15
    assert all(later - sooner > 500_000 for sooner, later in pairwise_by(5, starts))
    assert starts[-1] - starts[0] < 5_000_000


def test_place_and_rate_together(open_: Open) -> None:
    origin, cache = Origin(0.01), open_(concurrency=2, rate="1000/1s")
    ask(cache, origin, range(20))
    assert origin.most <= 2


def test_a_cap_fails_open_for_the_fleet_and_holds_for_the_process(own: RedisServer, open_: Open) -> None:
    """If the engine is down, computations go on, and each process keeps the cap by itself."""
    origin, cache = Origin(0.005), open_(own.url, concurrency=2)
    assert ask(cache, origin, range(4)) == [f"row {key}" for key in range(4)]
    own.stop()
    assert ask(cache, origin, range(100, 110), 5) == [f"row {key}" for key in range(100, 110)]
    assert origin.most <= 2


def test_an_error_of_one_question_opens_no_cap(tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed request to the engine does not open the cap: the caller asks again and waits."""
    first, second = (open_(f"disk://{tmp_path}", concurrency=1) for _ in range(2))
    locks, failing, asked = second._core.engine.lock_engine.blocking.locks, iter([True]), threading.Event()
    assert locks is not None
    real = locks.acquire

    def acquire(*args: Any, **options: Any) -> Any:
        if next(failing, False):
            raise EngineError("no answer")
        asked.set()
        return real(*args, **options)

    monkeypatch.setattr(locks, "acquire", acquire)
    gate = Gate()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(first.get_or_compute, "slow", gate, origin="db")
        until(lambda: gate.calls == 1)
        other = pool.submit(second.get_or_compute, "k", lambda: gate.open.is_set(), origin="db")
        assert asked.wait(10) or other.result(10)
        gate.open.set()
        assert other.result(20) is True
        slow.result(20)


class Told:
    """An adaptive room that records the times that it is told."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.times: list[float] = []

    def ended(self, name: str, seconds: float, now: float, *, failed: bool) -> None:
        self.times.append(seconds)


def test_a_computation_tells_of_the_room_for_which_it_has_asked() -> None:
    """A time counts only if the room is the one for which the computation asked. Otherwise a smaller room would be
    judged by times of the larger one, and be given up."""
    gate = OriginGate("db", OriginSettings(concurrency=4, adaptive=True), MemoryEngine())
    told: Any = Told(4)
    gate.adaptive = told
    before = run_blocking(gate.enter(BLOCKING, 0.0, 30.0, 60.0))
    told.room = 2
    after = run_blocking(gate.enter(BLOCKING, 0.0, 30.0, 60.0))
    before.ended("rows", 1.0, failed=False)
    after.ended("rows", 2.0, failed=False)
    assert told.times == [2.0]
    told.room = 4
    after.ended("rows", 3.0, failed=False)
    before.ended("rows", 4.0, failed=False)
    assert told.times == [2.0, 4.0]
    run_blocking(before.leave())
    run_blocking(after.leave())


def test_an_engine_without_an_answer_rests_for_a_moment(
    tmp_path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After failed requests the engine is not asked for a while, so computations do not wait for its time-outs."""
    cache, questions = open_(f"disk://{tmp_path}", concurrency=1), []
    locks = cache._core.engine.lock_engine.blocking.locks
    assert locks is not None
    real = locks.acquire

    def acquire(*args: Any, **options: Any) -> Any:
        questions.append(args)
        if len(questions) <= 2:
            raise EngineError("no answer")
        return real(*args, **options)

    monkeypatch.setattr(locks, "acquire", acquire)
    monkeypatch.setattr(origins, "DOWN", 1000.0)
    assert ask(cache, Origin(), range(3), 1) == ["row 0", "row 1", "row 2"]
    assert len(questions) == 2
    cache._core.gates.gate_of("db")._down_until = 0.0  # type: ignore[union-attr]
    assert ask(cache, Origin(), range(3, 5), 1) == ["row 3", "row 4"]
    assert len(questions) == 4


def test_a_computation_that_waits_for_itself_is_told(
    open_: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a computation's own threads wait for its place, a warning says so. The remedy in the warning works."""
    monkeypatch.setattr(origins, "STALLED", 0.05)
    cache = open_(concurrency=1)

    def part(number: int) -> int:
        return cache.get_or_compute(f"part {number}", lambda: number, origin="db")

    with ThreadPoolExecutor(1) as pool:

        def whole() -> Future[int]:
            asked = pool.submit(part, 1)
            until(lambda: "waits for itself" in caplog.text)
            return asked

        asked = cache.get_or_compute("whole", whole, origin="db", cache_if=lambda _: False)
        assert asked.result(20) == 1
        (told,) = [each.getMessage() for each in caplog.records if "waits for itself" in each.getMessage()]
        assert "the origin 'db'" in told and "contextvars.copy_context().run" in told
        remedy = lambda: pool.submit(copy_context().run, part, 7).result(20)  # noqa: E731
        assert cache.get_or_compute("whole", remedy, origin="db") == 7


def test_an_adaptive_cap_follows_the_origin(open_: Open) -> None:
    """An adaptive cap is told how long the computations take, and its room is the cap."""
    origin, cache, adaptive = Origin(0.002), open_(concurrency=16, adaptive=True), Told(16)
    cache._core.gates.gate_of("db").adaptive = adaptive  # type: ignore[assignment, union-attr]
    ask(cache, origin, range(40), 16)
    adaptive.room, origin.most = 2, 0
    ask(cache, origin, range(100, 140), 16)
    assert origin.most <= 2
    assert len(adaptive.times) == 80 and min(adaptive.times) >= 0.002


def test_an_origin_that_nobody_wrote_is_an_error(open_: Open) -> None:
    cache = open_(concurrency=1)
    with pytest.raises(SettingsError, match=r"origin is 'bd', and there is no \[origins.bd\]: there are db"):
        cache.get_or_compute("k", lambda: "row", origin="bd")
    with pytest.raises(SettingsError, match="origin is 'bd'"):
        cache.cached(origin="bd")(lambda: "row")()
    with pytest.raises(SettingsError, match="the settings have no origins"):
        Cache().get_or_compute("k", lambda: "row", origin="db")


def test_origins_of_a_settings_file() -> None:
    with isolated(origins={"db": {"concurrency": 1}}, caches={"default": {"origin": "db"}}):
        from stampede import cached

        origin = Origin(0.005)

        @cached
        def row(key: int) -> str:
            return origin.row(key)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(row, range(8))) == [f"row {key}" for key in range(8)]
        assert origin.most == 1


@pytest.mark.parametrize(
    "caps, words",
    [
        ({"concurrency": 0}, "concurrency is 0: give a whole number, at least 1"),
        ({"concurrency": 2**31}, "concurrency is 2147483648: give a whole number, at least 1, and 2147483647 at most"),
        ({"adaptive": True}, "adaptive is true: also give concurrency, the upper bound"),
        ({"concurrency": 2, "at_least": 3}, "at_least is 3: it must not be more than concurrency, 2"),
        ({"adaptive": "perhaps", "concurrency": 2}, "adaptive is 'perhaps': give true or false"),
    ],
)
def test_wrong_caps_are_refused(caps: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Cache(origins={"db": caps})


def test_a_place_outlives_no_process_that_waits(open_: Open, own: RedisServer) -> None:
    """A caller that gives up leaves the queue, so it blocks no caller behind it."""
    first, second = open_(own.url, concurrency=1), open_(own.url, concurrency=1)
    gate = Gate()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(first.get_or_compute, "slow", gate, origin="db")
        until(lambda: gate.calls == 1)
        with pytest.raises(OriginFull):
            second.get_or_compute("k", lambda: "row", origin="db", wait=0.05)
        gate.open.set()
        slow.result(20)
        wait_until(lambda: second.get_or_compute("l", lambda: "row", origin="db", wait=5) == "row")


def test_a_lease_ends_with_max_hold_after_the_wait(busy: Callable[..., tuple[Cache, Gate]]) -> None:
    """`max_hold` counts after the wait for a place: the wait ends no lease, but a computation that hangs loses it."""
    cache, gate = busy(when_full="wait")
    slow = Gate()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(cache.get_or_compute, "k", slow, origin="db", lease=0.2, max_hold=0.3)
        time.sleep(0.6)
        assert not asked.done()
        gate.open.set()
        until(lambda: slow.calls == 1)
        follower = pool.submit(cache.get_or_compute, "k", lambda: "other", lease=0.2, max_hold=0.3)
        assert follower.result(20) == "other"
        slow.open.set()
        assert asked.result(20) == "value"


def test_one_inside_another_hangs_for_max_hold_only(open_: Open) -> None:
    """A computation inside another one loses its lease after `max_hold`, though it needs no place of its own."""
    cache, slow = open_(concurrency=1), Gate()

    def inner() -> str:
        return cache.get_or_compute("inner", slow, origin="db", lease=0.2, max_hold=0.3)

    with ThreadPoolExecutor(2) as pool:
        outer = pool.submit(cache.get_or_compute, "outer", inner, origin="db")
        until(lambda: slow.calls == 1)
        try:
            assert cache.get_or_compute("inner", lambda: "other", wait=10) == "other"
        finally:
            slow.open.set()
        assert outer.result(20) == "value"
