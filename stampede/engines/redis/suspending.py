"""The suspending side: questions of one turn of an event loop are sent together, over one connection of that loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stampede.engines.kit.pipe import Pipe, Pipes
from stampede.engines.kit.pool import is_once
from stampede.engines.kit.wire import Question, Wire
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.inside import packer, parser, refusal, streams_of, take_streams
from stampede.engines.redis.line import ServerLine
from stampede.engines.redis.news import RedisNews, follow
from stampede.engines.redis.scripts import OF_COMMANDS, Command, Scripts

__all__ = ["RedisSuspending"]


class RedisSuspending(ServerLine):
    """The line to a server for any task of any event loop."""

    def __init__(self, server: RedisConnector, scripts: Scripts, news: RedisNews) -> None:
        super().__init__(server, scripts, news)
        self._pipes = Pipes[_Pipe](lambda end: _Pipe(server, scripts, news))

    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        if self._server.closed:
            self._server.check()
        if not commands:
            return [], 0
        try:
            replies, reporter = await self._sent(commands)
            for reply in replies:
                if isinstance(reply, Exception):
                    return await self._refused(commands, replies, reporter)
        except self._any as error:
            raise self._failure(commands, error) from error
        return replies, reporter

    async def _sent(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        question = self._pipes.to(None).ask(commands, len(commands))
        question.again = is_once(commands)  # treated as already sent once
        try:
            await question.future
        except BaseException:
            question.drop()
            raise
        return question.replies, question.reporter

    def close(self) -> None:
        self._pipes.close()

    def start_again(self) -> None:
        self._pipes.start_again()

    def close_dead(self) -> None:
        self._pipes.close_dead()


class _Pipe(Pipe):
    """How to connect to Redis, ask it, and read its replies."""

    def __init__(self, server: RedisConnector, scripts: Scripts, news: RedisNews) -> None:
        from redis.exceptions import RedisError
        from redis.exceptions import TimeoutError as Hung

        super().__init__(server.hang_detector, server.patience)
        self._server = server
        self._scripts = scripts
        self._news = news
        self._pack = packer()
        self.hung, self.final, self.known = Hung, (Hung,), (RedisError, OSError)

    async def reach(self) -> Wire:
        connection: Any = await self._server.suspending_connection()
        try:
            await connection.connect()
            wire = _Wire(self, connection)
            if self._server.moves:
                self._server.met(wire)
                self._news.start()  # its thread watches for a new master
            wire.kept = streams_of(connection)
            wire.connection_made(wire.kept[1].transport)
            wire.stand()
            wire.transport.set_protocol(wire)
            take_streams(connection)
        except RuntimeError as closed:  # uvloop raises this if the server has just closed the connection
            await connection.disconnect(nowait=True)
            raise ConnectionResetError(str(closed)) from closed
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return wire

    def written(self, wire: Any, questions: Sequence[Question]) -> bytes:
        return b"".join([self._pack(command) for question in questions for command in question.asked])

    def check(self, question: Question, reply: Any) -> None:
        command = question.asked[len(question.replies)]
        if type(reply) not in OF_COMMANDS.get(command[0], ()):  # a hit needs one step less
            self._scripts.check(command, reply)

    def before(self, wire: Any) -> Question | None:
        """Ask the server to notify the news connection of changes of what this connection reads from now on."""
        reporter = self._news.reporter
        if not reporter or reporter == wire.following:
            return None
        wire.following = reporter
        question = Question([follow(reporter)], 1, asyncio.get_running_loop().create_future())
        question.again = True  # never sent again: it is about this connection

        def followed() -> None:
            answer = question.replies[0]
            if answer == b"OK" and self._news.watch(wire.socket):
                wire.reporter = reporter
            elif isinstance(answer, Exception):
                self._news.refused(reporter, answer)

        question.forget()
        question.on_replies = followed  # at once: the next reply may have arrived with this one
        return question

    def left(self, wire: Any, *, ours: bool) -> None:
        if wire.reporter > 0:
            self._news.reader_lost(ours=ours)
        wire.reporter = 0


class _Wire(Wire):
    """A connection that the client library has made."""

    def __init__(self, pipe: Pipe, connection: Any) -> None:
        super().__init__(pipe, parser(refusal(connection)))
        self.connection = connection
        self.following = 0  # the news connection that we asked the server to notify
