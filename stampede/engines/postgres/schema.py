"""The tables and functions that a database needs: made by one command, of one version."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from psycopg import Connection

from stampede.errors import EngineError

__all__ = ["VERSION", "check_version", "grants", "make", "statements"]

VERSION = 5


def _text(name: str) -> str:
    return (files(__package__) / name).read_text()


_ONE = 8319104481669375078  # the lock of who makes it, or another version of it


def statements(*, durable: bool = False) -> str:
    """All of it, for who migrates by hand. With `durable`, nothing is lost in a crash, and every change is logged."""
    tables, *functions = map(_text, ("tables.sql", "values.sql", "locks.sql", "limits.sql"))
    return "\n".join([re.sub(r"\bUNLOGGED (?=TABLE)", "", tables) if durable else tables, *functions])


def grants(role: str) -> str:
    """The rights that a program's role needs, and no more; said again after each new version."""
    name = '"' + role.replace('"', '""') + '"'
    return "\n".join(f"GRANT {right} TO {name};" for right in _RIGHTS)


_RIGHTS = (
    "USAGE ON SCHEMA stampede",
    "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA stampede",
    "USAGE ON ALL SEQUENCES IN SCHEMA stampede",
    "EXECUTE ON ALL FUNCTIONS IN SCHEMA stampede",
)


def make(connection: Connection[Any], *, durable: bool = False) -> str:
    """Make it, or what is missing of it, in one transaction; says what was done. The connection is in autocommit.

    With `durable`, tables that were unlogged are logged from now on; without it they stay as they are.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")  # or who had to wait sees nothing new
        connection.execute(f"SELECT pg_advisory_xact_lock({_ONE})".encode())
        made, version = _there(connection)
        if version is None:
            text = statements(durable=durable)
            # Who may not make schemas may have been given this one.
            connection.execute((re.sub(r"CREATE SCHEMA [^;]*;", "", text, count=1) if made else text).encode())
            return f"made version {VERSION}{', durable' if durable else ''}"
        if version > VERSION:
            raise EngineError(f"it {_NEWER.format(version, VERSION)}")
        if version < VERSION:
            raise EngineError(
                f"no way leads from version {version} to {VERSION}: DROP SCHEMA stampede CASCADE, with all that is "
                "stored in it (locks that are held and the record, too), and make it anew"
            )
        done = f"version {version} was there already"
        if durable and (unlogged := _unlogged(connection)):
            for name in unlogged:
                connection.execute(f"ALTER TABLE stampede.{name} SET LOGGED".encode())
            done += "; durable from now on"
        return done


def _there(connection: Connection[Any]) -> tuple[bool, int | None]:
    """Is there such a schema, and which version is in it?"""
    ((made, versioned),) = connection.execute(_THERE).fetchall()
    if not versioned:
        return made, None
    ((version,),) = connection.execute(b"SELECT stampede.version()").fetchall()
    return made, version


_THERE = b"""SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'stampede'),
    EXISTS (SELECT FROM pg_proc JOIN pg_namespace AS its ON its.oid = pronamespace
            WHERE nspname = 'stampede' AND proname = 'version')"""


def _unlogged(connection: Connection[Any]) -> list[str]:
    """The tables that are, and would not be if it was durable."""
    found = {name for (name,) in connection.execute(_UNLOGGED).fetchall()}
    return [name for name in re.findall(r"\bUNLOGGED TABLE stampede\.(\w+)", statements()) if name in found]


_UNLOGGED = b"""SELECT relname FROM pg_class JOIN pg_namespace AS its ON its.oid = relnamespace
    WHERE nspname = 'stampede' AND relkind = 'r' AND relpersistence = 'u'"""


_NEWER = "has the tables of a newer release (version {}; this one's is {}): install that release here, too"


def check_version(version: int | None, server: str, init: str) -> None:
    """EngineError, with what is to be done, unless it is ours. `init` is the command that makes it."""
    if version == VERSION:
        return
    if version is not None and version > VERSION:
        raise EngineError(f"{server} {_NEWER.format(version, VERSION)}")
    what = "has no tables" if version is None else f"has the tables of an older release (version {version})"
    raise EngineError(
        f"{server} {what} of stampede's: run {init} as one who may "
        "make them (`--grant ROLE` gives a role of a program's own its rights, `--sql` prints what would be done)"
    )
