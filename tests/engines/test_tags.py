"""Tags on every engine: what carries an invalidated tag is served by no process, and never stored again."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("moto")

from addresses import EMPTY
from herd import Herd, had, until

from stampede import Cache, OptionError, current
from stampede.engines.memory import MemoryEngine
from stampede.model.tags import key_of_tag, name_of_tag
from stampede.runtime.colour import run_blocking

STORES = ["memory", "disk", "redis", "memcached", "postgres", "sql", "dynamodb", "etcd", "zookeeper"]


class World:
    """An engine with several caches, as several processes have them."""

    def __init__(self, url: str, opened: ExitStack) -> None:
        self.url = url
        self.engine = MemoryEngine() if url == "memory://" else None
        self._opened = opened

    def cache(self, **options: Any) -> Cache:
        made = Cache(self.url, engine=self.engine, **{"early": 0, "ttl": 600, "stale": 600, **options})
        return self._opened.enter_context(made)


@pytest.fixture(params=STORES)
def world(request: pytest.FixtureRequest, memory_path: Path) -> Iterator[World]:
    with ExitStack() as opened:
        yield World(EMPTY[request.param](memory_path), opened)


def counted(cache: Cache, colour: str, **options: Any) -> Any:
    """A function that returns how often it was called."""
    calls: list[int] = []

    def number(user: int) -> int:
        calls.append(user)
        return len(calls)

    async def anumber(user: int) -> int:
        return number(user)

    return cache.cached(version=1, key="n:{user}", **options)(number if colour == "sync" else anumber)


def end(cache: Cache, colour: str, *tags: str, soft: bool = False) -> None:
    verb = ("" if colour == "sync" else "a") + ("expire_tags" if soft else "invalidate_tags")
    had(getattr(cache, verb)(*tags))


# -- what is invalidated --------------------------------------------------------------------------------------------


def test_what_carries_a_tag_goes(world: World, colour: str) -> None:
    """An invalidated tag ends what carries it, in each process, and nothing else."""
    here, there = world.cache(), world.cache()
    mine, theirs = (counted(each, colour, tags=["user:{user}", "all"]) for each in (here, there))
    assert (had(mine(1)), had(mine(2)), had(theirs(1)), had(theirs(2))) == (1, 2, 1, 2)
    end(there, colour, "user:1")
    assert had(mine.peek(1)) is None
    assert (had(mine(1)), had(theirs(1)), had(mine(2))) == (3, 3, 2)
    end(here, colour, "nothing", "all")
    assert had(theirs.peek(1)) is had(theirs.peek(2)) is None


def test_a_soft_one_makes_it_stale(world: World, colour: str) -> None:
    """An expired tag makes what carries it stale: it is still there, and computed anew."""
    here, there = world.cache(), world.cache()
    mine, theirs = (counted(each, colour, tags=["user:{user}"]) for each in (here, there))
    assert had(mine(1)) == 1
    end(there, colour, "user:1", soft=True)
    entry = had(mine.peek(1))
    assert entry.value == 1
    assert entry.fresh <= 0
    assert had(theirs(1)) == 1  # of its own list
    assert had(mine.peek(1)).fresh > 0
    end(here, colour, "user:1", soft=True)
    end(here, colour, "user:1")
    assert had(theirs.peek(1)) is None


def test_tags_that_only_the_computation_knows(world: World, colour: str) -> None:
    """`current().tag` gives a value tags while it is computed, from the first computation on."""
    here, there = world.cache(), world.cache()
    calls: list[int] = []

    def basket(user: int) -> int:
        calls.append(user)
        current().tag("article:5", f"article:{user}")
        return len(calls)

    async def abasket(user: int) -> int:
        return basket(user)

    mine, theirs = (
        each.cached(version=1, key="b:{user}")(basket if colour == "sync" else abasket) for each in (here, there)
    )
    assert [had(mine(1)), had(mine(1)), had(theirs(1)), had(theirs(2)), had(mine(2))] == [1, 1, 1, 2, 2]
    end(there, colour, "article:1")
    assert [had(mine(1)), had(mine(2))] == [3, 2]
    end(here, colour, "article:5")
    assert had(mine.peek(1)) is had(theirs.peek(1)) is had(theirs.peek(2)) is None


def test_values_that_are_set(world: World, colour: str) -> None:
    """`set`, `set_many`, `add` and `update` take tags; `touch` leaves the tags as they are."""
    here, there = world.cache(), world.cache()
    a = "" if colour == "sync" else "a"
    had(getattr(here, f"{a}set")("one", 1, tags=["x"]))
    had(getattr(here, f"{a}set_many")({"two": 2, "three": 3}, tags=["x", "y"]))
    assert had(getattr(there, f"{a}add")("four", 4, tags=["x"]))
    assert had(getattr(there, f"{a}update")("five", lambda n: n + 5, 0, tags=["z"])) == 5
    assert had(getattr(there, f"{a}touch")("one", ttl=1200))
    keys = ["one", "two", "three", "four", "five"]
    assert had(getattr(there, f"{a}get_many")(keys)) == dict(zip(keys, range(1, 6), strict=True))
    end(there, colour, "y")
    assert had(getattr(here, f"{a}get_many")(keys)) == {"one": 1, "four": 4, "five": 5}
    end(here, colour, "x")
    assert had(getattr(there, f"{a}get_many")(keys)) == {"five": 5}
    assert had(getattr(there, f"{a}update")("one", lambda n: n + 1, 0)) == 1  # what had ended is replaced


def test_a_batch_has_the_tags_of_each_id(world: World, colour: str) -> None:
    """In `@cached.many` each id has the tags of its own arguments, and those that its computation names."""
    cache, calls = world.cache(), []

    def users(ids: list[int]) -> dict[int, int]:
        calls.append(ids)
        for id in ids:
            current()[id].tag(f"even:{id % 2 == 0}")
        return {id: len(calls) for id in ids}

    async def ausers(ids: list[int]) -> dict[int, int]:
        return users(ids)

    many = cache.cached.many(version=1, tags=["user:{ids}", "all"])(users if colour == "sync" else ausers)
    assert had(many([1, 2, 3])) == {1: 1, 2: 1, 3: 1}
    end(cache, colour, "user:2")
    assert had(many([1, 2, 3])) == {1: 1, 2: 2, 3: 1}
    end(cache, colour, "even:False")
    assert had(many([1, 2, 3])) == {1: 3, 2: 2, 3: 3}
    end(cache, colour, "all")
    assert had(many([1, 2, 3])) == {1: 4, 2: 4, 3: 4}
    assert calls == [[1, 2, 3], [2], [1, 3], [1, 2, 3]]


def test_what_lost_its_tag_is_a_miss(world: World, colour: str) -> None:
    """If the engine loses a tag, what carries it is computed anew. It may have been invalidated, and nobody knows."""
    cache = world.cache()
    mine = counted(cache, colour, tags=["user:{user}", "all"])
    assert [had(mine(user)) for user in (1, 2)] == [1, 2]
    run_blocking(cache.engine.blocking.store.invalidate(key_of_tag(name_of_tag("", "user:1"))))
    assert had(mine.peek(1)) is None
    until(lambda: had(mine(1)) == 3)  # hits of the memory engine look at their tags from time to time
    assert [had(mine(user)) for user in (1, 2)] == [3, 2]


def test_a_tag_lasts_as_long_as_what_carries_it(world: World) -> None:
    """A tag is stored at least as long as the values that carry it, so that they need not be computed anew."""
    cache, day = world.cache(), 86_400.0

    def left(tag: str) -> float:
        (entry,) = run_blocking(cache.engine.blocking.store.get([key_of_tag(name_of_tag("", tag))]))
        assert entry is not None
        return entry.keep

    cache.set("brief", 1, ttl=60, stale=0, tags=["t"])
    assert day / 25 < left("t")  # an hour at least, for computations that are under way
    cache.set("long", 1, ttl=5 * day, tags=["t"])
    assert left("t") > 5 * day
    cache.touch("long", ttl=12 * day)
    assert left("t") > 12 * day
    assert cache.get("brief") == 1  # its tag is still the same one
    cache.get_or_compute("longest", lambda: current().tag("u"), ttl=20 * day)
    assert left("u") > 20 * day


def test_touch_keeps_the_tags(world: World) -> None:
    """`touch` starts a new ttl under the tags that a value has, also if its cache has tags of its own."""
    cache = world.cache(tags=["shop"])
    cache.set("k", 1, tags=["t"])
    assert cache.touch("k", ttl=99)
    cache.expire_tags("t")
    assert cache.touch("k", ttl=99)  # it is good again, as after `expire`
    assert cache.get("k") == 1
    cache.invalidate_tags("shop")
    assert cache.get("k") == 1
    cache.invalidate_tags("t")
    assert cache.get("k") is None
    assert not cache.touch("k", ttl=99)
    with pytest.raises(OptionError, match="touch"):
        cache.touch("k", tags=["other"])


def test_after_a_commit(world: World, colour: str) -> None:
    """`via=` postpones an invalidation until a commit."""
    cache, hooks = world.cache(), list[Callable[[], Any]]()
    cache.set("k", 1, tags=["t"])
    a = "" if colour == "sync" else "a"
    had(getattr(cache, f"{a}invalidate_tags")("t", via=hooks.append))
    assert cache.get("k") == 1

    async def commit() -> None:
        await hooks.pop()()

    hooks.pop()() if colour == "sync" else asyncio.run(commit())
    assert cache.get("k") is None


# -- what is being computed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["by the arguments", "by the computation"])
def test_what_is_being_computed_is_not_stored(world: World, colour: str, named: str) -> None:
    """If a tag is invalidated while a value is computed, only its caller gets it: callers after that compute again."""
    here, there = world.cache(), world.cache()
    began, goes_on, calls = threading.Event(), threading.Event(), []

    def report(number: int) -> int:
        calls.append(number)
        if named == "by the computation":
            current().tag("late")
        if len(calls) == 2:
            began.set()
            assert goes_on.wait(10)
        return len(calls)

    async def areport(number: int) -> int:
        return await asyncio.to_thread(report, number)

    tags = ["early"] if named == "by the arguments" else []
    function = report if colour == "sync" else areport
    mine, theirs = (each.cached(version=1, key="r:{number}", tags=tags)(function) for each in (here, there))
    assert had(mine(1)) == 1
    end(here, colour, "early", "late")
    first = Herd(lambda: had(mine(2)))
    assert began.wait(10)
    end(there, colour, "early", "late")
    later = Herd(lambda: had(mine(2)), lambda: had(theirs(2)))
    goes_on.set()
    assert first.join() == [2]
    after = later.join()
    assert min(after) >= 3
    assert had(theirs(2)) >= 3


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_no_call_after_an_invalidation_gets_what_is_older(world: World, soft: bool) -> None:
    """A checker of histories: while some threads change what tags stand for, no reader gets a value that is older than
    an invalidation that had returned before it asked."""
    rounds = 60 if world.url.partition(":")[0] in ("memory", "disk", "redis") else 15  # some take long for each
    caches = [world.cache(stale=0), world.cache(stale=0)]
    versions, floors = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    wrong: list[Any] = []
    reads_done: list[str] = []
    over, end = threading.Event(), time.monotonic() + 8

    def value(first: str, second: str) -> dict[str, int]:
        seen = {tag: versions[tag] for tag in (first, second)}
        current().tag(second)
        return seen

    functions = [each.cached(version=1, key="{first}-{second}", tags=["{first}"])(value) for each in caches]
    pairs = [(first, second) for first in "abc" for second in "abc"]

    def reads(function: Callable[..., dict[str, int]], seed: int) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            first, second = chance.choice(pairs)
            least = {tag: floors[tag] for tag in (first, second)}
            got = function(first, second)
            if any(got[tag] < least[tag] for tag in least):
                wrong.append((first, second, least, got))
            reads_done.append(first)

    def changes() -> None:
        chance = random.Random(7)
        try:
            for _ in range(rounds):
                if time.monotonic() > end:
                    break  # on a slow engine
                read = len(reads_done)
                until(lambda: len(reads_done) >= read + 8 or wrong)
                tag, cache = chance.choice("abc"), chance.choice(caches)
                versions[tag] += 1
                version = versions[tag]
                (cache.expire_tags if soft else cache.invalidate_tags)(tag)
                floors[tag] = version
        finally:
            over.set()

    jobs = [partial(reads, functions[number % 2], number) for number in range(4)]
    assert Herd(changes, *jobs).join() == [None] * 5
    assert wrong == []
