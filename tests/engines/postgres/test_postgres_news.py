"""Notifications of a Postgres server and of the teller: their receivers, and odd, late or lost ones."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import inf
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("psycopg")

import psycopg
from herd import until
from postgres_server import PgBouncer, PostgresServer, shared_postgres
from proxy import Proxy

from stampede import Cache, EngineError, events
from stampede.engines.kit import feed
from stampede.engines.postgres import PostgresEngine, tell, verbs
from stampede.engines.postgres import news as news_module
from stampede.engines.postgres.news import SLOTS, PostgresNews
from stampede.engines.postgres.tell import LONGEST, Teller
from stampede.engines.postgres.verbs import slot_of_scope
from stampede.engines.postgres.wire import SMALL, message_of, names, news_of
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Busy, Granted
from stampede.runtime.colour import BLOCKING
from stampede.runtime.colour import run_blocking as run

LONG = 60.0
SLOT = names("k").channel[:4].decode()


@pytest.fixture
def server() -> PostgresServer:
    shared_postgres().prepare()
    shared_postgres().say("DELETE FROM stampede.keepers")
    return shared_postgres()


@pytest.fixture
def open_(request: pytest.FixtureRequest, server: PostgresServer) -> Callable[..., PostgresEngine]:
    """Open engines that are closed at the end. With `keeps`, an engine follows changes, as for a local tier."""

    def opened(url: str | None = None, *, keeps: bool = False, **options: Any) -> PostgresEngine:
        engine = PostgresEngine(url or server.postgres_url, **options)
        request.addfinalizer(engine.close)
        if keeps:
            engine.follow()
            kept(engine)
        return engine

    return opened


Open = Callable[..., PostgresEngine]


def news_of_engine(engine: PostgresEngine) -> PostgresNews:
    return engine._all.news


def kept(engine: PostgresEngine) -> None:
    """Wait until the engine is notified of changes."""
    run(engine.blocking.claims.look("k"))
    until(lambda: news_of_engine(engine).reporter)


def some(value: bytes = b"value") -> Entry[Any]:
    return Entry(value, new_id(), ttl=LONG, fresh=LONG, keep=LONG)


def put(engine: PostgresEngine, value: bytes = b"value", key: str = "k") -> None:
    run(engine.blocking.store.set(key, some(value)))


def ticket(engine: PostgresEngine, key: str = "k") -> Any:
    found = run(engine.blocking.claims.look(key))
    assert found is not None
    return found.ticket


def shared(near: PostgresEngine, far: PostgresEngine) -> Any:
    """Store a value with `near`, and return the ticket that `far` has for it after it was notified."""
    news, slot = news_of_engine(far), int(SLOT, 16)
    before = news.stamps[slot]
    put(near)
    until(lambda: news.stamps[slot] != before)
    its = ticket(far)
    assert its is not None
    return its


def holds(its: Any) -> bool:
    return bool(its.stamps[its.slot] == its.stamp)


@contextmanager
def stranger(server: PostgresServer, *channels: str) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Another listener on these channels. The function returns the notifications that have arrived until now."""
    with psycopg.connect(server.postgres_url, autocommit=True) as line:
        for each in channels:
            line.execute(f"LISTEN {each}")
        line.execute("LISTEN over")

        def heard() -> list[tuple[str, str]]:
            server.say("NOTIFY over")
            found: list[tuple[str, str]] = []
            for each in line.notifies(timeout=10):
                if each.channel == "over":
                    return found
                found.append((each.channel, each.payload))
            raise AssertionError("nothing came")

        yield heard


# -- changes --------------------------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[PostgresEngine], object]] = {
    "set": lambda engine: put(engine),
    "replace": lambda engine: run(engine.blocking.store.replace("k", None, some())),
    "expire": lambda engine: run(engine.blocking.store.expire("k")),
    "invalidate": lambda engine: run(engine.blocking.store.invalidate("k")),
    "fill": lambda engine: fill(engine),
}


def fill(engine: PostgresEngine) -> None:
    token = new_id()
    run(engine.blocking.claims.claim("k", token, Ask(LONG, force=True)))
    run(engine.blocking.claims.fill("k", token, some()))


