"""An event loop's connection, and the questions on it. Its bytes are read and written here."""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Protocol

from stampede.engines.kit.hang_detector import HangDetector
from stampede.engines.kit.replies import MORE, ODD, Parser, out_of_step
from stampede.engines.kit.transport import disown, shut

__all__ = ["INTERRUPTED", "Question", "Wire", "until_the_end"]

ROOM = 1 << 16
"""Bytes that are read at once."""

INTERRUPTED = "an exception interrupted the exchange, so replies can no longer be matched to questions"
"""Why a connection is closed after an error that the server did not cause. The error itself goes on to the event
loop."""


class Question:
    """What was asked together, in the engine's own form, and the replies so far."""

    __slots__ = ("again", "asked", "count", "future", "on_replies", "replies", "reporter", "twice", "wire")

    def __init__(self, asked: Any, count: int, future: asyncio.Future[None], *, twice: bool = True) -> None:
        self.asked = asked
        self.count = count  # number of replies
        self.future = future
        self.twice = twice  # it may be sent again over a new connection, if the old one turns out to be closed
        self.replies: list[Any] = []
        self.wire: Wire | None = None  # the connection that brought the replies
        self.reporter = 0  # the connection's `reporter` when the replies came
        self.again = False  # it was sent before
        self.on_replies: Callable[[], object] | None = None  # called as soon as the replies are there

    def forget(self) -> None:
        """Ignore the answer and the error: no caller waits for them."""
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def drop(self) -> None:
        """Note that the caller is gone. A question that was not sent yet is never sent."""
        with suppress(RuntimeError):  # its loop was closed
            self.future.cancel()

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            with suppress(RuntimeError):  # its loop was closed: no caller waits any more
                self.future.set_exception(error)


class Owner(Protocol):
    """The pipe that made a connection, as the connection sees it (`pipe.py`)."""

    wire: Wire | None
    hang_detector: HangDetector

    @property
    def known(self) -> tuple[type[Exception], ...]: ...

    def written(self, wire: Wire, questions: Sequence[Question]) -> bytes: ...
    def take_reply(self, wire: Wire, reply: Any) -> None: ...
    def broken(self, wire: Wire, error: Exception) -> None: ...
    def left(self, wire: Wire, *, ours: bool) -> None: ...
    def close(self) -> object: ...


class Wire(asyncio.BufferedProtocol):
    """A connection of an event loop."""

    _watched: select.poll | None = None
    kept: Any = None
    """The client library's part of the connection. It is held so that the library does not close the connection."""

    def __init__(self, pipe: Owner, parser: Parser) -> None:
        self.pipe = pipe
        self.parser = parser
        self.flying: deque[Question] = deque()  # questions that were sent, in the order of their replies
        self.dead = False
        self.current = True  # it leads where a new connection would
        self.born = inf  # when it was connected
        self.reporter = 0  # an engine's number of the connection that reports changes of what is read here
        self.transport: Any = None
        self._hang_detector = pipe.hang_detector
        self.since = 0.0  # when bytes last moved, or the first of the questions was sent
        self._unsent = 0  # bytes
        self._room = memoryview(bytearray(ROOM))
        self._reads = False  # asyncio asked for the buffer, and has not reported what it read
        self._tells = False  # the loop always reports that: asyncio's own loop, without TLS
        self.ended = until_the_end(self)

    def stand(self) -> None:
        """Begin to use the connection, which is established now."""
        if self.transport.get_extra_info("sslcontext") is None:  # TLS also sends bytes that are no reply
            self._tells = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
            self._watched = select.poll()
            self._watched.register(self.socket.fileno(), select.POLLIN)
        if self.transport.is_closing():
            raise ConnectionError("the server closed the connection")
        self.born = time.monotonic()

    @property
    def socket(self) -> Any:
        return self.transport.get_extra_info("socket")

    def speaks(self) -> bool:
        """Return whether something can be read. If nothing was asked, that is no reply."""
        return self._watched is not None and bool(self._watched.poll(0))

    async def ask(self, asked: Any, count: int = 1) -> list[Any]:
        """Return the replies to a question that is asked before the connection is shared."""
        question = Question(asked, count, asyncio.get_running_loop().create_future(), twice=False)
        self.flying.append(question)
        self.send(self.pipe.written(self, [question]), idle=True)
        await question.future
        return question.replies

    def send(self, data: bytes, *, idle: bool) -> None:
        if idle:
            self.since = time.monotonic()
        self.transport.write(data)

    def left(self, patience: float) -> float:
        """Return the seconds until the server is said to hang. They start anew whenever bytes were sent or received."""
        unsent, now = self.transport.get_write_buffer_size(), time.monotonic()
        if unsent < self._unsent:
            self.since = now
        self._unsent = unsent
        return self.since + patience - now

    # -- asyncio's protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reads and not self.dead:
            # Ctrl-C came after asyncio had taken bytes from the socket, and before it reported them. The next reply
            # would be taken for the one that is lost.
            self.lose(ConnectionAbortedError(INTERRUPTED))
        self._reads = self._tells
        return self._room  # TLS fills slices of it

    def buffer_updated(self, nbytes: int) -> None:
        self._reads = False
        if self.dead:
            return
        take_reply, gets = self.pipe.take_reply, self.parser.gets
        try:
            self._hang_detector.heard = self.since = time.monotonic()
            self.parser.feed(self._room[:nbytes])
            while (reply := gets()) is not MORE:
                take_reply(self, reply)
        except self.pipe.known as error:  # no valid replies, or not to our questions
            self.lose(error)
        except ODD as error:
            self.lose(out_of_step(error))
        except BaseException:
            self.lose(ConnectionAbortedError(INTERRUPTED))
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    # -- its end ----------------------------------------------------------------------------------------------------

    def lose(self, error: Exception) -> None:
        """Give up a connection that is broken. The questions under way need another one."""
        if not self.dead:
            self._leave(ours=False)
            self.transport.abort()
            self.pipe.broken(self, error)

    def close(self) -> None:
        """Close the connection, even if its loop no longer runs."""
        if not self.dead:
            self._leave(ours=True)
            if self.transport is not None:  # None if it was given up while connecting
                shut(self.transport)

    def _leave(self, *, ours: bool) -> None:
        self.dead = True
        self.pipe.left(self, ours=ours)

    def disown(self) -> None:
        """Give up the connection in a forked child: it belongs to the parent."""
        self.dead = True
        disown(self.transport)

    def loop_ends(self) -> None:
        self.close()
        if self.pipe.wire is self:
            self.pipe.close()


class _Ending(Protocol):
    def loop_ends(self) -> None: ...


async def until_the_end(wire: _Ending) -> AsyncGenerator[None, None]:
    """Call `wire.loop_ends` when the loop ends: a loop closes the generators that were begun in it. There is no other
    public way to learn of a loop's end, and asyncio warns of a connection that outlives its loop."""
    try:
        yield
    finally:
        wire.loop_ends()
        await asyncio.sleep(0)  # the transport closes in the next turn
