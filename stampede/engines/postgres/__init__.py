"""The Postgres engine: values, leases and locks in an ordinary database, decided by functions in that database.

tables.sql   the tables;  values.sql, locks.sql, limits.sql   the functions in the database that decide
schema.py    creates tables and functions, and refuses those of another release
address.py   reads and writes URLs;  connect.py   makes the connections
talk.py      statements and results of one connection, without waiting;  wire.py   names of keys, arguments and rows
verbs.py     Claims and Store, written once over a `PostgresLine`;  locks.py   Locks, likewise, and their record
line.py      sends commands, and maps psycopg's errors;  blocking.py, suspending.py   how each colour sends: with the
             pool and the pipe of the kit
news.py      the connection that receives notifications;  tell.py   sends notifications to other processes
sweep.py     removes expired rows, and entries beyond the limits"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from stampede.engines.kit.feed import MEANS
from stampede.engines.kit.generations import PushedGenerations
from stampede.engines.postgres.blocking import PostgresBlocking
from stampede.engines.postgres.connect import PostgresConnector, of_pool, of_url
from stampede.engines.postgres.limits import PostgresLimits
from stampede.engines.postgres.line import PostgresLine
from stampede.engines.postgres.locks import History, PostgresLocks, PostgresReports
from stampede.engines.postgres.news import Bumps, PostgresNews
from stampede.engines.postgres.suspending import PostgresSuspending
from stampede.engines.postgres.sweep import Sweeper
from stampede.engines.postgres.talk import Command, Row
from stampede.engines.postgres.tell import Teller
from stampede.engines.postgres.verbs import PostgresKeys, slot_of_scope
from stampede.model.ports import Engine, Hears, Side
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING, Colour, run_blocking

__all__ = ["PostgresEngine", "check_url", "from_url", "of_client"]


class PostgresEngine(Engine):
    """Tables of one database, shared by all processes that connect to it. `stampede postgres init` creates them. `url`
    takes every option of libpq in its query; options given here win. Or pass a `pool` of psycopg, of either colour: the
    engine makes connections of its own, in the same way as the pool does, and uses none of the pool's."""

    scheme = "postgres"
    pushes = True
    fair = True
    rooms = True
    looks = changes = True
    coherent = True

    def __init__(self, url: str | None = None, *, pool: Any = None, **options: Any) -> None:
        server = of_pool(pool, options) if url is None else of_url(url, options)
        self.url = server.name
        self.audience = WeakSet[Hears]()
        self._all = all = _All(server, self.audience)
        self.recalls = self.many = all.claims
        self.blocking = _side(all.claims, all.locks, all.line)
        self.suspending = _side(all.aclaims, all.alocks, all.aline)
        self.records = all.history
        self.reports = PostgresReports(all.line)
        self._closing = forks.closing(self, all.close)
        forks.in_child(self._start_again)

    def follow(self) -> None:
        self._all.news.track()

    def close(self) -> None:
        self._closing()

    def ping(self) -> float:
        start = time.perf_counter()
        run_blocking(self._all.line.ask(("SELECT 1", ())))
        return time.perf_counter() - start

    def advice(self) -> Sequence[str]:
        self.ping()  # without a connection it is not known yet whether there is a pooler
        return self._all.advice()

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return {self.url: run_blocking(self._all.facts())}

    def _start_again(self) -> None:
        self._all.start_again()


def _side(keys: Any, locks: Any, line: Any) -> Side:
    limits = PostgresLimits(line)
    return Side(keys, keys, locks, limits, lists=keys, softens=keys, shows=keys, holds=locks, handover=locks)


class _All:
    """The parts of an engine. They have no reference to it, and are closed when the engine is garbage-collected."""

    def __init__(self, server: PostgresConnector, audience: WeakSet[Hears]) -> None:
        self._server = server
        self._audience = audience
        self.news = PostgresNews(server.listening, bound=server.bound)
        self.news.on_refused = self.news.on_deaf = self._untold
        self.news.answered_others = lambda: server.hang_detector.heard
        self.generations = PushedGenerations(Bumps(self.news), slot_of_scope)
        self.line, self.aline = PostgresBlocking(server), PostgresSuspending(server)
        self.news.on_tick = self.aline.close_dead
        self.teller = Teller(self._ask, self.news)
        self.sweeper = Sweeper(self._ask, server.entries, server.max_bytes)
        self.news.on_left = self.sweeper.unbind
        self.history = History(*server.history)
        self.claims, self.aclaims = self._keys(self.line, BLOCKING), self._keys(self.aline, SUSPENDING)
        self.locks, self.alocks = self._names(self.line, BLOCKING), self._names(self.aline, SUSPENDING)

    def _keys(self, line: PostgresLine, colour: Colour) -> PostgresKeys:
        return PostgresKeys(line, self.news, self.teller, self.sweeper, self.generations, colour)

    def _names(self, line: PostgresLine, colour: Colour) -> PostgresLocks:
        return PostgresLocks(line, self.news, self.teller, self.history, self.sweeper, colour)

    def _ask(self, command: Command) -> list[Row]:
        return run_blocking(self.line.ask(command))

    def _untold(self, how: str) -> None:
        for each in list(self._audience):
            each.untold(self._server.name, how)

    async def facts(self) -> dict[str, Any]:
        """Return what an operator wants to know about the database."""
        (row,) = await self.line.ask((FACTS, ()))
        way = {"reached": "through a pooler" if self._server.pooled else "directly"}
        return dict(zip(NAMED, row, strict=True)) | way

    def advice(self) -> list[str]:
        error = self._server.deaf()
        if error is None:
            return []
        return [f"the connection for notifications fails ({error}): {MEANS}" if error else POOLED]

    def close(self) -> None:
        self.teller.close()
        self.sweeper.close()
        self._server.close()  # first: the callers that the next lines wake find it closed
        for part in (self.news, self.line, self.aline):
            part.close()

    def start_again(self) -> None:
        """Start every part anew in a forked child."""
        forks.each(part.start_again for part in (self.line, self.aline, self.news, self.teller, self.generations))


NAMED = (
    "version", "tables", "entries, about", "bytes of entries", "locks held", "record of, about", "connections",
    "at most",
)  # fmt: skip
FACTS = """SELECT current_setting('server_version'),
        'version ' || stampede.version() || CASE relpersistence WHEN 'u' THEN ', unlogged' ELSE ', durable' END,
        pg_stat_get_live_tuples(entries.oid), pg_total_relation_size(entries.oid),
        (SELECT count(*) FROM stampede.held),
        pg_stat_get_live_tuples('stampede.released'::regclass),
        (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
        current_setting('max_connections')::int
    FROM pg_class AS entries WHERE oid = 'stampede.entries'::regclass"""

POOLED = (
    "it is behind a pooler, which passes no notifications on: waiters look ten times a second, a local tier keeps "
    "nothing, and a dead holder's lease ends only by its time. Name the server's own address: listen=postgres://..."
)


def from_url(url: str, **options: Any) -> PostgresEngine:
    """Return an engine for `postgres://user:password@host:5432/database?sslmode=require`, with any options of libpq."""
    return PostgresEngine(url, **options)


def check_url(url: str) -> None:
    """Raise OptionError if the URL is wrong. No connection is made."""
    of_url(url, {}).close()


def of_client(pool: Any) -> PostgresEngine:
    """Return an engine on the database of a psycopg pool, of either colour."""
    return PostgresEngine(pool=pool)
