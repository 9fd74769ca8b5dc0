"""Leases that are bound to the connection of their holder, or are not. Holders are killed or cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("psycopg")

from disk_world import Connection, other
from herd import Herd, until
from postgres_server import PostgresServer, shared_postgres

from stampede import Cache
from stampede.leases.keeper import keeper

LEASE = 60.0
"""Longer than any test here takes."""


@pytest.fixture
def server() -> PostgresServer:
    shared_postgres().prepare()
    return shared_postgres()


@pytest.fixture
def mine(request: pytest.FixtureRequest, server: PostgresServer) -> Callable[..., Cache]:
    """Open caches of this process that are closed at the end."""

    def made(**options: Any) -> Cache:
        cache = cache_at(server.postgres_url, **options)
        request.addfinalizer(cache.close)
        return cache

    return made


Mine = Callable[..., Cache]


def cache_at(url: str, **options: Any) -> Cache:
    """Return a cache that listens: it has a sign of life, and is notified when a lease ends."""
    cache = Cache(url, **{"local": True, "early": 0, "lease": LEASE, **options})
    cache.get("another")
    until(lambda: cache.engine._all.news.listens)  # type: ignore[attr-defined]
    return cache


def hold(pipe: Connection, url: str, lease: float) -> None:
    """One call whose computation waits for its value from the pipe. Send the result and the count of lost leases. If
    told to renew, it renews its lease at once."""
    cache = cache_at(url, lease=lease)

    def compute() -> Any:
        pipe.send("computing")
        while (told := pipe.recv()) == "renew":
            for each in keeper.holds():
                keeper.look_at(each, 0.0)
        return told

    pipe.send((cache.get_or_compute("k", compute), cache.stats().lease_lost))
    pipe.recv()


def test_a_killed_holder_that_was_not_bound_holds_nobody_up(server: PostgresServer) -> None:
    """Promise 3: if a killed holder is not bound to a connection, waiters compute when its lease ends."""
    lease, url = 0.3, f"{server.postgres_url}&bound=false"
    with other(hold, url, lease) as holder, cache_at(url, lease=lease) as cache:
        assert holder.hear() == "computing"
        herd = Herd(*[lambda: cache.get_or_compute("k", lambda: "alive")] * 4)
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL") or not herd.waiting)
        holder.kill()
        assert herd.join() == ["alive"] * 4
        assert cache.stats().computations == 1


def test_a_holder_whose_connection_is_cut_is_overtaken(server: PostgresServer, mine: Mine) -> None:
    """Promise 5: a holder whose connection is cut counts as dead. Its result must not replace a newer one."""
    cache = mine()
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        holder.freeze()  # otherwise it could send a sign of life first
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        assert cache.get_or_compute("k", lambda: "new") == "new"
        holder.thaw()
        holder.tell("old")
        assert holder.hear() == ("old", 1)
        assert cache.get("k") == "new"


def test_a_holder_whose_connection_is_cut_stores_what_nobody_else_computes(server: PostgresServer, mine: Mine) -> None:
    """If a holder's connection is cut and no other process computes, its result is stored. No work is lost."""
    cache = mine()
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        holder.tell("value")
        assert holder.hear() == ("value", 0)
        assert cache.get("k") == "value"


def test_a_renewed_lease_is_bound_to_the_connection_that_is_there(server: PostgresServer, mine: Mine) -> None:
    """A renewed lease is bound to the new connection: a holder that has connected again does not count as dead."""
    cache, bound = mine(), "SELECT FROM stampede.leases WHERE pid <> %s AND stampede.lives(pid, started)"
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        until(lambda: (holder.tell("renew"), server.ask(bound, pid))[1])
        herd = Herd(lambda: cache.get_or_compute("k", lambda: "another"))
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL"))
        holder.tell("value")
        assert holder.hear() == ("value", 0)
        assert herd.join() == ["value"]
