"""The suspending side: one connection per server and event loop; what one turn of the loop asks goes together."""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from stampede import forks
from stampede.engines.attendant import Attendant
from stampede.engines.landing import Interrupted, Landing
from stampede.engines.memcached import meta
from stampede.engines.memcached.holds import Link
from stampede.engines.memcached.meta import Reply, check, claimed, parse
from stampede.engines.memcached.servers import Server, Servers, checked, refusal, trouble
from stampede.engines.memcached.unheard import unheard
from stampede.engines.progress import LARGE, Pace, unsent
from stampede.engines.transport import disown, doubled, shut
from stampede.engines.vigil import NOT_TO_OTHERS
from stampede.errors import EngineError
from stampede.interruptions import of_a_caller
from stampede.loops import Loop, PerLoop, nobodys
from stampede.stalls import NEXT, given_back, unhurried

__all__ = ["SuspendingLine"]


class _Question:
    """Commands whose replies are awaited together."""

    __slots__ = ("answer", "awaited", "commands", "count", "replies")

    def __init__(self, commands: bytes, count: int, answer: asyncio.Future[list[Reply]], awaited: bool) -> None:
        self.commands = commands
        self.count = count
        self.answer = answer
        self.awaited = awaited  # by somebody
        self.replies: list[Reply] = []


