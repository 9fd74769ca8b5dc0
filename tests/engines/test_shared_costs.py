"""What calls and invalidations cost: how often an engine is asked, and in how many round trips."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("psycopg")

from addresses import EMPTY
from herd import until
from memcached_server import shared_memcached
from postgres_server import shared_postgres
from proxy import Proxy
from servers import shared_redis

from stampede import Cache
from stampede.algorithm import generations as algorithm_generations
from stampede.engines.cells.records import CellRecords
from stampede.engines.kit import generations
from stampede.local_tier import pulses

NEWS = 0.05
"""Seconds after which a local tier knows of a change by another process, where the engine pushes."""

ASKS = ("claim", "look", "look_too", "get", "generations", "change")


@pytest.fixture(params=["disk", "redis", "postgres"])
def caches(request: pytest.FixtureRequest, memory_path: Path) -> Iterator[tuple[Cache, Cache]]:
    """Two caches with local tiers on one engine, as two processes have them."""
    url = EMPTY[request.param](memory_path)
    with ExitStack() as opened:
        here, there = (
            opened.enter_context(Cache(url, ttl=600, early=0, local=True, namespace="shop")) for _ in range(2)
        )
        yield here, there


def asked_of(cache: Cache, patch: pytest.MonkeyPatch, colour: str = "sync") -> Counter[str]:
    """Count the questions of this cache to its engine from now on."""
    asked: Counter[str] = Counter()
    side = cache.engine.blocking if colour == "sync" else cache.engine.suspending
    near = [(cache.engine.near, "look")] if cache.engine.near is not None else []
    for port, verb in [*((port, verb) for port in (side.claims, side.store) for verb in ASKS), *near]:
        if hasattr(port, verb):
            patch.setattr(port, verb, _counting(asked, verb, getattr(port, verb)))
    return asked


def _counting(asked: Counter[str], verb: str, ask: Any) -> Any:
    def counting(*args: Any, **terms: Any) -> Any:
        asked[verb] += 1
        return ask(*args, **terms)

    return counting


def kept(function: Any, *args: Any) -> bool:
    """Call the function, and return whether the local tier had the value."""
    before = function.stats().hits
    function(*args)
    return bool(function.stats().hits > before)


def lost(calls: Sequence[tuple[Any, int]]) -> int:
    """Return how many of these values no local tier has."""
    return sum([not kept(function, number) for function, number in calls])


def stay_kept(calls: Sequence[tuple[Any, int]]) -> bool:
    """Return whether the local tier has all these values, for a while: also after the news of their own storing."""
    end = time.monotonic() + NEWS
    while time.monotonic() < end:
        if lost(calls):
            return False
    return True


def is_told(cache: Cache, function: Any) -> bool:
    """Return whether the process knows that its generation of the function has ended."""
    assert cache.engine.recalls is not None
    return cache.engine.recalls.generation_at_hand(function.key(1).rpartition(":")[0]) is None


MANY = range(50)

SELDOM = 3
"""A few of many hits may ask the engine, as news of their own storing can be late."""


def trusts(patch: pytest.MonkeyPatch) -> None:
    """Have hits trust what is kept also while news wait to be read. Otherwise, many ask the engine if the thread that
    reads the news does not run for a moment."""
    patch.setattr("stampede.engines.kit.feed.LATELY", 60.0)


def test_a_new_generation_costs_other_functions_nothing(
    caches: tuple[Cache, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`invalidate_all` and `expire_all` end what local tiers keep of the function, in all processes. What they keep of
    other functions is hit as before, without a question to the engine."""
    here, there = caches

    def invalidated(number: int) -> int:
        return number

    def other(number: int) -> int:
        return number

    mine, theirs = here.cached(version=1)(invalidated), there.cached(version=1)(invalidated)
    others = [(each.cached(version=1)(other), number) for each in caches for number in MANY]
    until(lambda: stay_kept([(mine, 1), (theirs, 1), *others]))
    for end, told, untold in ((theirs.invalidate_all, here, mine), (mine.expire_all, there, theirs)):
        end()
        until(lambda: is_told(told, untold))  # called at once
        with monkeypatch.context() as patch:
            trusts(patch)
            asked = [asked_of(each, patch) for each in caches]
            assert lost(others) <= SELDOM
            assert asked[0].total() + asked[1].total() <= SELDOM
        until(lambda: not kept(untold, 1))  # called at once, too
        until(lambda: stay_kept([(mine, 1), (theirs, 1), *others]))


