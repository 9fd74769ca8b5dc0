"""`Cache`: plain verbs and their twins, options, what a cache's engine and local tier make of them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from both_colours import Suspending
from herd import Herd, Origin, had, until, until_async
from servers import RedisServer

from stampede import Cache, EngineError, Entry, OptionError, events
from stampede.engines.memory import MemoryEngine
from stampede.errors import EngineClosed
from stampede.testing import isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


# Each way to keep values in one colour, with or without a namespace.
WAYS = [
    ("memory://", "sync", ""),
    ("memory://?codec=sealed", "async", "shop"),
    ("disk", "async", ""),
    ("disk local", "sync", "shop"),
    ("paired", "async", "shop"),
]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(filter(None, way)))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    """One cache over each way that values can be kept on one machine; its plain verbs may be their twins."""
    url, colour, namespace = request.param
    with made(url, tmp_path, namespace=namespace) as cache:
        yield cache if colour == "sync" else cast("Cache", Suspending(cache))


def made(kind: str, directory: Path, **options: Any) -> Cache:
    if kind == "paired":
        return Cache("memory://?codec=sealed", locks=f"file://{directory}/locks", **options)
    if kind.startswith("disk"):
        return Cache(f"disk://{directory}/disk", local=kind == "disk local", **options)
    return Cache(kind, **options)


def counting(value: Any = "v") -> Any:
    """A function without arguments, and of keys: it answers with the number of its computation."""
    calls: list[Any] = []

    def compute() -> Any:
        calls.append(1)
        return f"{value}{len(calls)}"

    compute.calls = calls  # type: ignore[attr-defined]
    return compute


def test_get_or_compute(cache: Cache) -> None:
    """Computed once; a key of its own each."""
    compute = counting()
    assert [cache.get_or_compute("k", compute) for _ in range(3)] == ["v1"] * 3
    assert cache.get_or_compute("other", compute) == "v2"
    assert cache.get("k") == "v1"
    assert cache.stats().computations == 2


def test_aget_or_compute_takes_both_colours(cache: Cache) -> None:
    """A plain function in async code is called as it is; an async one is awaited; they share their keys."""
    compute = counting()

    async def suspending() -> Any:
        return compute()

    async def main() -> None:
        assert await cache.aget_or_compute("k", suspending) == "v1"
        assert await cache.aget_or_compute("k", compute) == "v1"
        assert await cache.aget_or_compute("k2", compute) == "v2"
        assert await cache.aget("k2") == "v2"

    asyncio.run(main())
    assert cache.get_or_compute("k", compute) == "v1"


def test_verbs(cache: Cache) -> None:
    """Each verb does what its name says."""
    assert cache.get("k") is None
    assert cache.get("k", "default") == "default"
    assert cache.peek("k") is None
    cache.set("k", None, stale=60)
    assert cache.get("k", "default") is None
    entry = cache.peek("k")
    assert isinstance(entry, Entry)
    assert entry.value is None
    assert cache.expire("k") is True
    assert cache.expire("k") is False
    assert cache.get("k", "default") == "default"
    assert cache.peek("k") is not None
    assert cache.get_or_compute("k", lambda: 5) == 5
    assert cache.invalidate("k") is True
    assert cache.invalidate("k") is False
    assert cache.peek("k") is None


def test_async_verbs(cache: Cache) -> None:
    """And their twins."""

    async def main() -> None:
        assert await cache.aget("k", "default") == "default"
        await cache.aset("k", 1, stale=60)
        assert await cache.aget("k") == 1
        entry = await cache.apeek("k")
        assert entry is not None
        assert entry.value == 1
        assert await cache.aexpire("k") is True
        assert await cache.aget("k", "default") == "default"
        assert await cache.ainvalidate("k") is True
        assert await cache.apeek("k") is None
        await cache.aset_many({"a": 1, "b": 2})
        assert await cache.aget_many(["a", "b", "c"]) == {"a": 1, "b": 2}
        assert await cache.ainvalidate_many(["b", "c"]) == 1
        assert await cache.aget_many(["a", "b", "c"]) == {"a": 1}
        await cache.aclear()
        assert await cache.aget_many(["a", "b", "c"]) == {}

    asyncio.run(main())


def test_every_verb_that_asks_an_engine_has_a_twin() -> None:
    """Without one, async code would block its loop for a round trip."""
    io = {"get_or_compute", "get_or_compute_many", "get", "get_many", "set", "set_many"}
    io |= {"expire", "invalidate", "invalidate_many", "peek", "clear", "add", "update", "touch", "close"}
    io |= {"status", "keys", "expire_many", "expire_all", "ping"}
    assert {verb for verb in io if not hasattr(Cache, f"a{verb}")} == set()
    plain = {name for name, _ in inspect.getmembers(Cache, inspect.isfunction) if not name.startswith("_")}
    twins = {f"a{verb}" for verb in io}
    statistics = {"stats", "stats_of", "stats_by_function"}
    assert plain == io | twins | statistics | {"scope", "lock", "limiter", "bulkhead", "refreshing", "bypassed"}


def test_a_cache_that_was_closed_has_no_ping(tmp_path: Path) -> None:
    """Broken if a health check goes on answering for a cache that raises EngineClosed everywhere else."""
    for url in ("memory://", f"disk://{tmp_path}"):
        cache = Cache(url)
        assert cache.ping() >= 0
        cache.close()
        with pytest.raises(EngineClosed):
            cache.ping()


@pytest.mark.redis
@pytest.mark.parametrize("trouble", ["stop", "freeze"])
def test_ping_is_for_health_checks(trouble: str) -> None:
    """An endpoint that answers from the local tier, or never, would keep a broken process in the load balancer."""
    server = RedisServer()
    try:
        with Cache(server.url, local=True) as cache:
            assert 0 < cache.ping() < 20 and 0 < asyncio.run(cache.aping()) < 20
            getattr(server, trouble)()
            began = time.monotonic()
            with pytest.raises(EngineError):
                cache.ping()
            with pytest.raises(EngineError):
                asyncio.run(cache.aping())
            assert time.monotonic() - began < 10
        with pytest.raises(EngineError):
            cache.ping()
    finally:
        server.close()


def test_many_values(cache: Cache) -> None:
    """get_many leaves out what isn't there; a None that is there is there."""
    cache.set_many({"a": 1, "b": None}, ttl=60)
    assert cache.get_many(["b", "a", "c"]) == {"b": None, "a": 1}
    assert cache.get_many([]) == {}


