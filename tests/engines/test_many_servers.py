"""`@cached.many` on real servers, and between processes: round trips, and batches that overlap."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from disk_world import Connection, other
from herd import Herd, Origin, had, until
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import RedisServer, shared_redis

from stampede import Absent, Cache

LEASE = 60.0
"""Seconds. No lease of this length ends during a test."""


@pytest.fixture(params=["disk", "redis", "memcached", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return f"disk://{tmp_path}/c"
    name = os.urandom(4).hex()  # keys that only this test uses
    if request.param == "postgres":
        return f"{prepared_postgres().postgres_url}?namespace={name}"
    server: Any = shared_redis() if request.param == "redis" else shared_memcached()
    return f"{server.url}?namespace={name}"


def opened(url: str, **options: Any) -> Cache:
    url, _, name = url.partition("?namespace=")
    return Cache(url, namespace=name, **{"early": 0, "lease": LEASE, "strict": True, **options})


def loader(cache: Cache, colour: str, load: Callable[[list[int]], dict[int, Any]], **options: Any) -> Any:
    def users(ids: list[int]) -> dict[int, Any]:
        return load(ids)

    async def ausers(ids: list[int]) -> dict[int, Any]:
        return await asyncio.to_thread(load, ids)

    return cache.cached.many(key="user:{ids}", **options)(users if colour == "sync" else ausers)


def compute_when_told(
    pipe: Connection, url: str, colour: str, ids: list[int], left_out: bool, lease: float = LEASE
) -> None:
    """One batch. The process sends the ids that it had to compute, and what it got."""
    cache = opened(url, lease=lease)
    asked: list[int] = []

    def load(ids: list[int]) -> dict[int, str]:
        asked.extend(ids)
        pipe.send("computing")
        pipe.recv()
        return {} if left_out else dict.fromkeys(ids, "theirs")

    got = had(loader(cache, colour, load)(ids))
    pipe.send((asked, got))
    pipe.recv()


@pytest.mark.parametrize("left_out", [False, True], ids=["values", "nothing"])
def test_two_processes_whose_batches_overlap(url: str, colour: str, left_out: bool) -> None:
    """If the batches of two processes overlap, each waits for ids that the other computes, even if they are absent."""
    asked: list[int] = []

    def load(ids: list[int]) -> dict[int, str]:
        asked.extend(ids)
        return dict.fromkeys(ids, "ours")

    theirs, ours = list(range(20)), list(range(10, 30))
    with opened(url) as cache, other(compute_when_told, url, colour, theirs, left_out) as process:
        assert process.hear() == "computing"
        users = loader(cache, colour, load)
        batch = Herd(lambda: had(users(ours)))
        until(lambda: len(asked) == 10)
        single = Herd(lambda: had(users.one(5)))
        until(lambda: any(key.endswith("user:5") for key in list(cache._core.flights._flights)))
        process.tell()
        their_asked, their_got = process.hear()
        (got,) = batch.join()
        assert their_asked == theirs
        assert their_got == ({} if left_out else dict.fromkeys(theirs, "theirs"))
        if left_out:
            # A call for an id that it did not wait for may find that there is a value now.
            assert {id: got[id] for id in range(20, 30)} == dict.fromkeys(range(20, 30), "ours")
            assert single.join()[0] == "ours" or isinstance(single.join()[0], Absent)  # Absent if it waited by then
        else:
            assert got == dict.fromkeys(range(10, 20), "theirs") | dict.fromkeys(range(20, 30), "ours")
            assert single.join() == ["theirs"]
            assert asked == list(range(20, 30))
        process.tell()


@pytest.mark.parametrize("url", ["disk", "redis"], indirect=True)
def test_a_process_that_dies_with_its_batch(url: str) -> None:
    """If a process dies during a batch, its ids are computed elsewhere, in a few batches. No id remains locked."""
    asked: list[list[int]] = []

    def load(ids: list[int]) -> dict[int, str]:
        asked.append(sorted(ids))
        return dict.fromkeys(ids, "ours")

    lease = LEASE if url.startswith("disk") else 2.0  # the disk engine notices the death
    with other(compute_when_told, url, "sync", list(range(20)), False, lease) as process, opened(url) as cache:
        assert process.hear() == "computing"
        batch = Herd(lambda: loader(cache, "sync", load)(range(10, 30)))
        until(lambda: asked)
        process.kill()
        assert batch.join() == [dict.fromkeys(range(10, 30), "ours")]
    assert asked[:2] == [list(range(20, 30)), [10]]
    assert sorted(id for ids in asked for id in ids) == list(range(10, 30))
    assert len(asked) < 8  # mostly three, as leases that were renewed one by one also end so


def packets(server: RedisServer) -> int:
    return int(server.cli("INFO", "stats").split("total_reads_processed:")[1].split()[0])


def test_a_hundred_ids_are_two_round_trips(server: RedisServer, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a hundred ids takes two round trips: one to claim all, and one to fill all."""
    asked: list[list[int]] = []

    def load(ids: list[int]) -> dict[int, int]:
        asked.append(ids)
        return {id: id for id in ids}

    with opened(server.url) as near, opened(server.url) as far, asyncio.Runner() as runner:

        def run(value: Any) -> Any:
            return runner.run(value) if asyncio.iscoroutine(value) else value

        users, theirs = loader(near, colour, load), loader(far, colour, load)
        run(users([-1]))
        run(theirs([-1]))
        monkeypatch.setattr("stampede.engines.kit.feed.TICK", 60.0)  # no pings from here on
        ids = list(range(100))
        before = packets(server)
        assert run(users(ids)) == run(theirs(ids)) == {id: id for id in ids}
        assert packets(server) - before < 50  # a claim, a fill, a claim; our own; pieces; pings of others
        assert asked[1:] == [ids]
        assert run(theirs.one(7)) == 7
        before = packets(server)
        assert run(users.invalidate_many(ids)) == 100
        run(users.set_many({id: -id for id in ids}))
        assert run(theirs(ids)) == {id: -id for id in ids}
        assert packets(server) - before < 80  # generations are read, too
        assert asked[1:] == [ids]


def test_who_waits_for_a_batch_finds_it_at_once(
    server: RedisServer, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that waits for a hundred ids of another process gets them in a few round trips, not one for each id."""
    origin = Origin()

    def slow(ids: list[int]) -> dict[int, int]:
        origin()
        return {id: id for id in ids}

    def never(ids: list[int]) -> dict[int, int]:
        raise AssertionError(ids)

    ids = list(range(100))
    with opened(server.url) as near, opened(server.url) as far:
        users = loader(far, "sync", slow)
        first = Herd(lambda: users(ids))
        origin.has_begun()
        monkeypatch.setattr("stampede.engines.kit.feed.TICK", 60.0)
        waiting = Herd(lambda: had(loader(near, colour, never)(ids)))
        until(lambda: near._core.flights._flights)
        before = packets(server)
        origin.let_on()
        assert first.join() == waiting.join() == [{id: id for id in ids}]
        assert packets(server) - before < 80
