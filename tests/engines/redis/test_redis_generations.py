"""How generations are asked for, and how changes find the right one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from herd import until
from interrupting import Line, lines_in, lines_of
from known_generation import generation_of
from servers import RedisServer

from stampede import Cache, cached
from stampede.engines.kit import generations
from stampede.errors import EngineError
from stampede.local_tier import pulses
from stampede.runtime.colour import run_blocking as run
from stampede.testing import isolated

pytest.importorskip("redis")

from stampede.engines.redis import RedisEngine, verbs


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


async def asked(cache: Cache) -> list[str | BaseException]:
    return await asyncio.gather(*(cache._aroot.learn() for _ in range(100)), return_exceptions=True)


def test_a_herd_shares_its_question_for_a_generation(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A herd of tasks asks for its generation twice, and not once for each task: those that come while a question is
    under way share the next one."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)
    with Cache(server.url, namespace="shop") as cache:
        asyncio.run(asked(cache))
        server.cli("CONFIG", "RESETSTAT")
        names = asyncio.run(asked(cache))
        calls = [line for line in server.cli("INFO", "commandstats").splitlines() if "cmdstat_evalsha:" in line]
    assert len(set(names)) == 1
    assert [line.partition("calls=")[2].partition(",")[0] for line in calls] in (["1"], ["2"])


def test_a_herd_that_asked_in_vain_hears_why(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the question for a generation fails, all tasks that share it go on as while the engine is down."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)
    with Cache(server.url) as cache:
        known = asyncio.run(asked(cache))
        server.stop()
        assert asyncio.run(asked(cache)) == known
        assert cache.down


@pytest.mark.parametrize("local", [False, True])
def test_changes_go_to_a_generation_that_somebody_else_has_just_begun(server: RedisServer, local: bool) -> None:
    """A change also reaches a generation that another process has just begun. Otherwise it would have no effect."""
    here, there = (Cache(server.url, local=local) for _ in range(2))
    for verb in ("invalidate", "set", "expire"):
        assert here.get_or_compute(verb, lambda: "old") == there.get_or_compute(verb, lambda: "not asked") == "old"
    there.clear()
    for verb in ("invalidate", "set", "expire"):
        there.set(verb, "new", stale=60)
    here.invalidate("invalidate")
    here.set("set", "newest")
    assert here.expire("expire") is True
    engine = RedisEngine(server.url, tracking=False)
    assert [entry and entry.fresh > 0 for entry in map(Cache(engine=engine).peek, ("invalidate", "set", "expire"))] == [
        None, True, False,
    ]  # fmt: skip
    assert here.get("set") == "newest"
    for each in (here, there):
        each.close()
    engine.close()


@pytest.mark.parametrize("namespace", ["", "shop"])
@pytest.mark.parametrize("suspending", [False, True])
def test_a_change_is_a_round_trip(server: RedisServer, namespace: str, *, suspending: bool) -> None:
    """A change takes one round trip. It does not ask for generations first."""

    def reads() -> int:
        return int(server.cli("INFO", "stats").split("total_reads_processed:")[1].split()[0])

    with Cache(server.url, namespace=namespace) as cache, asyncio.Runner() as runner:

        async def answer(n: int) -> int:
            return n

        function: Any = cache.cached(answer if suspending else lambda n: n)
        changes: dict[str, Callable[[], Any]] = {
            "set": lambda: function.set(1, 7),
            # `touch` reads the value that it replaces, and asks for the generation before.
            "touch": lambda: cache.atouch("k") if suspending else cache.touch("k"),
            "expire": lambda: function.expire(7),
            "invalidate": lambda: function.invalidate(7),
        }

        def cost(change: Callable[[], Any]) -> int:
            before, made = reads(), change()
            if suspending:
                runner.run(made)
            return reads() - before

        for _ in range(2):  # the first time, connections are made and scripts are sent
            cache.set("k", 1)
            costs = {verb: cost(change) for verb, change in changes.items()}
        nothing = cost(lambda: asyncio.sleep(0) if suspending else None)
        assert {verb: number - nothing for verb, number in costs.items()} == {
            "set": 1, "touch": 3, "expire": 1, "invalidate": 1,
        }  # fmt: skip


def test_many_changes_are_a_round_trip(server: RedisServer) -> None:
    """Many changes, small and large, can be made in one batch."""

    async def change(cache: Cache) -> None:
        await cache.aset_many({f"k{number}": number for number in range(100)} | {"large": b"x" * 200_000})
        assert await cache.aget_many(["k1", "large"]) == {"k1": 1, "large": b"x" * 200_000}
        assert await cache.ainvalidate_many([f"k{number}" for number in range(100)]) == 100
        assert await cache.aget_many(["k1", "large"]) == {"large": b"x" * 200_000}

    with Cache(server.url, namespace="shop") as cache:
        asyncio.run(change(cache))


@pytest.mark.parametrize("suspending", [False, True])
def test_what_is_set_after_somebody_elses_expire_all_is_fresh(server: RedisServer, *, suspending: bool) -> None:
    """A value that is set just after another process's `expire_all` is fresh."""
    near, far = (Cache(server.url, namespace="shop") for _ in range(2))
    with near, far:
        for cache in (near, far):
            cache.set("k", "old")
        far.expire_all()
        if suspending:
            asyncio.run(near.aset("k", "new"))
        else:
            near.set("k", "new")
        for cache in (far, near):
            assert cache.get("k") == "new"