def test_many_changes(cache: Cache) -> None:
    """What was set or invalidated together would be there, or computed, as if it had not been."""
    cache.set_many({"a": 1, "b": 2, "c": 3})
    assert cache.get_many(["a", "b", "c"]) == {"a": 1, "b": 2, "c": 3}
    assert cache.invalidate_many(["a", "c", "d"]) == 2
    assert cache.get_many(["a", "b", "c"]) == {"b": 2}
    assert cache.invalidate_many([]) == 0
    cache.set_many({})


@pytest.mark.parametrize("change", ["set", "invalidate"])
def test_many_changes_go_before_what_is_being_computed(cache: Cache, change: str) -> None:
    """A computation that began before them would replace what they have set, or bring back what they took away."""
    origin = Origin()
    herd = Herd(lambda: cache.get_or_compute("k", origin))
    origin.has_begun()
    if change == "set":
        cache.set_many({"k": "set", "l": "set"})
    else:
        cache.invalidate_many(["k", "l"])
    origin.let_on()
    assert herd.join() == [1]
    assert cache.get("k") == ("set" if change == "set" else None)


def test_clear(cache: Cache) -> None:
    """Everything is gone, functions' values too; new values are kept."""
    f = cache.cached(lambda x: x)
    cache.set("k", 1)
    f(1)
    f(1)
    cache.clear()
    assert cache.get("k") is None
    assert f.peek(1) is None
    cache.set("k", 2)
    assert cache.get("k") == 2
    assert f(1) == 1


