"""The suspending side: what one turn of an event loop asks goes out together, over one connection of that loop.

Replies come in the order of the questions, so that many callers share the connection without waiting for each other,
and nobody is refused for being one too many.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from math import inf
from typing import Any

from stampede import forks
from stampede.engines.attendant import Attendant
from stampede.engines.landing import Interrupted, Landing
from stampede.engines.progress import LARGE, Pace, unsent
from stampede.engines.redis.clients import Server, note_reader, trouble
from stampede.engines.redis.news import News, follow
from stampede.engines.redis.resp import MORE, Parser, packed, parser
from stampede.engines.redis.scripts import REMEDIES, Command, Scripts
from stampede.engines.redis.shapes import OutOfStep
from stampede.engines.transport import disown, shut
from stampede.engines.vigil import NOT_TO_OTHERS
from stampede.errors import EngineError
from stampede.interruptions import of_a_caller, pass_on
from stampede.loops import PerLoop, nobodys
from stampede.stalls import NEXT, given_back, unhurried

__all__ = ["Suspending"]


class Suspending:
    """Asks a server, from any task of any event loop."""

    def __init__(self, server: Server, scripts: Scripts, news: News) -> None:
        from redis import exceptions

        self._server = server
        self._scripts = scripts
        self._news = news
        self._any = (exceptions.RedisError, OSError, asyncio.TimeoutError)
        self._pipes: PerLoop[_Pipe] = PerLoop()
        self._wide: PerLoop[_Pipe] = PerLoop()  # for what is large: who sends, or is sent, little doesn't wait for it

    async def ask(self, command: Command) -> Any:
        """The reply."""
        large = max(map(len, command)) > LARGE
        return (await self._asked([command], self._wide if large else self._pipes)).replies[0]

    async def ask_all(self, commands: Sequence[Command], *, wide: bool = False) -> list[Any]:
        """The replies, in order, of what goes out together."""
        return (await self._asked(commands, self._wide if wide else self._pipes)).replies if commands else []

    async def read(self, command: Command, undo: Command | None = None) -> tuple[Any, int]:
        """The reply, and which connection will be told when what was read changes (0: none)."""
        try:
            question = await self._asked([command], self._pipes if undo is None else self._wide)
        except EngineError:
            raise
        except BaseException:
            if undo is not None:
                with suppress(RuntimeError, *self._any):  # its loop was closed
                    self._pipe(self._wide).ask([undo]).forget()
            raise
        return question.replies[0], question.told

    async def read_all(self, commands: Sequence[Command]) -> tuple[list[Any], int]:
        """The same of many."""
        if not commands:
            return [], 0
        question = await self._asked(commands)
        return question.replies, question.told

    async def _asked(self, commands: Sequence[Command], pipes: PerLoop[_Pipe] | None = None) -> _Question:
        self._server.check()
        try:
            pipe = self._pipe(self._pipes if pipes is None else pipes)
            question = pipe.ask(commands)
            try:
                await question.future
            except BaseException:
                question.drop()
                raise
            for reply in question.replies:
                if isinstance(reply, Exception):
                    await self._mended(pipe, list(commands), question)
                    break
        except Exception as error:
            pass_on(error)
            self._server.check()
            if isinstance(error, self._any):
                raise trouble(self._server.name, error) from error
            raise
        return question

    async def _mended(self, pipe: _Pipe, commands: list[Command], question: _Question) -> None:
        """Have each reply be one, or raise the refusal."""
        replies = question.replies
        for tried in range(REMEDIES):
            remedies = self._scripts.remedies(commands, replies, tried)
            if not remedies:
                break
            again = pipe.ask([command for some in remedies.values() for command in some])
            await again.future
            question.told = question.told if again.told == question.told else 0
            for number, end in zip(remedies, accumulate(map(len, remedies.values())), strict=True):
                replies[number] = again.replies[end - 1]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply

    def close(self) -> None:
        """Close the connections of all loops, also of those that run in other threads."""
        for loop, pipe in [*self._pipes.take_all(), *self._wide.take_all()]:
            if loop.is_running() and loop is not asyncio._get_running_loop():
                try:
                    loop.call_soon_threadsafe(pipe.close)
                except RuntimeError:
                    pass  # closed meanwhile, and its connection with it
            else:
                pipe.close()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's."""
        forks.each(pipe.disown for _, pipe in [*self._pipes.take_all(), *self._wide.take_all()])

    def close_dead(self) -> None:
        """Close the connections of loops that were closed without cancelling their tasks, as a loop should."""
        for _, pipe in [*self._pipes.take_all(closed=True), *self._wide.take_all(closed=True)]:
            pipe.close()

    def _pipe(self, pipes: PerLoop[_Pipe]) -> _Pipe:
        loop = asyncio.get_running_loop()
        pipe = pipes.get(loop)
        if pipe is None:
            self.close_dead()
            pipe = pipes.put(loop, _Pipe(self._server, self._scripts, self._news))
        return pipe