class Stream(Landing):
    """One connection, for all tasks of one loop. Replies come in the order of the questions.

    What a signal's handler raises may come between any two steps of this. What it leaves undone is done by a task that
    looks, as long as there are questions; where it leaves in doubt what has been said, the connection is lost.
    """

    broken = True  # until it is whole

    def __init__(self, server: Server, loop: Loop, again: Callable[[Server], Coroutine[Any, Any, Stream]]) -> None:
        super().__init__()
        self._server = server
        self._loop = loop
        self._again = again
        self._next: Stream | None = None  # that has come in its place
        self._transport: Any = None
        self._watched: select.poll | None = None
        self._waiting: deque[_Question] = deque()
        self._flying: deque[_Question] = deque()
        self._buffer = bytearray()
        self._attendant = Attendant()
        self._pace = Pace()
        self._why: Interrupted | None = None  # it is broken
        self.born = 0.0
        self.longest = 0
        self.ended = _until_the_end(self)
        self.broken = False

    async def connect(self) -> None:
        """Have it stand; EngineError also if the server is too old."""
        options, address = self._server.options, self._server.address
        tls = options.get("tls_context")
        async with asyncio.timeout(options["connect_timeout"]):
            if isinstance(address, tuple):
                host, port = address
                transport, _ = await self._loop.create_connection(lambda: self, host, port, ssl=tls)
            else:
                transport, _ = await self._loop.create_unix_connection(lambda: self, address, ssl=tls)
            self._transport = transport
            if transport.get_extra_info("sslcontext") is None:  # TLS sends what is no reply, too
                self._watched = select.poll()
                self._watched.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
            checked(self._server, (await self._asked(b"version\r\n"))[0].text)
            if not self._server.longest:
                told = (await self._asked(b"stats settings\r\n"))[0].text
                self._server.longest = _longest(told)
        self.longest = self._server.longest
        self.born = time.monotonic()

    async def ask(self, commands: bytes, count: int = 1, *, twice: bool = False) -> list[Reply]:
        answer: asyncio.Future[list[Reply]] = self._loop.create_future()
        try:
            self._ask(commands, count, answer)
            replies = await answer
        except EngineError as error:
            if not twice:
                raise
            replies = await self._asked_again(commands, count, error)
        except BaseException:
            if not answer.cancel() and not answer.cancelled() and answer.exception() is None:
                self.unheard(commands, answer.result())  # they came in this very turn
            raise
        for reply in replies:
            if reply.text:
                raise refusal(self._server, reply)
        return replies

    async def _asked_again(self, commands: bytes, count: int, error: EngineError) -> list[Reply]:
        """Over a new connection, as this one was closed: once; and as often as we have broken it ourselves."""
        closed = False
        while not closed or error.interrupted:
            if not isinstance(error.__cause__, ConnectionError):
                raise error
            closed |= not error.interrupted
            self._next = await self._again(self._server)
            self.born = self._next.born
            try:
                return await self._asked(commands, count)
            except EngineError as failure:
                error = failure
        raise error

    def _asked(self, commands: bytes, count: int = 1, *, awaited: bool = True) -> asyncio.Future[list[Reply]]:
        answer: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._ask(commands, count, answer, awaited=awaited)
        return answer

    def _ask(self, commands: bytes, count: int, answer: asyncio.Future[list[Reply]], *, awaited: bool = True) -> None:
        if self._next is not None:
            self._next._ask(commands, count, answer, awaited=awaited)
            return
        if self._watched is not None and not self._flying and not self._waiting and self._watched.poll(0):
            self.lose(ConnectionResetError("it has said what nobody had asked for, or goodbye"))
        if self.broken:
            broken = self._why or ConnectionResetError("the connection is broken")
            raise trouble(self._server, broken) from broken
        self._attendant.attend(self._loop, self)
        self._waiting.append(_Question(commands, count, answer, awaited))
        if len(self._waiting) == 1:  # for all that this turn asks; if it is lost, the attending task flushes
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if not self._waiting or self.broken:
            return
        try:
            asked = [question for question in self._waiting if not question.answer.done()]
            commands = asked[0].commands if len(asked) == 1 else b"".join([question.commands for question in asked])
            if not self._flying:
                self._pace.begin(time.monotonic())
            if len(commands) > LARGE:
                self._pace.sends(len(commands))
            self._flying.extend(asked)
            self._waiting.clear()
            if asked:
                self._transport.write(commands)
        except BaseException as error:
            self.stumbled(error)

    def interrupted(self, error: BaseException) -> None:
        """What a signal's handler raises comes out of the call of one who waits, as if it had come there. If nobody
        does it is the loop's to tell."""
        for question in (*self._flying, *self._waiting):
            if question.awaited and not question.answer.done():
                question.answer.set_exception(error)
                return
        raise error

    # -- of the transport ---------------------------------------------------------------------------------------

    # No Python code, in which a signal may be served: uvloop would never go on with who waits for the connection.
    connection_made = staticmethod(id)  # type: ignore[assignment]

    def landed(self, data: memoryview) -> None:
        try:
            self._server.vigil.heard = now = time.monotonic()
            self._pace.heard(now)
            self._buffer += data
            self._parse()
        except BaseException as error:
            self.stumbled(error)

    def _parse(self) -> None:
        at = 0
        while self._flying and (found := _reply(self._buffer, at)) is not None:
            reply, at = found
            question = self._flying[0]
            if not question.replies:
                check(question.commands, reply)
            question.replies.append(reply)
            if len(question.replies) == question.count:
                if not question.answer.done():
                    question.answer.set_result(question.replies)
                else:
                    self.unheard(question.commands, question.replies)
                self._flying.popleft()  # not before: who isn't answered is told when the connection is lost
        del self._buffer[:at]
        if self._buffer and not self._flying and self.born:
            raise EngineError("memcached's reply is out of step: it is more than was asked for")

    def unheard(self, commands: bytes, replies: Sequence[Reply]) -> None:
        """Who asked was cancelled meanwhile. A stub that was won goes: nobody else knows by its number whose it is."""
        if replies[0].won and not self.broken:
            with suppress(EngineError):
                self._asked(meta.delete(commands.split(b" ", 2)[1], replies[0].cas), awaited=False)

    # -- what is left undone, and a server that hangs ---------------------------------------------------------------

    def look(self, sure: bool) -> float | None:
        """Seconds until it is to be called hung."""
        self.look_for_missed()
        if self.broken or (self._transport is not None and self._transport.is_closing()):
            self.lose(ConnectionResetError("the server has closed the connection"))
        self._flush()
        if not self._flying:
            return inf if self._waiting else None
        patience = self._server.options["timeout"]
        if patience is None:
            return inf
        left, vigil = self._pace.left(patience, unsent(self._transport), time.monotonic()), self._server.vigil
        since = self._pace.since
        if left > 0 and vigil.hangs(since):
            if sure:
                self.lose(TimeoutError(NOT_TO_OTHERS), owes=True)
            return -NEXT
        if left <= 0 and sure:
            self.lose(TimeoutError(f"no answer in {patience:g} s"), owes=True)
            vigil.ends(since, patience)
        # Overdue, it may be our own loop that was blocked, and the answer be there to be read.
        return left if left > 0 else -given_back(-left, patience)

    def lose(self, error: BaseException, *, owes: bool = False) -> None:
        """The connection is of no use any more: whoever waits for a reply won't get it. `owes`: it may come yet."""
        if self.broken and not self._flying and not self._waiting:
            return
        self.broken = True
        if isinstance(error, Interrupted):
            self._why = error
        self._watched = None
        if owes and self._flying:
            self._leave()
        if self._transport is not None:
            shut(self._transport, at_once=True)
        failure = trouble(self._server, error)
        if failure is not error:
            failure.__cause__ = error
        for question in (*self._flying, *self._waiting):
            if not question.answer.done():
                with suppress(RuntimeError):  # its loop was closed: nobody waits there any more
                    question.answer.set_exception(failure)
                question.answer.exception()  # seen, also if its caller was cancelled
        self._flying.clear()
        self._waiting.clear()

    def _leave(self) -> None:
        """What a claim has won there, or wins yet, goes."""
        claims = [name for question in self._flying for name in claimed(question.commands)]
        own = doubled(self._transport) if any(claims) else None
        if own is not None:
            unheard.add(own, claims, self._flying[0].replies, self._buffer, self._server)

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        self.broken = True
        disown(self._transport)

    def __del__(self) -> None:
        if not self.broken:
            self.lose(ConnectionResetError("the event loop was collected"), owes=True)


