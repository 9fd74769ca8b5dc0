"""The suspending side: questions of tasks go out at once, over the connection of their loop with the smallest load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from psycopg import Error

from stampede.engines.kit.pipe import Pipe, Pipes
from stampede.engines.kit.pool import is_once
from stampede.engines.kit.wire import Question, Wire
from stampede.engines.kit.worker_threads import WorkerThreads
from stampede.engines.postgres.connect import PostgresConnector
from stampede.engines.postgres.line import PostgresLine, check_refusal
from stampede.engines.postgres.talk import Answer, Command, Encoded, Talk, encoded
from stampede.errors import StampedeError

__all__ = ["PostgresSuspending"]

MOST = 4
"""Connections of a loop, at most. One is mostly enough: a question does not wait for the answers before it."""

BUSY = 4
"""Questions under way on each connection from which on another connection is worth its cost. (With a pooler: one.)"""

REST = 1.0  # seconds without new connections after the server has refused one


class PostgresSuspending(PostgresLine):
    """A line to the server for any task of any event loop."""

    def __init__(self, server: PostgresConnector) -> None:
        super().__init__(server)
        worker_threads = WorkerThreads(threads=MOST)
        self._per_loop = Pipes[_Connections](lambda _: _Connections(server, worker_threads))

    async def send(self, commands: Sequence[Command]) -> list[Answer]:
        asked = [encoded(each) for each in commands]
        connections = self._per_loop.to(None)
        pipe = connections.pipe(asked)
        question = pipe.ask(asked, len(asked), twice=not is_once(commands))
        try:
            await question.future
        except BaseException:
            question.drop()
            connections.left.append((pipe, question))
            raise
        return question.replies

    def close(self) -> None:
        self._per_loop.close()

    def start_again(self) -> None:
        self._per_loop.start_again()

    def close_dead(self) -> None:
        self._per_loop.close_dead()


class _Connections:
    """The connections of one loop."""

    def __init__(self, server: PostgresConnector, worker_threads: WorkerThreads) -> None:
        self.server = server
        self.worker_threads = worker_threads  # connecting takes several steps that block
        self.pipes: list[_Pipe] = []
        self.left: list[tuple[_Pipe, Question]] = []  # questions of cancelled callers, not yet answered
        self.rests = 0.0  # no new connections before this moment

    def pipe(self, asked: Sequence[Encoded]) -> _Pipe:
        """Return the connection for these commands: the first that is not busy, or the one with the smallest load."""
        self.left = [(pipe, question) for pipe, question in self.left if pipe.owes(question)]
        for pipe, question in self.left:
            # The cancelled caller is about to undo its question. Over another connection, that could arrive first.
            if _ids(question.asked) & _ids(asked):
                return pipe
        pooled = self.server.pooled
        for pipe in self.pipes:
            if pipe.load < (1 if pooled else BUSY) or (pipe.wire is None and not pooled):
                return pipe
        most = min(self.server.max_connections, self.server.max_connections if pooled else MOST)
        if not self.pipes or (len(self.pipes) < most and time.monotonic() >= self.rests):
            self.pipes.append(_Pipe(self))
            return self.pipes[-1]
        return min(self.pipes, key=lambda pipe: pipe.load)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()

    def disown(self) -> None:
        """Detach the parent's connections in a forked child."""
        for pipe in self.pipes:
            pipe.disown()


def _ids(asked: Sequence[Encoded]) -> set[bytes | None]:
    """Return the first argument of each command: the id of its key or lock."""
    return {params[0] for _, params, _ in asked if params}


class _Pipe(Pipe):
    """One connection."""

    known = (Error, OSError, StampedeError)

    def __init__(self, connections: _Connections) -> None:
        super().__init__(connections.server.hang_detector, connections.server.timeout)
        self._connections = connections

    @property
    def load(self) -> int:
        return len(self._waiting) + (0 if self.wire is None else len(self.wire.flying))

    def owes(self, question: Question) -> bool:
        return self.wire is not None and question in self.wire.flying

    async def reach(self) -> Wire:
        talk = await self._connections.worker_threads.run(self._connections.server.connection)
        wire = Wire(self, talk)
        wire.connection_made(_Transport(talk, wire))
        wire.stand()
        return wire

    def failed(self, error: Exception) -> None:
        """Move the waiting questions to other connections, if there are any: the server takes no more at present."""
        others = [each for each in self._connections.pipes if each.wire is not None]
        self._connections.pipes.remove(self)
        if others:
            self._connections.rests = time.monotonic() + REST
            for question in self._waiting:
                min(others, key=lambda pipe: pipe.load).take(question)
            self._waiting.clear()

    def take(self, question: Question) -> None:
        """Send a question that waited for another connection, which could not be made."""
        self._waiting.append(question)
        self._flush()

    def written(self, wire: Wire, questions: Sequence[Question]) -> Any:
        return [command for question in questions for command in question.asked]

    def check(self, question: Question, reply: Any) -> None:
        if isinstance(reply, Exception):
            check_refusal(reply)


class _Transport:
    """The transport of a `Wire`. libpq reads and writes the bytes."""

    def __init__(self, talk: Talk, wire: Wire) -> None:
        self._talk = talk
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._fd: int = talk.connection.fileno()
        self._writing = False
        self._loop.add_reader(self._fd, self._read)

    def fileno(self) -> int:
        return self._fd

    def get_extra_info(self, name: str) -> Any:
        # "sslcontext": as with TLS, bytes may arrive that are no reply. libpq reads them.
        return self if name == "socket" else name == "sslcontext"

    def get_write_buffer_size(self) -> int:
        return 0  # unknown: libpq doesn't say. `_written` notes progress instead

    def is_closing(self) -> bool:
        return self._fd < 0

    def write(self, commands: Sequence[Encoded]) -> None:
        try:
            for command in commands:
                self._talk.put(command)
        except Error as error:
            self._wire.lose(error)
            return
        self._flush()

    def _read(self) -> None:
        self._wire.buffer_updated(0)  # through a pooler, this also sends the next command
        if (self._writing or self._talk.pooled) and not self._wire.dead:
            self._flush()

    def _written(self) -> None:
        self._wire.since = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        try:
            more = self._talk.flush()
        except Error as error:
            self._wire.lose(error)
            return
        if more and not self._writing:
            self._loop.add_writer(self._fd, self._written)
        elif self._writing and not more:
            self._loop.remove_writer(self._fd)
        self._writing = more

    def close(self) -> None:
        if self._fd < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self._fd = -1
        self._talk.connection.pgconn.finish()

    abort = close
