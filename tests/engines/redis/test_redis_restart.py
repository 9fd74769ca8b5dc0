"""Redis after a restart from its snapshot, or a replica that replaces it: removed values do not come back."""

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
    """A server that makes snapshots, as configured on Debian."""
    server = RedisServer("--save", "3600", "1")
    yield server
    server.close()


@pytest.fixture
def pair() -> Iterator[tuple[SteppedServer, SteppedServer]]:
    """A master and its replica. By their clocks, both started ten seconds ago."""
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
    """Promise 4: a value that was invalidated or cleared after the last snapshot is not served after a restart."""
    monkeypatch.setattr(generations, "KNOWN", 0.0)
    with Cache(saving.url, ttl=600, **options) as cache:
        for key in ("invalidated", "cleared"):
            cache.set(key, "old")
        saving.cli("SAVE")
        cache.invalidate("invalidated")
        cache.clear()
        saving.restart()
        assert saving.cli("DBSIZE") != "0"
        with Cache(saving.url, ttl=600, **options) as later:  # a process that starts after the restart
            assert later.get_or_compute("invalidated", lambda: "new") == "new"
            assert cache.get_or_compute("invalidated", lambda: "newer") == "new"
            assert later.get("cleared") is cache.get("cleared") is None


def test_a_run_that_began_within_the_second_in_which_the_last_one_ended() -> None:
    """A restart is noticed even if the last run ended in the same second. A server gives its uptime in seconds."""
    with closing(SteppedServer("--save", "3600", "1")) as server:
        began = time.time()
        server.step(10.4 - began % 1)  # the server's clock is 0.4 s after a full second
        with Cache(server.url, ttl=600) as cache:
            cache.set("k", "old")
            server.cli("SAVE")
            cache.invalidate("k")
        server.restart()  # the new run begins later in the same second
        server.step(13.0 - began % 1 - (time.time() - began))  # the server's clock is at a full second
        with Cache(server.url, ttl=600) as cache:
            assert cache.get("k") is None


def test_twice(saving: RedisServer) -> None:
    """Each restart is noticed, not only the first one."""
    for value in range(3):
        with Cache(saving.url, ttl=600) as cache:
            assert cache.get("k") is None
            cache.set("k", value)
            saving.cli("SAVE")
            cache.invalidate("k")
        saving.restart()


def test_a_server_that_goes_on_forgets_nothing(saving: RedisServer) -> None:
    """A `SCRIPT FLUSH`, or the loss of the marker of the run, does not empty the cache."""
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
    """A replica that has the marker of the run keeps its values after a failover. The cache is not emptied."""
    master, replica = pair
    with Cache(master.url, ttl=600) as cache:
        cache.set("k", "value")
        wait_until(lambda: replica.cli("DBSIZE") == master.cli("DBSIZE"))
    master.stop()
    replica.cli("REPLICAOF", "NO", "ONE")
    with Cache(replica.url, ttl=600) as cache:
        assert cache.get("k") == "value"


def test_a_run_is_noted_anew_now_and_then(pair: tuple[SteppedServer, SteppedServer]) -> None:
    """The marker of the run is renewed. Otherwise, a replica that joins later would look like a restarted server."""
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
    """A user of an ACL without `+info` can use the cache, although restarts are not noticed."""
    saving.cli("ACL", "SETUSER", "shop", "on", ">x", "~*", "&*", "+@all", "-info")
    with Cache(saving.url.replace("://", "://shop:x@"), ttl=600) as cache:
        cache.set("k", "value")
        saving.cli("SCRIPT", "FLUSH")
        cache.set("other", 1)
        assert cache.get("k") == "value"