def test_namespaces_share_an_engine(tmp_path: Path) -> None:
    """Two applications on one directory: neither sees, nor clears, what is the other's."""
    with (
        Cache(f"disk://{tmp_path}/c", namespace="a") as first,
        Cache(f"disk://{tmp_path}/c", namespace="b") as second,
        Cache(f"disk://{tmp_path}/c", namespace="a") as again,
    ):
        first.set("k", 1)
        f = first.cached(lambda: 5)
        f()
        assert second.get("k") is None
        assert again.get("k") == 1
        second.set("k", 2)
        second.clear()
        assert first.get("k") == 1
        assert f.peek() is not None
        first.clear()
        assert again.get("k") is None
        assert f.peek() is None


def test_options_of_a_call(cache: Cache) -> None:
    """They beat the cache's; the cache's beat the library's."""
    cache.get_or_compute("a", lambda: 1)
    cache.get_or_compute("b", lambda: 1, ttl=timedelta(seconds=60))
    cache.set("c", 1, ttl=70)
    times = [entry.ttl for key in "abc" if (entry := cache.peek(key)) is not None]
    assert times == [300, 60, 70]
    assert made("memory://", Path(), ttl=9).cached(ttl=8)(lambda: 1)() == 1


def test_errors_as_answers(cache: Cache) -> None:
    """`raises` in a call: kept and raised again; `get` doesn't take it for a value."""
    calls: list[int] = []

    def compute() -> None:
        calls.append(1)
        raise LookupError("gone", 5)

    for _ in range(3):
        with pytest.raises(LookupError) as caught:
            cache.get_or_compute("k", compute, raises=LookupError)
        assert caught.value.args == ("gone", 5)
    assert len(calls) == 1
    assert cache.get("k", "default") == "default"


def test_a_herd_of_both_colours_computes_once(cache: Cache) -> None:
    """Threads and tasks on one key."""
    origin = Origin()
    leader = Herd(lambda: cache.get_or_compute("k", origin))
    origin.has_begun()
    others = Herd(
        *[lambda: cache.get_or_compute("k", origin)] * 4, *[lambda: had(cache.aget_or_compute("k", origin))] * 4
    )
    until(lambda: sum(flight.callers for flight in list(cache._core.flights._flights.values())) == 9)
    origin.let_on()
    assert leader.join() + others.join() == [1] * 9
    assert origin.calls == 1


