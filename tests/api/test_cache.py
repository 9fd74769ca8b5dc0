"""`Cache`: its verbs and their async twins, its options, its engine and its local tier."""

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
from herd import PATIENCE, Herd, Origin, had, until, until_async
from servers import RedisServer

from stampede import Cache, EngineError, Entry, OptionError, events
from stampede.engines.memory import MemoryEngine
from stampede.errors import EngineClosed
from stampede.testing import isolated


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    with isolated():
        yield


# Ways to store values: each in one colour, with or without a namespace.
WAYS = [
    ("memory://", "sync", ""),
    ("memory://?codec=sealed", "async", "shop"),
    ("disk", "async", ""),
    ("disk local", "sync", "shop"),
    ("paired", "async", "shop"),
]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(filter(None, way)))
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    """One cache for each way to store values on one machine. Its plain verbs may call their async twins."""
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
    """Return a function without arguments that returns the number of its computation."""
    calls: list[Any] = []

    def compute() -> Any:
        calls.append(1)
        return f"{value}{len(calls)}"

    compute.calls = calls  # type: ignore[attr-defined]
    return compute


def test_get_or_compute(cache: Cache) -> None:
    """Each key is computed once."""
    compute = counting()
    assert [cache.get_or_compute("k", compute) for _ in range(3)] == ["v1"] * 3
    assert cache.get_or_compute("other", compute) == "v2"
    assert cache.get("k") == "v1"
    assert cache.stats().computations == 2


def test_aget_or_compute_takes_both_colours(cache: Cache) -> None:
    """`aget_or_compute` accepts sync and async functions. Both use the same keys as `get_or_compute`."""
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
    """Each async verb does the same as its plain twin."""

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
    """Each verb that asks an engine has an async twin. Otherwise, async code would block its loop."""
    io = {"get_or_compute", "get_or_compute_many", "get", "get_many", "set", "set_many"}
    io |= {"expire", "invalidate", "invalidate_many", "peek", "clear", "add", "update", "touch", "refresh", "close"}
    io |= {"status", "keys", "expire_many", "expire_all", "ping", "invalidate_tags", "expire_tags"}
    assert {verb for verb in io if not hasattr(Cache, f"a{verb}")} == set()
    plain = {name for name, _ in inspect.getmembers(Cache, inspect.isfunction) if not name.startswith("_")}
    twins = {f"a{verb}" for verb in io}
    statistics = {"stats", "stats_of", "stats_by_function"}
    assert plain == io | twins | statistics | {"scope", "lock", "limiter", "bulkhead", "refreshing", "bypassed"}


def test_a_cache_that_was_closed_has_no_ping(tmp_path: Path) -> None:
    """`ping` of a closed cache raises EngineClosed, so that a health check fails."""
    for url in ("memory://", f"disk://{tmp_path}"):
        cache = Cache(url)
        assert cache.ping() >= 0
        cache.close()
        with pytest.raises(EngineClosed):
            cache.ping()


@pytest.mark.redis
@pytest.mark.usefixtures("default_timeouts")
@pytest.mark.parametrize("trouble", ["stop", "freeze"])
def test_ping_is_for_health_checks(trouble: str) -> None:
    """If the server is down or frozen, `ping` raises an error within a few seconds, even with a local tier."""
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
    """`get_many` leaves out keys that are not stored. A stored None is returned."""
    cache.set_many({"a": 1, "b": None}, ttl=60)
    assert cache.get_many(["b", "a", "c"]) == {"b": None, "a": 1}
    assert cache.get_many([]) == {}


def test_many_changes(cache: Cache) -> None:
    """`set_many` stores all values. `invalidate_many` removes the values of its keys and returns their number."""
    cache.set_many({"a": 1, "b": 2, "c": 3})
    assert cache.get_many(["a", "b", "c"]) == {"a": 1, "b": 2, "c": 3}
    assert cache.invalidate_many(["a", "c", "d"]) == 2
    assert cache.get_many(["a", "b", "c"]) == {"b": 2}
    assert cache.invalidate_many([]) == 0
    cache.set_many({})


