"""The blocking side: each question on a connection of the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

from psycopg import Connection, Error

from stampede import forks
from stampede.engines.kit.pool import Pool
from stampede.engines.kit.replies import ODD
from stampede.engines.kit.transport import disown_number
from stampede.engines.kit.vigil import NOT_TO_OTHERS, Vigil
from stampede.engines.postgres.connect import Server
from stampede.engines.postgres.drive import Ready, drive
from stampede.engines.postgres.line import Broken, Hung, ServerLine, is_refusal
from stampede.engines.postgres.talk import READ, Command, Row, Talk, Talking
from stampede.errors import StampedeError

__all__ = ["Blocking"]


class Blocking(ServerLine):
    """Asks a server, from any thread."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        server.vigil.waiters = lambda before: self._wires.cut(before)
        self._wires: _Wires = _Wires(server)

    async def sent(self, commands: Sequence[Command]) -> list[list[Row]]:
        return self._wires.ask(commands)

    def close(self) -> None:
        self._wires.close()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's."""
        inherited, self._wires = self._wires, _Wires(self._server)
        forks.each(wire.disown for wire in inherited.all)


class _Wires(Pool["_Wire", Sequence[Command], list[list[Row]]]):
    """The rows of each of some commands."""

    broken, hung = (Broken,), Hung

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._leading = server

    def made(self) -> _Wire:
        return _Wire(self._leading.vigil)

    def cut(self, before: float) -> None:
        """Cut the connections that have waited for the server since before that moment."""
        for wire in list(self.all):
            if wire.since < before:
                wire.cut = wire.since

    def exchange(self, wire: _Wire, commands: Sequence[Command]) -> list[list[Row]]:
        wire.asking = True
        try:
            if wire.connection is None:
                wire.stand(self._leading.connection())
            rows = wire.rows(commands, self._leading.timeout)
        except RecursionError:
            raise  # hanging up would get stuck half way, too: it is done before the next question
        except (StampedeError, Error, OSError, *ODD) as error:
            connected = wire.connection is not None
            if connected and not wire.lost(error):
                wire.asking = False  # it has answered
                raise
            wire.disconnect()
            self._leading.hear(error)
            if isinstance(error, StampedeError):
                raise
            raise (Hung if isinstance(error, TimeoutError) else Broken)(error) from error
        except BaseException:
            wire.disconnect()  # its answer would be taken for that to the next question
            raise
        wire.asking = False
        return rows


class _Wire:
    """A connection, or none yet."""

    __slots__ = ("_ready", "_talk", "_vigil", "asking", "connection", "cut", "since")

    def __init__(self, vigil: Vigil) -> None:
        self._vigil = vigil
        self.connection: Connection[Row] | None = None
        self.asking = False
        self.since, self.cut = inf, 0.0  # when it began to wait for what it waits for; that wait is known to be vain

    @property
    def stands(self) -> bool:
        return self.connection is not None

    @property
    def current(self) -> bool:
        return True

    def stand(self, connection: Connection[Row]) -> None:
        """It leads there."""
        self.connection = connection
        self._talk = Talk(connection, named=connection.prepare_threshold is not None)
        self._ready = Ready(connection.fileno())

    def rows(self, commands: Sequence[Command], patience: float) -> list[list[Row]]:
        its, talk = self.connection, self._talk
        if its is None:
            raise ConnectionError("it was closed meanwhile")
        if its.prepare_threshold is None:  # it is a pooler's, which may lose its place in a pipeline
            ask = talk.ask if its.isolation_level is None else talk.apart
            return [rows for command in commands for rows in self._driven(ask(command), patience)]
        return self._driven(talk.ask(commands[0]) if len(commands) == 1 else talk.ask_all(commands), patience)

    def _driven(self, talking: Talking, patience: float) -> list[list[Row]]:
        """Return the rows. If nothing moves for `patience` seconds, all threads learn that the server hangs."""
        self.since = time.monotonic()
        try:
            rows: list[list[Row]] = drive(talking, self._ready, patience, self._moves, self._look)
        except TimeoutError:
            self._vigil.ends(self.since, patience)
            raise
        finally:
            self.since = inf
        return rows

    def _moves(self) -> None:
        self._vigil.heard = self.since = time.monotonic()

    def _look(self) -> None:
        if self.cut == self.since:
            raise TimeoutError(NOT_TO_OTHERS)

    def speaks(self) -> bool:
        """Return whether there is something to read before anything was asked."""
        return self._ready.wait(READ, 0.0, self._look)

    def disown(self) -> None:
        """In a forked child."""
        if self.connection is not None:
            disown_number(self.connection.fileno())

    def lost(self, error: Exception) -> bool:
        """Is it of no use any more? Who was refused may go on, unless what was refused is what was prepared."""
        its = self.connection
        return its is None or its.closed or its.broken or not is_refusal(error) or its.info.transaction_status != 0

    def disconnect(self) -> None:
        its, self.connection = self.connection, None
        self.asking = False
        if its is not None:
            its.close()
