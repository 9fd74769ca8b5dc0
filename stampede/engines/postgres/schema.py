"""The tables and functions that the engine needs in a database. One version number covers all of them."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from psycopg import Connection

from stampede.errors import EngineError

__all__ = ["VERSION", "check_version", "grants", "make", "statements"]

VERSION = 7


def _text(name: str) -> str:
    return (files(__package__) / name).read_text()


_ONE = 8319104481669375078  # the advisory lock of a process that creates the schema


def statements(*, durable: bool = False) -> str:
    """Return all SQL statements, for a migration by hand. With `durable`, nothing is lost in a crash, and every change
    is written to the write-ahead log."""
    tables, *functions = map(_text, ("tables.sql", "values.sql", "locks.sql", "limits.sql"))
    return "\n".join([re.sub(r"\bUNLOGGED (?=TABLE)", "", tables) if durable else tables, *functions])


def grants(role: str) -> str:
    """Return the statements that grant a program's role the rights it needs, and no more. They must be run again after
    each new version."""
    name = '"' + role.replace('"', '""') + '"'
    return "\n".join(f"GRANT {right} TO {name};" for right in _RIGHTS)


_RIGHTS = (
    "USAGE ON SCHEMA stampede",
    "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA stampede",
    "USAGE ON ALL SEQUENCES IN SCHEMA stampede",
    "EXECUTE ON ALL FUNCTIONS IN SCHEMA stampede",
)


def make(connection: Connection[Any], *, durable: bool = False) -> str:
    """Create the schema if it is missing, in one transaction, and return what was done. Raise EngineError if another
    version is there. The connection must be in autocommit. With `durable`, unlogged tables become logged; without it,
    existing tables stay as they are."""
    with connection.transaction():
        # With a snapshot, a process that waits for the lock would not see what the holder has created.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.execute(f"SELECT pg_advisory_xact_lock({_ONE})".encode())
        made, version = _there(connection)
        if version is None:
            text = statements(durable=durable)
            # A role that may not create schemas may have been given an empty one.
            connection.execute((re.sub(r"CREATE SCHEMA [^;]*;", "", text, count=1) if made else text).encode())
            return f"made version {VERSION}{', durable' if durable else ''}"
        if version > VERSION:
            raise EngineError(f"the database {_NEWER.format(version, VERSION)}")
        if version < VERSION:
            raise EngineError(
                f"version {version} cannot be migrated to {VERSION}: run DROP SCHEMA stampede CASCADE, which deletes "
                "all that is stored in it (locks that are held and the record, too), and then this command again"
            )
        done = f"version {version} was there already"
        if durable and (unlogged := _unlogged(connection)):
            for name in unlogged:
                connection.execute(f"ALTER TABLE stampede.{name} SET LOGGED".encode())
            done += "; durable from now on"
        return done


def _there(connection: Connection[Any]) -> tuple[bool, int | None]:
    """Return whether the schema exists, and its version (None: it has no functions)."""
    ((made, versioned),) = connection.execute(_THERE).fetchall()
    if not versioned:
        return made, None
    ((version,),) = connection.execute(b"SELECT stampede.version()").fetchall()
    return made, version


_THERE = b"""SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'stampede'),
    EXISTS (SELECT FROM pg_proc JOIN pg_namespace AS its ON its.oid = pronamespace
            WHERE nspname = 'stampede' AND proname = 'version')"""


def _unlogged(connection: Connection[Any]) -> list[str]:
    """Return the tables that are unlogged now and would be logged in a durable schema."""
    found = {name for (name,) in connection.execute(_UNLOGGED).fetchall()}
    return [name for name in re.findall(r"\bUNLOGGED TABLE stampede\.(\w+)", statements()) if name in found]


_UNLOGGED = b"""SELECT relname FROM pg_class JOIN pg_namespace AS its ON its.oid = relnamespace
    WHERE nspname = 'stampede' AND relkind = 'r' AND relpersistence = 'u'"""


_NEWER = "has the tables of a newer release (version {}; this one's is {}): install that release here, too"


def check_version(version: int | None, server: str, init: str) -> None:
    """Raise EngineError, with what to do, unless this is the version of this release. None: there are no tables. `init`
    is the command that creates the tables."""
    if version == VERSION:
        return
    if version is not None and version > VERSION:
        raise EngineError(f"{server} {_NEWER.format(version, VERSION)}")
    what = "has no tables" if version is None else f"has the tables of an older release (version {version})"
    raise EngineError(
        f"{server} {what} of stampede's: run {init} with a role that may "
        "create them (`--grant ROLE` grants a program's own role its rights, `--sql` prints the statements)"
    )
