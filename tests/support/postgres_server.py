"""Real PostgreSQL servers and poolers for the tests: on free loopback ports, ended by their pids."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4

import marks
import psycopg
from disk_world import Script
from psycopg import sql
from server_process import PATIENCE, ServerProcess, freeze, states
from servers import in_memory, missing, to_empty, wait_until

from stampede.engines.postgres import connect
from stampede.engines.postgres.schema import make, statements

__all__ = ["MovedClock", "PgBouncer", "PostgresServer", "prepared_postgres", "process", "shared_postgres"]


_connector = connect._server
connect._server = lambda name, given: _connector(name, {"timeout": PATIENCE, **given})
"""Engines wait for long unless their test gives a `timeout`: a new backend needs much time beside other work."""


def _program(name: str) -> str:
    """The path of a program. Debian installs each version in a directory of its own, which is not on PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: float(place.parent.name))
    path = [*map(str, reversed(places)), os.environ.get("PATH", ""), "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(path))
    if found is None:
        missing(f"{name} is not installed")
    return found


def _nobody() -> list[str]:
    """The prefix for a command that refuses to run as root."""
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []


def _directory(kind: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix=f"stampede-{kind}-", dir=in_memory()))
    if os.geteuid() == 0:
        shutil.chown(made, "nobody", "nogroup")
    return made


def _run(*command: str) -> None:
    subprocess.run([*_nobody(), *command], check=True, capture_output=True, cwd="/")


@cache
def _new_data() -> Path:
    """The initial data of each server. Creating it takes ten times as long as copying it."""
    made = _directory("initdb")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _run(
        _program("initdb"), "--no-sync", "--no-instructions", "--auth=trust", "--username=root",
        "--encoding=UTF8", "--locale=C", "--wal-segsize=1", f"--pgdata={made}/data",
    )  # fmt: skip
    return made / "data"


def _url(port: int, user: str, database: str) -> str:
    return f"postgres://{user}@127.0.0.1:{port}/{database}?sslmode=disable"


def _met(port: int, database: str = "postgres") -> psycopg.Connection[Any]:
    # The application name marks connections of this file: tests count and end only the others.
    where = f"host=127.0.0.1 port={port} user=root dbname={database} sslmode=disable application_name=stampede-tests"
    return psycopg.connect(where, autocommit=True, prepare_threshold=None)


def _is_there(port: int) -> bool:
    try:
        _met(port).close()
    except psycopg.OperationalError as trouble:
        raise ConnectionError from trouble
    return True


