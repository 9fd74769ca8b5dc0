"""The blocking side: pymemcache's sockets and pools, one connection for each question."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from stampede.engines.memcached.holds import Link
from stampede.engines.memcached.meta import Reply, check, parse
from stampede.engines.memcached.servers import Server, Servers, checked, refusal, trouble
from stampede.engines.progress import send
from stampede.errors import EngineError

if TYPE_CHECKING:
    from pymemcache.pool import ObjectPool

__all__ = ["BlockingLine"]

T = TypeVar("T")
CHUNK = 1 << 17


class Connection:
    """One connection, for one question at a time."""

    __slots__ = ("_client", "_last_used", "_server", "_sock", "_watch", "born", "broken", "longest")

    def __init__(self, server: Server) -> None:
        self._last_used = 0.0  # the pool's
        self.broken = False
        self._server = server
        self._client = server.client()
        self._sock: Any = None
        self.born = 0.0
        self.longest = 0

    def connect(self) -> None:
        """Have it stand; EngineError also if the server is too old."""
        checked(self._server, self._client.version())
        if not self._server.longest:
            self._server.longest = int(self._client.stats("settings").get(b"item_size_max", 1 << 20))
        self._sock = self._client.sock
        self._watch = self.watch()
        self.longest = self._server.longest
        self.born = time.monotonic()

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        replies = self.send(commands, count, twice=twice)
        for reply in replies:
            if reply.text:
                raise refusal(self._server, reply)
        return replies

    def send(self, commands: bytes, count: int, *, twice: bool) -> list[Reply]:
        """The same, refusals too."""
        if self.broken:
            raise trouble(self._server, ConnectionResetError("the connection is broken"))
        try:
            try:
                if not self.quiet():
                    raise ConnectionResetError("it has said what nobody had asked for, or goodbye")
                replies = self._exchange(commands, count)
            except ConnectionError as closed:
                if not twice or isinstance(closed, EngineError):
                    raise
                self._client.close()
                self.connect()
                replies = self._exchange(commands, count)
        except BaseException as error:
            self.broken = True
            if isinstance(error, Exception):
                raise trouble(self._server, error) from error
            raise
        return replies

    def _exchange(self, commands: bytes, count: int) -> list[Reply]:
        send(self._sock, commands)
        replies = self._replies(count)
        check(commands, replies[0])
        return replies

    def _replies(self, count: int) -> list[Reply]:
        buffer: bytes | bytearray = self._sock.recv(CHUNK)
        replies: list[Reply] = []
        at = 0
        while True:
            if not buffer:
                raise ConnectionResetError("the server has closed the connection")
            while (found := parse(buffer, at)) is not None:
                reply, at = found
                replies.append(reply)
                if len(replies) == count:
                    if at < len(buffer):
                        raise EngineError("memcached's reply is out of step: it is more than was asked for")
                    return replies
            more = self._sock.recv(CHUNK)
            if not more:
                raise ConnectionResetError("the server has closed the connection")
            if isinstance(buffer, bytes):
                buffer = bytearray(buffer)
            del buffer[:at]
            at = 0
            buffer += more

    def watch(self) -> select.poll:
        """What looks at its socket, for one thread at a time."""
        watch = select.poll()
        watch.register(self._sock, select.POLLIN)
        return watch

    def quiet(self, watch: select.poll | None = None) -> bool:
        """Whether nothing has come that nobody asked for, as the connection's end is. Who hasn't taken the connection
        looks with a `watch` of his own."""
        if self.broken:
            return False
        if hasattr(self._sock, "pending"):  # TLS sends what is no reply, too
            return not self._sock.pending()
        return not (watch or self._watch).poll(0)

    def close(self) -> None:
        self._client.close()

    def __del__(self) -> None:
        self.close()


class BlockingLine:
    """Connections with every server of the ring, from any thread."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.start_again()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's."""
        from pymemcache.pool import ObjectPool

        self._pools: dict[Server, ObjectPool[Connection]] = {
            server: ObjectPool(_maker(server), after_remove=Connection.close) for server in self.servers.all
        }

    async def take(self, name: bytes) -> Link:
        return self.connection(self.servers.of(name))

    async def reach(self, server: Server) -> Link:
        return self.connection(server)

    def connection(self, server: Server) -> Connection:
        self.servers.check()
        pool = self._pools[server]
        connection: Connection = pool.get()
        if not connection.born:
            try:
                server.admit()
                connection.connect()
            except BaseException as error:
                pool.destroy(connection)
                if not isinstance(error, Exception):
                    raise
                if not isinstance(error, EngineError):
                    server.failed()
                raise trouble(server, error) from error
            server.breaker.succeeded(time.monotonic())
        return connection

    def give(self, link: Link) -> None:
        assert isinstance(link, Connection)
        pool = self._pools.get(link._server)
        if pool is None:
            link.close()
        elif self.servers.closed:
            pool.destroy(link)
        elif link.broken:
            pool.destroy(link)
            while pool.free:  # what broke one has broken them all, or they would find that out one by one
                pool.destroy(pool.get())
        else:
            pool.release(link)

    def groups(self, names: Sequence[bytes]) -> list[list[int]]:
        return self.servers.groups(names)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.clear()


def _maker(server: Server) -> Callable[[], Connection]:
    return lambda: Connection(server)