def test_a_change_that_cant_learn_the_generation_raises(server: RedisServer) -> None:
    """A change that can't learn its generation raises. Otherwise the old value would come back after the outage."""
    cache = Cache(server.url)
    cache.set("k", "old")
    server.stop()
    for change in (cache.invalidate, cache.expire, lambda key: cache.set(key, "new")):
        with pytest.raises(EngineError):
            change("k")
    cache.close()


def test_ended_generations_are_noted_as_long_as_they_are_believed_in(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended generations are noted as long as other processes may use them, and only a limited number of them."""
    monkeypatch.setattr(verbs, "NOTED", 60.0)
    engine = RedisEngine(server.url, tracking=False)
    known = [generation_of(engine, "f")]
    for scope in ("f", "", "f"):
        run(engine.blocking.store.bump(scope))
        known.append(run(engine.blocking.store.generations("f"))[0])
    today, *ended = run(engine.blocking.store.generations("f"))
    assert today == known[-1] and {*known[:-1]} <= {*ended} and today not in ended
    assert server.cli("PTTL", "{stampede}p") != "-1" != server.cli("PTTL", "{stampede}p:f")
    for _ in range(40):
        run(engine.blocking.store.bump("f"))
    assert len(run(engine.blocking.store.generations("f"))) <= 2 * (1 + verbs.MOST)
    monkeypatch.setattr(verbs, "NOTED", 0.001)
    run(engine.blocking.store.bump("f"))
    time.sleep(0.01)  # the server's clock, in ms, moves on
    run(engine.blocking.store.bump("f"))
    assert len(server.cli("GET", "{stampede}p:f").split()) <= 1
    engine.close()


def test_who_may_not_ask_for_the_time_may_clear(server: RedisServer) -> None:
    """A user whose ACL lacks `+time` can clear."""
    server.cli("ACL", "SETUSER", "shop", "on", ">x", "~*", "&*", "+@all", "-time")
    with Cache(server.url.replace("://", "://shop:x@")) as here, Cache(server.url) as there:
        assert here.get_or_compute("k", lambda: "old") == there.get_or_compute("k", lambda: "older") == "old"
        here.clear()
        here.set("k", "new")
        assert there.get("k") == "new"


@pytest.mark.parametrize("verb", ["invalidate", "set"])
def test_a_change_after_a_flush_reaches_who_has_not_heard_of_it(server: RedisServer, verb: str) -> None:
    """A change after a flush also reaches a process that still uses the generation before it."""
    with Cache(server.url) as here, Cache(server.url) as there:
        here.set("other", 0)
        assert there.get("other") == 0  # both know the generation, for a second
        server.cli("FLUSHALL")
        assert there.get_or_compute("k", lambda: "old") == "old"
        here.invalidate("other")  # this learns the new generation
        if verb == "invalidate":
            here.invalidate("k")
        else:
            here.set("k", "new")
        assert there.get("k") in (None, "new")


@pytest.mark.parametrize("verb", ["invalidate", "set"])
def test_a_change_after_a_flush_reaches_who_has_heard_but_half_of_it(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A change reaches a process even if it knows the new generation of a namespace, but not yet its function's."""

    def price(item: str) -> str:
        return "old"

    monkeypatch.setattr(generations, "KNOWN", 60.0)
    with Cache(server.url, namespace="shop") as here, Cache(server.url, namespace="shop") as there:
        ours, theirs = (cache.cached(version="1")(price) for cache in (here, there))
        assert ours("tea") == theirs("tea") == "old"
        server.cli("FLUSHALL")
        there.engine._servers.generations.forget("shop")  # type: ignore[attr-defined]  # as after a second
        there.get("other")  # learns the namespace's new generation
        assert theirs("tea") == "old"
        if verb == "invalidate":
            ours.invalidate("tea")
        else:
            ours.set("new", "tea")
        entry = theirs.peek("tea")
        assert entry is None or entry.value == "new"


def test_what_is_found_in_an_older_generation_is_kept_nowhere(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value found in an older generation is not kept in a function's own table, which knows no generations."""
    monkeypatch.setattr(pulses, "LAG", 1e-6)  # what was valid a moment ago is looked at again
    with Cache(server.url, ttl=600) as there, Cache(server.url, ttl=600, local=True) as here:

        def value(number: int) -> int:
            return source

        other, mine, source = there.cached(value), here.cached(value), 0
        name, recalls = mine.key(0).rpartition(":")[0], here.engine.recalls
        assert recalls is not None
        mine(0)

        def known() -> bool:
            mine.peek(0)  # asks, unless it is known: the first answer may come before changes are notified
            return recalls.generation_at_hand(name) is not None

        until(known)
        lines = [
            line for line in lines_in(partial(mine, -1)) if line[0].endswith(("generations.py", "scope.py", "core.py"))
        ]
        for number, where in enumerate(lines, start=1):
            assert other(number) == source
            cleared: list[int] = []

            def at(line: Line, where: Line = where, cleared: list[int] = cleared) -> None:
                nonlocal source
                if line == where and not cleared:
                    other.invalidate_all()
                    until(lambda: recalls.generation_at_hand(name) is None)  # now this process has been notified
                    source += 1
                    cleared.append(source)

            lines_of(partial(mine, number), at)
            assert mine(number) == source, where


def test_key_and_stats_ask_nobody(server: RedisServer) -> None:
    """`key` and `stats` ask no server. They leave no keys there, and do not wait for a server that hangs."""
    with isolated(url=server.url):
        f, g = cached(version=1)(lambda n: n), cached(key="{n}")(lambda n: n)
        assert (f.stats().hits, g.stats().hits) == (0, 0)
        assert f.key(1) and g.key(1)
        assert server.cli("DBSIZE") == "0"
        assert f(1) == 1
        assert server.cli("DBSIZE") != "0"
