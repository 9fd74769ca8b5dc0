"""How connections are made: the address of a server, its options, and what the first connections found out about it."""

from __future__ import annotations

import select
import shlex
import time
from collections.abc import Callable, Mapping
from inspect import getattr_static
from math import ceil, inf
from typing import Any

from psycopg import AsyncConnection, Connection, Error, OperationalError, RawCursor
from psycopg.conninfo import make_conninfo
from psycopg.errors import InvalidSchemaName, UndefinedFunction
from psycopg.pq import ConnStatus, PGconn, PollingStatus

from stampede.engines.kit.hang_detector import NOT_TO_OTHERS, HangDetector
from stampede.engines.kit.hang_up import HangUp
from stampede.engines.kit.replies import MORE
from stampede.engines.kit.url import safe_url
from stampede.engines.postgres import address
from stampede.engines.postgres.schema import check_version
from stampede.engines.postgres.talk import Command, Row, Talk, encoded
from stampede.errors import EngineClosed, OptionError

__all__ = ["LOOK", "READ", "WRITE", "PostgresConnector", "of_pool", "of_url", "until_ready"]

LOOK = 0.05  # seconds between two checks whether a wait still makes sense

READ, WRITE = select.POLLIN, select.POLLIN | select.POLLOUT

BACKEND = """SELECT pid, date_part('epoch', backend_start), (
        SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout' AND pid = $1)
    FROM pg_stat_get_activity(pg_backend_pid())"""
"""The backend's pid and start. If it is the one that was connected to, it is never ended for being idle."""

MISSING = InvalidSchemaName, UndefinedFunction

IDENTIFY = """SELECT pg_backend_pid(), stampede.version(),
    CASE WHEN pg_backend_pid() = $1 THEN set_config('default_transaction_isolation', 'read committed', false) END,
    (SELECT set_config(name, '{0:.0f}', false) FROM pg_settings
     WHERE name = 'lock_timeout' AND pg_backend_pid() = $1 AND NOT setting::bigint BETWEEN 1 AND {0:.0f})"""
"""The backend's pid, and the version of the tables. If it is the backend that was connected to, and not one behind a
pooler, its session has these settings from now on: a statement that waits for a row lock sees what was committed
meanwhile (read committed), and gives up no later than its caller does."""


