"""Who is told what by a Postgres server and its teller, and what becomes of news that are odd, late, or cut."""

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
from stampede.engines.postgres import PostgresEngine, tell
from stampede.engines.postgres import news as news_module
from stampede.engines.postgres.news import PostgresNews
from stampede.engines.postgres.tell import LONGEST, Teller
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
    """Engines that are closed at the end; with `keeps`, as a cache has one that has a local tier."""

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
    """Returns when changes are told to it."""
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
    """What one has put there, as the other keeps it that has heard so."""
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
    """Somebody who listens there; asked, what has come until now."""
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
    """With server and origin down, a process would have nothing of what it has computed and not yet read."""
    engine, other = open_(keeps=True), open_()
    for change in ("set", "expire", "invalidate", "fill"):
        token = new_id()
        run(engine.blocking.claims.claim("k", token, Ask(LONG, force=True)))
        its = run(engine.blocking.claims.fill("k", token, some()))
        until(lambda its=its: holds(its))
        CHANGES[change](other)
        until(lambda its=its: not holds(its))


def test_changes_are_told_while_somebody_keeps(server: PostgresServer, open_: Open) -> None:
    """Each change would cost what a notification costs, or tiers would not hear of one."""
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
        until(lambda: server.ask("SELECT FROM stampede.keepers") == [])
        put(writer)
        assert heard() == []


