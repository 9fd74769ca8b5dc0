"""The blocking side: pymemcache's sockets, one connection for each question."""

from __future__ import annotations

import select
import time
from functools import cache
from math import inf
from weakref import ref

from stampede.engines.kit.replies import ODD
from stampede.engines.kit.sock import Sock, cut_all
from stampede.engines.kit.vigil import NOT_TO_OTHERS, hang_up
from stampede.engines.memcached.holds import Link
from stampede.engines.memcached.meta import Reply, check, parse
from stampede.engines.memcached.servers import Server, Servers, Unasked, checked, refusal, trouble
from stampede.errors import EngineError

__all__ = ["BlockingLine"]


class Connection(Sock):
    """One connection, for one question at a time."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_server",
        "born",
        "broken",
        "longest",
    )

    def __init__(self, server: Server) -> None:
        super().__init__(server.vigil)
        self.broken = False
        self._server = server
        self._client = server.client()
        self.born = 0.0
        self.longest = 0

    def connect(self) -> None:
        """Have it stand; EngineError also if the server is too old."""
        asking, self.asking, self.since = self.asking, True, time.monotonic()
        checked(self._server, self._client.version())
        if not self._server.longest:
            self._server.longest = int(self._client.stats("settings").get(b"item_size_max", 1 << 20))
        self.stand(self._client.sock, self._server.options["timeout"])
        self.longest = self._server.longest
        self.asking, self.since, self.born = asking, inf, time.monotonic()

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        replies = self.replies(commands, count, twice=twice)
        for reply in replies:
            if reply.text:
                raise refusal(self._server, reply)
        return replies

    def replies(self, commands: bytes, count: int, *, twice: bool) -> list[Reply]:
        """The same, refusals too."""
        if self.broken or self.asking:
            raise trouble(self._server, ConnectionResetError("the connection is broken"))
        self.asking = True
        try:
            try:
                if not self.quiet():
                    raise Unasked("it has said what nobody had asked for, or goodbye")
                replies = self._exchange(commands, count)
            except ConnectionError as closed:
                if not twice or isinstance(closed, EngineError) or self.is_cut() or self._server.closed:
                    raise
                self._client.close()
                self.connect()
                replies = self._exchange(commands, count)
        except EngineError:
            self.broken = True
            raise
        except _troubles() as error:
            self.broken = True
            error = self.told(error)
            raise trouble(self._server, error) from error
        self.asking = False
        return replies

    def told(self, error: Exception) -> Exception:
        """What has ended its wait, if the server has."""
        if self.is_cut():
            return TimeoutError(NOT_TO_OTHERS)
        if isinstance(error, TimeoutError):
            self._vigil.ends(self.since, self._server.options["timeout"])
        return error

    def cut(self) -> None:
        super().cut()
        hang_up(self._client.sock)

    def _exchange(self, commands: bytes, count: int) -> list[Reply]:
        self.since = inf
        self.send(commands)
        replies = self._replies(count)
        check(commands, replies[0])
        return replies

    def _replies(self, count: int) -> list[Reply]:
        buffer: bytes | bytearray = self.received()
        replies: list[Reply] = []
        at = 0
        while True:
            while (found := parse(buffer, at)) is not None:
                reply, at = found
                replies.append(reply)
                if len(replies) == count:
                    if at < len(buffer):
                        raise EngineError("memcached's reply is out of step: it is more than was asked for")
                    return replies
            more = self.received()
            if isinstance(buffer, bytes):
                buffer = bytearray(buffer)
            del buffer[:at]
            at = 0
            buffer += more

    def quiet(self, watch: select.poll | None = None) -> bool:
        """Whether nothing has come that nobody asked for, as the connection's end is. Who hasn't taken the connection
        looks with a `watch` of his own."""
        return not self.broken and not self.speaks(watch)

    def close(self) -> None:
        self._client.close()

    def leave(self) -> None:
        """Ask it nothing more: its caller has left without the replies. What a claim has won ends by itself, soon."""
        self.broken = True
        self._client.close()

    def __del__(self) -> None:
        try:
            self._client.close()
        except (AttributeError, RecursionError):
            pass  # it was never begun; or no stack is left: the socket closes itself


@cache
def _troubles() -> tuple[type[Exception], ...]:
    """What says that something is wrong with a server, or with the way to it."""
    from pymemcache.exceptions import MemcacheError

    return OSError, MemcacheError, *ODD


class BlockingLine:
    """Connections with every server of the ring, from any thread."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.start_again()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._pools = {server: _Pool() for server in self.servers.all}
        for server, pool in self._pools.items():
            server.vigil.waiters = pool.hang_up

    async def take(self, name: bytes) -> Link:
        return self.connection(self.servers.of(name))

    async def reach(self, server: Server) -> Link:
        return self.connection(server)

    def connection(self, server: Server) -> Connection:
        self.servers.check()
        connection = self._pools[server].take(server)
        if not connection.born:
            server.admit()
            try:
                connection.connect()
            except _troubles() as error:
                connection.close()
                if not isinstance(error, EngineError):
                    server.failed()
                error = connection.told(error)
                raise trouble(server, error) from error
            server.breaker.succeeded(time.monotonic())
        return connection

    def give(self, link: Link) -> None:
        assert isinstance(link, Connection)
        pool = self._pools.get(link._server)
        if pool is None or self.servers.closed or link.asking:
            if pool is not None and link.broken:
                pool.close_free()  # what broke one has broken them all, or they would find that out one by one
            if link.asking:
                link.leave()
            link.close()
        else:
            pool.free.append(link)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class _Pool:
    """Connections with one server. One that was taken is the taker's alone: if it is lost, it closes itself."""

    def __init__(self) -> None:
        self.free: list[Connection] = []
        self._all: dict[ref[Connection], None] = {}

    def take(self, server: Server) -> Connection:
        """One for this thread alone, perhaps not connected."""
        try:
            return self.free.pop()
        except IndexError:
            connection = Connection(server)
            self._all[ref(connection, self._gone)] = None
            return connection

    def _gone(self, connection: ref[Connection]) -> None:
        self._all.pop(connection, None)

    def hang_up(self, before: float) -> None:
        cut_all([each for refer in list(self._all) if (each := refer()) is not None], before)

    def close_free(self) -> None:
        while self.free:
            self.free.pop().close()

    def close(self) -> None:
        self.close_free()
        for each in list(self._all):
            connection = each()
            if connection is not None:
                if connection.asking:
                    connection.leave()
                connection.close()
