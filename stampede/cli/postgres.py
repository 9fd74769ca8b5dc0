"""`stampede postgres init`: the tables and functions that a database needs."""

from __future__ import annotations

import sys
from argparse import Namespace
from getpass import getpass
from typing import Any

from psycopg import Connection, Error, OperationalError
from psycopg.errors import InsufficientPrivilege, UndefinedObject

from stampede.cli.address import addresses, url_of_locks
from stampede.cli.show import say
from stampede.engines import check_url, safe_url
from stampede.engines.postgres.connect import PostgresConnector, of_url
from stampede.engines.postgres.schema import grants, make, statements
from stampede.errors import EngineError, OptionError

__all__ = ["init"]


def init(options: Namespace) -> int:
    """Make what is missing, and print what was there; or print the SQL, for migrations by hand."""
    role = options.grant
    if options.sql:
        say(statements(durable=options.durable).rstrip("\n"))
        if role is not None:
            say("\n" + grants(role))
        return 0
    (url,) = addresses(options, url_of_locks)
    check_url(url)
    if not url.startswith("postgres"):
        raise OptionError(
            f"{safe_url(url)} is not on Postgres: give postgres://user@host/database, or a cache that is on Postgres"
        )
    server = of_url(url, {})
    try:
        with _connection(server) as connection:
            say(f"{server.name}: {make(connection, durable=options.durable)}")
            if role is not None:
                connection.execute(grants(role).encode())
                say(f"{server.name}: {role} has the rights that a program needs, and no more")
    except EngineError as error:
        raise EngineError(f"{server.name}: {error}") from error
    except Error as error:
        raise EngineError(f"{server.name}: {str(error).strip()}{_advice(error, role)}") from error
    return 0


def _connection(server: PostgresConnector) -> Connection[Any]:
    try:
        return server.unchecked()
    except OperationalError as error:
        if "no password supplied" not in str(error) or not sys.stdin.isatty():
            raise
        return server.unchecked(password=getpass("password: "))


def _advice(error: Error, role: str | None) -> str:
    if isinstance(error, InsufficientPrivilege):
        return ": run it as a role that may create a schema here, or let such a role run what --sql prints"
    if isinstance(error, UndefinedObject) and role is not None:
        return f": CREATE ROLE it first, or give --grant an existing role. Its name has to be spelled exactly: {role!r}"
    if "no password supplied" in str(error):
        return ": set PGPASSWORD, or use ~/.pgpass"
    return ""