class SuspendingLine:
    """Connections with every server of the ring, from any event loop."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self._streams: PerLoop[dict[Server, asyncio.Future[Stream]]] = PerLoop()

    def start_again(self) -> None:
        """In a forked child: loops and connections are the parent's."""
        forks.each(stream.disown for _, streams in self._streams.take_all() for stream in _standing(streams.values()))

    async def take(self, name: bytes) -> Link:
        return await self.reach(self.servers.of(name))

    async def reach(self, server: Server, *, again: bool = False) -> Stream:
        self.servers.check()
        loop = asyncio.get_running_loop()
        streams = self._streams.get(loop)
        if streams is None:
            for _, dead in self._streams.take_all(closed=True):
                _close_all(dead.values())
            streams = self._streams.put(loop, {})
        coming = streams.get(server)
        if coming is not None and coming.done():
            if not coming.cancelled() and coming.exception() is None and not coming.result().broken:
                return coming.result()
            coming = None
        if coming is None:
            server.admit()
            coming = streams[server] = nobodys(loop.create_task, _connected(server, loop, self.reach))
            coming.add_done_callback(_seen)
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            if coming.cancelled():  # by us, and not its caller
                self.servers.check()
            asking = asyncio.current_task()
            if again or not coming.cancelled() or asking is None or asking.cancelling():
                raise
        except _Stopped as stopped:
            if stopped.by:
                raise stopped.by.pop() from None
            return await self.reach(server, again=again)
        except EngineError as error:
            if not error.interrupted:
                raise
            return await self.reach(server, again=again)
        except Exception as error:
            if again or not coming.done() or coming.exception() is not error:
                raise
        # Interrupted while it was connecting, or cancelled with all tasks but ours, it says nothing of the server.
        return await self.reach(server, again=True)

    def give(self, link: Link) -> None:
        pass  # it is everybody's

    def forsake(self, link: Link, name: bytes, reply: Reply | None) -> None:
        if reply is not None:  # of any other it knows itself that nobody has heard it
            assert isinstance(link, Stream)
            link.unheard(meta.claim(name), [reply])

    def groups(self, names: Sequence[bytes]) -> list[list[int]]:
        return self.servers.groups(names)

    def close(self) -> None:
        for loop, streams in self._streams.take_all():
            if loop.is_running():
                with suppress(RuntimeError):  # closed meanwhile
                    loop.call_soon_threadsafe(_close_all, list(streams.values()))
            else:
                _close_all(streams.values())