class PostgresServer(ServerProcess):
    """One server with these settings. It needs no password, and ends at the latest when the tests end."""

    kind = "postgres"

    def __init__(self, *settings: str) -> None:
        self._settings = settings
        self._directory = _directory("postgres")
        self._make()
        super().__init__()

    def _make(self) -> None:
        _run("cp", "-R", str(_new_data()), f"{self._directory}/data")

    @property
    def url(self) -> str:
        """The URL for the engine of any SQL database."""
        return f"sql+postgresql+psycopg://root@127.0.0.1:{self.port}/postgres?sslmode=disable"

    @property
    def postgres_url(self) -> str:
        return self.url_of()

    def url_of(self, *, user: str = "root", database: str = "postgres") -> str:
        return _url(self.port, user, database)

    def command(self, port: int) -> list[str]:
        settings = [
            "listen_addresses=127.0.0.1", f"port={port}", "unix_socket_directories=", "max_connections=300",
            "shared_buffers=16MB", "dynamic_shared_memory_type=mmap",
            "fsync=off",  # data survives the server, but not a crash of the machine
            *self._settings,
        ]  # fmt: skip
        given = [word for each in settings for word in ("-c", each)]
        return [*_nobody(), _program("postgres"), "-D", f"{self._directory}/data", *given]

    def _answers(self, port: int) -> bool:
        return _is_there(port)

    # -- commands and questions of the tests --------------------------------------------------------------------------

    def say(self, *commands: str, database: str = "postgres") -> None:
        """Execute the commands on a new connection."""
        with _met(self.port, database) as line:
            for each in commands:
                line.execute(each.encode())

    def ask(self, question: str, *values: object, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a query on a new connection, and return its rows."""
        with _met(self.port, database) as line:
            return line.execute(question.encode(), values or None).fetchall()

    def prepare(self, *, durable: bool = False, database: str = "postgres") -> None:
        """Create the tables of the engine if they are missing, and empty them."""
        with self._line(database) as line:
            if line.execute("SELECT to_regnamespace('stampede') IS NULL").fetchall() == [(True,)]:
                make(line, durable=durable)
            _empty(line)

    def empty(self, *, database: str = "postgres") -> None:
        """Delete all rows of the engine. Listeners stay connected and still hear of changes."""
        with self._line(database) as line:
            _empty(line)

    @contextmanager
    def _line(self, database: str) -> Iterator[psycopg.Connection[Any]]:
        with _met(self.port, database) as line:
            yield line

    def backends(self, application: str) -> list[int]:
        """The server processes of connections with this `application_name`, which may be a pattern with %."""
        found = self.ask("SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s ORDER BY 1", application)
        return [pid for (pid,) in found]

    def terminate(self, application: str = "%", *, database: str = "postgres") -> int:
        """End these connections as an administrator would. Wait until they are gone, and return their number."""
        return self._terminate("application_name LIKE %s AND datname = %s", application, database)

    def _terminate(self, which: str, *values: str) -> int:
        # pg_terminate_backend with a time-out would check only ten times a second.
        theirs = f"FROM pg_stat_activity WHERE application_name <> 'stampede-tests' AND {which}"
        found = self.ask(f"SELECT pid, pg_terminate_backend(pid) {theirs}", *values)
        pids = [pid for pid, _ in found]
        wait_until(lambda: not self.ask("SELECT FROM pg_stat_activity WHERE pid = ANY(%s)", pids))
        return len(pids)

    def set(self, **settings: object) -> None:
        """Change settings, also for open connections, unless they need a restart. None resets a setting."""
        if None in settings.values():
            self._say_all("ALTER SYSTEM RESET {}", {name: () for name, value in settings.items() if value is None})
        self._say_all("ALTER SYSTEM SET {} = {}", {k: (str(v),) for k, v in settings.items() if v is not None})
        self._reload()

    def _say_all(self, command: str, of: dict[str, tuple[str, ...]]) -> None:
        with _met(self.port) as line:
            for name, values in of.items():
                line.execute(sql.SQL(command).format(sql.Identifier(name), *map(sql.Literal, values)))

    def _reload(self) -> None:
        ((before,),) = self.ask("SELECT pg_conf_load_time()")
        self.say("SELECT pg_reload_conf()")
        wait_until(lambda: self.ask("SELECT pg_conf_load_time()")[0][0] > before)

    @contextmanager
    def role(self, *grants: str, **settings: object) -> Iterator[str]:
        """The name of a new role with only these rights: `role("USAGE ON SCHEMA stampede", lock_timeout="1s")`."""
        name = f"role_{uuid4().hex[:12]}"
        self.say(
            f"CREATE ROLE {name} LOGIN",
            *(f"GRANT {each} TO {name}" for each in grants),
            *(f"ALTER ROLE {name} SET {each} = '{value}'" for each, value in settings.items()),
        )
        try:
            yield name
        finally:
            self._terminate("usename = %s", name)
            self.say(f"DROP OWNED BY {name}", f"DROP ROLE {name}")

    @contextmanager
    def database(self, **settings: object) -> Iterator[str]:
        """The name of a new database with these settings: `database(default_transaction_isolation="serializable")`."""
        name = f"database_{uuid4().hex[:12]}"
        self.say(
            f"CREATE DATABASE {name} TEMPLATE template0",
            *(f"ALTER DATABASE {name} SET {each} = '{value}'" for each, value in settings.items()),
        )
        try:
            yield name
        finally:
            self.say(f"DROP DATABASE {name} WITH (FORCE)")

    def replica(self, *settings: str) -> Replica:
        """A replica of this server. It is read-only until it is promoted."""
        return Replica(self, *settings)

    # -- each connection has a process of its own ----------------------------------------------------------------------

    def stop(self) -> None:
        """Send SIGKILL to all processes, and wait until they have ended: a new server refuses to start before. Clients
        see their connections close."""
        if self._process is not None and self._process.poll() is None:
            freeze(self.pid)  # it forks no more
        theirs = self._children() if self._process is not None else []
        super().stop()
        for pid in theirs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(states(pid) - {"Z", "X"} for pid in theirs))

    def shut_down(self) -> None:
        """Shut down as an administrator would: clients are told, and unlogged tables survive."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE)
        self._process = None

    def freeze(self) -> None:
        super().freeze()
        for pid in self._children():
            with suppress(ProcessLookupError):
                freeze(pid)

    def thaw(self) -> None:
        for pid in [self.pid, *self._children()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _children(self) -> list[int]:
        with suppress(FileNotFoundError):
            return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def close(self) -> None:
        if self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGQUIT)  # immediate shutdown, which leaves no shared memory
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Replica(PostgresServer):
    """A server that replicates another one by streaming."""

    def __init__(self, of: PostgresServer, *settings: str) -> None:
        self._of = of
        super().__init__("wal_retrieve_retry_interval=20ms", *settings)  # a promotion waits for this interval

    def _make(self) -> None:
        _run(
            _program("pg_basebackup"), "--no-sync", "--checkpoint=fast", "--wal-method=stream", "--write-recovery-conf",
            f"--pgdata={self._directory}/data", f"--dbname={self._of.postgres_url}",
        )  # fmt: skip

    def catch_up(self) -> None:
        """Wait until the replica has everything that the primary has committed until now."""
        ((there,),) = self._of.ask("SELECT pg_current_wal_lsn()::text")
        wait_until(lambda: self.ask("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", there) == [(True,)])

    def promote(self) -> None:
        """Make the replica an independent server, and wait until it accepts writes."""
        assert self.ask("SELECT pg_promote(true, %s)", int(PATIENCE)) == [(True,)], "it stays what it was"


class MovedClock:
    """A database whose clock can be set to any offset."""

    MOVED = """
        CREATE TABLE moved (seconds float8);
        INSERT INTO moved VALUES (0);
        CREATE OR REPLACE FUNCTION stampede.clock() RETURNS float8 LANGUAGE sql VOLATILE AS $$
            SELECT date_part('epoch', clock_timestamp()) + seconds FROM public.moved
        $$
    """

    def __init__(self, server: PostgresServer, database: str) -> None:
        self._server, self._database = server, database
        self.url = server.url_of(database=database)
        server.say(statements(), self.MOVED, database=database)

    def step(self, seconds: float) -> None:
        self._server.say(f"UPDATE moved SET seconds = {seconds!r}", database=self._database)


_WRITTEN = """
SELECT oid::regclass::text, pg_relation_size(oid) > 65536
FROM (
    SELECT oid FROM pg_class WHERE
        relkind = 'r' AND relnamespace = (SELECT to_regnamespace('stampede')) AND relname <> 'keepers'
        OR oid = (SELECT to_regclass('public.stampede'))
    OFFSET 0  -- or the sizes of all tables there are would be asked for
) AS tables
WHERE pg_relation_size(oid) > 0
ORDER BY oid
"""
"""Selects the tables of the engine that have data, and whether each is large."""


def _empty(line: psycopg.Connection[Any]) -> None:
    """Empty the tables. For a small table, DELETE takes a tenth of the time of TRUNCATE."""
    line.prepare_threshold = 1000  # None would not prepare the next statement
    tables = line.execute(_WRITTEN, prepare=True).fetchall()
    if tables:
        words = ["SET LOCAL lock_timeout = '10s'"]  # fail if a test left a transaction open
        words += [f"TRUNCATE {name}" if large else f"DELETE FROM {name}" for name, large in tables]
        line.execute("; ".join(words).encode())


class PgBouncer(ServerProcess):
    """A pgbouncer with a common configuration in front of a server: `PgBouncer(server, "default_pool_size=1")`."""

    kind = "postgres"

    def __init__(self, server: PostgresServer, *settings: str) -> None:
        self._server = server
        self._settings = settings
        self._directory = _directory("pgbouncer")
        (self._directory / "users").write_text('"root" ""\n')
        super().__init__()

    def url_of(self, *, user: str = "root", database: str = "postgres") -> str:
        return _url(self.port, user, database)

    @property
    def postgres_url(self) -> str:
        return self.url_of()

    def command(self, port: int) -> list[str]:
        settings = [
            "listen_addr = 127.0.0.1", f"listen_port = {port}", "unix_socket_dir =", "pool_mode = transaction",
            "auth_type = trust", f"auth_file = {self._directory}/users", "auth_user = root", "admin_users = root",
            "max_client_conn = 1000",
            "server_login_retry = 0.1",  # by default, it refuses clients for 15 s after an outage
            *self._settings,
        ]  # fmt: skip
        where = f"[databases]\n* = host=127.0.0.1 port={self._server.port}\n[pgbouncer]\n"
        file = self._directory / "pgbouncer.ini"
        file.write_text(where + "\n".join(settings) + "\n")
        return [*_nobody(), _program("pgbouncer"), "--quiet", str(file)]

    def _answers(self, port: int) -> bool:
        return _is_there(port)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Shared(PostgresServer):
    """A server that keeps one connection to empty its tables: hundreds of tests do that, and connecting is slower."""

    _kept: psycopg.Connection[Any] | None = None

    @contextmanager
    def _line(self, database: str) -> Iterator[psycopg.Connection[Any]]:
        if database != "postgres":
            with super()._line(database) as line:
                yield line
            return
        line = self._kept or _met(self.port)
        self._kept = None
        try:
            line.execute("")
        except psycopg.OperationalError:  # the server closed it, or was restarted
            line.close()
            line = _met(self.port)
        try:
            yield line
        except BaseException:
            line.close()
            raise
        self._kept = line

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        super().close()


def shared_postgres() -> PostgresServer:
    """The server that the tests of a session share."""
    marks.starts("postgres")
    server = _postgres()
    to_empty["postgres"] = server.empty
    return server


def prepared_postgres() -> PostgresServer:
    """The shared server, with the tables of the engine."""
    server = shared_postgres()
    server.prepare()
    return server


_postgres = cache(_Shared)


PROGRAM = """
import os, sys, time
from stampede import Cache
cache, end = Cache(sys.argv[1]), time.monotonic() + 10
cache.get("another")
while not cache.engine._all.news.listens and time.monotonic() < end:
    time.sleep(0.005)
"""
"""The program waits until its process listens: a lease granted before that does not end with the process."""


@contextmanager
def process(url: str, code: str) -> Iterator[Script]:
    """Run code in another process that has a `cache`. The code prints "there" when it is ready."""
    with Script(PROGRAM + dedent(code), url) as other:
        assert other.stdout.readline() == "there\n"
        yield other
