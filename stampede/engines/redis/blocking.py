"""The blocking side: each question uses a connection of the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import Any

from stampede.engines.kit.hang_detector import hang_up
from stampede.engines.kit.pool import Pool, SentOnce
from stampede.engines.kit.replies import MORE, OutOfStep
from stampede.engines.kit.sock import Sock, cut_all
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.inside import packer, parser, refusal, socket_of
from stampede.engines.redis.line import ServerLine
from stampede.engines.redis.news import RedisNews, follow
from stampede.engines.redis.scripts import OF_COMMANDS, Command, Scripts

__all__ = ["RedisBlocking"]

AT_ONCE = 500
"""Commands of a batch that are under way together. Their replies use the server's memory until they are read."""


class RedisBlocking(ServerLine):
    """The line to a server for blocking callers, from any thread."""

    def __init__(self, server: RedisConnector, scripts: Scripts, news: RedisNews) -> None:
        super().__init__(server, scripts, news)
        server.hang_detector.waiters = lambda before: cut_all(list(self._wires.all), before)
        self.start_again()

    async def ask_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        if self._server.closed:
            self._server.check()
        if not 0 < len(commands) <= AT_ONCE:
            return await self._in_parts(commands)
        try:
            replies, reporter = self._wires.ask(commands, once=type(commands[0]) is SentOnce)
            for reply in replies:
                if isinstance(reply, Exception):
                    return await self._refused(commands, replies, reporter)
        except self._any as error:
            raise self._failure(commands, error) from error
        return replies, reporter

    async def _in_parts(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        parts = [await self.ask_all(commands[at : at + AT_ONCE]) for at in range(0, len(commands), AT_ONCE)]
        reporters = {reporter for _, reporter in parts}
        return [reply for replies, _ in parts for reply in replies], reporters.pop() if len(reporters) == 1 else 0

    async def _sent(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        return self._wires.ask(commands, once=type(commands[0]) is SentOnce)

    def close(self) -> None:
        self._wires.close()

    def start_again(self) -> None:
        """Begin anew in a forked child: the connections belong to the parent, and the pool's lock may be locked for
        ever."""
        self._wires = _Wires(self._server, self._scripts, self._news)


class _Wires(Pool["_Wire", Sequence[Command], tuple[list[Any], int]]):
    """A pool whose answers are the replies and the number of the news connection that is notified of changes (0:
    none)."""

    def __init__(self, server: RedisConnector, scripts: Scripts, news: RedisNews) -> None:
        from redis import exceptions

        super().__init__(server)
        self._leading, self._scripts, self._news, self._pack = server, scripts, news, packer()
        self.broken, self.hung = (exceptions.ConnectionError, OSError), exceptions.TimeoutError

    def made(self) -> _Wire:
        return _Wire(self._leading, self._news)

    def lost(self, wire: _Wire, error: BaseException) -> None:
        if not isinstance(error, Exception):
            wire.disconnect(ours=True)  # the caller was interrupted, which says nothing about the server
        super().lost(wire, error)

    def exchange(self, wire: _Wire, commands: Sequence[Command]) -> tuple[list[Any], int]:
        reporter = self._news.reporter
        follows = reporter and wire.following != reporter
        if follows:  # first ask the server to report changes of what this connection reads from now on
            commands = [follow(reporter), *commands]
        wire.asking, wire.since = True, inf
        replies: list[Any] = []
        try:
            if not wire.stands:
                wire.connect()
            elif wire.speaks():
                raise wire.why_it_speaks()
            wire.send(b"".join(map(self._pack, commands)))
            reader, plain = wire.parser, OF_COMMANDS
            for command in commands:
                while (reply := reader.gets()) is MORE:
                    reader.feed(wire.received())
                if type(reply) not in plain.get(command[0], ()):  # a hit needs one step less
                    self._scripts.check(command, reply)
                replies.append(reply)
            if reader.has_data():
                raise OutOfStep("the server sent more replies than there were questions")
        except BaseException as error:
            self.lost(wire, error)
            raise
        wire.asking = False
        if follows:
            wire.follows(reporter, replies.pop(0))
        return replies, wire.reporter


class _Wire(Sock):
    """A connection that the client library has made. Its bytes are read and written here."""

    __slots__ = ("__weakref__", "_news", "_server", "connection", "current", "following", "parser", "reporter")

    def __init__(self, server: RedisConnector, news: RedisNews) -> None:
        self.connection: Any = None
        self._server, self._news, self.reporter = server, news, 0
        super().__init__(server.hang_detector)

    def forget(self) -> None:
        super().forget()
        self.parser: Any = None
        self.current = True
        self.following = 0  # the news connection that we asked the server to notify
        self.reporter = 0  # the news connection that it agreed to notify

    def connect(self) -> None:
        self.since = time.monotonic()
        self.connection = self._server.connection()
        self.connection.connect()
        if self._server.moves:
            self._server.met(self)
            self._news.start()  # its thread watches for a new master
        self.since = inf
        sock = socket_of(self.connection)
        self.parser = parser(refusal(self.connection))
        self.stand(sock, sock.gettimeout())

    def disconnect(self, *, ours: bool = False) -> None:
        if self.reporter > 0:
            self._news.reader_lost(ours=ours)
        if self.connection is not None:
            self.connection.disconnect()
        self.forget()

    def cut(self) -> None:
        super().cut()
        if self.connection is not None:
            hang_up(socket_of(self.connection))

    def follows(self, reporter: int, answer: Any) -> None:
        """Note the server's answer to the request to notify the news connection."""
        self.following = reporter
        self.reporter = reporter if answer == b"OK" and self._news.watch(self.sock) else 0
        if isinstance(answer, Exception):
            self._news.refused(reporter, answer)