class _Question:
    """Some commands that were asked together, and their replies so far."""

    __slots__ = ("again", "awaited", "commands", "future", "heard", "replies", "told")

    def __init__(self, commands: Sequence[Command], future: asyncio.Future[None]) -> None:
        self.commands = commands
        self.future = future
        self.replies: list[Any] = []
        self.told = 0  # which connection will be told when what was read changes
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


class _Pipe:
    """One event loop's connection, and the questions before and in it.

    What a signal's handler raises may come between any two steps of this. So a question waits, or is on its way,
    until it has been answered; it may be in both places, and each step can be done again. As long as there are
    questions, a task looks at what there is, and does what was left undone.
    """

    _wire: _Wire | None = None

    def __init__(self, server: Server, scripts: Scripts, news: News) -> None:
        from redis.exceptions import ReadOnlyError, RedisError
        from redis.exceptions import TimeoutError as Hung

        self._server = server
        self._scripts = scripts
        self._news = news
        self._hung = Hung
        self._known = (RedisError, OSError, asyncio.TimeoutError)
        self._readonly = ReadOnlyError
        self._waiting: deque[_Question] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._connects = inf  # since when
        self._odd = False  # the last connection failed in a way that no server makes it fail
        self._attendant = Attendant()

    def ask(self, commands: Sequence[Command]) -> _Question:
        """A question whose future ends with its replies. Who stops waiting for them bothers nobody else."""
        loop = asyncio.get_running_loop()
        question = _Question(commands, loop.create_future())
        self._attendant.attend(loop, self)
        self._waiting.append(question)
        if len(self._waiting) == 1:  # for all that this turn asks; if it is lost, the attending task flushes
            loop.call_soon(self._turn)
        return question

    def _turn(self) -> None:
        try:
            self._flush()
        except BaseException as error:
            own = of_a_caller(error)
            if own is None:
                raise
            self.interrupted(own)

    def _flush(self) -> None:
        if not self._waiting:
            return
        wire = self._wire
        if wire is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = nobodys(asyncio.ensure_future, self._connect())
                self._connecting.add_done_callback(self._connected)
            return
        if not self._server.current(wire.connection):
            wire.lose(ConnectionError("this is not the master any more"))
            return
        if not wire.flying and wire.speaks():
            wire.lose(OutOfStep("it has said what nobody had asked for, or goodbye"))
            return
        try:
            asked = [question for question in self._waiting if not question.future.done()]
            told = self._news.told
            if told > 0 and told != wire.following:
                asked.insert(0, self._follow(wire, told))
            elif told < 0:
                wire.following = wire.told = told
            idle = not wire.flying
            wire.flying.extend(asked)
            self._waiting.clear()
            wire.send([command for question in asked for command in question.commands], idle=idle)
        except BaseException as error:  # nobody else would tell those who wait
            wire.stumbled(error)

    def _follow(self, wire: _Wire, told: int) -> _Question:
        """Have the server tell that connection of changes in what is read by this one from here on."""
        wire.following = told
        question = _Question([follow(told)], asyncio.get_running_loop().create_future())
        question.again = self  # on another connection it would be wrong

        def followed() -> None:
            answer = question.replies[0]
            if answer == b"OK" and self._news.watch(wire.socket):
                wire.told = told
            elif isinstance(answer, Exception):
                self._news.refused(told, answer)

        question.forget()
        question.heard = followed  # at once: what was read next may have come with it
        return question

    # -- the connection -----------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        connection: Any = None
        readers: list[Any] = []
        made = False
        self._connects = time.monotonic()

        async def connect() -> None:
            nonlocal connection
            connection = self._server.suspending_connection()
            note_reader(connection, readers)
            await connection.connect()

        try:
            await unhurried(connect, (self._hung, TimeoutError))
            wire = _Wire(connection, self)
            await anext(wire.ended)
            if self._wire is None:  # or whoever began this was interrupted before it had it, and another has come
                self._wire = wire
                made = True
            self._odd = False
        except asyncio.CancelledError:  # the loop ends, or the engine is closed
            self._fail_waiting(ConnectionError("the connection was closed"))
            raise
        except Exception as error:
            for ended in (error, *(reader.exception() for reader in readers)):
                if ended is not None:
                    pass_on(ended)
            if isinstance(error, self._known):
                self._fail_waiting(error)
            else:  # what it stumbles over; or thrown in by whom we don't know: once more tells which
                if self._odd:
                    self._fail_waiting(OutOfStep(f"{type(error).__name__}: {error}"))
                self._odd = not self._odd
        finally:
            self._connecting = None
            if connection is not None and not made:
                await connection.disconnect(nowait=True)
        self._flush()

    def _connected(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        own = None if error is None else of_a_caller(error)
        if own is not None:
            self._flush()
            self.interrupted(own)

    def interrupted(self, error: BaseException) -> None:
        """What a signal's handler raises comes out of the call of one who waits, as if it had come there. If nobody
        does it is the loop's to tell."""
        for question in [*(self._wire.flying if self._wire is not None else ()), *self._waiting]:
            if question.awaited and not question.future.done():
                question.fail(error)
                return
        raise error

    def heard(self, wire: _Wire, reply: Any) -> None:
        if isinstance(reply, Exception) and (isinstance(reply, self._readonly) or _is_all(reply)):
            raise ConnectionError(str(reply)) from reply  # another server is the master now: a new one may find it
        flying = wire.flying
        if not flying:
            raise OutOfStep("it has said more than it was asked for")
        question = flying[0]
        replies, commands = question.replies, question.commands
        self._scripts.check(commands[len(replies)], reply)
        replies.append(reply)
        if len(replies) == len(commands):
            question.told = wire.told
            if question.heard is not None:
                question.heard()
            future = question.future
            if not future.done():
                future.set_result(None)
            flying.popleft()  # not before: until it is answered, it is asked again on another connection

    def broken(self, wire: _Wire, error: Exception) -> None:
        """What was under way is asked once more on a new connection: every verb may be sent twice."""
        if self._wire is not wire:
            return
        if not isinstance(error, self._known):  # what a parser has stumbled over
            error = OutOfStep(f"{type(error).__name__}: {error}")
        again, ours = [], isinstance(error, Interrupted)
        for question in wire.flying:
            first = question.again in (None, wire) or (ours and question.again is not self)
            if isinstance(error, self._hung) or not first:
                question.fail(error)
            elif not question.future.done():
                question.again, question.replies = question.again if ours else wire, []
                again.append(question)
        self._waiting = deque(dict.fromkeys((*again, *self._waiting)))
        self._wire = None  # not before: until here, all of this is done again if it is interrupted
        self._flush()

    def look(self, sure: bool) -> float | None:
        """Do what was left undone; break a connection that owes a reply, and on which nothing has moved for as long as
        a reply may take. Seconds until it is to be called hung."""
        if self._wire is not None:
            self._wire.look_for_missed()
        if self._wire is not None and self._wire.lost:
            self._wire.lose(ConnectionError("the server closed the connection"))
        self._flush()
        wire, patience = self._wire, self._server.patience
        if wire is None and self._server.vigil.hangs(self._connects):
            self._fail_waiting(self._hung(NOT_TO_OTHERS))  # who comes later finds out whether it has connected
        if wire is None or not wire.flying:
            return inf if self._waiting else None
        if patience is None:
            return inf
        left, vigil, since = wire.left(patience), self._server.vigil, wire.since
        if left > 0 and vigil.hangs(since):
            if sure:
                wire.lose(self._hung(NOT_TO_OTHERS))
            return -NEXT
        if left <= 0 and sure:
            wire.lose(self._hung(f"no reply within {patience:g} s"))
            vigil.ends(since, patience)
        # Overdue, it may be our own loop that was blocked, and the reply be there to be read.
        return left if left > 0 else -given_back(-left, patience)

    def _fail_waiting(self, error: BaseException) -> None:
        for question in self._waiting:
            question.fail(error)
        self._waiting.clear()

    def gone(self) -> None:
        """The loop ends, or the engine is closed. (A loop that we refer to would never be collected.)"""
        error = ConnectionError("the connection was closed")
        for question in self._wire.flying if self._wire is not None else ():
            question.fail(error)
        self._wire = None
        self._fail_waiting(error)
        with suppress(RuntimeError):  # its loop was closed
            self._attendant.leave()

    def close(self) -> None:
        if self._connecting is not None and not self._connecting.get_loop().is_closed():
            self._connecting.cancel()
        if self._wire is not None:
            self._wire.close()
        self.gone()

    def __del__(self) -> None:
        if self._wire is not None:
            self._wire.close()  # its loop was collected

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.disown()


def _is_all(refusal: Exception) -> bool:
    """So a server speaks to one who has not logged in, and says no more than that."""
    return str(refusal).startswith("Protocol error")


class _Wire(Landing):
    """A connection that the client library has made, with its bytes read and written by us."""

    def __init__(self, connection: Any, pipe: _Pipe) -> None:
        super().__init__()
        self.connection = connection
        self._pipe = pipe
        self._news = pipe._news
        self._vigil = pipe._server.vigil
        self.dead = False
        self.told = 0  # which connection the server has agreed to tell of changes in what is read here
        self.following = 0  # and which we have asked it to
        self.flying: deque[_Question] = deque()  # questions that were sent, in the order of their replies
        self._parser: Parser = parser(connection._parser.parse_error)
        self._transport: asyncio.Transport = connection._writer.transport
        self.socket = self._transport.get_extra_info("socket")
        self._watched: select.poll | None = None
        if self._transport.get_extra_info("sslcontext") is None:  # TLS sends what is no reply, too
            self._watched = select.poll()
            self._watched.register(self.socket.fileno(), select.POLLIN)
        self._pace = Pace()
        self.ended = _until_the_end(self)
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            raise ConnectionError("the server closed the connection")

    @property
    def lost(self) -> bool:
        """It is of no use any more, and perhaps nobody was told."""
        return self.dead or self._transport.is_closing()

    def speaks(self) -> bool:
        """Whether there is something to read, which is no reply if nothing has been asked."""
        return self._watched is not None and bool(self._watched.poll(0))

    def send(self, commands: Sequence[Command], *, idle: bool) -> None:
        data = packed(self.connection, commands)
        if idle:
            self._pace.begin(time.monotonic())
        if len(data) > LARGE:
            self._pace.sends(len(data))
        self._transport.write(data)

    def left(self, patience: float) -> float:
        """Seconds until it is to be called hung."""
        return self._pace.left(patience, unsent(self._transport), time.monotonic())

    @property
    def since(self) -> float:
        """When it began to wait for what it waits for."""
        return self._pace.since

    def landed(self, data: memoryview) -> None:
        if self.dead:
            return
        pipe, gets = self._pipe, self._parser.gets
        try:
            self._vigil.heard = now = time.monotonic()
            self._pace.heard(now)
            self._parser.feed(data)
            while (reply := gets()) is not MORE:
                pipe.heard(self, reply)
        except BaseException as error:  # these are no replies, or not to our questions
            self.stumbled(error)

    def interrupted(self, error: BaseException) -> None:
        self._pipe.interrupted(error)

    def lose(self, error: Exception) -> None:
        """What is under way on it needs another."""
        self._leave()
        self._transport.abort()
        self.connection._reader = self.connection._writer = None
        self._pipe.broken(self, error)

    def close(self) -> None:
        """Close it, also when its loop runs no more."""
        self._leave()
        shut(self._transport)
        self.connection._reader = self.connection._writer = None  # or it would warn that it was not closed

    def _leave(self) -> None:
        self.dead = True
        if self.told > 0:
            self._news.reader_lost()
        self.told = 0

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        self.dead = True
        disown(self._transport)

    def _loop_ends(self) -> None:
        self.close()
        if self._pipe._wire is self:
            self._pipe.gone()


async def _until_the_end(wire: _Wire) -> AsyncGenerator[None, None]:
    """A loop that is shut down closes its generators, and not always its tasks."""
    try:
        yield
    finally:
        try:
            wire._loop_ends()
        except BaseException:  # interrupted; and nobody else closes it
            wire._loop_ends()
            raise
        await asyncio.sleep(0)  # the transport closes in the next turn