def test_a_fill_has_a_ticket_until_the_next_change(server: PostgresServer, open_: Open) -> None:
    """A filled value has a ticket until its next change, so that the local tier can keep it without a new read."""
    engine, other = open_(keeps=True), open_()
    for change in ("set", "expire", "invalidate", "fill"):
        token = new_id()
        run(engine.blocking.claims.claim("k", token, Ask(LONG, force=True)))
        its = run(engine.blocking.claims.fill("k", token, some()))
        until(lambda its=its: holds(its))
        CHANGES[change](other)
        until(lambda its=its: not holds(its))


def test_changes_are_told_while_somebody_keeps(server: PostgresServer, open_: Open) -> None:
    """Changes are notified only while some process keeps values, because each notification has a cost."""
    writer = open_()
    with stranger(server, "stampede") as heard:
        for change in CHANGES.values():
            change(writer)
        assert heard() == []
        keeper = open_(keeps=True)
        for change in CHANGES.values():
            change(writer)
            run(writer.blocking.store.invalidate("k"))
        assert heard() == [("stampede", SLOT)] * 2 * len(CHANGES)
        keeper.close()
        sweep = "SELECT FROM stampede.sweep('', 1, 'infinity', 'infinity')"  # if it could not say that it ends
        until(lambda: server.ask(sweep) and server.ask("SELECT FROM stampede.keepers") == [])
        put(writer)
        assert heard() == []


