"""The coherent local tier on Postgres follows changes of others, and serves nothing while no notifications arrive."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("psycopg")

from disk_world import Connection, other
from herd import until
from postgres_server import PostgresServer, shared_postgres
from proxy import Proxy

from stampede import Cache
from stampede.engines.kit import feed
from stampede.engines.postgres import PostgresEngine, blocking, talk, tell, verbs
from stampede.engines.postgres.verbs import slot_of_scope
from stampede.model.entry import Entry, new_id
from stampede.runtime.colour import run_blocking as run

LATE = 10.0
"""Seconds within which each change must be seen on a busy machine. On an idle one it takes a few milliseconds, and
without a notification it is never seen."""


@pytest.fixture
def server() -> PostgresServer:
    shared_postgres().prepare()
    return shared_postgres()


def cache_at(url: str, **options: Any) -> Cache:
    return Cache(url, **{"local": True, "early": 0, **options})


answers: dict[str, Any] = {}


def report_of(cache: Cache) -> Any:
    """A cached function with the same keys in every process. It returns what `answers` holds in its process."""

    @cache.cached(ttl=600)
    def report(customer: int) -> Any:
        return answers["next"]

    return report


def never() -> Any:
    raise AssertionError("it is there")


def read(cache: Cache) -> Any:
    return cache.get_or_compute("k", never)


def is_kept(cache: Cache, ask: Callable[[Cache], object] = read) -> bool:
    """Whether the value comes from the memory of this process."""
    before = cache.stats().hits
    ask(cache)
    return cache.stats().hits > before


# -- each verb -----------------------------------------------------------------------------------------------------


def follow(pipe: Connection, url: str) -> None:
    """In each round, wait until the value is in memory and say so. Then send the time when another value is read."""
    cache = cache_at(url)
    report = report_of(cache)
    answers["next"] = "read again"
    while True:
        old = pipe.recv()
        until(lambda old=old: report(1) == old and is_kept(cache, lambda _: report(1)))
        pipe.send("kept")
        while report(1) == old:
            time.sleep(0.0005)
        pipe.send(time.monotonic())


CHANGES: dict[str, Callable[[Any, Cache], object]] = {
    "set": lambda report, cache: report.set("new", 1),
    "invalidate": lambda report, cache: report.invalidate(1),
    "expire": lambda report, cache: report.expire(1),
    "fill": lambda report, cache: report.refresh(1),
    "bump": lambda report, cache: report.invalidate_all(),
    "clear": lambda report, cache: cache.clear(),
    "expire_all": lambda report, cache: report.expire_all(),
}


def test_a_local_tier_follows_what_others_change(server: PostgresServer) -> None:
    """A change in one process reaches the local tiers of others, which would serve the old value until it expires."""
    lags: dict[str, float] = {}
    with other(follow, server.postgres_url) as reader, closing(cache_at(server.postgres_url)) as cache:
        report = report_of(cache)
        for name, change in CHANGES.items():
            answers["next"] = f"before {name}"
            report.refresh(1)
            reader.tell(f"before {name}")
            assert reader.hear() == "kept"
            answers["next"] = "new"
            change(report, cache)
            done = time.monotonic()
            lags[name] = reader.hear() - done
    print({name: f"{1000 * lag:.1f} ms" for name, lag in lags.items()})
    assert max(lags.values()) < LATE


def test_who_changes_sees_it_at_once(server: PostgresServer) -> None:
    """A process sees its own change at once, before the server notifies it."""
    with closing(cache_at(server.postgres_url)) as cache:
        for number in range(200):
            cache.set("k", number)
            assert read(cache) == number
        until(lambda: is_kept(cache))


def test_a_bump_between_generation_and_ticket(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a bump comes between a read of the generation and its ticket, the local tier must not keep the old value."""
    with closing(cache_at(server.postgres_url)) as near, closing(cache_at(server.postgres_url)) as far:
        first, second = report_of(near), report_of(far)
        answers["next"] = "old"
        second(1)
        first.peek(2)  # now this process knows the generation
        engine: Any = near.engine
        news = engine._all.news
        until(lambda: news.reporter)
        first.peek(2)
        asked, slot = verbs.PostgresKeys.claim, slot_of_scope(first.key(1).rpartition(":")[0])

        def meanwhile(its: verbs.PostgresKeys, *args: Any, **terms: Any) -> Any:
            if its is engine.blocking.claims and answers["next"] == "old":
                answers["next"] = "new"
                before = news.stamps[slot]
                second.invalidate_all()
                until(lambda: news.stamps[slot] != before)
            return asked(its, *args, **terms)

        monkeypatch.setattr(verbs.PostgresKeys, "claim", meanwhile)
        assert first(1) in ("old", "new")
        assert answers["next"] == "new"
        assert [first(1) for _ in range(3)] == ["new"] * 3


# -- writers that are killed -----------------------------------------------------------------------------------------


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


POINTS: dict[str, tuple[Any, str]] = {
    "before it is sent": (blocking._Wire, "answers"),
    "before it is answered": (talk.Talk, "feed"),
    "behind its answer": (verbs.PostgresKeys, "_done"),
    "before it tells who waits": (tell.Teller, "tell"),
}