def test_claims_are_no_changes(server: PostgresServer, open_: Open) -> None:
    """Local tiers would read again for nothing, and hits of others would wait for notifying commits."""
    engine, token = open_(keeps=True), new_id()
    with stranger(server, "stampede") as heard:
        assert isinstance(run(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
        run(engine.blocking.claims.renew("k", token, LONG))
        run(engine.blocking.claims.abandon("k", token))
        assert heard() == []


def test_bumps_are_told_to_all(server: PostgresServer, open_: Open) -> None:
    """Who keeps no values believes in a generation, too."""
    engine = open_()
    with stranger(server, "stampede") as heard:
        run(engine.blocking.store.bump("scope"))
        run(engine.blocking.softens.soften("scope"))
        assert heard() == [("stampede", "g")] * 2


def test_many_clears_make_changes_no_dearer_than_they_are(open_: Open) -> None:
    """Each change goes to the generations that ended a moment ago, too: of twenty clears four hundred."""
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
    """What was removed to make room lives on in local tiers: it would be fresh there after it was expired."""
    near, far = open_(), open_(keeps=True)
    its = shared(near, far)
    server.say("DELETE FROM stampede.entries")
    assert holds(its)
    run(near.blocking.store.expire("k"))
    until(lambda: not holds(its))


def test_no_change_is_missed_by_who_begins_to_keep(server: PostgresServer, open_: Open) -> None:
    """A change that is under way has looked before us who keeps: what we read before its commit would stay here."""
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
        assert ticket(far) is None  # it is there still
        writer.commit()
    until(lambda: news_of_engine(far).reporter)
    assert run(far.blocking.claims.look("k")) is None


def test_who_begins_to_keep_waits_for_nobody_for_long(
    server: PostgresServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All changes wait behind it: one transaction that somebody leaves open would stop every writer."""
    monkeypatch.setattr(news_module, "PATIENCE", "100ms")
    monkeypatch.setattr(news_module, "TICK", 0.1)
    near, far, its = open_(), open_(), names("other")
    with psycopg.connect(server.postgres_url) as writer:
        writer.execute("SELECT stampede.invalidate(%s, %s)", (its.id, its.lock))
        far.follow()
        run(far.blocking.claims.look("k"))
        waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: server.ask(waits))
        put(near)  # the engine's own timeout is 3 s
        assert ticket(far) is None
        writer.rollback()
    until(lambda: news_of_engine(far).reporter)
    assert ticket(far) is not None


@pytest.mark.parametrize(
    "how", ["TRUNCATE stampede.generations", "DELETE FROM stampede.generations", "TRUNCATE stampede.entries"]
)
def test_an_emptied_table_is_told(server: PostgresServer, open_: Open, how: str) -> None:
    """Who listens would go on in its generation, where no change of the others is seen; or with what it keeps."""
    near, far = Cache(engine=open_(), ttl=60), Cache(engine=open_(keeps=True), ttl=60, local=True)
    near.set("k", 1)
    until(lambda: far.get("k") == 1 and news_of_engine(far._core.engine).reporter)
    assert far.get_or_compute("k", lambda: 0) == 1  # and keeps it
    server.say(how)
    until(lambda: far.get("k") is None)
    near.set("k", 2)
    until(lambda: far.get("k") == 2)
    near.invalidate("k")
    until(lambda: far.get("k") is None)


def test_a_connection_that_was_given_up_takes_no_other_s_place(server: PostgresServer, open_: Open) -> None:
    """What it had asked may be heard late, behind what the next one asks: nobody would tell us, who are sure of it."""
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
    """Processes that were killed would be noted as keepers for ever."""
    dead = open_(keeps=True)
    backend = news_of_engine(dead).home_backend
    assert backend is not None
    dead.close()
    server.ask("SELECT stampede.keep('0123456789ab', %s, %s)", *backend)
    keeper = open_(keeps=True)
    until(lambda: server.ask("SELECT home FROM stampede.keepers") == [(news_of_engine(keeper).home,)])


def test_a_role_that_may_not_keep(server: PostgresServer, open_: Open) -> None:
    """Local tiers would believe in news that nobody sends, or nobody would hear why they keep nothing."""
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
            assert news_of_engine(engine).listens  # wake-ups come all the same


class Said:
    """What those who use an engine are told of it."""

    def __init__(self) -> None:
        self.how: list[str] = []

    def untold(self, server: str, how: str) -> None:
        self.how.append(how)

    def damaged(self, key: str, why: str) -> None:
        raise AssertionError(why)


# -- wake-ups -------------------------------------------------------------------------------------------------------


def busy(engine: PostgresEngine) -> tuple[bytes, Busy]:
    """A lease on k, and what others are told of it."""
    token = new_id()
    assert isinstance(run(engine.blocking.claims.claim("k", token, Ask(LONG))), Granted)
    refused = run(engine.blocking.claims.claim("k", new_id(), Ask(LONG)))
    assert isinstance(refused, Busy)
    return token, refused


def awaited(server: PostgresServer, token: bytes, home: str) -> None:
    assert server.ask("SELECT stampede.await(%s, %s, %s)", names("k").id, token, home) == [(True,)]


@pytest.mark.parametrize("size", [0, 1, SMALL, SMALL + 1])
def test_who_waits_is_told_the_value_and_nobody_else_is(server: PostgresServer, open_: Open, size: int) -> None:
    """Waiters would ask for what could have come along; or all processes would hear of every herd."""
    engine = open_()
    token, _ = busy(engine)
    awaited(server, token, "0123456789ab")
    with stranger(server, "stampede_0123456789ab", "stampede") as heard, stranger(server, "stampede_f00") as apart:
        entry = Entry(b"v" * size, token, 1.0, 2.0, LONG, LONG, 2 * LONG)
        assert run(engine.blocking.claims.fill("k", token, entry))
        engine.close()  # what is to be told has been
        ((channel, payload),) = heard()
        assert channel == "stampede_0123456789ab"
        key, _, message = payload.partition(" ")
        assert key == names("k").channel.decode()
        told = news_of(base64.b64decode(message), token)
        assert told == (entry if size <= SMALL else None)
        assert apart() == []


def test_nobody_waits_nobody_is_told(server: PostgresServer, open_: Open) -> None:
    """Every fill would be a notification: a few hundred a second is all that a server does."""
    engine = open_()
    with psycopg.connect(server.postgres_url, autocommit=True) as line:
        before = line.execute("SELECT pg_notification_queue_usage()").fetchone()
        fill(engine)
        assert engine._all.teller._left == type(engine._all.teller._left)()
        assert line.execute("SELECT pg_notification_queue_usage()").fetchone() == before


def test_what_strangers_say(server: PostgresServer, open_: Open) -> None:
    """Anybody can notify on our channels: odd words would end the news, or wake nobody any more."""
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
    forged = message_of(Entry(b"forged", new_id(), ttl=LONG, fresh=LONG, keep=LONG))  # of no computation that we know
    payload = f"{key} {base64.b64encode(forged).decode()}"
    server.ask("SELECT pg_notify(%s, %s)::text", news.channel.decode(), payload)
    waiting.join(10)
    assert found == [None]  # it looks for itself
    assert run(engine.blocking.claims.abandon("k", token))


# -- the teller -----------------------------------------------------------------------------------------------------


class Here:
    """The process, as its teller sees it."""

    home = "ours"

    def __init__(self) -> None:
        self.rung: list[tuple[bytes, bytes]] = []

    def ring(self, name: bytes, message: bytes) -> None:
        self.rung.append((name, message))


def test_what_is_for_this_process_takes_no_round_trip() -> None:
    """Waiters of the process itself would wait for the server to tell it what it knows."""
    here, asked = Here(), []
    teller = Teller(asked.append, here)
    teller.tell(["ours"], b"channel", b"message")
    teller.tell(None, b"channel")
    teller.flush(10)
    assert here.rung == [(b"channel", b"message")]
    assert asked == []


def test_what_comes_while_one_is_told_goes_together() -> None:
    """The server does notifying commits one by one: a herd of herds would stand in line there."""
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
    assert asked[0] == [["a"], ["0 "]]  # too long: it wakes, and says nothing
    assert [len(homes) for homes, _ in asked] == [1, 198]
    assert max(len(payload) for _, payloads in asked for payload in payloads) < 8000


def test_a_teller_that_cannot_send_goes_on() -> None:
    """One trouble with the server, and nobody would ever be told again; or memory would fill while it lasts."""
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
    """What is to be told would heap up; and the end of the program would wait for a server that says nothing."""
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
    """A close would leave something untold: what is told while the thread ends its work is no work that has ended."""
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
from stampede.engines.postgres import PostgresEngine
from stampede.engines.postgres.wire import names
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask

engine, tokens = PostgresEngine(sys.argv[1]), [new_id() for _ in range(3)]
for number, token in enumerate(tokens):
    run(engine.blocking.claims.claim(str(number), token, Ask(60.0)))
    run(engine._all.line.ask(("SELECT stampede.await($1, $2, $3)", (names(str(number)).id, token, "0123456789ab"))))
for number, token in enumerate(tokens):
    run(engine.blocking.claims.fill(str(number), token, Entry(b"", token, ttl=60.0, fresh=60.0, keep=60.0)))
"""


def test_what_was_stored_last_is_told_at_the_end_of_the_program(server: PostgresServer) -> None:
    """Whoever waits for what a job computes last would look for it a second later."""
    with stranger(server, "stampede_0123456789ab") as heard:
        subprocess.run([sys.executable, "-c", AT_EXIT, server.postgres_url], check=True, timeout=60)
        assert [payload.partition(" ")[0] for _, payload in heard()] == [
            names(str(number)).channel.decode() for number in range(3)
        ]


def test_a_forked_child_tells_and_is_told(server: PostgresServer, open_: Open) -> None:
    """Both would have one home, or the child would have nobody who tells: its parent's thread isn't there."""
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
    """A port before the server's."""
    with closing(Proxy(server.port)) as made:
        yield made


# -- connections that end -------------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_without_a_word(
    server: PostgresServer, way: Proxy, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that forgets would leave a tier that hears of no change, for ever."""
    monkeypatch.setattr(feed, "TICK", 0.1)
    engine = open_(server.postgres_url.replace(f":{server.port}/", f":{way.port}/"), keeps=True)
    its, told = shared(open_(), engine), news_of_engine(engine).reporter
    way.hold()
    until(lambda: not news_of_engine(engine).reporter, 5)
    assert not holds(its)
    way.cut()
    way.let_go()
    until(lambda: news_of_engine(engine).reporter > told)
    assert ticket(engine) is not None


def test_pings_keep_a_connection_that_has_nothing_to_say(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet hour would end the news, and empty every tier."""
    monkeypatch.setattr(feed, "TICK", 0.3)
    engine = open_(keeps=True)
    its, news, ticks = shared(open_(), engine), news_of_engine(engine), threading.Semaphore(0)
    news.on_tick = ticks.release
    for _ in range(4):
        assert ticks.acquire(timeout=10)
    assert holds(its)
    assert news.reporter == 1


def test_a_process_is_known_by_the_very_start_of_its_connection(server: PostgresServer) -> None:
    """Where numbers are told with fewer digits, no backend would be the one that was meant: every holder were dead."""
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
    """An administrator ends a connection: tiers would serve what they have until the next ping."""
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
    """LISTEN is lost there without an error: tiers would believe in news that never come, and nobody would say so."""
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
    """With `listen=` all is told as without a pooler."""
    near, far = (open_(bouncer.postgres_url, keeps=True, listen=server.postgres_url) for _ in range(2))
    its = shared(near, far)
    put(near)
    until(lambda: not holds(its))


def test_who_waits_behind_a_pooler_looks(bouncer: PgBouncer, server: PostgresServer) -> None:
    """Waiters there would wait for the lease's end."""
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
    """Nothing was kept, waiters polled, and neither the log nor `stampede check` said so."""
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
    """Each outage would be told twice."""
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
    news._failed(OSError("it broke"), -inf)  # once it has stood for a while
    news._failed(OSError("refused"), inf)
    assert len(told) == 2
