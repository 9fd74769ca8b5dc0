"""What an event loop has asked on a connection, and the connection: its bytes are read and written by us."""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from stampede.engines.kit.landing import Received
from stampede.engines.kit.replies import MORE, Parser
from stampede.engines.kit.transport import disown, shut

if TYPE_CHECKING:
    from stampede.engines.kit.pipe import Pipe

__all__ = ["Question", "Wire", "until_the_end"]


class Question:
    """What was asked together, in the engine's words, and its replies so far."""

    __slots__ = ("again", "asked", "awaited", "count", "future", "heard", "replies", "told", "twice", "wire")

    def __init__(self, asked: Any, count: int, future: asyncio.Future[None], *, twice: bool = True) -> None:
        self.asked = asked
        self.count = count  # of its replies
        self.future = future
        self.twice = twice  # it may be sent again, over a new connection, where the old one turns out to be closed
        self.replies: list[Any] = []
        self.wire: Wire | None = None  # that has brought them
        self.told = 0  # what was noted on that by then
        self.again: object = None  # the connection on which it has been sent once before
        self.heard: Callable[[], object] | None = None  # to be called at once when it has its replies
        self.awaited = True  # by somebody

    def forget(self) -> None:
        """Nobody waits for it, nor for its error."""
        self.awaited = False
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def drop(self) -> None:
        """Who asked is gone: if it hasn't been sent, it needn't be."""
        with suppress(RuntimeError):  # its loop was closed
            self.future.cancel()

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            with suppress(RuntimeError):  # its loop was closed: nobody waits there any more
                self.future.set_exception(error)


class Wire(Received):
    """A connection, with its bytes read and written by us."""

    _transport: Any = None
    _watched: select.poll | None = None
    kept: Any = None
    """What a client library has of it, and would close."""

    def __init__(self, pipe: Pipe, parser: Parser) -> None:
        super().__init__()
        self.pipe = pipe
        self.parser = parser
        self.flying: deque[Question] = deque()  # questions that were sent, in the order of their replies
        self.dead = False
        self.born = inf  # when it stood
        self.told = 0  # for an engine's notes
        self._vigil = pipe.vigil
        self.since = 0.0  # when bytes last moved, or the first of the questions was sent
        self._unsent = 0  # bytes
        self._begun: list[Any] = []
        # No Python code, in which a signal may be served: uvloop would never go on with who waits for the connection.
        self.connection_made = self._begun.append  # type: ignore[assignment, method-assign]
        self.ended = until_the_end(self)

    def stand(self, transport: Any) -> None:
        """It leads there."""
        self._transport = transport
        if transport.get_extra_info("sslcontext") is None:  # TLS sends what is no reply, too
            self._watched = select.poll()
            self._watched.register(self.socket.fileno(), select.POLLIN)
        if transport.is_closing():
            raise ConnectionError("the server closed the connection")
        self.born = time.monotonic()

    @property
    def transport(self) -> Any:
        return self._transport

    @property
    def socket(self) -> Any:
        return self._transport.get_extra_info("socket")

    @property
    def lost(self) -> bool:
        """It is of no use any more, and perhaps nobody was told."""
        return self.dead or self._transport.is_closing()

    def speaks(self) -> bool:
        """Whether there is something to read, which is no reply if nothing has been asked."""
        return self._watched is not None and bool(self._watched.poll(0))

    async def ask(self, asked: Any, count: int = 1) -> list[Any]:
        """The replies to what is asked before it stands for all."""
        question = Question(asked, count, asyncio.get_running_loop().create_future(), twice=False)
        question.awaited = False
        self.flying.append(question)
        self.send(self.pipe.written(self, [question]), idle=True)
        await question.future
        return question.replies

    def send(self, data: bytes, *, idle: bool) -> None:
        if idle:
            self.since = time.monotonic()
        self._transport.write(data)

    def left(self, patience: float) -> float:
        """Return the seconds until it is called hung. They begin anew whenever bytes were sent or received."""
        unsent, now = self._transport.get_write_buffer_size(), time.monotonic()
        if unsent < self._unsent:
            self.since = now
        self._unsent = unsent
        return self.since + patience - now

    def landed(self, data: memoryview) -> None:
        if self.dead:
            return
        heard, gets = self.pipe.heard, self.parser.gets
        try:
            self._vigil.heard = self.since = time.monotonic()
            self.parser.feed(data)
            while (reply := gets()) is not MORE:
                heard(self, reply)
        except BaseException as error:  # these are no replies, or not to our questions
            self.stumbled(error)

    def interrupted(self, error: BaseException) -> None:
        self.pipe.interrupted(error)

    def lose(self, error: Exception) -> None:
        """What is under way on it needs another."""
        self._leave(ours=False)
        if self._transport is not None:
            self._transport.abort()
        self.pipe.broken(self, error)

    def close(self) -> None:
        """Close it, also when its loop runs no more."""
        self._leave(ours=True)
        for transport in self._begun if self._transport is None else [self._transport]:
            shut(transport)

    def _leave(self, *, ours: bool) -> None:
        if not self.dead:
            self.pipe.left(self, ours=ours)
        self.dead = True

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        self.dead = True
        disown(self._transport)

    def loop_ends(self) -> None:
        self.close()
        if self.pipe.wire is self:
            self.pipe.gone()


class _Ending(Protocol):
    def loop_ends(self) -> None: ...


async def until_the_end(wire: _Ending) -> AsyncGenerator[None, None]:
    """A loop that is shut down closes its generators, and not always its tasks."""
    try:
        yield
    finally:
        try:
            wire.loop_ends()
        except BaseException:  # interrupted; and nobody else closes it
            wire.loop_ends()
            raise
        await asyncio.sleep(0)  # the transport closes in the next turn
