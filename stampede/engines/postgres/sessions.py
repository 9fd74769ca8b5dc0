"""Connections that a lock stands and falls with: what is done on one is done by who has the lock, or not at all."""

from __future__ import annotations

from inspect import isawaitable
from typing import Any

from psycopg import AsyncConnection, Connection, Error

from stampede.colour import run_blocking
from stampede.engines.postgres.connect import STAY, Server
from stampede.engines.postgres.line import trouble
from stampede.engines.postgres.locks import lock_id
from stampede.engines.postgres.talk import Row
from stampede.errors import OptionError
from stampede.ports import Sessions

__all__ = ["PostgresSessions"]

WHO = "SELECT pg_backend_pid()"
BIND = "SELECT stampede.bind(%s, %s)"


class PostgresSessions(Sessions):
    """Each is a new connection to the server itself, in autocommit, with psycopg's own cursors."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def session(self, name: str, token: bytes) -> Connection[Row] | None:
        made: Connection[Row] | None = run_blocking(self._bound(Connection, name, token))
        return made

    async def asession(self, name: str, token: bytes) -> AsyncConnection[Row] | None:
        made: AsyncConnection[Row] | None = await self._bound(AsyncConnection, name, token)
        return made

    async def _bound(self, kind: Any, name: str, token: bytes) -> Any:
        """A connection of this kind, if the lock stands."""
        made, server = None, self._server
        server.check()
        try:
            made = await _awaited(kind.connect(**server.direct, autocommit=True))
            with server.overdue.asking(made):
                (pid,) = await _row(made, WHO)
                if pid != made.info.backend_pid:
                    raise OptionError(f"{server.name} is a pooler, which keeps no connection for a lock: give listen=")
                await _awaited(made.execute(STAY))
                (stands,) = await _row(made, BIND, (lock_id(name), token))
            made, kept = (None, made) if stands else (made, None)
        except (Error, OSError) as error:
            raise trouble(server, error) from error
        finally:
            if made is not None:
                self.close(made)
        return kept

    def close(self, session: Connection[Row] | AsyncConnection[Row]) -> None:
        closing = session.close()
        if closing is not None:
            run_blocking(closing)


async def _awaited(found: Any) -> Any:
    """What a connection of either colour has done."""
    return await found if isawaitable(found) else found


async def _row(connection: Any, *asked: Any) -> Any:
    return await _awaited((await _awaited(connection.execute(*asked))).fetchone()) or (0,)
