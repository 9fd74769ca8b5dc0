"""Several processes with caches on SQL databases and DynamoDB: herds, killed and frozen holders, and forks."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("pymysql")
pytest.importorskip("sqlalchemy")
pytest.importorskip("moto")

from disk_world import Connection, other
from dynamodb_server import MotoServer, shared_moto
from herd import Herd, until
from mariadb_server import MariadbServer, shared_mariadb
from postgres_server import PostgresServer, shared_postgres

from stampede import Cache, EngineError

SERVERS = "mariadb", "postgres", "dynamodb"
SHARED = {"mariadb": shared_mariadb, "postgres": shared_postgres, "dynamodb": shared_moto}


@pytest.fixture
def url(request: pytest.FixtureRequest, memory_path: Path) -> str:
    """The URL of an empty store. Its server is shared by all tests of the session."""
    if request.param == "sqlite":
        return f"sql+sqlite:///{memory_path}/cache.db"
    server = SHARED[request.param]()
    server.empty()
    return server.url


def over(*names: str) -> pytest.MarkDecorator:
    """Run the test on these stores. What `test_processes.py` does on SQLite is not repeated here."""
    return pytest.mark.parametrize("url", names, indirect=True)


@pytest.fixture
def mine(request: pytest.FixtureRequest, url: str) -> Callable[..., Cache]:
    """Makes a cache of this process."""

    def made(**options: Any) -> Cache:
        cache = cache_at(url, **options)
        request.addfinalizer(cache.close)
        return cache

    return made


Mine = Callable[..., Cache]


def cache_at(url: str, **options: Any) -> Cache:
    return Cache(url, **{"early": 0, "lease": 60.0, **options})


# -- herds ----------------------------------------------------------------------------------------------------------


def ask_at_once(pipe: Connection, url: str, number: int) -> None:
    """Eight threads or tasks ask for one key when they are told to. The process sends what they got, and when."""
    cache = cache_at(url)

    def compute() -> str:
        time.sleep(0.3)
        return f"by {number}"

    async def tasks() -> list[str]:
        return await asyncio.gather(*[cache.aget_or_compute("k", compute) for _ in range(8)])

    cache.get("warm")
    pipe.send("ready")
    pipe.recv()
    if number % 2:
        got = asyncio.run(tasks())
    else:
        got = Herd(*[lambda: cache.get_or_compute("k", compute)] * 8).join()
    pipe.send((set(got), cache.stats().computations, time.monotonic()))
    pipe.recv()


@over("mariadb", "dynamodb")
def test_a_herd_of_processes_computes_once(url: str) -> None:
    """Promise 1: only one process computes, and the waiters get the value soon after it is stored."""
    with ExitStack() as opened:
        # Each process makes its own client, which takes a third of a second with DynamoDB.
        herd = [opened.enter_context(other(ask_at_once, url, number)) for number in range(4)]
        assert [each.hear() for each in herd] == ["ready"] * 4
        for each in herd:
            each.tell()
        got, computations, had = zip(*[each.hear() for each in herd], strict=True)
    assert len(set.union(*got)) == 1
    assert sum(computations) == 1
    stored = had[computations.index(1)]  # the computing process returns when the value is stored
    assert max(had) - stored < 10  # long before the lease ends


# -- killed and frozen holders --------------------------------------------------------------------------------------


def hold(pipe: Connection, url: str, lease: float) -> None:
    """One call whose computation ends when it is told to."""
    cache = cache_at(url, lease=lease)

    def compute() -> Any:
        pipe.send("computing")
        return pipe.recv()

    pipe.send((cache.get_or_compute("k", compute), cache.stats().lease_lost))
    pipe.recv()


@over(*SERVERS)
def test_a_killed_holder_holds_nobody_up(url: str, mine: Mine) -> None:
    """Promise 3: if the holder is killed, one waiter computes soon after the lease has ended."""
    lease, began = 3.0, []
    cache = mine(lease=lease)

    def compute() -> str:
        began.append(time.monotonic())
        return "alive"

    async def tasks() -> list[Any]:
        return await asyncio.gather(*[cache.aget_or_compute("k", compute) for _ in range(4)])

    with other(hold, url, lease) as holder:
        assert holder.hear() == "computing"
        herd = Herd(*[lambda: cache.get_or_compute("k", compute)] * 4, lambda: asyncio.run(tasks()))
        until(lambda: any(flight.callers == 8 for flight in list(cache._core.flights._flights.values())))
        assert began == []
        killed = time.monotonic()
        holder.kill()
        assert herd.join() == ["alive"] * 4 + [["alive"] * 4]
    assert len(began) == 1
    assert began[0] - killed < lease + 5.0


def compute_in_rounds(pipe: Connection, url: str, keys: int, lease: float) -> None:
    """In each round, one caller for each key, with a computation that takes a moment."""
    cache, dice = cache_at(url, lease=lease), random.Random(1)
    cache.get("warm")
    pipe.send("ready")
    while True:
        number = pipe.recv()

        def compute(number: int = number) -> list[Any]:
            time.sleep(dice.random() / 50)
            return ["old", number]

        calls = [lambda key=key: cache.get_or_compute(str(key), compute) for key in range(keys)]
        pipe.send([tuple(value) for value in Herd(*calls).join()])


@over(*SERVERS, "sqlite")
def test_a_frozen_holder_stores_nothing_late(url: str, mine: Mine) -> None:
    """Promise 5: what a frozen holder computed does not replace what others computed meanwhile."""
    keys, lease, dice, caught = 6, 0.1, random.Random(2), 0
    cache, downs = mine(), 0
    with other(compute_in_rounds, url, keys, lease) as holder:
        assert holder.hear() == "ready"
        for number in range(40):
            if number >= 6 and caught >= 6:
                break  # on a fast machine a round may end before its holder is frozen
            for key in range(keys):
                cache.invalidate(str(key))
            holder.tell(number)
            time.sleep(dice.random() / 20)  # anywhere: before, in or after a claim, a computation, a fill
            holder.freeze()
            new = ["new", number]
            kept = Herd(*[lambda key=key, new=new: cache.get_or_compute(str(key), lambda: new) for key in range(keys)])
            got = kept.join()
            holder.thaw()
            assert {key for _, key in holder.hear()} == {number}
            if cache.stats().engine_downs > downs:  # it was frozen inside a write, and SQLite blocks the others
                downs = cache.stats().engine_downs
                until(lambda number=number: cache.get_or_compute(f"{number}", lambda: 1) and not cache.down)
                continue
            assert [cache.get(str(key)) for key in range(keys)] == got
            caught += got.count(new)
    assert caught >= 6


@over(*SERVERS)
def test_an_invalidation_elsewhere_wins(url: str, mine: Mine) -> None:
    """Promise 4: if a key is invalidated during a computation elsewhere, the computed value is not stored."""
    cache = mine()
    with other(hold, url, 60.0) as holder:
        assert holder.hear() == "computing"
        mine().invalidate("k")
        assert cache.get_or_compute("k", lambda: "new") == "new"
        holder.tell("old")
        assert holder.hear() == ("old", 1)
    assert cache.get("k") == "new"


# -- forks ----------------------------------------------------------------------------------------------------------


def fork_after_use(pipe: Connection, url: str) -> None:
    """A fork as in gunicorn with preload: connections, threads and a loop were used before it."""
    cache = cache_at(url)

    async def suspending(key: str) -> Any:
        return await cache.aget_or_compute(key, lambda: "async")

    cache.set("warm", "warm")
    asyncio.run(suspending("warm"))
    pids = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                fine = cache.get("warm") == "warm" == asyncio.run(suspending("warm"))
                cache.set(f"child {number}", number)
                os._exit(0 if fine else 2)
            finally:
                os._exit(1)
        pids.append(pid)
    seen = [cache.get("warm") for _ in range(20)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    pipe.send((codes, set(seen), [cache.get(f"child {number}") for number in range(3)]))


@over(*SERVERS)
def test_both_sides_of_a_fork_go_on(url: str) -> None:
    """Promise 13: after a fork, parent and children do not read each other's replies."""
    with other(fork_after_use, url) as parent:
        assert parent.hear() == ([0] * 3, {"warm"}, [0, 1, 2])