def test_an_invalidated_tag_costs_others_nothing(caches: tuple[Cache, Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    """A local tier hits on values with tags. If another tag is invalidated, by this process or by another one, these
    hits ask the engine nothing more. If it is one of theirs, no process hits on them after a moment."""
    here, there = caches
    functions = [each.cached(version=1, tags=["user:{user}", "all"])(lambda user: user) for each in caches]
    calls = [(each, user) for each in functions for user in MANY]
    until(lambda: stay_kept(calls))
    trusts(monkeypatch)
    asked = [asked_of(each, monkeypatch) for each in caches]
    for cache in caches:
        cache.invalidate_tags("nobody's", "user:700")
        assert lost(calls) <= SELDOM
    assert asked[0].total() + asked[1].total() <= 2 * SELDOM
    there.invalidate_tags("user:1")
    assert not kept(functions[1], 1)  # at once in the process that invalidates
    until(lambda: not kept(functions[0], 1))
    assert lost(calls) <= 2 + SELDOM
    here.expire_tags("all")
    assert lost([(functions[0], user) for user in MANY]) == len(MANY)
    until(lambda: not kept(functions[1], 0))
    time.sleep(pulses.LAG)
    assert lost([(functions[1], user) for user in MANY[1:]]) == len(MANY) - 1


def test_hits_with_tags_look_at_them_rarely(caches: tuple[Cache, Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    """Most hits compare one stamp, however many tags a value has."""
    function = caches[0].cached(version=1, tags=[f"tag {number}" for number in range(50)])(lambda user: user)
    until(lambda: stay_kept([(function, 1)]))
    looks: list[object] = []
    holds = pulses.are_valid

    def are_valid(*args: Any) -> bool:
        looks.append(args)
        return holds(*args)

    monkeypatch.setattr("stampede.local_tier.tier.are_valid", are_valid)
    trusts(monkeypatch)
    began = time.monotonic()
    hits = sum(kept(function, 1) for _ in range(10_000))
    assert hits >= 10_000 - SELDOM
    assert len(looks) <= (time.monotonic() - began) / pulses.LAG + SELDOM + 1


# -- round trips ----------------------------------------------------------------------------------------------------


class Far:
    """A server behind a proxy that counts the round trips of a call."""

    def __init__(self, kind: str, opened: ExitStack) -> None:
        if kind == "redis":
            self.proxy = Proxy(shared_redis().port)
            self.url = f"redis://127.0.0.1:{self.proxy.port}/0"
        elif kind == "memcached":
            self.proxy = Proxy(shared_memcached().port)
            self.url = f"memcached://127.0.0.1:{self.proxy.port}"
        else:
            server = shared_postgres()
            server.prepare()
            self.proxy = Proxy(server.port)
            self.url = server.postgres_url.replace(f":{server.port}/", f":{self.proxy.port}/")
        opened.callback(self.proxy.close)

    def trips(self, call: Any) -> int:
        """Return the number of replies during the call. Those to other connections of the cache count, too."""
        before = self.proxy.turns
        call()
        return self.proxy.turns - before


@pytest.fixture(params=["redis", "memcached", "postgres"])
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    with ExitStack() as opened:
        yield Far(request.param, opened)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_hit_is_one_round_trip(far: Far, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must be known to believe an entry is asked for together with the entry, also by a process that has not asked
    for a while."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)  # as after a second without a question
    monkeypatch.setattr(generations, "BRIEFLY", 0.0)
    with Cache(far.url, ttl=600, early=0, namespace="shop") as cache:
        for call in calls_of(cache, colour):
            until(lambda call=call: far.trips(call) == 1)  # a request in two packets may have two replies


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("kind", ["sql", "dynamodb", "etcd", "zookeeper"])
def test_a_hit_reads_cells_once(kind: str, memory_path: Path, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on engines made of cells: all cells that a hit needs are read together."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)
    steps: list[str] = []
    for step in ("seen", "swapped"):
        asked = getattr(CellRecords, step)
        monkeypatch.setattr(
            CellRecords, step, lambda *args, step=step, asked=asked: (steps.append(step), asked(*args))[1]
        )
    with Cache(EMPTY[kind](memory_path), ttl=600, early=0, namespace="shop") as cache:
        for call in calls_of(cache, colour):
            steps.clear()
            call()
            assert steps == ["seen"]


@pytest.mark.parametrize("kind", ["memcached", "sql", "paired"])
def test_what_is_believed_is_not_asked_for(kind: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that knows the generation reads a key in one question, whichever verb reads it."""
    monkeypatch.setattr(generations, "KNOWN", 60.0)
    url = EMPTY["sql" if kind == "paired" else kind](memory_path)
    with Cache(url, **({"locks": "memory://"} if kind == "paired" else {}), ttl=600) as cache:
        cache.set("k", 1)
        asked = asked_of(cache, monkeypatch)
        assert cache.get("k") == 1
        assert cache.get_many(["k"]) == {"k": 1}
        assert set(asked) <= {"get", "look"} and asked.total() == 4  # claims and store are one object


def calls_of(cache: Cache, colour: str) -> Iterator[Callable[[], object]]:
    """Return calls that hit: of functions, of `get`, and of many keys, on values without tags and with two tags. `get`
    and `get_many` also ask for what is not there."""

    async def avalue(number: int) -> int:
        return number

    def value(number: int) -> int:
        return number

    plain = cache.cached(version=1)(value if colour == "sync" else avalue)
    with_tags = cache.cached(version=2, tags=["{number}", "all"])(value if colour == "sync" else avalue)
    cache.set("plain", 1)
    cache.set("tagged", 1, tags=["all", "some"])
    get, get_many, load = (
        (cache.get, cache.get_many, cache.get_or_compute_many)
        if colour == "sync"
        else (cache.aget, cache.aget_many, cache.aget_or_compute_many)
    )
    keys = ["plain", "tagged"]
    calls = [
        *(partial(plain, 1), partial(with_tags, 1)),
        *(partial(get, "plain"), partial(get, "tagged")),
        *(partial(get, "missing"), partial(get_many, [*keys, "missing"]), partial(load, keys, lambda missing: {})),
        *([partial(each.many, [(1,), (2,)]) for each in (plain, with_tags)] if colour == "sync" else []),
    ]
    with asyncio.Runner() as runner:
        for each in calls:
            call = each if colour == "sync" else lambda each=each: runner.run(each())
            for _ in range(3):
                call()
            yield call


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("verb", ["get", "get_many"])
def test_what_get_has_found_stays_here(
    caches: tuple[Cache, Cache], verb: str, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a local tier, `get` and `get_many` keep what they have found, as a call does, and do not ask for it
    again."""
    here, there = caches
    with asyncio.Runner() as runner:

        def get(key: str) -> Any:
            given = [key, "other"] if verb == "get_many" else key
            found = getattr(here, verb)(given) if colour == "sync" else runner.run(getattr(here, "a" + verb)(given))
            return found.get(key) if verb == "get_many" else found

        there.set("other", 0)
        for tags in ([], ["all"]):
            there.set("k", 1, tags=tags)

            def is_kept() -> bool:
                assert get("k") == 1
                asked.clear()
                assert get("k") == 1
                return asked.total() == 0

            with monkeypatch.context() as patch:
                asked = asked_of(here, patch, colour)
                until(is_kept)
            there.set("k", 2, tags=tags)
            until(lambda: get("k") == 2)
            there.invalidate("k")
            until(lambda: get("k") is None)


@pytest.mark.redis
@pytest.mark.parametrize("verb", ["get", "get_many", "get_or_compute", "get_or_compute_many"])
def test_a_change_after_a_look_ends_what_it_found(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this process changes a key while the answer to a look is on its way, the local tier does not keep the old
    value. Here no news from the server would end it."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)  # each question for the generation also looks for the key
    with Cache(f"{shared_redis().url}?tracking=false", ttl=600, early=0, local={"ttl": 60}) as cache:
        store: Any = cache.engine.blocking.store
        look_too = store.look_too
        cache.set("k", "old")

        async def late(keys: Sequence[str], scopes: Sequence[str]) -> Any:
            found = await look_too(keys, scopes)
            if keys and changes:
                cache.set("k", changes.pop())
            return found

        def ask() -> Any:
            given: Any = ["k"] if verb.endswith("many") else "k"
            more = [lambda *_: "computed"] if verb == "get_or_compute" else [lambda _: {}] if "compute" in verb else []
            found = getattr(cache, verb)(given, *more)
            return found["k"] if verb.endswith("many") else found

        changes = ["new"]
        monkeypatch.setattr(store, "look_too", late)
        assert ask() in ("old", "new")
        assert not changes
        assert ask() == "new"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cache, list[str], asyncio.Event]]:
    """A cache of a process that has to ask for generations, the questions that have been sent, and an event for which
    all answers wait."""
    monkeypatch.setattr(algorithm_generations, "SAFETY", 0.05)
    with Cache(shared_redis().url, ttl=600, early=0, namespace="slow") as cache:
        store, asked, answer = cache.engine.suspending.store, list[str](), asyncio.Event()
        assert store is not None
        look_too = store.look_too

        async def slow_look(keys: Sequence[str], scopes: Sequence[str]) -> Any:
            asked.extend(scopes[:1])
            await answer.wait()
            return await look_too(keys, scopes)

        monkeypatch.setattr(store, "look_too", slow_look)
        yield cache, asked, answer


@pytest.mark.redis
def test_callers_do_not_queue_behind_a_slow_question(slow: tuple[Cache, list[str], asyncio.Event]) -> None:
    """Callers that need the generations share a question. If its answer takes long, each asks by itself: otherwise the
    last of many callers would wait as long as all of them together."""
    cache, asked, answer = slow

    @cache.cached
    async def double(number: int) -> int:
        return 2 * number

    async def main() -> list[int]:
        calls = [asyncio.ensure_future(double(number)) for number in range(5)]
        while len(asked) < 5:  # all of them, although nothing is answered
            await asyncio.sleep(0.01)
        answer.set()
        return await asyncio.gather(*calls)

    assert asyncio.run(asyncio.wait_for(main(), 20)) == [0, 2, 4, 6, 8]
