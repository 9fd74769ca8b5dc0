"""The suspending side: one connection per server and event loop; what one turn of the loop asks goes together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from stampede.engines.kit.pipe import Pipe, Pipes
from stampede.engines.kit.replies import MORE
from stampede.engines.kit.wire import Question, Wire
from stampede.engines.memcached import meta
from stampede.engines.memcached.holds import Link
from stampede.engines.memcached.meta import Reply, check, parse
from stampede.engines.memcached.servers import Server, Servers, checked, refusal, trouble
from stampede.errors import EngineError

__all__ = ["SuspendingLine"]


class _Stream(Pipe):
    """How memcached is connected to, asked, and heard."""

    known = (OSError, EngineError)
    final = (TimeoutError, EngineError)

    def __init__(self, server: Server) -> None:
        super().__init__(server.vigil, server.options["timeout"])
        self.server = server

    async def reach(self) -> Wire:
        """EngineError also if the server is too old."""
        server, wire = self.server, Wire(self, _Replies())
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
                checked(server, (await wire.ask(b"version\r\n"))[0].text)
                if not server.longest:
                    server.longest = _longest((await wire.ask(b"stats settings\r\n"))[0].text)
        except BaseException:
            wire.close()
            raise
        server.breaker.succeeded(time.monotonic())
        return wire

    def failed(self, error: Exception) -> None:
        if not isinstance(error, EngineError):  # it answers, then
            self.server.failed()

    def written(self, wire: Wire, questions: Sequence[Question]) -> bytes:
        asked: bytes = questions[0].asked
        return asked if len(questions) == 1 else b"".join([question.asked for question in questions])

    def check(self, question: Question, reply: Any) -> None:
        if not question.replies:
            check(question.asked, reply)

    def unheard(self, question: Question) -> None:
        """A stub that was won goes: nobody else knows by its number whose it is."""
        if question.wire is self.wire and question.replies[0].won:
            name, cas = question.asked.split(b" ", 2)[1], question.replies[0].cas
            self.ask(meta.delete(name, cas), 1, twice=False).forget()


class _Link:
    """What one verb asks, of a server that may be connected to anew meanwhile."""

    def __init__(self, stream: _Stream, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire  # over which it was last answered
        self.longest = stream.server.longest

    @property
    def born(self) -> float:
        return self._wire.born

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        stream, server = self._stream, self._stream.server
        if not twice and stream.wire is not self._wire:
            broken = ConnectionResetError("the connection is broken")
            raise trouble(server, broken) from broken
        self._wire, replies = await asked(stream, commands, count, twice=twice)
        for reply in replies:
            if reply.text:
                raise refusal(server, reply)
        return replies


async def asked(stream: _Stream, commands: bytes, count: int = 1, *, twice: bool = True) -> tuple[Wire, list[Reply]]:
    """The replies, and over what they came."""
    question = stream.ask(commands, count, twice=twice)
    try:
        await question.future
    except stream.known as error:
        raise trouble(stream.server, error) from error
    except BaseException:
        question.drop()
        if question.wire is not None:  # they came in this very turn
            stream.unheard(question)
        raise
    assert question.wire is not None
    return question.wire, question.replies


class SuspendingLine:
    """Connections with every server of the ring, from any event loop."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._streams = Pipes(_Stream)
        self.close, self.start_again = self._streams.close, self._streams.start_again

    async def take(self, name: bytes) -> Link:
        return await self.reach(self.servers.of(name))

    async def reach(self, server: Server) -> _Link:
        self.servers.check()
        stream = self._streams.to(server)
        wire = stream.wire
        if wire is None:
            if not stream.connecting:
                server.admit()
            wire, _ = await asked(stream, b"mn\r\n")
        return _Link(stream, wire)

    def give(self, link: Link) -> None:
        pass  # it is everybody's


class _Replies:
    """Of the meta protocol; or, while connecting, of the older one."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0

    def feed(self, data: bytes | memoryview) -> None:
        del self._data[: self._at]
        self._at = 0
        self._data += data

    def gets(self) -> Any:
        data, at = self._data, self._at
        if at == len(data):
            return MORE
        found = _text(data, at) if data[at : at + 1] in b"VS" and data[at : at + 3] != b"VA " else parse(data, at)
        if found is None:
            return MORE
        reply, self._at = found
        return reply


_ENDS = {b"VERSION ": b"\r\n", b"STAT ": b"\r\nEND\r\n"}


def _text(buffer: bytearray, at: int) -> tuple[Reply, int] | None:
    for begin, end in _ENDS.items():
        if buffer.startswith(begin, at):
            stop = buffer.find(end, at)
            if stop < 0:
                return None
            reply = Reply(b"TEXT")
            reply.text = bytes(buffer[at:stop])
            return reply, stop + len(end)
    return parse(buffer, at)


def _longest(settings: bytes) -> int:
    for line in settings.splitlines():
        word = line.removeprefix(b"STAT item_size_max ")
        if word != line and word.isdigit():
            return int(word)
    return 1 << 20