class PostgresConnector:
    """Makes connections to one database. They are in autocommit: each question is a transaction. A question takes at
    most `timeout` seconds. `listen` is the address of the server itself, if the other address is a pooler's. With
    `bound`, a lease ends with the connection on which its holder's process listens. About `entries` entries and
    `max_bytes` bytes of values are kept; without these limits, all that have not expired. The record of locks covers
    `history` seconds, and at most `history_rows` rows."""

    closed = False
    pooled = False
    """Whether the address is a pooler's, which runs each transaction on any of its connections. The first connection
    finds it out."""

    def __init__(
        self,
        name: str,
        conninfo: Mapping[str, Any],
        *,
        timeout: float = 3.0,
        max_connections: int = 16,
        listen: str | None = None,
        bound: bool = True,
        entries: float = inf,
        max_bytes: float = inf,
        history: float = 30 * 86_400.0,
        history_rows: int = 100_000,
    ) -> None:
        if not timeout or min(max_connections, entries, max_bytes, history_rows) < 1:
            raise OptionError(
                f"{name}: timeout, max_connections, entries, max_bytes and history_rows must be greater than 0"
            )
        self.history = None if history == inf else history, history_rows
        self.entries, self.max_bytes = entries, max_bytes
        self.name, self.timeout, self.max_connections, self.bound = name, timeout, max_connections, bound
        self.patience: float | None = timeout
        self.hang_up = HangUp(timeout)
        self.hang_detector = HangDetector()
        self._identify = IDENTIFY.format(max(450 * timeout, 1))  # below half of it: a refused question is repeated
        defaults = {"connect_timeout": ceil(timeout), "application_name": "stampede"}
        ours = {"client_encoding": "UTF8"}
        self._conninfo: dict[str, Any] = defaults | dict(conninfo) | ours
        direct = None if listen is None else address.checked(address.read(listen), f"{name}: the address to listen at")
        self._direct = None if direct is None else defaults | direct | ours
        self.init = f"`stampede postgres init {shlex.quote(address.without_secrets(direct or conninfo))}`"
        """The command that creates the tables, for error messages."""

    def check(self) -> None:
        """Raise EngineClosed if `close` was called."""
        if self.closed:
            raise EngineClosed(self.name)

    def close(self) -> None:
        """Make no more connections from now on."""
        self.closed = True

    def connection(self) -> Talk:
        """Return a new connection. This blocks. Raise EngineError if the tables are missing or of another release."""
        self.check()
        made = self._connect(self._conninfo)
        try:
            first = Talk(made, pooled=True)  # it may be: that is not known yet
            own = made.info.backend_pid
            ((pid, version, *_),) = query(first, (self._identify, (own,)), self.timeout)
            self.hang_detector.heard = time.monotonic()
            check_version(version, self.name, self.init)
            self.pooled = pid != own  # a pooler invents a pid for each of its clients
            made._pool = None  # as with connections of a pool: no ResourceWarning if the program ends without `close`
            return Talk(made, pooled=self.pooled)
        except BaseException as error:
            made.close()
            if isinstance(error, MISSING):
                check_version(None, self.name, self.init)
            raise

    def _connect(self, conninfo: Mapping[str, Any]) -> Connection[Row]:
        began = time.monotonic()

        def look() -> None:
            if self.hang_detector.hangs(began):
                raise TimeoutError(NOT_TO_OTHERS)

        try:
            return connect(conninfo, self.timeout, look)
        except TimeoutError:
            self.hang_detector.ends(began, self.timeout)
            raise

    @property
    def direct(self) -> dict[str, Any]:
        """The options of a connection to the server itself, or to the only address that is known."""
        return self._direct or self._conninfo

    def listening(self) -> Connection[Row] | None:
        """Return a new connection to the server itself, for notifications. None: there is a pooler in between. The
        server never ends it for being idle: other processes take this process for dead when it ends."""
        self.check()
        made = self._connect(self.direct)
        try:
            with self.hang_up.asking(made):
                own = made.info.backend_pid
                pid, when, _ = made.execute(BACKEND, (own,), binary=True).fetchone() or (0, 0.0, "")
                self.hang_detector.heard = time.monotonic()
                if pid == own:
                    self._check_same(pid, when)
                    return made
        except BaseException:
            made.close()
            raise
        made.close()
        return None

    def deaf(self) -> str | None:
        """Try now, and return why no notifications can be received: an error, or "" for a pooler. None: they can."""
        try:
            made = self.listening()
        except (Error, OSError) as error:
            return " ".join(str(error).split())
        if made is not None:
            made.close()
        return "" if made is None else None

    def _check_same(self, pid: int, started: float) -> None:
        """Raise OperationalError unless the server that stores the keys knows this backend. Otherwise it would take
        this process for dead, and grant its leases to others."""
        if self._direct is None:
            return
        asked = self.connection()
        try:
            ((lives,),) = query(asked, ("SELECT stampede.lives($1, $2)", (pid, started)), self.timeout)
        finally:
            asked.connection.close()
        if not lives:
            raise OperationalError("listen= is the address of another server than the rest of the URL")

    def unchecked(self, **also: str) -> Connection[Any]:
        """Return a new connection to the server itself, which needs no tables there."""
        return Connection.connect(**(self.direct | also), autocommit=True, prepare_threshold=None)


def of_url(url: str, options: Mapping[str, Any]) -> PostgresConnector:
    """Return the connector of `postgres://user:password@host:5432/database?sslmode=require`, also in SQLAlchemy's
    spelling."""
    return _server(safe_url(url), address.read(url) | dict(options))


