"""A Postgres server is lost, and its streaming replica is promoted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest

pytest.importorskip("psycopg")

from both_colours import Face
from herd import Herd, Origin, until
from postgres_server import PostgresServer

from stampede import Cache, events
from stampede.engines.postgres.schema import statements

__all__ = ["Face"]  # for the fixture of this name

Faces = Callable[..., Face]

both = pytest.mark.parametrize("colour", ["sync", "async"])


class Pair(NamedTuple):
    """A server and its replica."""

    primary: PostgresServer
    replica: Any

    @property
    def url(self) -> str:
        """A URL for whichever of the two accepts writes."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self)
        return f"postgres://root@{hosts}/postgres?sslmode=disable&target_session_attrs=read-write"

    def fail_over(self) -> None:
        self.replica.catch_up()
        self.primary.stop()
        self.replica.promote()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(PostgresServer()) as primary:
        primary.prepare()
        with closing(primary.replica()) as replica:
            yield Pair(primary, replica)


def kept(cache: Cache) -> int:
    """How many values this process keeps in memory."""
    return len(cache._core.local_tier.residents or ())


def stored(server: PostgresServer) -> int:
    ((number,),) = server.ask("SELECT count(*) FROM stampede.entries")
    return int(number)


@both
def test_calls_go_on(pair: Pair, face: Faces, colour: str) -> None:
    """A failover causes no error for callers, and afterwards values are shared through the new server."""
    one, two = face(pair.url, colour), face(pair.url, colour)
    origin = Origin()
    assert one("k", lambda: 1) == two("k", lambda: 2) == 1
    herd = Herd(lambda: one("late", origin))
    origin.has_begun()
    pair.fail_over()
    assert two("other", lambda: 3) == 3
    origin.let_on()
    assert herd.join() == [1]  # the lease is lost in the failover, but the caller gets no error
    until(lambda: one("shared", lambda: 4) == two("shared", lambda: 5))  # until then, each has a value of its own
    until(lambda: stored(pair.replica) > 0)
    assert not one.down and not two.down


@both
def test_a_lock_is_held_over_it(pair: Pair, face: Faces, colour: str) -> None:
    """A lock remains held after a failover, although its holder is not connected there. The next fence is higher."""
    one, two = face(pair.url, colour), face(pair.url, colour)
    assert one.lock("nightly")
    before = one._locks[0].fence
    pair.fail_over()

    def refused() -> bool:
        try:
            return not two.lock("nightly")
        except ConnectionError:  # the engine is not reachable yet: no lock is granted without it
            return False

    until(refused)
    one.release()
    assert two.lock("nightly")
    assert two._locks[-1].fence > before


@both
def test_what_is_kept_in_the_process_follows(pair: Pair, face: Faces, colour: str) -> None:
    """After a failover, the local tier follows changes on the new server. It must not serve values from before."""
    one, two = face(pair.url, colour, local=True), face(pair.url, colour)

    def is_kept() -> bool:
        before = one.cache.stats().hits
        one("k", lambda: "old")
        return one.cache.stats().hits > before

    until(is_kept)
    pair.fail_over()
    until(lambda: not two.down and two("probe", lambda: 1) == 1 and stored(pair.replica) > 0)
    two.run("set", "k", "new")
    until(lambda: one.run("get", "k") == "new")
    until(is_kept)
    two.run("set", "k", "newer")
    until(lambda: one.run("get", "k") == "newer")


@both
def test_one_that_writes_nothing_yet(pair: Pair, face: Faces, colour: str) -> None:
    """A replica that is not promoted yet causes no error for calls that compute. Its promotion is noticed."""
    pair.replica.catch_up()
    cache = face(pair.replica.postgres_url, colour)
    assert [cache("k", lambda: 1), cache("k", lambda: 2)] == [1, 1]
    with pytest.raises(ConnectionError):
        cache.lock("nightly")
    with pytest.raises(ConnectionError):
        cache.invalidate("k")
    assert any(isinstance(each, events.EngineDown) for each in cache.told)
    pair.replica.promote()

    def is_stored() -> bool:
        cache("another", lambda: 3)
        return stored(pair.replica) > 0

    until(is_stored)
    assert cache.lock("nightly")


@pytest.mark.parametrize("verb", ["invalidate", "clear"])
def test_what_was_ended_does_not_come_back(pair: Pair, verb: str) -> None:
    """Values ended before a failover do not come back, although the replica has lost the generations."""
    with Cache(pair.url, local=True) as near, Cache(pair.url, local=True) as far:
        for cache in near, far:
            until(lambda: cache.get_or_compute("k", lambda: "old") == "old" and kept(cache))
        hold, inside = threading.Event(), threading.Event()

        def slow() -> str:
            inside.set()
            assert hold.wait(20)
            return "old"

        late = Herd(lambda: far.get_or_compute("late", slow))
        assert inside.wait(20)
        if verb == "clear":
            near.clear()
        else:
            near.invalidate("k")
            near.invalidate("late")
        until(lambda: far.get("k") is None)
        pair.fail_over()
        until(lambda: is_stored(near))
        hold.set()
        assert late.join() == ["old"]  # its caller asked before the invalidation
        for cache in near, far:
            until(lambda: cache.get_or_compute("probe", lambda: 1) == 1)
            assert cache.get("k") is None
            assert cache.get("late") is None


def is_stored(cache: Cache) -> bool:
    try:
        cache.set("another", 1)
    except ConnectionError:
        return False
    return True


def test_what_is_logged_is_there(pair: Pair) -> None:
    """With `durable`, values are on the replica after a failover."""
    pair.primary.say("DROP SCHEMA stampede CASCADE", statements(durable=True))
    with Cache(pair.primary.postgres_url) as cache:
        assert cache.get_or_compute("k", lambda: 1) == 1
    pair.fail_over()
    with Cache(pair.replica.postgres_url) as cache:
        assert cache.get("k") == 1
