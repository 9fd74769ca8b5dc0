"""Connections that a lock stands and falls with: what is done on one is done by who has the lock, or not at all."""

from __future__ import annotations

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
        made, server = None, self._server
        server.check()
        try:
            made = Connection.connect(**server.direct, autocommit=True)
            with server.overdue.asking(made):
                (pid,) = made.execute(WHO).fetchone() or (0,)
                self._check(pid, made)
                made.execute(STAY)
                (stands,) = made.execute(BIND, (lock_id(name), token)).fetchone() or (False,)
            made, kept = (None, made) if stands else (made, None)
        except (Error, OSError) as error:
            raise trouble(server, error) from error
        finally:
            if made is not None:
                self.close(made)
        return kept

    async def asession(self, name: str, token: bytes) -> AsyncConnection[Row] | None:
        made, server = None, self._server
        server.check()
        try:
            made = await AsyncConnection.connect(**server.direct, autocommit=True)
            with server.overdue.asking(made):
                (pid,) = await (await made.execute(WHO)).fetchone() or (0,)
                self._check(pid, made)
                await made.execute(STAY)
                (stands,) = await (await made.execute(BIND, (lock_id(name), token))).fetchone() or (False,)
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

    def _check(self, pid: int, made: Connection[Row] | AsyncConnection[Row]) -> None:
        if pid != made.info.backend_pid:
            raise OptionError(f"{self._server.name} is a pooler, which keeps no connection for a lock: give listen=")
