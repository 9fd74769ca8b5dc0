"""The suspending side: one connection per server and event loop. Commands of one turn of the loop are sent together."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

from stampede.engines.kit.pipe import Pipe, Pipes
from stampede.engines.kit.wire import Question, Wire
from stampede.engines.memcached.meta import OTHER, MetaParser, MetaReply, check
from stampede.engines.memcached.servers import MemcachedNode, Servers, accepted, checked, trouble
from stampede.errors import EngineError

__all__ = ["SuspendingLine"]


class SuspendingLine:
    """Sends commands to the servers of the ring, from any event loop."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._pipes = Pipes(_Pipe)
        self.close, self.start_again = self._pipes.close, self._pipes.start_again

    async def ask(
        self, server: MemcachedNode, *commands: bytes, since: float | None = None
    ) -> tuple[list[MetaReply], float]:
        self.servers.check()
        pipe, at = self._pipes.to(server), time.monotonic()
        wire = pipe.wire
        if since is not None and (wire is None or wire.born >= since or (not wire.flying and wire.speaks())):
            return [OTHER] * len(commands), at  # no connection is old enough, or it has just broken
        if wire is None and not pipe.connecting:
            server.admit()
        question = pipe.ask(commands, len(commands), twice=since is None)
        try:
            await question.future
        except OSError as error:
            raise trouble(server, error) from error
        except BaseException:
            question.drop()
            raise
        if question.wire is not wire and question.wire is not None:
            at = max(at, question.wire.born + 1e-6)  # it was sent over a connection that was made later
        return accepted(server, question.replies), at


class _Pipe(Pipe):
    """How a loop connects to one server, and sends and reads."""

    final = (TimeoutError, EngineError)

    def __init__(self, server: MemcachedNode) -> None:
        super().__init__(server.hang_detector, server.patience)
        self._server = server

    async def reach(self) -> Wire:
        """Return a new connection. Raise EngineError if the server is too old."""
        server, wire = self._server, Wire(self, MetaParser())
        options, address, loop = server.options, server.address, asyncio.get_running_loop()
        tls = options.get("tls_context")
        try:
            async with asyncio.timeout(options["connect_timeout"]):
                if isinstance(address, tuple):
                    host, port = address
                    await loop.create_connection(lambda: wire, host, port, ssl=tls)
                else:
                    await loop.create_unix_connection(lambda: wire, address, ssl=tls)
                wire.stand()
                (version,) = await wire.ask([b"version\r\n"])
                checked(server, version.value or version.text)
                if not server.longest:
                    (settings,) = await wire.ask([b"stats settings\r\n"])
                    found = re.search(rb"STAT item_size_max (\d+)", settings.value)
                    server.longest = int(found[1]) if found else 1 << 20
        except BaseException:
            wire.close()
            raise
        server.breaker.succeeded(time.monotonic())
        return wire

    def failed(self, error: Exception) -> None:
        if not isinstance(error, EngineError):  # an EngineError means that the server answers
            self._server.breaker.failed(time.monotonic())

    def written(self, wire: Wire, questions: Sequence[Question]) -> bytes:
        return b"".join([command for question in questions for command in question.asked])

    def check(self, question: Question, reply: Any) -> None:
        check(question.asked[len(question.replies)], reply)