def of_pool(pool: Any, options: Mapping[str, Any]) -> PostgresConnector:
    """Return the connector of the database of a psycopg pool, of either colour. The pool is only a recipe: none of its
    connections is used, and it need not be open. Its `configure` is not called."""
    conninfo, kwargs = getattr(pool, "conninfo", None), getattr(pool, "kwargs", None)
    if not isinstance(conninfo, str) or not isinstance(kwargs, Mapping | None):
        raise OptionError(
            f"a cache can't be on {pool!r}, which calls a function to learn its address: give a pool with a string as "
            "its conninfo and a dict as its kwargs, or a URL"
        )
    if getattr_static(getattr(pool, "connection_class", None), "connect", None) not in _CONNECTS:
        raise OptionError(f"a cache can't be on {pool!r}: its connection_class connects in its own way: give a URL")
    theirs = {name: value for name, value in (kwargs or {}).items() if name not in _PSYCOPGS}
    given = address.read(conninfo) | theirs
    return _server(
        address.written({name: given.get(name) for name in ("user", "host", "port", "dbname")}), given | dict(options)
    )


_CONNECTS = [getattr_static(each, "connect") for each in (Connection, AsyncConnection)]
_PSYCOPGS = {"autocommit", "context", "cursor_factory", "prepare_threshold", "row_factory"}


def _server(name: str, given: Mapping[str, Any]) -> PostgresConnector:
    ours = {each: kind(each, given[each]) for each, kind in address.OURS.items() if each in given}
    theirs = {each: value for each, value in given.items() if each not in address.OURS}
    return PostgresConnector(name, address.checked(theirs, name), **ours)


# -- waiting ------------------------------------------------------------------------------------------------------


def until_ready(poll: select.poll, seconds: float, look: Callable[[], object]) -> bool:
    """Wait until a connection is ready. False: it was not within `seconds`. `look` is called every LOOK seconds, and
    raises to end the wait."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        look()
        if poll.poll(1000 * min(left, LOOK)):
            return True
    return bool(poll.poll(0))


def connect(conninfo: Mapping[str, Any], seconds: float, look: Callable[[], object]) -> Connection[Row]:
    """Return a blocking connection in autocommit that prepares no statements by itself. Raise TimeoutError after
    `seconds`: libpq's own limit is at least 2 seconds. With several hosts, psycopg gives each its time."""
    if any("," in str(conninfo.get(each) or "") for each in ("host", "hostaddr")):
        return Connection.connect(**conninfo, autocommit=True, prepare_threshold=None, cursor_factory=RawCursor)
    end = time.monotonic() + seconds
    pg = PGconn.connect_start(make_conninfo("", **conninfo).encode())
    while pg.status != ConnStatus.BAD:
        status = pg.connect_poll()
        if status == PollingStatus.OK:
            pg.nonblocking = 1
            made: Connection[Row] = Connection(pg)
            made.autocommit, made.prepare_threshold, made.cursor_factory = True, None, RawCursor
            return made
        if status == PollingStatus.FAILED:
            break
        poll = select.poll()  # anew each time: libpq may have another socket by now
        poll.register(pg.socket, select.POLLIN if status == PollingStatus.READING else select.POLLOUT)
        if not until_ready(poll, max(end - time.monotonic(), 0.0), look):
            raise TimeoutError(f"no connection within {seconds:g} s")
    raise OperationalError(f"connection failed: {pg.get_error_message()}")


def query(talk: Talk, command: Command, seconds: float) -> list[Row]:
    """Return the rows of a command, sent over a connection that no other caller has yet. Raise TimeoutError."""
    talk.put(encoded(command))
    end, poll, fd = time.monotonic() + seconds, select.poll(), talk.connection.fileno()
    while (answer := talk.gets()) is MORE:
        poll.register(fd, WRITE if talk.flush() else READ)
        if not until_ready(poll, end - time.monotonic(), lambda: None):
            raise TimeoutError(f"no answer for {seconds:g} s")
        talk.feed()
    if isinstance(answer, Exception):
        raise answer
    rows: list[Row] = answer
    return rows
