"""Redis, started again from what it had on disk; or a replica in its place: what has ended must not be back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("redis")

from servers import RedisServer, SteppedServer, wait_until

from stampede import Cache
from stampede.engines.kit import generations

RUN = "{stampede}r"


@pytest.fixture
def saving() -> Iterator[RedisServer]:
    """One that makes snapshots, as Debian has it."""
    server = RedisServer("--save", "3600", "1")
    yield server
    server.close()


@pytest.fixture
def pair() -> Iterator[tuple[SteppedServer, SteppedServer]]:
    """A master and its replica, up for ten seconds by their clocks."""
    with ExitStack() as ends:
        master = ends.enter_context(closing(SteppedServer("--repl-diskless-sync-delay", "0")))
        replica = ends.enter_context(closing(SteppedServer("--replicaof", "127.0.0.1", str(master.port))))
        wait_until(lambda: "master_link_status:up" in replica.cli("INFO", "replication"))
        for each in (master, replica):
            each.step(10)
        yield master, replica


@pytest.mark.parametrize("options", [{}, {"local": True}, {"namespace": "shop"}])
def test_a_snapshot_brings_nothing_back(
    saving: RedisServer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Promise 4: what was invalidated, or cleared, since the last snapshot would be served again until its ttl ends."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)
    with Cache(saving.url, ttl=600, **options) as cache:
        for key in ("invalidated", "cleared"):
            cache.set(key, "old")
        saving.cli("SAVE")
        cache.invalidate("invalidated")
        cache.clear()
        saving.restart()
        assert saving.cli("DBSIZE") != "0"
        with Cache(saving.url, ttl=600, **options) as later:  # a process that was not there before
            assert later.get_or_compute("invalidated", lambda: "new") == "new"
            assert cache.get_or_compute("invalidated", lambda: "newer") == "new"
            assert later.get("cleared") is cache.get("cleared") is None


def test_a_run_that_began_within_the_second_in_which_the_last_one_ended() -> None:
    """A server says in whole seconds how long it has been up: it would seem to have been there all the time."""
    with closing(SteppedServer("--save", "3600", "1")) as server:
        began = time.time()
        server.step(10.4 - began % 1)  # it is four tenths of a second past
        with Cache(server.url, ttl=600) as cache:
            cache.set("k", "old")
            server.cli("SAVE")
            cache.invalidate("k")
        server.restart()  # in the same second, later
        server.step(13.0 - began % 1 - (time.time() - began))  # it is full
        with Cache(server.url, ttl=600) as cache:
            assert cache.get("k") is None


def test_twice(saving: RedisServer) -> None:
    """The second restart would go unnoticed."""
    for value in range(3):
        with Cache(saving.url, ttl=600) as cache:
            assert cache.get("k") is None
            cache.set("k", value)
            saving.cli("SAVE")
            cache.invalidate("k")
        saving.restart()


def test_a_server_that_goes_on_forgets_nothing(saving: RedisServer) -> None:
    """A `SCRIPT FLUSH`, or a marker that was evicted, would empty the cache."""
    with Cache(saving.url, ttl=600) as cache:
        cache.set("k", "value")
        saving.cli("SCRIPT", "FLUSH")
        cache.set("other", 1)
        assert cache.get("k") == "value"
        saving.cli("DEL", RUN)
        cache.set("other", 2)
        assert cache.get("k") == "value"
        assert saving.cli("GET", RUN)
        saving.cli("SCRIPT", "FLUSH")
        cache.set("other", 3)
        assert cache.get("k") == "value"


def test_a_replica_that_was_told_keeps_what_it_has(pair: tuple[SteppedServer, SteppedServer]) -> None:
    """Each failover would empty the cache, in the very moment in which the origin can bear it least."""
    master, replica = pair
    with Cache(master.url, ttl=600) as cache:
        cache.set("k", "value")
        wait_until(lambda: replica.cli("DBSIZE") == master.cli("DBSIZE"))
    master.stop()
    replica.cli("REPLICAOF", "NO", "ONE")
    with Cache(replica.url, ttl=600) as cache:
        assert cache.get("k") == "value"


def test_a_run_is_noted_anew_now_and_then(pair: tuple[SteppedServer, SteppedServer]) -> None:
    """A replica that joined while the master ran would be taken for one that came from the disk."""
    master, _ = pair
    with Cache(master.url, ttl=600) as cache:
        cache.set("k", 1)
        noted = master.cli("GET", RUN)
        cache.set("k", 2)
        assert master.cli("GET", RUN) == noted
        master.step(21)
        cache.set("k", 3)
        run, _, at = master.cli("GET", RUN).partition("@")
        assert (run, int(at) - int(noted.partition("@")[2]) > 10_000) == (noted.partition("@")[0], True)


def test_who_may_not_ask_for_the_run_goes_on(saving: RedisServer) -> None:
    """A user of an ACL without `+info` would have no cache."""
    saving.cli("ACL", "SETUSER", "shop", "on", ">x", "~*", "&*", "+@all", "-info")
    with Cache(saving.url.replace("://", "://shop:x@"), ttl=600) as cache:
        cache.set("k", "value")
        saving.cli("SCRIPT", "FLUSH")
        cache.set("other", 1)
        assert cache.get("k") == "value"
