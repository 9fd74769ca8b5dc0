"""The Postgres engine with servers that freeze, restart, refuse or lose their tables, and a network that is cut."""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg")

from both_colours import Face
from child import Child
from disk_world import Script
from herd import Herd, until
from postgres_server import PostgresServer, shared_postgres
from proxy import Proxy
from servers import Authority

from stampede import EngineError, events
from stampede.engines.kit import feed
from stampede.engines.postgres import PostgresEngine, from_url, tell
from stampede.engines.postgres.connect import of_url
from stampede.engines.postgres.schema import grants
from stampede.model.entry import Entry, new_id
from stampede.model.ports import Ask, Asked, Busy, Granted
from stampede.runtime.colour import run_blocking

__all__ = ["Face"]  # for the fixture of this name

Faces = Callable[..., Face]
Before = Callable[[Any], Proxy]

both = pytest.mark.parametrize("colour", ["sync", "async"])
LONG = 60.0


@pytest.fixture
def server() -> PostgresServer:
    shared = shared_postgres()
    shared.prepare()
    return shared


@pytest.fixture(scope="module")
def its_own() -> Iterator[PostgresServer]:
    with closing(PostgresServer()) as made:
        made.prepare()
        yield made


@pytest.fixture
def own_server(its_own: PostgresServer) -> PostgresServer:
    """A server that a test may stop and freeze."""
    its_own.thaw()
    its_own.prepare()
    return its_own


def at(port: int, **options: object) -> str:
    query = "".join(f"&{name}={value}" for name, value in options.items())
    return f"postgres://root@127.0.0.1:{port}/postgres?sslmode=disable{query}"


def some(value: bytes = b"value") -> Entry[bytes]:
    return Entry(value, new_id(), ttl=LONG, fresh=LONG, keep=LONG)


class Asker:
    """The verbs of an engine in one colour."""

    def __init__(self, engine: PostgresEngine, colour: str) -> None:
        self.engine = engine
        self.runner = asyncio.Runner() if colour == "async" else None
        self.claims: Any = engine.blocking.claims if self.runner is None else engine.suspending.claims
        self.store: Any = engine.blocking.store if self.runner is None else engine.suspending.store

    def __call__(self, asked: Any) -> Any:
        return run_blocking(asked) if self.runner is None else self.runner.run(asked)

    def close(self) -> None:
        self.engine.close()
        if self.runner is not None:
            self.runner.close()


@pytest.fixture
def asking(request: pytest.FixtureRequest) -> Callable[..., Asker]:
    def made(url: str, colour: str) -> Asker:
        asked = Asker(PostgresEngine(url), colour)
        request.addfinalizer(asked.close)
        return asked

    return made


Asking = Callable[..., Asker]


# -- servers that are away ----------------------------------------------------------------------------------------


def test_who_closes_waits_for_no_connection_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait for a connection attempt that hangs. Otherwise a program would end a second late."""
    monkeypatch.setattr(feed, "TICK", LONG)
    monkeypatch.setattr(tell, "AT_EXIT", LONG)
    with socket.create_server(("127.0.0.1", 0)) as door:
        engine = from_url(at(door.getsockname()[1]))
        engine._all.news.start()
        with door.accept()[0]:
            began = time.monotonic()
            engine.close()
            assert time.monotonic() - began < 5


@both
def test_a_server_that_lets_nobody_in_takes_no_longer_than_its_time(
    before: Before, server: PostgresServer, asking: Asking, colour: str
) -> None:
    """`timeout` limits the wait for a server that accepts no session. libpq alone would wait at least two seconds."""
    proxy = before(server)
    proxy.hold()
    asked = asking(at(proxy.port, timeout=0.3), colour)
    with pytest.raises(EngineError, match=r"within 0\.3 s|question of another caller"):  # or the listener noticed first
        asked(asked.claims.claim("k", new_id(), Ask(LONG)))
    proxy.let_go()

    def answers() -> bool:
        try:  # on a busy machine this may take longer than `timeout`
            return isinstance(asked(asked.claims.claim("k", new_id(), Ask(LONG))), (Granted, Busy))
        except EngineError:
            return False

    until(answers)


def test_a_server_that_lets_somebody_in_answers(server: PostgresServer) -> None:
    """A new connection shows that the server does not hang. Otherwise one slow connection would end other questions."""
    line, began = of_url(server.postgres_url, {}), time.monotonic()
    for connect in (lambda: line.connection().connection, line.listening):
        with closing(connect()):
            assert line.hang_detector.heard > began
        line.hang_detector.heard = began


@both
def test_a_restart_is_nobodys_error(own_server: PostgresServer, face: Faces, colour: str) -> None:
    """If connections end while they are idle, no call gets an error, also after a restart of the server."""
    asked = face(own_server.postgres_url, colour, on_engine_error="raise")
    asked.herd(8, "warm", lambda: 1)
    herds = [asked.herd(8, f"k{n}", lambda: 1) for n in range(3)]
    assert herds == [[1] * 8] * 3
    for way in "terminate", "restart":
        if way == "terminate":
            own_server.terminate("stampede")
        else:
            own_server.stop()
            own_server.start()
            own_server.prepare()
        results = asked.herd(8, f"after {way}", lambda: 2)
        assert results == [2] * 8
    assert not asked.count(events.EngineDown)


def test_connections_of_a_loop_that_end_together_are_nobodys_error(server: PostgresServer) -> None:
    """If all connections of a loop end together, no call fails because it is asked again on another ended one."""
    engine = PostgresEngine(server.postgres_url)

    async def scenario() -> None:
        for number in range(20):
            asked = [engine.suspending.claims.claim(f"{number}.{n}", new_id(), Ask(LONG)) for n in range(40)]
            assert all(isinstance(answer, Granted) for answer in await asyncio.gather(*asked))
            if number % 4 == 3:
                server.terminate("stampede")  # the loop has not noticed it yet

    asyncio.run(scenario())
    engine.close()


ASKS_TWICE = """
import sys, time
from stampede import Cache, EngineError
cache = Cache(sys.argv[1], on_engine_error="raise")

