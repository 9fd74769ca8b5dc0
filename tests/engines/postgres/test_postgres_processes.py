"""Leases that are bound to their holder's connection, or are not: holders that are killed and cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("psycopg")

from disk_world import Connection, other
from herd import Herd, until
from postgres_server import PostgresServer, shared_postgres

from stampede import Cache

LEASE = 60.0
"""So long that no test here ends by it."""


@pytest.fixture
def server() -> PostgresServer:
    shared_postgres().prepare()
    return shared_postgres()


@pytest.fixture
def mine(request: pytest.FixtureRequest, server: PostgresServer) -> Callable[..., Cache]:
    """A cache of this process."""

    def made(**options: Any) -> Cache:
        cache = cache_at(server.postgres_url, **options)
        request.addfinalizer(cache.close)
        return cache

    return made


Mine = Callable[..., Cache]


def cache_at(url: str, **options: Any) -> Cache:
    return Cache(url, **{"local": True, "early": 0, "lease": LEASE, **options})


def hold(pipe: Connection, url: str, lease: float) -> None:
    """One call whose computation ends as it is told; then what it got, and whether the lease was lost."""
    cache = cache_at(url, lease=lease)
    cache.get("another")
    until(lambda: cache.engine._all.news.listens)  # type: ignore[attr-defined]

    def compute() -> Any:
        pipe.send("computing")
        return pipe.recv()

    pipe.send((cache.get_or_compute("k", compute), cache.stats().lease_lost))
    pipe.recv()


def test_a_killed_holder_that_was_not_bound_holds_nobody_up(server: PostgresServer) -> None:
    """Promise 3: behind a pooler its connection's end tells nothing: a herd would wait for it for ever."""
    lease, url = 0.3, f"{server.postgres_url}&bound=false"
    with other(hold, url, lease) as holder, cache_at(url, lease=lease) as cache:
        assert holder.hear() == "computing"
        herd = Herd(*[lambda: cache.get_or_compute("k", lambda: "alive")] * 4)
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL"))
        holder.kill()
        assert herd.join() == ["alive"] * 4
        assert cache.stats().computations == 1


def test_a_holder_whose_connection_is_cut_is_overtaken(server: PostgresServer, mine: Mine) -> None:
    """Promise 5: nobody can tell it from one that died. What it has computed would replace what was computed since."""
    cache = mine()
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        holder.freeze()  # or it may say that it lives before anybody asks
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        assert cache.get_or_compute("k", lambda: "new") == "new"
        holder.thaw()
        holder.tell("old")
        assert holder.hear() == ("old", 1)
        assert cache.get("k") == "new"


def test_a_holder_whose_connection_is_cut_stores_what_nobody_else_computes(server: PostgresServer, mine: Mine) -> None:
    """Each short trouble with one connection would cost all the work that was under way."""
    cache = mine()
    with other(hold, server.postgres_url, LEASE) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        holder.tell("value")
        assert holder.hear() == ("value", 0)
        assert cache.get("k") == "value"


def test_a_renewed_lease_is_bound_to_the_connection_that_is_there(server: PostgresServer, mine: Mine) -> None:
    """Who had a short trouble, and is well again, would be taken for dead until it is done."""
    cache, lease = mine(), 1.0
    with other(hold, server.postgres_url, lease) as holder:
        assert holder.hear() == "computing"
        ((pid,),) = server.ask("SELECT pid FROM stampede.leases")
        server.ask("SELECT pg_terminate_backend(%s)", pid)
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE pid <> %s AND stampede.lives(pid, started)", pid))
        herd = Herd(lambda: cache.get_or_compute("k", lambda: "another"))
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE homes IS NOT NULL"))
        holder.tell("value")
        assert holder.hear() == ("value", 0)
        assert herd.join() == ["value"]