class _Stopped(Exception):
    """What a signal's handler has raised while it was connecting: one of those who wait takes it for his own."""

    def __init__(self, by: BaseException) -> None:
        self.by = [by]


async def _connected(server: Server, loop: Loop, again: Callable[[Server], Coroutine[Any, Any, Stream]]) -> Stream:
    made: list[Stream] = []

    async def connect() -> Stream:
        for late in made:
            late.lose(TimeoutError("timed out"))
        stream = Stream(server, loop, again)
        made.append(stream)
        await stream.connect()
        return stream

    try:
        stream = await unhurried(connect, TimeoutError)
        server.breaker.succeeded(time.monotonic())
        await anext(stream.ended)
    except BaseException as error:
        for stream in made:
            stream.lose(error if isinstance(error, (OSError, EngineError)) else Interrupted())
        own = of_a_caller(error)
        if own is not None:
            raise _Stopped(own) from None
        if not isinstance(error, (OSError, EngineError)):
            raise
        if not isinstance(error, EngineError):
            server.failed()
        raise trouble(server, error) from error
    return stream


async def _until_the_end(stream: Stream) -> AsyncGenerator[None, None]:
    """A loop that is shut down closes its generators, and so this connection: nobody else tells us of its end."""
    try:
        yield
    finally:
        try:
            stream.lose(ConnectionResetError("the event loop has ended"), owes=True)
        except BaseException:  # interrupted; and nobody else closes it
            if stream._transport is not None:
                shut(stream._transport, at_once=True)
            raise
        await asyncio.sleep(0)  # the transport closes in the next turn


def _seen(coming: asyncio.Future[Stream]) -> None:
    """Its error is for those who wait; there may be none any more."""
    if not coming.cancelled():
        coming.exception()


def _standing(coming: Iterable[asyncio.Future[Stream]]) -> list[Stream]:
    return [each.result() for each in coming if each.done() and not each.cancelled() and each.exception() is None]


def _close_all(coming: Iterable[asyncio.Future[Stream]]) -> None:
    for each in coming:
        if not each.done():
            with suppress(RuntimeError):  # its loop was closed
                each.cancel()
    for stream in _standing(coming):
        stream.lose(ConnectionResetError("the engine was closed"), owes=True)


def _reply(buffer: bytearray, at: int) -> tuple[Reply, int] | None:
    """A reply of the meta protocol; or, while connecting, of the older one."""
    if buffer[at : at + 8] == b"VERSION ":
        return _text(buffer, at, b"\r\n")
    if buffer[at : at + 5] == b"STAT ":
        return _text(buffer, at, b"\r\nEND\r\n")
    return parse(buffer, at)


def _text(buffer: bytearray, at: int, end: bytes) -> tuple[Reply, int] | None:
    stop = buffer.find(end, at)
    if stop < 0:
        return None
    reply = Reply(b"TEXT")
    reply.text = bytes(buffer[at:stop])
    return reply, stop + len(end)


def _longest(settings: bytes) -> int:
    for line in settings.splitlines():
        word = line.removeprefix(b"STAT item_size_max ")
        if word != line and word.isdigit():
            return int(word)
    return 1 << 20