def test_claims_are_no_changes(server: PostgresServer, open_: Open) -> None:
    """Claims, renewals and abandoned leases notify no change. Otherwise local tiers would read again for nothing."""
    engine, token = open_(keeps=True), new_id()
    with stranger(server, "stampede") as heard:
        assert isinstance(run(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
        run(engine.blocking.claims.renew("k", token, LONG))
        run(engine.blocking.claims.abandon("k", token))
        assert heard() == []


def test_bumps_are_told_to_all(server: PostgresServer, open_: Open) -> None:
    """A bump is notified to every process, also to those that keep no values: each of them uses generations."""
    engine = open_()
    with stranger(server, "stampede") as heard:
        run(engine.blocking.store.bump("scope"))
        run(engine.blocking.softens.soften("scope"))
        run(engine.blocking.store.bump(""))
        *own, whole = heard()
        assert own == [("stampede", f"g{slot_of_scope('scope') - SLOTS:02x}")] * 2
        assert whole == ("stampede", "g")


def test_many_clears_make_changes_no_dearer_than_they_are(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes also go to generations that ended recently. Their number grows by one per clear, not by a square."""
    monkeypatch.setattr(verbs, "NOTED", LONG)
    recalls = open_().recalls
    store = open_().blocking.store
    assert recalls is not None
    for scope in "", "scope":
        run(recalls.generations(scope))
    for _ in range(10):
        run(store.bump(""))
    run(store.bump("scope"))
    assert len(set(run(recalls.generations("")))) == 1 + 10
    assert len(set(run(recalls.generations("scope")))) == (1 + 10) * (1 + 1)


def test_what_is_no_more_there_can_be_expired(server: PostgresServer, open_: Open) -> None:
    """A value that the server has removed can still be expired. Otherwise it would remain fresh in local tiers."""
    near, far = open_(), open_(keeps=True)
    its = shared(near, far)
    server.say("DELETE FROM stampede.entries")
    assert holds(its)
    run(near.blocking.store.expire("k"))
    until(lambda: not holds(its))


def test_no_change_is_missed_by_who_begins_to_keep(server: PostgresServer, open_: Open) -> None:
    """A process that begins to keep values waits for changes under way, and so misses none of them."""
    near, far = open_(), open_()
    put(near, b"old")
    its = names("k")
    with psycopg.connect(server.postgres_url) as writer:
        writer.execute("SELECT stampede.invalidate(%s, %s)", (its.id, its.lock))
        far.follow()
        assert ticket(far) is None
        until(lambda: news_of_engine(far).listens)
        waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: server.ask(waits))
        assert ticket(far) is None  # the value is still stored
        writer.commit()
    until(lambda: news_of_engine(far).reporter)
    assert run(far.blocking.claims.look("k")) is None


def test_who_begins_to_keep_waits_for_nobody_for_long(
    server: PostgresServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that begins to keep values waits only briefly for open transactions: all changes wait behind it."""
    monkeypatch.setattr(news_module, "PATIENCE", "100ms")
    monkeypatch.setattr(news_module, "TICK", 0.1)
    near, far, its = open_(), open_(), names("other")
    with psycopg.connect(server.postgres_url) as writer:
        writer.execute("SELECT stampede.invalidate(%s, %s)", (its.id, its.lock))
        far.follow()
        run(far.blocking.claims.look("k"))
        waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: server.ask(waits))
        put(near)  # it does not wait until the writer ends
        assert ticket(far) is None
        writer.rollback()
    until(lambda: news_of_engine(far).reporter)
    assert ticket(far) is not None


@pytest.mark.parametrize(
    "how", ["TRUNCATE stampede.generations", "DELETE FROM stampede.generations", "TRUNCATE stampede.entries"]
)
def test_an_emptied_table_is_told(server: PostgresServer, open_: Open, how: str) -> None:
    """If a table is emptied, listeners are notified: they take a new generation and keep no old value."""
    near, far = Cache(engine=open_(), ttl=60), Cache(engine=open_(keeps=True), ttl=60, local=True)
    near.set("k", 1)
    until(lambda: far.get("k") == 1 and news_of_engine(far._core.engine).reporter)
    assert far.get_or_compute("k", lambda: 0) == 1  # and the value is kept in memory
    server.say(how)
    until(lambda: far.get("k") is None)
    near.set("k", 2)
    until(lambda: far.get("k") == 2)
    near.invalidate("k")
    until(lambda: far.get("k") is None)


def test_a_connection_that_was_given_up_takes_no_other_s_place(server: PostgresServer, open_: Open) -> None:
    """A late request of a lost connection must not end the keeper of its process: changes would not be notified."""
    keeper = open_(keeps=True)
    news, keep = news_of_engine(keeper), "SELECT stampede.keep(%s, %s, %s)"
    with psycopg.connect(server.postgres_url, autocommit=True) as late:
        backend = server.ask(
            "SELECT pid, date_part('epoch', backend_start) FROM pg_stat_get_activity(%s)", late.info.backend_pid
        )
        late.execute(keep, (news.home, *backend[0]))
    until(lambda: not server.ask("SELECT FROM pg_stat_activity WHERE pid = %s", backend[0][0]))
    open_(keeps=True)
    assert (news.home,) in server.ask("SELECT home FROM stampede.keepers")
    its = shared(open_(), keeper)
    put(open_())
    until(lambda: not holds(its))


def test_who_has_died_is_told_of_nothing(server: PostgresServer, open_: Open) -> None:
    """Processes that were killed do not remain keepers."""
    dead = open_(keeps=True)
    backend = news_of_engine(dead).home_backend
    assert backend is not None
    dead.close()
    until(lambda: not server.ask("SELECT FROM pg_stat_activity WHERE pid = %s", backend[0]))
    server.ask("SELECT stampede.keep('0123456789ab', %s, %s)", *backend)
    keeper = open_(keeps=True)
    until(lambda: server.ask("SELECT home FROM stampede.keepers") == [(news_of_engine(keeper).home,)])


def test_a_role_that_may_not_keep(server: PostgresServer, open_: Open) -> None:
    """If the role may not become a keeper, the engine reports it once, and local tiers keep nothing."""
    grants = ["USAGE ON SCHEMA stampede"] + [
        f"SELECT, INSERT, UPDATE, DELETE ON stampede.{table}" for table in ("entries", "leases", "generations")
    ]
    with server.role(*grants, "SELECT ON stampede.keepers") as role:
        said = Said()
        with closing(PostgresEngine(server.url_of(user=role))) as engine:
            engine.audience.add(said)  # type: ignore[arg-type]
            engine.follow()
            put(engine)
            assert ticket(engine) is None
            until(lambda: said.how)
            assert len(said.how) == 1
            assert "keepers" in said.how[0]
            assert ticket(engine) is None
            assert news_of_engine(engine).listens  # wake-ups still arrive


class Said:
    """Collects what an engine reports to its users."""

    def __init__(self) -> None:
        self.how: list[str] = []

    def untold(self, server: str, how: str) -> None:
        self.how.append(how)

    def damaged(self, key: str, why: str) -> None:
        raise AssertionError(why)


# -- wake-ups -------------------------------------------------------------------------------------------------------


def busy(engine: PostgresEngine) -> tuple[bytes, Busy]:
    """The token of a lease on `k`, and the reply `Busy` to another claim."""
    token = new_id()
    assert isinstance(run(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
    refused = run(engine.blocking.claims.claim("k", new_id(), Ask(LONG)))
    assert isinstance(refused, Busy)
    return token, refused


def awaited(server: PostgresServer, token: bytes, home: str) -> None:
    assert server.ask("SELECT stampede.await(%s, %s, %s)", names("k").id, token, home) == [(True,)]


@pytest.mark.parametrize("size", [0, 1, SMALL, SMALL + 1])
def test_who_waits_is_told_the_value_and_nobody_else_is(server: PostgresServer, open_: Open, size: int) -> None:
    """A waiter is notified with the value if it is small enough. Other processes are not notified."""
    engine = open_()
    token, _ = busy(engine)
    awaited(server, token, "0123456789ab")
    with stranger(server, "stampede_0123456789ab", "stampede") as heard, stranger(server, "stampede_f00") as apart:
        entry = Entry(b"v" * size, token, 1.0, 2.0, LONG, LONG, 2 * LONG)
        assert run(engine.blocking.claims.fill("k", token, entry))
        engine._all.teller.flush(20)
        ((channel, payload),) = heard()
        assert channel == "stampede_0123456789ab"
        key, _, message = payload.partition(" ")
        assert key == names("k").channel.decode()
        told = news_of(base64.b64decode(message), token)
        assert told == (entry if size <= SMALL else None)
        assert apart() == []


def test_nobody_waits_nobody_is_told(server: PostgresServer, open_: Open) -> None:
    """A fill without waiters sends no notification: a server manages only a few hundred a second."""
    engine = open_()
    with psycopg.connect(server.postgres_url, autocommit=True) as line:
        before = line.execute("SELECT pg_notification_queue_usage()").fetchone()
        fill(engine)
        assert engine._all.teller._left == type(engine._all.teller._left)()
        assert line.execute("SELECT pg_notification_queue_usage()").fetchone() == before


def test_what_strangers_say(server: PostgresServer, open_: Open) -> None:
    """Malformed notifications, which any client can send, neither end the feed nor prevent later wake-ups."""
    engine = open_(keeps=True)
    news = news_of_engine(engine)
    told, key = news.reporter, names("k").channel.decode()
    its = shared(open_(), engine)
    odd = ["", " ", "zzzz", "-001", "+fff", "0x1f", "12345", "g ", "\u00e9", "\U0001f40e" * 500, "x" * 7999]
    odd += [f"{key} ", f"{key} =", f"{key} AAA", f"{key} !!!!", f"{key} {'A' * 4000}", f"{'0' * 32} AAAA", key]
    for channel in ("stampede", news.channel.decode()):
        for each in odd:
            server.ask("SELECT pg_notify(%s, %s)::text", channel, each)
    server.say(f"NOTIFY {news.channel.decode()}", "NOTIFY stampede")
    server.ask("SELECT pg_notify('stampede', %s)::text", SLOT)
    until(lambda: not holds(its))
    assert news.reporter == told

    run(engine.blocking.store.invalidate("k"))
    token, refused = busy(open_())
    waiting = threading.Thread(target=lambda: found.append(run(engine.blocking.claims.wait("k", refused, LONG))))
    found: list[Any] = []
    waiting.start()
    until(lambda: server.ask("SELECT homes FROM stampede.leases") == [([news.home],)])
    forged = message_of(Entry(b"forged", new_id(), ttl=LONG, fresh=LONG, keep=LONG))  # of an unknown computation
    payload = f"{key} {base64.b64encode(forged).decode()}"
    server.ask("SELECT pg_notify(%s, %s)::text", news.channel.decode(), payload)
    waiting.join(10)
    assert found == [None]  # the waiter has to look itself
    assert run(engine.blocking.claims.abandon("k", token))


# -- the teller -----------------------------------------------------------------------------------------------------


class Here:
    """The feed of this process, as the teller uses it."""

    home = "ours"

    def __init__(self) -> None:
        self.rung: list[tuple[bytes, bytes]] = []

    def ring(self, name: bytes, message: bytes) -> None:
        self.rung.append((name, message))


def test_what_is_for_this_process_takes_no_round_trip() -> None:
    """A notification for waiters of the same process takes no round trip to the server."""
    here, asked = Here(), []
    teller = Teller(asked.append, here)
    teller.tell(["ours"], b"channel", b"message")
    teller.tell(None, b"channel")
    teller.flush(10)
    assert here.rung == [(b"channel", b"message")]
    assert asked == []


def test_what_comes_while_one_is_told_goes_together() -> None:
    """Notifications that come while one is sent go together: the server runs notifying commits one by one."""
    inside, go, asked = threading.Event(), threading.Event(), []

    def ask(telling: Any) -> None:
        asked.append(telling[1])
        inside.set()
        assert go.wait(20)

    teller = Teller(ask, Here())
    teller.tell(["a"], b"0", b"x" * (LONGEST + 1))
    assert inside.wait(20)
    for number in range(1, 100):
        teller.tell(["a", "b", "ours"], b"%d" % number, b"")
    go.set()
    teller.flush(20)
    assert asked[0] == [["a"], ["0 "]]  # too long: it is sent without the message
    assert [len(homes) for homes, _ in asked] == [1, 198]
    assert max(len(payload) for _, payloads in asked for payload in payloads) < 8000


def test_a_teller_that_cannot_send_goes_on() -> None:
    """If the server fails to send a notification, the teller still sends later ones."""
    asked: list[Any] = []

    def ask(telling: Any) -> None:
        asked.append(telling)
        if len(asked) == 1:
            raise EngineError("no server")

    teller = Teller(ask, Here())
    teller.tell(["a"], b"first")
    teller.flush(20)
    teller.tell(["a"], b"second")
    teller.flush(20)
    assert [payloads for _, (_, payloads) in asked] == [["first "], ["second "]]


def test_a_server_that_hangs_costs_no_memory_and_no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server hangs, the queue of the teller is bounded, and `close` does not wait for the server."""
    monkeypatch.setattr(tell, "AT_EXIT", 0.05)
    inside, go, asked = threading.Event(), threading.Event(), []

    def ask(telling: Any) -> None:
        asked.append(telling)
        inside.set()
        assert go.wait(20)

    teller = Teller(ask, Here())
    teller.tell(["a"], b"first")
    assert inside.wait(20)
    for number in range(tell.MOST + 10):
        teller.tell(["a"], b"%d" % number)
    began = time.monotonic()
    teller.close()
    assert time.monotonic() - began < 5
    go.set()
    teller.flush(20)
    assert sum(len(homes) for _, (homes, _) in asked) == 1 + tell.MOST
    assert asked[-1][1][1][-1] == f"{tell.MOST + 9} "


def test_a_flush_waits_for_what_was_told_just_now() -> None:
    """`flush` waits for a notification that was queued just before, even while the thread ends its last work."""
    asked: list[int] = []
    teller = Teller(lambda telling: asked.append(len(telling[1][0])), Here())
    for number in range(300):
        teller.tell(["a"], b"")
        teller.flush(20)
        assert sum(asked) == number + 1


AT_EXIT = """
import sys
from stampede.runtime.colour import BLOCKING
from stampede.runtime.colour import run_blocking as run
from stampede.engines.postgres import PostgresEngine, tell
from stampede.engines.postgres.wire import names
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask

tell.AT_EXIT = 20.0
engine, tokens = PostgresEngine(sys.argv[1]), [new_id() for _ in range(3)]
for number, token in enumerate(tokens):
    run(engine.blocking.claims.claim(str(number), token, Ask(60.0)))
    run(engine._all.line.ask(("SELECT stampede.await($1, $2, $3)", (names(str(number)).id, token, "0123456789ab"))))
for number, token in enumerate(tokens):
    run(engine.blocking.claims.fill(str(number), token, Entry(b"", token, ttl=60.0, fresh=60.0, keep=60.0)))
"""


def test_what_was_stored_last_is_told_at_the_end_of_the_program(server: PostgresServer) -> None:
    """At the end of a program, the last notifications are sent. Otherwise waiters would notice a second later."""
    with stranger(server, "stampede_0123456789ab") as heard:
        subprocess.run([sys.executable, "-c", AT_EXIT, server.postgres_url], check=True, timeout=60)
        assert [payload.partition(" ")[0] for _, payload in heard()] == [
            names(str(number)).channel.decode() for number in range(3)
        ]


def test_a_forked_child_tells_and_is_told(server: PostgresServer, open_: Open) -> None:
    """A forked child has a home and a teller of its own: the thread of its parent's teller does not run there."""
    engine = open_(keeps=True)
    put(engine)
    home, told, news = news_of_engine(engine).home, news_of_engine(engine).reporter, news_of_engine(engine)
    with stranger(server, "stampede_0123456789ab") as heard:
        pid = os.fork()
        if pid == 0:
            try:
                token, _ = busy_other(engine)
                awaited_here(engine, token)
                run(engine.blocking.claims.fill("other", token, some()))
                engine._all.teller.flush(10)
                kept(engine)
                os._exit(0 if news.home != home and ticket(engine) is not None else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(heard()) == 1
    assert news.reporter == told
    its = shared(open_(), engine)
    put(open_())
    until(lambda: not holds(its))


def busy_other(engine: PostgresEngine) -> tuple[bytes, None]:
    token = new_id()
    assert isinstance(run(engine.blocking.claims.claim("other", token, Ask(LONG))), Granted)
    return token, None


def awaited_here(engine: PostgresEngine, token: bytes) -> None:
    command = "SELECT stampede.await($1, $2, $3)", (names("other").id, token, "0123456789ab")
    assert run(engine._all.line.ask(command)) == [(True,)]


@pytest.fixture
def way(server: PostgresServer) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with closing(Proxy(server.port)) as made:
        yield made


# -- connections that end -------------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_without_a_word(
    server: PostgresServer, way: Proxy, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is cut silently is recognized. Otherwise its local tier would never hear of changes again."""
    engine = open_(server.postgres_url.replace(f":{server.port}/", f":{way.port}/"), keeps=True)
    its, told = shared(open_(), engine), news_of_engine(engine).reporter
    with monkeypatch.context() as patch:
        patch.setattr(feed, "TICK", 0.1)
        way.hold()
        until(lambda: not news_of_engine(engine).reporter)
    assert not holds(its)
    way.cut()
    way.let_go()
    until(lambda: news_of_engine(engine).reporter > told)
    assert ticket(engine) is not None


def test_pings_keep_a_connection_that_has_nothing_to_say(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings keep a quiet connection alive. Otherwise a quiet hour would empty every local tier."""
    monkeypatch.setattr(feed, "TICK", 0.7)
    engine = open_(keeps=True)
    its, news, ticks = shared(open_(), engine), news_of_engine(engine), threading.Semaphore(0)
    news.on_tick = ticks.release
    for _ in range(3):
        assert ticks.acquire(timeout=10)
    assert holds(its)
    assert news.reporter == 1


def test_a_process_is_known_by_the_very_start_of_its_connection(server: PostgresServer) -> None:
    """The start of a connection is read exactly where floats have few digits. Otherwise each holder would seem dead."""
    with (
        server.role("USAGE ON SCHEMA stampede", extra_float_digits=0) as role,
        closing(PostgresEngine(server.url_of(user=role))) as engine,
    ):
        news = news_of_engine(engine)
        news.start()
        until(lambda: news.home_backend)
        assert news.home_backend is not None
        assert server.ask("SELECT stampede.lives(%s, %s)", *news.home_backend) == [(True,)]


def test_an_end_is_heard_at_once(server: PostgresServer, open_: Open) -> None:
    """If the server ends the listening connection, tickets end at once, not at the next ping."""
    engine = open_(keeps=True)
    news, its = news_of_engine(engine), shared(open_(), engine)
    told = news.reporter
    assert news.home_backend is not None
    server.ask("SELECT pg_terminate_backend(%s)", news.home_backend[0])
    until(lambda: not holds(its))
    until(lambda: news.reporter > told)
    assert ticket(engine) is not None


# -- behind a pooler ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bouncer() -> Iterator[PgBouncer]:
    with closing(PgBouncer(shared_postgres())) as made:
        yield made


def test_nobody_is_told_behind_a_pooler(bouncer: PgBouncer, server: PostgresServer, open_: Open) -> None:
    """LISTEN has no effect behind a pooler. The engine notices it, reports it once, and gives no tickets."""
    engine, said = open_(bouncer.postgres_url), Said()
    engine.audience.add(said)  # type: ignore[arg-type]
    engine.follow()
    put(engine)
    for _ in range(3):
        assert ticket(engine) is None
    until(lambda: said.how)
    news = news_of_engine(engine)
    until(lambda: news.mute)
    with news.listen(b"channel") as ear:
        assert run(BLOCKING.park(ear.ready, 0.0))
        assert not ear.hears
    assert len(said.how) == 1
    assert "ten times a second" in said.how[0]
    assert server.ask("SELECT FROM stampede.keepers") == []


def test_a_direct_address_beside_a_pooler(bouncer: PgBouncer, server: PostgresServer, open_: Open) -> None:
    """With `listen=`, notifications arrive as they do without a pooler."""
    near, far = (open_(bouncer.postgres_url, keeps=True, listen=server.postgres_url) for _ in range(2))
    its = shared(near, far)
    put(near)
    until(lambda: not holds(its))


def test_who_waits_behind_a_pooler_looks(bouncer: PgBouncer, server: PostgresServer) -> None:
    """Behind a pooler, waiters look for the value. Otherwise they would wait until the lease ends."""
    with closing(Cache(bouncer.postgres_url)) as near, closing(Cache(bouncer.postgres_url)) as far:
        inside, go = threading.Event(), threading.Event()

        def slow() -> str:
            inside.set()
            assert go.wait(20)
            return "value"

        computing = threading.Thread(target=lambda: near.get_or_compute("k", slow))
        computing.start()
        assert inside.wait(20)
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(far.get_or_compute("k", lambda: "another")))
        waiting.start()
        go.set()
        waiting.join(10)
        assert got == ["value"]
        computing.join(10)


# -- a connection that can't be made -----------------------------------------------------------------------------------


def test_who_can_t_listen_is_told_why(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the listening connection fails, observers and `stampede check` are told the reason, once."""
    monkeypatch.setattr(feed, "DEAF", 0.05)
    monkeypatch.setattr(feed, "AGAIN", 0.02)
    nobody = quote("postgres://root@127.0.0.1:1/postgres", safe="")
    told: list[Any] = []
    with closing(Cache(f"{server.postgres_url}&listen={nobody}", local=True, observers=[told.append])) as cache:
        until(lambda: (cache.get_or_compute("k", lambda: 1), cache.stats().untold)[1])
        news = cache.engine._all.news  # type: ignore[attr-defined]
        failed = news._failed_at
        until(lambda: (cache.get_or_compute("k", lambda: 1), news._failed_at > failed + 0.1)[1])
        assert cache.stats().untold == 1
        (how,) = [event.how for event in told if isinstance(event, events.Untold)]
        assert "Connection refused" in how
        assert "a local tier keeps nothing" in how
        (advice,) = cache.engine.advice()
        assert "Connection refused" in advice


def test_a_server_that_is_down_is_not_one_that_can_t_be_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage is not also reported as a failure to listen. It is one only if the server answers other connections."""
    monkeypatch.setattr(feed, "DEAF", 0.0)
    news, told = PostgresNews(lambda: None), list[str]()
    news.on_deaf = told.append
    for _ in range(3):
        news._failed(OSError("refused"), inf)
    assert told == []
    news.answered_others = time.monotonic
    for _ in range(3):
        news._failed(OSError("refused"), inf)
    assert len(told) == 1
    news._failed(OSError("it broke"), -inf)  # after it has lasted for a while
    news._failed(OSError("refused"), inf)
    assert len(told) == 2
