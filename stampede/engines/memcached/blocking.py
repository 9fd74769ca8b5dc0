"""The blocking side: each question takes a connection of the pool. pymemcache makes the connections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import TypeAlias

from stampede.engines.kit.hang_detector import hang_up
from stampede.engines.kit.pool import Pool
from stampede.engines.kit.replies import MORE, OutOfStep
from stampede.engines.kit.sock import Sock, cut_all
from stampede.engines.memcached.meta import OTHER, MetaParser, MetaReply, check
from stampede.engines.memcached.servers import MemcachedNode, Servers, accepted, checked, trouble
from stampede.errors import EngineError

__all__ = ["BlockingLine"]

_Question: TypeAlias = tuple[Sequence[bytes], float | None]
_Answer: TypeAlias = tuple[list[MetaReply], float]

AT_ONCE = 200
"""Commands that are sent together, at most: a server stops reading while it can't get rid of its replies."""


class BlockingLine:
    """Sends commands to the servers of the ring, from any thread."""

    def __init__(self, servers: Servers) -> None:
        from pymemcache.exceptions import MemcacheError

        self.servers = servers
        self._known = OSError, MemcacheError
        self.start_again()

    def start_again(self) -> None:
        """Begin with empty pools in a forked child: the old connections are the parent's."""
        self._wires = {server: _Wires(server, self._known) for server in self.servers.all}

    async def ask(self, server: MemcachedNode, *commands: bytes, since: float | None = None) -> _Answer:
        replies, at = self.send(server, commands, since)
        return accepted(server, replies), at

    def send(self, server: MemcachedNode, commands: Sequence[bytes], since: float | None) -> _Answer:
        """Return the replies as `ask` does, but with refusals among them instead of raising."""
        if server.closed:
            self.servers.check()
        wires, once = self._wires[server], since is not None
        try:
            if len(commands) <= AT_ONCE:
                return wires.ask((commands, since), once=once)
            portions = [commands[at : at + AT_ONCE] for at in range(0, len(commands), AT_ONCE)]
            answers = [wires.ask((some, since), once=once) for some in portions]
            return [reply for replies, _ in answers for reply in replies], answers[0][1]
        except EngineError:
            raise
        except self._known as error:
            raise trouble(server, error) from error

    def close(self) -> None:
        for wires in self._wires.values():
            wires.close()


class _Wires(Pool["_Wire", _Question, _Answer]):
    """The pool of connections to one server."""

    def __init__(self, server: MemcachedNode, known: tuple[type[Exception], ...]) -> None:
        super().__init__(server)
        self._node, self.broken = server, known
        server.hang_detector.waiters = lambda before: cut_all(list(self.all), before)

    def made(self) -> _Wire:
        return _Wire(self._node)

    def lost(self, wire: _Wire, error: BaseException) -> None:
        if not wire.stands and isinstance(error, Exception) and not isinstance(error, EngineError):
            self._node.breaker.failed(time.monotonic())
        super().lost(wire, error)

    def exchange(self, wire: _Wire, question: _Question) -> _Answer:
        commands, since = question
        wire.asking, wire.since = True, inf
        try:
            if wire.sock is None:
                wire.connect()
            elif wire.speaks():
                raise wire.why_it_speaks()
            at = time.monotonic()
            if since is not None and wire.born >= since:
                replies = [OTHER] * len(commands)
            else:
                wire.send(b"".join(commands))
                replies = wire.replies(commands)
        except BaseException as error:
            self.lost(wire, error)
            raise
        wire.asking = False
        return replies, at


class _Wire(Sock):
    """One connection. Its questions are sent one at a time."""

    __slots__ = ("_client", "_parser", "_server", "born")

    current = True

    def __init__(self, server: MemcachedNode) -> None:
        self._server, self._client, self.born = server, server.client(), inf
        super().__init__(server.hang_detector)

    def connect(self) -> None:
        """Connect. Raise EngineError if the server is too old, or was down a moment ago."""
        server, client = self._server, self._client
        server.admit()
        self.since = time.monotonic()
        checked(server, client.version())
        if not server.longest:
            server.longest = int(client.stats("settings").get(b"item_size_max", 1 << 20))
        self._parser = MetaParser()
        self.stand(client.sock, server.patience)
        self.since, self.born = inf, time.monotonic()
        server.breaker.succeeded(self.born)

    def replies(self, commands: Sequence[bytes]) -> list[MetaReply]:
        """Wait for the replies to all these commands, and return them."""
        parser, replies = self._parser, list[MetaReply]()
        while True:
            parser.feed(self.received())
            while (reply := parser.gets()) is not MORE:
                check(commands[len(replies)], reply)
                replies.append(reply)
                if len(replies) == len(commands):
                    if parser.at < len(parser.data):
                        raise OutOfStep("the server sent more replies than there were commands")
                    return replies

    def disconnect(self) -> None:
        self._client.close()
        self.forget()

    def cut(self) -> None:
        super().cut()
        hang_up(self._client.sock)

    def __del__(self) -> None:
        self._client.close()  # the engine was dropped without `close`
