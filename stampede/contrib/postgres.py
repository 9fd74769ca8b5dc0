"""Locks that end with a transaction of psycopg's: what it has done is seen by the next holder, or it hasn't been done.

with connection.transaction(), Lock("name:bob", on="postgres://...", release_via=on_commit(connection)):
    ...  # nobody else is here until the transaction's commit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from stampede.engines.postgres.locks import lock_id
from stampede.errors import LockLost, OptionError
from stampede.locks.holding import Release

__all__ = ["on_commit"]

_RELEASE = "SELECT stampede.release_at_commit(%s, %s)"

Hook = Callable[[Callable[[], object]], Any]


def on_commit(connection: Connection[Any] | AsyncConnection[Any]) -> Hook:
    """For `release_via`: the release is part of the transaction that is open on this connection.

    It happens with the commit. If the lock has been lost by then, the commit fails (SQLSTATE `LOCKS`), and nothing has
    been done. After a rollback nobody renews the lock, which ends with its lease. Where no transaction is open at the
    end of the block, it is released there. With `async with`, the connection is an `AsyncConnection`.
    SQLAlchemy has psycopg's as `session.connection().connection.driver_connection`, Django as `connection.connection`.

        >>> with connection.transaction():
        ...     with Lock("name:bob", on=url, release_via=on_commit(connection)):
        ...         connection.execute("INSERT INTO users VALUES ('bob')")
    """
    if isinstance(connection, AsyncConnection):
        return lambda release: _suspending(connection, _checked(release))
    if not isinstance(connection, Connection):
        raise OptionError(f"{connection!r} is no connection of psycopg's: give the one whose commit is waited for")
    return lambda release: _blocking(connection, _checked(release))


def _blocking(connection: Connection[Any], release: Release) -> None:
    if connection.info.transaction_status == TransactionStatus.IDLE:
        release()
        return
    with Cursor(connection, row_factory=tuple_row) as cursor:
        _told(release, cursor.execute(_RELEASE, (lock_id(release.name), release.token)).fetchone())


async def _suspending(connection: AsyncConnection[Any], release: Release) -> None:
    if connection.info.transaction_status == TransactionStatus.IDLE:
        release()
        return
    async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(_RELEASE, (lock_id(release.name), release.token))
        _told(release, await cursor.fetchone())


def _told(release: Release, row: Any) -> None:
    if row != (True,):
        raise LockLost(
            f"the lock {release.name!r} isn't held in this connection's database: it was lost, or is another's"
        )


def _checked(release: Callable[[], object]) -> Release:
    if not isinstance(release, Release):
        raise OptionError("on_commit is for the release_via of a lock")
    return release