def test_a_cancelled_crowd_leaves_nothing(cache: Cache) -> None:
    """When all tasks are cancelled, the lease is given back at once, on every engine."""
    origin = Origin()

    async def main() -> None:
        tasks = [asyncio.create_task(cache.aget_or_compute("k", origin.suspending, lease=60)) for _ in range(3)]
        await until_async(lambda: origin.calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        origin.let_on()
        assert await asyncio.wait_for(cache.aget_or_compute("k", origin.suspending), 5) == 2

    asyncio.run(main())


def test_local_tier_hits_ask_no_engine(tmp_path: Path) -> None:
    """`local=True` in front of a shared engine: hits are the very object, and invalidation reaches them."""
    with made("disk local", tmp_path) as cache:
        cache.set("k", [1])
        first = cache.get_or_compute("k", lambda: [2])
        assert first == [1]
        assert cache.get_or_compute("k", lambda: [2]) is cache.get_or_compute("k", lambda: [2])
        assert cache.stats().hits >= 1
        cache.invalidate("k")
        assert cache.get_or_compute("k", lambda: [2]) == [2]


def test_two_caches_on_one_directory_see_each_other_at_once(tmp_path: Path) -> None:
    """The coherent local tier: what the other process changes is gone from here before its call returns."""
    with made("disk local", tmp_path) as first, made("disk local", tmp_path) as second:
        for n in range(50):
            first.set("k", n)
            assert [second.get("k") for _ in range(3)] == [n] * 3
        f, g = first.cached(_same), second.cached(_same)
        for _ in range(3):
            f(1)
            g(1)
        f.invalidate_all()
        assert g.peek(1) is None
        g(1)
        g(1)
        f.set(5, 1)
        assert [g(1), g(1)] == [5, 5]


def _same(x: int) -> int:
    return x


@pytest.mark.parametrize("way", ["look", "claim"])
def test_an_invalidate_all_between_generation_and_ticket(way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Read under the old generation, with a ticket from after it: every hit would be stale until the ttl's end."""
    answers = ["old"]

    def answer(x: int) -> str:
        return answers[-1]

    with made("disk local", tmp_path) as first, made("disk local", tmp_path) as second:
        f, g = first.cached(answer), second.cached(answer)
        g(1)
        f.peek(1)  # the generation is known here
        engine: Any = first.engine
        port = engine.near if way == "look" else engine.blocking.claims
        if way == "claim":
            monkeypatch.setattr(engine.near, "look", lambda key: None)
        asked = getattr(port, way)

        def meanwhile(*args: Any) -> Any:
            if len(answers) == 1:
                answers.append("new")
                g.invalidate_all()
            return asked(*args)

        monkeypatch.setattr(port, way, meanwhile)
        assert f(1) in ("old", "new")
        assert [f(1) for _ in range(3)] == ["new"] * 3


def test_bytes_that_are_not_ours_are_a_miss(tmp_path: Path) -> None:
    """An entry written with another key is refused, told, and computed anew."""
    seen: list[events.Event] = []
    with Cache(f"disk://{tmp_path}/c", signing_key="old") as old:
        old.set("k", 1)
    with Cache(f"disk://{tmp_path}/c", signing_key="new", observers=[seen.append]) as new:
        assert new.get("k") is None
        assert new.get_or_compute("k", lambda: 2) == 2
        assert new.get("k") == 2
        assert new.stats().bad_bytes >= 1
    assert any(isinstance(event, events.BadBytes) for event in seen)
    with Cache(f"disk://{tmp_path}/c", signing_key=["newest", "new"]) as rotated:
        assert rotated.get("k") == 2


def test_an_observer_that_fails_is_nobody_s_error() -> None:
    """Metrics must not take the site down."""

    def broken(event: events.Event) -> None:
        raise ZeroDivisionError

    cache = Cache(observers=[broken])
    assert cache.get_or_compute("k", lambda: 1) == 1
    cache.invalidate("k")


def test_events_tell_what_happened() -> None:
    """In order, with the key as people know it, and never a value."""
    seen: list[events.Event] = []
    cache = Cache("memory://?codec=sealed", observers=[seen.append])
    cache.get_or_compute("k", lambda: "secret")
    cache.get_or_compute("k", lambda: "secret")
    cache.invalidate("k")
    assert [type(event).__name__ for event in seen] == ["Computed", "Found", "Invalidated"]
    assert all(event.key.endswith("k") for event in seen)
    assert "secret" not in repr(seen)


def test_an_engine_may_be_handed_over() -> None:
    """`engine=`: one that exists already, which others use too."""
    engine = MemoryEngine(entries=5)
    assert Cache(engine=engine).get_or_compute("k", lambda: 1) == 1
    assert Cache(engine=engine).get("k") == 1


def test_a_cache_says_who_it_is_without_secrets() -> None:
    """A repr goes into logs."""
    cache = Cache("memory://?codec=sealed", signing_key="geheim")
    assert "memory://" in repr(cache)
    assert "geheim" not in repr(cache) + repr(cache.settings)


def test_closed(tmp_path: Path) -> None:
    """Closing twice is no error, and a `with` block closes."""
    for kind, _, _ in WAYS:
        with made(kind, tmp_path / kind.replace(" ", "").replace(":", "").replace("/", "")) as cache:
            cache.set("k", 1)
        cache.close()


def test_a_cachetools_store() -> None:
    """The memory engine over a cachetools cache, whose policy evicts."""
    from cachetools import LRUCache

    cache = Cache(engine=MemoryEngine(store=LRUCache(2)))
    for key in "abc":
        cache.set(key, key)
    assert cache.get_many("abc") == {"b": "b", "c": "c"}
    f = cache.cached(lambda x: x)
    assert [f(1), f(1)] == [1, 1]
    assert f.stats().computations == 1


@pytest.mark.parametrize("wrong", [{"entries": 0}, {"entires": 5}, 5])
def test_wrong_local_settings(wrong: Any) -> None:
    """Named with their place."""
    with pytest.raises(OptionError, match="local"):
        Cache("memory://?codec=sealed", local=wrong)