def is_ready():
    try:
        cache.set("k", 1)
        return cache.get("k") == 1
    except EngineError:
        return False

while not is_ready():
    pass
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    cache.get("k")
except EngineError as error:
    print(type(error).__name__, time.monotonic() - began < 5, flush=True)
"""


def test_an_answer_that_has_come_but_for_its_end_is_waited_for_as_any_is(
    before: Before, server: PostgresServer
) -> None:
    """If the end of an answer does not arrive, the call times out. libpq would wait for it with the interpreter's lock
    held, so that all threads of the process stop."""
    proxy = before(server)
    with Script(ASKS_TWICE, at(proxy.port, timeout=1)) as asks:
        assert asks.stdout.readline() == "ready\n"
        proxy.alter = lambda data: data.removesuffix(b"Z\0\0\0\5I")
        print("now", file=asks.stdin, flush=True)
        with closing(selectors.DefaultSelector()) as answers:
            answers.register(asks.stdout, selectors.EVENT_READ)
            assert answers.select(10), "it stands still"
        assert asks.stdout.readline() == "EngineError True\n"


# -- servers that refuse ------------------------------------------------------------------------------------------


@both
def test_hits_go_on_where_nothing_may_be_written(server: PostgresServer, face: Faces, colour: str) -> None:
    """Hits work on a server that only reads. If it counted as down, every process would compute its values."""
    with server.role(default_transaction_read_only="on") as role:
        server.say(grants(role))
        writer, reader = face(server.postgres_url, colour), face(server.url_of(user=role), colour)
        assert writer("k", lambda: 1) == 1
        assert reader("k", lambda: 2) == 1
        assert reader("new", lambda: 3) == 3
        assert reader("k", lambda: 2) == 1
        assert not reader.cache._core.is_down()
        with pytest.raises(EngineError, match="read-only") as refused:
            reader.run("set", "k", 5)
        assert refused.value.refused and refused.value.partial
        writer.close()
        reader.close()


@both
def test_a_standby_has_no_values_and_says_so(its_own: PostgresServer, asking: Asking, colour: str) -> None:
    """A standby refuses each question with an error that names it, and the connection remains."""
    its_own.prepare()
    with closing(its_own.replica()) as replica:
        replica.start() if replica._process is None else None
        asked = asking(replica.postgres_url, colour)
        backends: set[int] = set()
        for _ in range(3):
            with pytest.raises(EngineError, match="standby") as refused:
                asked(asked.store.get(["k"]))
            assert refused.value.refused
            backends |= {*replica.backends("stampede")}
        assert len(backends) == 1


@both
def test_who_is_refused_a_connection_uses_those_that_stand(
    server: PostgresServer, asking: Asking, face: Faces, colour: str
) -> None:
    """If the server refuses further connections (53300), callers share the existing ones and get no error."""
    with server.role() as role:
        server.say(grants(role), f"ALTER ROLE {role} NOSUPERUSER CONNECTION LIMIT 4")
        asked = face(server.url_of(user=role), colour, on_engine_error="raise")
        asked("warm", lambda: 0)
        herds = [asked.herd(30, f"k{n}", lambda: 1) for n in range(3)]
        assert herds == [[1] * 30] * 3
        asked.close()
        server._terminate("usename = %s", role)
        server.say(f"ALTER ROLE {role} CONNECTION LIMIT 0")
        none = asking(server.url_of(user=role), colour)
        with pytest.raises(EngineError, match="too many connections"):
            none(none.claims.claim("k", new_id(), Ask(LONG)))


def test_what_waits_for_anothers_lock_has_an_end_and_does_nothing_later(
    server: PostgresServer, asking: Asking, colour: str
) -> None:
    """A claim that waits for another session's lock times out. It must not be granted later: its caller has gone."""
    import psycopg

    asked = asking(server.postgres_url + "&timeout=2.5", colour)
    asked(asked.claims.claim("warm", new_id(), Ask(LONG)))
    with psycopg.connect(server.postgres_url) as other:
        other.execute("LOCK stampede.leases IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(EngineError) as late:
            asked(asked.claims.claim("k", new_id(), Ask(LONG)))
        assert late.value.partial  # only this key is in trouble, not the server
    assert isinstance(asked(asked.claims.claim("k", new_id(), Ask(LONG))), Granted)


@both
def test_a_backend_that_is_cancelled_or_ended_in_the_middle(
    server: PostgresServer, asking: Asking, colour: str
) -> None:
    """pg_cancel_backend fails one question at most. A question that pg_terminate_backend ends is asked again."""
    import psycopg

    asked = asking(server.postgres_url + "&application_name=asks", colour)
    asked(asked.claims.claim("warm", new_id(), Ask(LONG)))
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'asks'"
    for how in "cancel", "terminate":
        with psycopg.connect(server.postgres_url, application_name="stampede-tests") as other:
            other.execute("LOCK stampede.entries IN ACCESS EXCLUSIVE MODE")
            herd = Herd(lambda how=how: asked(asked.claims.claim(how, new_id(), Ask(LONG))))
            until(lambda: server.ask(waits))
            ((pid,),) = server.ask(waits)
            server.ask(f"SELECT pg_{how}_backend(%s)", pid)
            until(lambda pid=pid: (pid,) not in server.ask(waits))
            other.rollback()
        if how == "terminate":
            assert isinstance(herd.join()[0], Granted)
        else:
            assert isinstance(herd.join()[0], (EngineError, Granted))
        assert isinstance(asked(asked.claims.claim(f"{how} 2", new_id(), Ask(LONG))), Granted)


# -- what was prepared --------------------------------------------------------------------------------------------


@both
def test_a_schema_that_is_made_anew_under_connections(own_server: PostgresServer, asking: Asking, colour: str) -> None:
    """If the schema is dropped and created again, the engine prepares its statements again and needs no restart."""
    asked = asking(own_server.postgres_url, colour)
    token = new_id()
    asked(asked.claims.claim("k", token, Ask(LONG)))
    asked(asked.claims.fill("k", token, some()))
    own_server.say("DROP SCHEMA stampede CASCADE")
    with pytest.raises(EngineError, match="stampede postgres init"):
        asked(asked.claims.claim("k", new_id(), Ask(LONG)))
    own_server.prepare()
    token = new_id()
    assert isinstance(asked(asked.claims.claim("k", token, Ask(LONG))), Granted)
    assert asked(asked.claims.fill("k", token, some()))
    (entry,) = asked(asked.store.get(["k"]))
    assert entry.value == b"value"
    own_server.say("ALTER TABLE stampede.entries ALTER COLUMN raised TYPE int USING 0")  # SQLSTATE 0A000
    own_server.say("ALTER TABLE stampede.entries ALTER COLUMN raised TYPE bool USING false")
    (entry,) = asked(asked.store.get(["k"]))
    assert entry.value == b"value"


# -- sizes --------------------------------------------------------------------------------------------------------


@both
def test_values_of_every_size_and_byte(server: PostgresServer, asking: Asking, colour: str) -> None:
    """Values of every size and every byte come back unchanged."""
    asked = asking(server.postgres_url + "&timeout=30", colour)  # timeouts are tested with servers that hang
    for value in b"", bytes(range(256)) * 2, os.urandom(1 << 20), b"\0" * 30_000_000:
        asked(asked.store.set("k", some(value)))
        (entry,) = asked(asked.store.get(["k"]))
        assert entry.value == value
    asked(asked.store.invalidate("k"))


@both
def test_a_batch_is_larger_than_all_buffers(server: PostgresServer, asking: Asking, colour: str) -> None:
    """A batch larger than all buffers does not block for ever: the engine reads answers while it sends."""
    asked = asking(server.postgres_url, colour)
    keys = [f"k{n}" for n in range(2000)]
    value = os.urandom(4000)
    asked(_sets(asked, keys, value))
    assert [entry.value for entry in asked(asked.store.get(keys))] == [value] * len(keys)


async def _sets(asked: Asker, keys: list[str], value: bytes) -> None:
    await asked.store.change([Asked("set", (key, some(value))) for key in keys], [])


# -- forks, loops -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@both
def test_a_child_holds_nothing_of_its_parents(server: PostgresServer, asking: Asking, colour: str) -> None:
    """A forked child neither holds nor ends its parent's connections. Otherwise a killed parent would seem alive."""
    url = server.postgres_url + "&application_name=parent"

    def parent() -> None:
        asked = Asker(PostgresEngine(url), colour)
        asked(asked.claims.claim("k", new_id(), Ask(LONG)))
        asked.engine._all.news.start()
        until(lambda: asked.engine._all.news.listens)
        if os.fork() == 0:
            signal.pause()
        asked(asked.claims.claim("k2", new_id(), Ask(LONG)))
        print(flush=True)
        signal.pause()

    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        with suppress(BaseException):
            parent()
        os._exit(1)
    with suppress(OSError):
        os.setpgid(pid, pid)
    try:
        until(lambda: server.ask("SELECT FROM stampede.leases WHERE name = 'k2'::bytea"))
        assert len(server.backends("parent")) == 2
        os.kill(pid, signal.SIGKILL)
        until(lambda: not server.backends("parent"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@both
def test_a_child_says_nothing_over_its_parents_connections(server: PostgresServer, asking: Asking, colour: str) -> None:
    """A forked child neither uses nor closes its parent's connections, not even when its objects are collected."""
    asked = asking(server.postgres_url + "&application_name=both", colour)
    asked(asked.claims.claim("k", new_id(), Ask(LONG)))
    backends = server.backends("both")

    def child() -> None:
        import gc

        assert isinstance(run_blocking(asked.engine.blocking.claims.claim("k", new_id(), Ask(LONG))), Busy)
        asked.engine.close()
        gc.collect()

    Child(child).join()
    assert isinstance(asked(asked.claims.claim("k", new_id(), Ask(LONG))), Busy)
    assert set(backends) <= set(server.backends("both"))


def test_loops_that_end_leave_no_connections(server: PostgresServer) -> None:
    """A loop that ends leaves no connections. Otherwise a program that runs many loops would use up the server's."""
    engine = PostgresEngine(server.postgres_url + "&application_name=loops")

    async def ask() -> None:
        await engine.suspending.store.get(["k"])

    for _ in range(30):
        asyncio.run(ask())
    until(lambda: len(server.backends("loops")) <= 2)
    engine.close()
    until(lambda: not server.backends("loops"))


def test_a_loop_that_was_blocked_calls_nobody_hung(server: PostgresServer) -> None:
    """If a computation blocks the loop for longer than `timeout`, the server does not count as hung."""
    engine = PostgresEngine(server.postgres_url)

    async def scenario() -> None:
        await engine.suspending.store.get(["k"])
        (pipe,) = engine._all.aline._per_loop.to(None).pipes
        pipe._patience = 0.2
        asked = asyncio.ensure_future(engine.suspending.store.get(["k"]))
        while not pipe.wire.flying:
            await asyncio.sleep(0)
        assert select.select([pipe.wire.socket], [], [], LONG)[0], "no answer"  # this blocks the loop
        time.sleep(0.5)
        assert await asked == [None]

    asyncio.run(scenario())
    engine.close()


# -- cuts ---------------------------------------------------------------------------------------------------------


@both
def test_batches_are_cut(server: PostgresServer, before: Before, asking: Asking, colour: str) -> None:
    """A batch whose connection is cut at any byte is asked again, and is stored or read completely."""
    proxy = before(server)
    asked = asking(at(proxy.port), colour)
    asked(_sets(asked, ["warm"], b""))
    for byte in range(0, 4000, 333):
        keys = [f"{byte}.{n}." for n in range(20)]
        proxy.at(keys[0].encode(), sent=byte)
        asked(_sets(asked, keys, b"v" * 100))
        assert all(asked(asked.store.get(keys)))
        proxy.at(b"", answered=byte)
        assert len(asked(asked.store.get(keys))) == 20


# -- authentication and encryption --------------------------------------------------------------------------------


@both
def test_a_wrong_password_is_told(its_own: PostgresServer, asking: Asking, colour: str) -> None:
    """The error of a wrong password says so, and does not show the password."""
    its_own.prepare()
    hba = its_own._directory / "data" / "pg_hba.conf"
    had = hba.read_text()
    with its_own.role() as role:
        its_own.say(f"ALTER ROLE {role} PASSWORD 'right'", grants(role))
        hba.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{had}")
        its_own._reload()
        try:
            right = asking(its_own.url_of(user=f"{role}:right"), colour)
            assert isinstance(right(right.claims.claim("k", new_id(), Ask(LONG))), Granted)
            wrong = asking(its_own.url_of(user=f"{role}:secret"), colour)
            with pytest.raises(EngineError, match="password authentication failed") as told:
                wrong(wrong.claims.claim("k", new_id(), Ask(LONG)))
            assert "secret" not in str(told.value)
            right.close()
        finally:
            hba.write_text(had)
            its_own._reload()


@pytest.fixture(scope="module")
def encrypted() -> Iterator[tuple[PostgresServer, Authority]]:
    authority, key = Authority(), Path(tempfile.mkdtemp(prefix="stampede-key-"))
    shutil.copy(authority.key, key / "key.pem")
    (key / "key.pem").chmod(0o600)
    if os.geteuid() == 0:
        for each in key, key / "key.pem":
            shutil.chown(each, "nobody", "nogroup")
    files = f"ssl_cert_file={authority.certificate}", f"ssl_key_file={key}/key.pem"
    with closing(PostgresServer("ssl=on", *files)) as made:
        made.prepare()
        yield made, authority
    shutil.rmtree(key)


@both
@pytest.mark.parametrize("mode", ["require", "verify-full"])
def test_it_speaks_tls(encrypted: tuple[PostgresServer, Authority], asking: Asking, colour: str, mode: str) -> None:
    """The engine speaks TLS. With `verify-full` it refuses a server whose certificate another authority has signed."""
    server, authority = encrypted
    url = f"postgres://root@127.0.0.1:{server.port}/postgres?sslmode={mode}&application_name={mode}-{colour}"
    asked = asking(url + (f"&sslrootcert={authority.ca}" if mode == "verify-full" else ""), colour)
    value = os.urandom(1 << 20)
    asked(asked.store.set("k", some(value)))
    (entry,) = asked(asked.store.get(["k"]))
    assert entry.value == value
    assert server.ask(
        "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = %s",
        f"{mode}-{colour}",
    ) == [(True,)]
    if mode == "verify-full":
        stranger = asking(url + f"&sslrootcert={Authority().ca}", colour)
        with pytest.raises(EngineError, match="certificate verify failed"):
            stranger(stranger.store.get(["k"]))


@both
def test_more_callers_than_connections(server: PostgresServer, face: Faces, colour: str) -> None:
    """If all connections are in use, further callers wait for one and get no error."""
    asked = face(server.postgres_url + "&max_connections=2", colour, on_engine_error="raise")
    for number in range(3):
        assert asked.herd(60, f"k{number}", lambda: 1) == [1] * 60


@pytest.fixture
def tiny() -> Iterator[Path]:
    """A disk of two megabytes that belongs to `nobody`, the user of the server."""
    made = Path(tempfile.mkdtemp(prefix="stampede-tiny-"))
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tiny", made], check=False).returncode:
        made.rmdir()
        pytest.skip("no file system can be mounted here")
    shutil.chown(made, "nobody", "nogroup")
    made.chmod(0o700)
    yield made
    subprocess.run(["umount", "-l", made], check=False)
    made.rmdir()


@both
def test_a_full_disk_refuses_and_hits_go_on(tiny: Path, face: Faces, colour: str) -> None:
    """A server with a full disk refuses writes, but does not count as down: hits are still served."""
    with closing(PostgresServer()) as server:
        server.prepare()
        server.say(f"CREATE TABLESPACE tiny LOCATION '{tiny}'", "ALTER TABLE stampede.entries SET TABLESPACE tiny")
        asked = face(server.postgres_url, colour)
        assert asked("small", lambda: 1) == 1
        with pytest.raises(EngineError, match="disk is full") as full:
            asked.run("set_many", {f"large {number}": os.urandom(500_000) for number in range(8)})
        assert full.value.refused
        assert asked("small", lambda: 2) == 1
        assert asked("large", lambda: b"x" * 3_000_000) == b"x" * 3_000_000  # the value is returned, but not stored
        asked.close()
