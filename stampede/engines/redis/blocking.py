"""The blocking side: each question on a connection of the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from stampede.engines.kit.pool import Pool
from stampede.engines.kit.replies import ODD, OutOfStep, out_of_step
from stampede.engines.kit.sock import Sock, cut_all
from stampede.engines.kit.vigil import NOT_TO_OTHERS, hang_up
from stampede.engines.redis.clients import Server
from stampede.engines.redis.inside import left_over, refusal, socket_of
from stampede.engines.redis.line import ServerLine
from stampede.engines.redis.news import News, follow
from stampede.engines.redis.resp import MORE, packed, parser
from stampede.engines.redis.scripts import Command, Scripts

if TYPE_CHECKING:
    from redis.connection import AbstractConnection as Connection

__all__ = ["Blocking"]

_AT_ONCE = 500
"""Commands of a batch that are under way together: replies wait in the server's memory until they are read."""


class Blocking(ServerLine):
    """Asks a server, from any thread."""

    def __init__(self, server: Server, scripts: Scripts, news: News) -> None:
        super().__init__(server, scripts, news)
        server.vigil.waiters = lambda before: cut_all(list(self._wires.all), before)
        self.start_again()

    async def sent(self, commands: Sequence[Command], *, large: bool) -> tuple[list[Any], int]:
        if len(commands) <= _AT_ONCE:
            return self._wires.ask(commands)
        replies: list[Any] = []
        tellers: set[int] = set()
        for start in range(0, len(commands), _AT_ONCE):
            some, told = self._wires.ask(commands[start : start + _AT_ONCE])
            replies += some
            tellers.add(told)
        return replies, tellers.pop() if len(tellers) == 1 else 0

    def close(self) -> None:
        self._wires.close()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's, and the pool's lock may be one that nobody opens."""
        self._wires = _Wires(self._server, self._scripts, self._news)


class _Wires(Pool["_Wire", Sequence[Command], tuple[list[Any], int]]):
    """The replies as they are, and which connection will be told when what was read changes."""

    def __init__(self, server: Server, scripts: Scripts, news: News) -> None:
        from redis import exceptions

        super().__init__(server)
        self._leading, self._scripts, self._news = server, scripts, news
        self.broken, self.hung = (exceptions.ConnectionError, OSError), exceptions.TimeoutError
        self._known = (exceptions.RedisError, OSError, *ODD)

    def made(self) -> _Wire:
        return _Wire(self._leading, self._news)

    def exchange(self, wire: _Wire, commands: Sequence[Command]) -> tuple[list[Any], int]:
        told = self._news.told
        if told and wire.following != told:
            if told > 0:
                return self._exchange_following(wire, commands, told)
            wire.following = wire.told = told
        return self._replies(wire, commands), wire.told

    def _exchange_following(self, wire: _Wire, commands: Sequence[Command], told: int) -> tuple[list[Any], int]:
        """The same, after the server has been asked to tell of changes in what this connection reads."""
        (answer, *replies) = self._replies(wire, [follow(told), *commands])
        wire.told = told if answer == b"OK" and self._news.watch(wire.sock) else 0
        wire.following = told
        if isinstance(answer, Exception):
            self._news.refused(told, answer)
        return replies, wire.told

    def _replies(self, wire: _Wire, commands: Sequence[Command]) -> list[Any]:
        wire.asking, wire.since = True, inf
        try:
            if wire.sock is None:
                wire.connect()
            elif wire.speaks():
                raise wire.why_it_speaks()
            wire.send(packed(wire.connection, commands))
            replies = [self._read(wire, command) for command in commands]
            if wire.has_more():
                raise OutOfStep("it has said more than it was asked for")
        except RecursionError:
            raise  # hanging up would get stuck half way, too: it is done before the next question
        except self._known as error:
            since, cut = wire.since, wire.is_cut()
            wire.disconnect()  # replies that nobody reads would be taken for those of the next question
            if cut:
                raise self.hung(NOT_TO_OTHERS) from error
            if isinstance(error, (TimeoutError, self.hung)):
                self._leading.vigil.ends(since, self._server.patience)
                raise self.hung(str(error)) from error
            if isinstance(error, ODD):
                raise out_of_step(error) from error
            raise
        except BaseException:
            wire.disconnect(ours=True)
            raise
        wire.asking = False
        return replies

    def _read(self, wire: _Wire, command: Command) -> Any:
        reply = wire.hear()
        self._scripts.check(command, reply)
        if isinstance(reply, self.broken):
            raise reply
        return reply


class _Wire(Sock):
    """A connection that the client library has made, with its bytes read and written by us."""

    __slots__ = ("_news", "_parser", "_server", "connection", "following", "told")

    def __init__(self, server: Server, news: News) -> None:
        self.connection: Connection = server.connection()
        self._server, self._news, self.told = server, news, 0
        super().__init__(server.vigil)

    @property
    def stands(self) -> bool:
        return self.sock is not None

    @property
    def current(self) -> bool:
        return self._server.current(self.connection)

    def forget(self) -> None:
        super().forget()
        self._parser: Any = None
        self.following = 0  # of which news we have asked the server to tell
        self.told = 0  # and of which it has agreed to

    def connect(self) -> None:
        connection: Any = self.connection
        self.since = time.monotonic()
        connection.connect()
        self.since = inf
        if left_over(connection):
            raise OutOfStep("it has said what nobody had asked for")
        sock = socket_of(connection)
        self._parser = parser(refusal(connection))
        self.stand(sock, sock.gettimeout())

    def disconnect(self, *, ours: bool = False) -> None:
        if self.told > 0:
            self._news.reader_lost(ours=ours)
        self.connection.disconnect()
        self.forget()

    def cut(self) -> None:
        super().cut()
        hang_up(socket_of(self.connection))

    def has_more(self) -> bool:
        """Whether more has been read than was asked for."""
        return bool(self._parser.has_data())

    def hear(self) -> Any:
        """The next reply, a refusal among them, as soon as all of it is there."""
        its = self._parser
        while (reply := its.gets()) is MORE:
            its.feed(self.received())
        return reply
