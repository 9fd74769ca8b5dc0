"""What an event loop has asked on a connection, and the connection: its bytes are read and written by us."""

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

INTERRUPTED = "an exception ended the exchange, and the replies can no longer be told apart"
"""Why a connection is closed after an error that no server causes. The error itself goes on to the event loop."""


class Question:
    """What was asked together, in the engine's words, and its replies so far."""

    __slots__ = ("again", "asked", "count", "future", "heard", "replies", "told", "twice", "wire")

    def __init__(self, asked: Any, count: int, future: asyncio.Future[None], *, twice: bool = True) -> None:
        self.asked = asked
        self.count = count  # of its replies
        self.future = future
        self.twice = twice  # it may be sent again, over a new connection, where the old one turns out to be closed
        self.replies: list[Any] = []
        self.wire: Wire | None = None  # that has brought them
        self.told = 0  # what was noted on that by then
        self.again = False  # it has been sent once before
        self.heard: Callable[[], object] | None = None  # to be called at once when it has its replies

    def forget(self) -> None:
        """Nobody waits for it, nor for its error."""
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())

    def drop(self) -> None:
        """The caller is gone. A question that was not sent yet is never sent."""
        with suppress(RuntimeError):  # its loop was closed
            self.future.cancel()

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            with suppress(RuntimeError):  # its loop was closed: nobody waits there any more
                self.future.set_exception(error)


class Owner(Protocol):
    """What a connection needs of the pipe that made it (`pipe.py`)."""

    wire: Wire | None
    hang_detector: HangDetector

    @property
    def known(self) -> tuple[type[Exception], ...]: ...

    def written(self, wire: Wire, questions: Sequence[Question]) -> bytes: ...
    def heard(self, wire: Wire, reply: Any) -> None: ...
    def broken(self, wire: Wire, error: Exception) -> None: ...
    def left(self, wire: Wire, *, ours: bool) -> None: ...
    def close(self) -> object: ...


class Wire(asyncio.BufferedProtocol):
    """A connection, with its bytes read and written by us."""

    _watched: select.poll | None = None
    kept: Any = None
    """What a client library has of it, and would close."""

    def __init__(self, pipe: Owner, parser: Parser) -> None:
        self.pipe = pipe
        self.parser = parser
        self.flying: deque[Question] = deque()  # questions that were sent, in the order of their replies
        self.dead = False
        self.current = True  # it leads where a new one would
        self.born = inf  # when it stood
        self.told = 0  # for an engine's notes
        self.transport: Any = None
        self._hang_detector = pipe.hang_detector
        self.since = 0.0  # when bytes last moved, or the first of the questions was sent
        self._unsent = 0  # bytes
        self._room = memoryview(bytearray(ROOM))
        self._reads = False  # asyncio has asked for room, and has not told of what it has read
        self._tells = False  # it tells each time: asyncio's own loop, without TLS
        self.ended = until_the_end(self)

    def stand(self) -> None:
        """It is connected."""
        if self.transport.get_extra_info("sslcontext") is None:  # TLS sends what is no reply, too
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
        """Whether there is something to read, which is no reply if nothing has been asked."""
        return self._watched is not None and bool(self._watched.poll(0))

    async def ask(self, asked: Any, count: int = 1) -> list[Any]:
        """The replies to what is asked before the connection is shared."""
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
        """Return the seconds until it is called hung. They begin anew whenever bytes were sent or received."""
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
            # Ctrl-C came while asyncio had taken bytes from the socket, and had not told us of them. The next reply
            # would be taken for the one that they were.
            self.lose(ConnectionAbortedError(INTERRUPTED))
        self._reads = self._tells
        return self._room  # TLS fills slices of it

    def buffer_updated(self, nbytes: int) -> None:
        self._reads = False
        if self.dead:
            return
        heard, gets = self.pipe.heard, self.parser.gets
        try:
            self._hang_detector.heard = self.since = time.monotonic()
            self.parser.feed(self._room[:nbytes])
            while (reply := gets()) is not MORE:
                heard(self, reply)
        except self.pipe.known as error:  # these are no replies, or not to our questions
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
        """What is under way on it needs another."""
        if not self.dead:
            self._leave(ours=False)
            self.transport.abort()
            self.pipe.broken(self, error)

    def close(self) -> None:
        """Close it, also when its loop runs no more."""
        if not self.dead:
            self._leave(ours=True)
            if self.transport is not None:  # or it was given up while it connected
                shut(self.transport)

    def _leave(self, *, ours: bool) -> None:
        self.dead = True
        self.pipe.left(self, ours=ours)

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        self.dead = True
        disown(self.transport)

    def loop_ends(self) -> None:
        self.close()
        if self.pipe.wire is self:
            self.pipe.close()


class _Ending(Protocol):
    def loop_ends(self) -> None: ...


async def until_the_end(wire: _Ending) -> AsyncGenerator[None, None]:
    """A loop that ends closes the generators that were begun in it. There is no other public way to be told of its end,
    and asyncio warns of a connection that outlives its loop."""
    try:
        yield
    finally:
        wire.loop_ends()
        await asyncio.sleep(0)  # the transport closes in the next turn
