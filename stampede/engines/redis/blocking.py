"""The blocking side: each question on a connection of the pool."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import ref

from stampede.engines.kit.replies import OutOfStep
from stampede.engines.kit.sock import Sock, cut_all
from stampede.engines.kit.vigil import NOT_TO_OTHERS, Vigil, hang_up
from stampede.engines.redis.clients import Server
from stampede.engines.redis.inside import left_over, refusal, socket_of
from stampede.engines.redis.line import ServerLine
from stampede.engines.redis.news import News, follow
from stampede.engines.redis.resp import MORE, packed, parser
from stampede.engines.redis.scripts import Command, Scripts
from stampede.errors import EngineError
from stampede.interruptions import pass_on

if TYPE_CHECKING:
    from redis.connection import AbstractConnection as Connection

__all__ = ["Blocking"]

_ODD = (TypeError, ValueError, LookupError, AttributeError, struct.error)
"""What bytes of another shape can raise in the library: it is made for servers."""

_AT_ONCE = 500
"""Commands of a batch that are under way together: replies wait in the server's memory until they are read."""


class Blocking(ServerLine):
    """Asks a server, from any thread."""

    def __init__(self, server: Server, scripts: Scripts, news: News) -> None:
        from redis import exceptions

        super().__init__(server, scripts, news)
        self._vigil = server.vigil
        self._vigil.waiters = lambda before: cut_all(list(self._pool.all), before)
        self.start_again()
        self._broken = (exceptions.ConnectionError, OSError)
        self._hung = exceptions.TimeoutError

    async def sent(self, commands: Sequence[Command], *, large: bool) -> tuple[list[Any], int]:
        if len(commands) <= _AT_ONCE:
            return self._sent(commands)
        replies: list[Any] = []
        tellers: set[int] = set()
        for start in range(0, len(commands), _AT_ONCE):
            some, told = self._sent(commands[start : start + _AT_ONCE])
            replies += some
            tellers.add(told)
        return replies, tellers.pop() if len(tellers) == 1 else 0

    def close(self) -> None:
        self._pool.close()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's, and the pool's lock may be one that nobody opens."""
        self._pool = _Pool(self._server)

    def _sent(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """The replies as they are. Where the server takes no new connection (it has too many, or another password by
        now), over one that it has taken before."""
        taken = self._pool.take()
        leave: _Leave | None = taken
        try:
            return self._tried(taken.wire, commands)
        except self._broken as error:
            pass_on(error)
            leave = None  # before another thread may have it
            self._pool.give_back(taken)
            leave = self._pool.take_connected()
            if leave is None:
                raise
            return self._exchange(leave.wire, commands)
        except self._hung as hung:
            pass_on(hung)
            self._pool.hung_at = time.monotonic()
            raise
        finally:
            if leave is not None:
                self._pool.give_back(leave)

    def _tried(self, wire: _Wire, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """The same over this one. It may have broken while it was idle: once more, then."""
        if wire.asking or not self._server.current(wire.connection):
            self._disconnect(wire)
        used = wire.sock is not None
        try:
            return self._exchange(wire, commands)
        except self._broken as error:
            pass_on(error)
            if not used or self._server.closed:
                raise
            return self._exchange(wire, commands)

    def _exchange(self, wire: _Wire, commands: Sequence[Command]) -> tuple[list[Any], int]:
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
                raise OutOfStep("it has said what nobody had asked for")
            wire.send(packed(wire.connection, commands))
            replies = [self._read(wire, command) for command in commands]
            if wire.has_more():
                raise OutOfStep("it has said more than it was asked for")
        except RecursionError:
            raise  # hanging up would get stuck half way, too: it is done before the next question
        except Exception as error:
            since, cut = wire.since, wire.is_cut()
            self._disconnect(wire)  # replies that nobody reads would be taken for those of the next question
            pass_on(error)
            if cut:
                raise self._hung(NOT_TO_OTHERS) from error
            if isinstance(error, (TimeoutError, self._hung)):
                self._vigil.ends(since, self._server.patience)
                raise self._hung(str(error)) from error
            if isinstance(error, _ODD):  # what the library, or its parser, stumbles over
                raise OutOfStep(f"{type(error).__name__}: {error}") from error
            raise
        except BaseException:
            self._disconnect(wire)
            raise
        wire.asking = False
        return replies

    def _disconnect(self, wire: _Wire) -> None:
        if wire.told > 0:
            self._news.reader_lost()
        wire.disconnect()

    def _read(self, wire: _Wire, command: Command) -> Any:
        reply = wire.hear()
        self._scripts.check(command, reply)
        if isinstance(reply, self._broken):
            raise reply
        return reply


class _Wire(Sock):
    """A connection that the client library has made, with its bytes read and written by us."""

    __slots__ = ("_parser", "connection", "following", "told")

    def __init__(self, connection: Connection, vigil: Vigil) -> None:
        self.connection = connection
        super().__init__(vigil)

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

    def disconnect(self) -> None:
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


class _Pool:
    """Connections that wait for their next question, the last used first.

    The library's own pools look at a connection before they hand it out, which costs a third of a GET. Since our
    questions may be asked twice, it is enough to see that it was broken.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[_Wire] = []
        self.all: list[_Wire] = []
        self._free: SimpleQueue[_Leave] = SimpleQueue()  # for each that may be in use: faster than a Semaphore
        for _ in range(server.max_connections):
            self._free.put(_Leave(self))
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)  # to be entered by the lock: it can be interrupted, half in
        self._waiting = 0  # for the return of one that is connected
        self.hung_at = 0.0  # when a reply was given up the last time

    def take(self) -> _Leave:
        """The leave to use one, perhaps not connected, in this thread alone; who finds none free waits for one."""
        try:
            leave = self._free.get_nowait()
        except Empty:
            leave = self._wait()
        try:
            leave.wire = self._idle.pop()
        except IndexError:
            wire = _Wire(self._server.connection(), self._server.vigil)
            self.all.append(wire)
            leave.wire = wire
        return leave

    def _wait(self) -> _Leave:
        since = time.monotonic()
        try:
            leave = self._free.get(timeout=self._server.timeout)
        except Empty:
            waited = f"no connection has been free for {self._server.timeout:g} s"
            raise EngineError(f"{self._server.name}: {waited}") from None
        if self.hung_at > since:  # or one after the other would find that out for itself
            self._free.put(leave)
            raise EngineError(f"{self._server.name}: no reply, and no connection was free")
        return leave

    def take_connected(self) -> _Leave | None:
        """One that is connected, as soon as it is free. None if there are none, or it takes longer than a reply may."""
        end = time.monotonic() + (self._server.patience or self._server.timeout)
        with self._lock:
            self._waiting += 1
            try:
                while any(self._leads(each) for each in self.all):
                    leave = self._idle_connected()
                    if leave is not None:
                        return leave
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    self._returned.wait(left)  # and look again, also if we have not run since then
            finally:
                self._waiting -= 1
        return None

    def _idle_connected(self) -> _Leave | None:
        try:
            leave = self._free.get_nowait()
        except Empty:
            return None
        try:
            leave.wire = self._idle.pop()
        except IndexError:
            self._free.put(leave)
            return None
        if self._leads(leave.wire):
            return leave
        self._idle.insert(0, leave.take())
        self._free.put(leave)
        return None

    def _leads(self, wire: _Wire) -> bool:
        return wire.sock is not None and self._server.current(wire.connection)

    def give_back(self, leave: _Leave) -> None:
        wire = leave.take()
        if wire is not None:
            if self._server.closed:
                wire.disconnect()  # or it stays: it may have been connected just after all were
            if wire.sock is None:
                self._idle.insert(0, wire)  # the last to be taken: the server may take no new ones
            else:
                self._idle.append(wire)
            self._free.put(leave)
        if self._waiting:
            with self._lock:
                self._returned.notify_all()

    def lost(self, wire: _Wire | None) -> None:
        """Its leave was lost: there is another one."""
        leave = _Leave(self)
        leave.wire = wire
        if wire is None:
            self._free.put(leave)
        else:
            self.give_back(leave)

    def close(self) -> None:
        for wire in list(self.all):
            wire.disconnect()


class _Leave:
    """To use a connection. If whoever had it was interrupted where nothing gives it back, it comes back by itself."""

    __slots__ = ("_pool", "wire")

    def __init__(self, pool: _Pool) -> None:
        self._pool = ref(pool)
        self.wire: Any = None

    def take(self) -> Any:
        """The connection, which is not the leave's any more: never is one given to two."""
        wire, self.wire = self.wire, None
        return wire

    def __del__(self) -> None:
        pool = self._pool()
        if pool is not None:
            pool.lost(self.take())