@pytest.mark.parametrize("change", ["set", "invalidate"])
def test_many_changes_go_before_what_is_being_computed(cache: Cache, change: str) -> None:
    """A computation that began before `set_many` or `invalidate_many` does not store its value over theirs."""
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
    """`clear` removes all values, also those of functions. Later values are stored."""
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
    """Caches with different namespaces on one engine do not see or clear each other's values."""
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
    """An option of a call replaces the default of the library."""
    cache.get_or_compute("a", lambda: 1)
    cache.get_or_compute("b", lambda: 1, ttl=timedelta(seconds=60))
    cache.set("c", 1, ttl=70)
    times = [entry.ttl for key in "abc" if (entry := cache.peek(key)) is not None]
    assert times == [300, 60, 70]
    assert made("memory://", Path(), ttl=9).cached(ttl=8)(lambda: 1)() == 1


def test_errors_as_answers(cache: Cache) -> None:
    """An error that `raises` names is stored and raised again. `get` does not return it as a value."""
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
    """Threads and tasks that need the same key at the same time share one computation."""
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
    """If all tasks that wait for a key are cancelled, its lease is given back at once."""
    origin = Origin()

    async def main() -> None:
        tasks = [asyncio.create_task(cache.aget_or_compute("k", origin.suspending, lease=60)) for _ in range(3)]
        await until_async(lambda: origin.calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        origin.let_on()
        assert await asyncio.wait_for(cache.aget_or_compute("k", origin.suspending), PATIENCE) == 2

    asyncio.run(main())


def test_local_tier_hits_ask_no_engine(tmp_path: Path) -> None:
    """With `local=True`, hits return the same object without asking the engine, and an invalidation ends them."""
    with made("disk local", tmp_path) as cache:
        cache.set("k", [1])
        first = cache.get_or_compute("k", lambda: [2])
        assert first == [1]
        assert cache.get_or_compute("k", lambda: [2]) is cache.get_or_compute("k", lambda: [2])
        assert cache.stats().hits >= 1
        cache.invalidate("k")
        assert cache.get_or_compute("k", lambda: [2]) == [2]


def test_two_caches_on_one_directory_see_each_other_at_once(tmp_path: Path) -> None:
    """A change by another process ends the value in this local tier before the change returns."""
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
    """If `invalidate_all` runs between the reads of the generation and of the ticket, no old value remains."""
    answers = ["old"]

    def answer(x: int) -> str:
        return answers[-1]

    with made("disk local", tmp_path) as first, made("disk local", tmp_path) as second:
        f, g = first.cached(answer), second.cached(answer)
        g(1)
        f.peek(1)  # `first` now knows the generation
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
    """An entry that was signed with another key is a miss. An event reports it."""
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
    """An observer that fails does not make the call fail."""

    def broken(event: events.Event) -> None:
        raise ZeroDivisionError

    cache = Cache(observers=[broken])
    assert cache.get_or_compute("k", lambda: 1) == 1
    cache.invalidate("k")


def test_events_tell_what_happened() -> None:
    """Events come in order and name the key, but never contain a value."""
    seen: list[events.Event] = []
    cache = Cache("memory://?codec=sealed", observers=[seen.append])
    cache.get_or_compute("k", lambda: "secret")
    cache.get_or_compute("k", lambda: "secret")
    cache.invalidate("k")
    assert [type(event).__name__ for event in seen] == ["Computed", "Found", "Invalidated"]
    assert all(event.key.endswith("k") for event in seen)
    assert "secret" not in repr(seen)


def test_an_engine_may_be_handed_over() -> None:
    """`engine=` accepts an existing engine, which several caches may share."""
    engine = MemoryEngine(entries=5)
    assert Cache(engine=engine).get_or_compute("k", lambda: 1) == 1
    assert Cache(engine=engine).get("k") == 1


def test_a_cache_says_who_it_is_without_secrets() -> None:
    """The repr of a cache contains no secrets, because it may be logged."""
    cache = Cache("memory://?codec=sealed", signing_key="geheim")
    assert "memory://" in repr(cache)
    assert "geheim" not in repr(cache) + repr(cache.settings)


def test_closed(tmp_path: Path) -> None:
    """Closing a cache twice is no error, and a `with` block closes its cache."""
    for kind, _, _ in WAYS:
        with made(kind, tmp_path / kind.replace(" ", "").replace(":", "").replace("/", "")) as cache:
            cache.set("k", 1)
        cache.close()


def test_a_cachetools_store() -> None:
    """The memory engine can store its values in a cachetools cache, which evicts by its own policy."""
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
    """A wrong `local` setting raises an error that names it."""
    with pytest.raises(OptionError, match="local"):
        Cache("memory://?codec=sealed", local=wrong)