# -- a server that goes away, and comes back ------------------------------------------------------------------------


@cache
def _own(kind: Callable[[], Any]) -> Any:
    return kind()


@pytest.fixture(params=[MariadbServer, PostgresServer, MotoServer], ids=["mariadb", "postgres", "dynamodb"])
def own(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server that a test may stop and freeze. It is empty, and works again after the test."""
    server = _own(request.param)
    server.empty()
    yield server
    server.start() if server._process is None else server.thaw()


@pytest.mark.parametrize("trouble", ["down", "hung"])
def test_a_server_that_goes_away_and_comes_back(own: Any, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 7: if a server is down or hangs, calls return soon and a change raises. Later, it is used again."""
    with Cache(f"{own.url}&timeout=0.5", early=0) as cache:

        async def suspending(key: str) -> Any:
            return await cache.aget_or_compute(key, lambda: "anew")

        assert cache.get_or_compute("k", lambda: "kept") == "kept"
        own.stop() if trouble == "down" else own.freeze()
        began = time.monotonic()
        assert cache.get_or_compute("l", lambda: "alone") == "alone"
        assert cache.get_or_compute("l", lambda: "again") == "alone"
        assert asyncio.run(suspending("m")) == "anew"
        with pytest.raises(EngineError):
            cache.invalidate("k")
        assert time.monotonic() - began < 15.0
        own.start() if trouble == "down" else own.thaw()

        def is_back() -> bool:
            cache.get_or_compute("k", lambda: "other")
            try:
                cache.set("k", "back")
            except EngineError:
                return False
            return cache.get("k") == "back"

        until(is_back)
        with Cache(own.url) as another:
            assert another.get("k") == "back"
