"""The blocking side: each question takes a connection of the pool."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from math import inf

from psycopg import Error

from stampede.engines.kit.hang_detector import NOT_TO_OTHERS
from stampede.engines.kit.pool import Pool, is_once
from stampede.engines.kit.replies import MORE
from stampede.engines.kit.transport import disown_number
from stampede.engines.postgres.connect import LOOK, READ, WRITE, PostgresConnector, until_ready
from stampede.engines.postgres.line import PostgresLine, check_refusal
from stampede.engines.postgres.talk import Answer, Command, Talk, encoded
from stampede.runtime import forks

__all__ = ["PostgresBlocking"]


class PostgresBlocking(PostgresLine):
    """A line to the server for any thread."""

    def __init__(self, server: PostgresConnector) -> None:
        super().__init__(server)
        server.hang_detector.waiters = lambda before: self._wires.cut(before)
        self._wires: _Wires = _Wires(server)

    async def send(self, commands: Sequence[Command]) -> list[Answer]:
        return self._wires.ask(commands, once=is_once(commands))

    def close(self) -> None:
        self._wires.close()

    def start_again(self) -> None:
        """Begin with an empty pool in a forked child: the old connections are the parent's."""
        inherited, self._wires = self._wires, _Wires(self._server)
        forks.each(wire.disown for wire in inherited.all)


class _Wires(Pool["_Wire", Sequence[Command], list[Answer]]):
    """The pool. A question to it is a list of commands."""

    broken = Error, OSError

    def __init__(self, server: PostgresConnector) -> None:
        super().__init__(server)
        self._connector = server

    def made(self) -> _Wire:
        return _Wire(self._connector)

    def cut(self, before: float) -> None:
        """Cut the connections that have waited for the server since before this moment."""
        for wire in list(self.all):
            since = wire.since  # read once: its thread may get an answer meanwhile
            if since < before:
                wire.cut = since

    def exchange(self, wire: _Wire, commands: Sequence[Command]) -> list[Answer]:
        wire.asking = True
        try:
            answers = wire.answers(commands)
        except BaseException as error:
            self.lost(wire, error)
            raise
        wire.asking = False
        return answers


class _Wire:
    """One connection, made when it is first needed."""

    __slots__ = ("_either", "_readable", "_server", "asking", "cut", "since", "stands", "talk")
    current = True

    def __init__(self, server: PostgresConnector) -> None:
        self._server = server
        self.talk: Talk | None = None
        self.asking = self.stands = False
        self.since, self.cut = inf, 0.0  # when the current wait began; when the wait began that another thread has cut

    def _stand(self) -> Talk:
        talk = self._server.connection()
        fd = talk.connection.fileno()
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(fd, READ)
        self._either.register(fd, WRITE)
        self.talk, self.stands = talk, True
        return talk

    def answers(self, commands: Sequence[Command]) -> list[Answer]:
        """Send these commands and return their answers. Raise TimeoutError if nothing is sent or received for `timeout`
        seconds. Raise an error of psycopg if it breaks the connection; other refusals are answers."""
        count, answers = len(commands), list[Answer]()
        asked = [encoded(commands[0])] if count == 1 else list(map(encoded, commands))
        server, talk = self._server, self.talk or self._stand()
        patience = server.timeout
        for each in asked:
            talk.put(each)
        unsent = talk.flush()
        while True:
            self.since = time.monotonic()
            poll = self._either if unsent else self._readable
            if not poll.poll(min(patience, LOOK) * 1000) and not until_ready(poll, patience - LOOK, self._look):
                raise TimeoutError(f"no answer for {patience:g} s")
            server.hang_detector.heard = time.monotonic()
            talk.feed()
            while (answer := talk.gets()) is not MORE:
                if isinstance(answer, Exception):
                    check_refusal(answer)
                answers.append(answer)
                if len(answers) == count:
                    self.since = inf
                    return answers
            unsent = (unsent or talk.pooled) and talk.flush()  # through a pooler, `gets` sends the next command

    def _look(self) -> None:
        if self.is_cut():
            raise TimeoutError(NOT_TO_OTHERS)

    def speaks(self) -> bool:
        """Return whether there is something to read before anything was asked."""
        return bool(self._readable.poll(0))

    def is_cut(self) -> bool:
        """Return whether another thread has cut the current wait."""
        return self.cut == self.since

    def disown(self) -> None:
        """Detach the parent's socket in a forked child. The server notices nothing."""
        if self.talk is not None:
            disown_number(self.talk.connection.fileno())

    def disconnect(self) -> None:
        talk, self.talk = self.talk, None
        self.asking = self.stands = False
        self.since = inf
        if talk is not None:
            talk.connection.close()