def write_and_die(pipe: Connection, url: str, point: str) -> None:
    engine = PostgresEngine(url)
    run(engine.blocking.claims.look("k"))
    token = new_id()
    run(engine.blocking.claims.claim("k", token, verbs.Ask(60.0, force=True)))
    command = "SELECT stampede.await($1, $2, $3)", (verbs.names("k").id, token, "0123456789ab")
    run(engine._all.line.ask(command))
    pipe.send("ready")
    pipe.recv()
    setattr(*POINTS[point], die)
    run(engine.blocking.claims.fill("k", token, some(b"new")))


def some(value: bytes) -> Entry[Any]:
    return Entry(value, new_id(), ttl=60.0, fresh=60.0, keep=60.0)


def holds(its: Any) -> bool:
    return bool(its.stamps[its.slot] == its.stamp)


@pytest.fixture
def keeper(server: PostgresServer) -> Iterator[PostgresEngine]:
    """An engine that is notified of changes."""
    engine = PostgresEngine(server.postgres_url)
    engine.follow()
    run(engine.blocking.claims.look("k"))
    until(lambda: engine._all.news.reporter)
    yield engine
    engine.close()


def kept(engine: PostgresEngine) -> Any:
    """A ticket that no notification of an earlier change can end."""
    news, slot = engine._all.news, verbs.names("k").slot
    with closing(PostgresEngine(engine.url)) as writer:
        before = news.stamps[slot]
        run(writer.blocking.store.set("k", some(b"old")))
        until(lambda: news.stamps[slot] != before)
    found = run(engine.blocking.claims.look("k"))
    assert found is not None
    assert found.ticket is not None
    return found.ticket


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_writer_leaves_no_tier_behind(server: PostgresServer, keeper: PostgresEngine, point: str) -> None:
    """If a writer is killed after its change is stored, local tiers are still notified. None keeps the old value."""
    its = kept(keeper)
    with other(write_and_die, f"{server.postgres_url}&application_name=dying", point) as writer:
        assert writer.hear() == "ready"
        writer.tell()
        writer.join()
    until(lambda: not server.backends("dying"))
    ((there,),) = server.ask("SELECT value FROM stampede.entries")
    assert there == (b"old" if point == "before it is sent" else b"new")
    if there == b"new":
        until(lambda: not holds(its), LATE)
    found = run(keeper.blocking.claims.look("k"))
    assert found is not None
    assert found.entry.value == there


# -- while no notifications arrive -----------------------------------------------------------------------------------


def test_nothing_is_served_from_memory_while_nobody_tells(server: PostgresServer) -> None:
    """While the listening connection alone is lost, hits come from the server: changes are not notified meanwhile."""
    with closing(Proxy(server.port)) as proxy:
        way = server.postgres_url.replace(f":{server.port}/", f":{proxy.port}/")
        with (
            closing(cache_at(f"{server.postgres_url}&listen={quote(way, safe='')}")) as cache,
            closing(Cache(server.postgres_url)) as writer,
        ):
            news = cache.engine._all.news  # type: ignore[attr-defined]
            writer.set("k", 0)
            until(lambda: is_kept(cache))
            proxy.hold()
            proxy.cut()
            until(lambda: not news.reporter, LATE)
            for number in range(1, 50):
                writer.set("k", number)
                assert read(cache) == number
                assert not is_kept(cache)
            proxy.let_go()
            until(lambda: is_kept(cache))
            writer.set("k", "told")
            until(lambda: read(cache) == "told", LATE)


def test_an_administrator_ends_what_listens(server: PostgresServer) -> None:
    """If the listening connection is ended, changes made before the next one must still be seen: none is notified."""
    with closing(cache_at(server.postgres_url)) as cache, closing(Cache(server.postgres_url)) as writer:
        news = cache.engine._all.news  # type: ignore[attr-defined]
        for number in range(2):
            writer.set("k", number)
            until(lambda: read(cache) == number and is_kept(cache))
            told = news.reporter
            server.ask("SELECT pg_terminate_backend(%s)", news.home_backend[0])
            writer.set("k", "meanwhile")
            until(lambda: read(cache) == "meanwhile", LATE)
            until(lambda: news.reporter > told)
            assert read(cache) == "meanwhile"


def test_a_server_that_hangs(server: PostgresServer, keeper: PostgresEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server hangs, tickets are invalid: the server may drop this listener and not notify it of changes."""
    its, news = kept(keeper), keeper._all.news
    with monkeypatch.context() as patch:
        patch.setattr(feed, "TICK", 0.1)
        server.freeze()
        try:
            until(lambda: not news.reporter)
            assert not holds(its)
        finally:
            server.thaw()
    until(lambda: news.reporter)
    its = kept(keeper)
    assert holds(its)


def test_a_server_that_crashes() -> None:
    """After a crash of the server its tables are empty, and local tiers must not serve values from before the crash."""
    with closing(PostgresServer()) as own:
        own.prepare()
        with closing(cache_at(own.postgres_url)) as cache, closing(Cache(own.postgres_url)) as writer:
            news = cache.engine._all.news  # type: ignore[attr-defined]
            writer.set("k", "old")
            until(lambda: is_kept(cache))
            own.stop()
            until(lambda: not news.reporter, LATE)
            own.start()
            until(lambda: is_set(writer))
            until(lambda: read(cache) == "new")
            for _ in range(20):
                assert read(cache) == "new"


def is_set(cache: Cache) -> bool:
    try:
        cache.set("k", "new")
    except ConnectionError:
        return False
    return True
