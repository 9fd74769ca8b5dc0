"""Locks that end with a psycopg transaction: the next holder sees what it has done, or it has done nothing.

with connection.transaction(), Lock("name:bob", on="postgres://...", release_via=on_commit(connection)):
    ...  # no other holder is here before the transaction's commit"""

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
    """Return a hook for `release_via` that makes the release a part of the transaction open on this connection.

    The commit releases the lock. If the lock has been lost by then, the commit fails (SQLSTATE `LOCKS`), and nothing
    has been done. After a rollback the lock is not renewed any more, and ends with its lease. If no transaction is open
    at the end of the block, the lock is released there. With `async with`, the connection is an `AsyncConnection`.
    In SQLAlchemy, psycopg's connection is `session.connection().connection.driver_connection`, in Django
    `connection.connection`.

        >>> with connection.transaction():
        ...     with Lock("name:bob", on=url, release_via=on_commit(connection)):
        ...         connection.execute("INSERT INTO users VALUES ('bob')")
    """
    if isinstance(connection, AsyncConnection):
        return lambda release: _suspending(connection, _checked(release))
    if not isinstance(connection, Connection):
        raise OptionError(f"{connection!r} is not a psycopg connection: give the one whose commit releases the lock")
    return lambda release: _blocking(connection, _checked(release))


def _blocking(connection: Connection[Any], release: Release) -> None:
    if connection.info.transaction_status == TransactionStatus.IDLE:
        release()
        return
    with Cursor(connection, row_factory=tuple_row) as cursor:
        _check(release, cursor.execute(_RELEASE, (lock_id(release.name), release.token)).fetchone())


async def _suspending(connection: AsyncConnection[Any], release: Release) -> None:
    if connection.info.transaction_status == TransactionStatus.IDLE:
        release()
        return
    async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(_RELEASE, (lock_id(release.name), release.token))
        _check(release, await cursor.fetchone())


def _check(release: Release, row: Any) -> None:
    if row != (True,):
        raise LockLost(
            f"the lock {release.name!r} isn't held in this connection's database: it was lost, or is in another one"
        )


def _checked(release: Callable[[], object]) -> Release:
    if not isinstance(release, Release):
        raise OptionError("on_commit works only as the release_via of a lock")
    return release
