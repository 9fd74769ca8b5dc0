"""The connection of an event loop: questions of one turn of the loop are sent together.

Replies come in the order of the questions, so many callers share the connection without waiting for each other, and
none is refused because there are too many. A server is said to hang when it owes a reply and no byte was sent or
received for the time of a time-out. An engine says in a `Pipe` of its own how it connects, writes and reads."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from stampede.engines.kit.hang_detector import NOT_TO_OTHERS, HangDetector
from stampede.engines.kit.replies import ODD, OutOfStep, out_of_step
from stampede.engines.kit.wire import INTERRUPTED, Question, Wire
from stampede.runtime import forks
from stampede.runtime.event_loops import Loop, PerLoop, in_empty_context

__all__ = ["Pipe", "Pipes", "Timer"]

P = TypeVar("P", bound="_Ends")


class _Ends(Protocol):
    """The connection of one loop, as `Pipes` sees it."""

    def close(self) -> None: ...
    def disown(self) -> None: ...


BLOCKED = 0.2
"""Seconds for which a loop must have been blocked while it connected, to try again after a time-out."""

LOOK = 0.05
"""Seconds between two looks at a connection that owes a reply."""


class Timer:
    """A timer that calls `look` every `LOOK` seconds until it returns False. It ends with its loop."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._handle: asyncio.TimerHandle | None = None
        self.late = 0.0  # seconds in all by which looks came too late, as the loop was blocked

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timer, unless it runs already."""
        handle = self._handle
        if handle is not None:
            if handle.when() + LOOK > loop.time():
                return
            self.late += loop.time() - handle.when()
            handle.cancel()  # late: the loop was blocked, or an exception such as Ctrl-C ended it and lost the call
        # Without the context of the caller, which is only the first of many to ask.
        self._handle = in_empty_context(loop.call_later, LOOK, self._due, loop)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._handle is not None:
            self.late += loop.time() - self._handle.when()
        self._handle = None
        again = True
        try:
            again = self._look()
        finally:
            if again:
                self.start(loop)


class Pipe(ABC):
    """One event loop's way to one server, with the questions that wait and those under way. It connects on demand."""

    hung: type[Exception] = TimeoutError
    """The error that means that no reply came in time. The question is not asked again."""

    final: tuple[type[Exception], ...] = (TimeoutError,)
    """Errors that end the questions under way. After any other error of the connection they are asked once more."""

    known: tuple[type[Exception], ...] = (OSError,)
    """Errors that a server, or the network, causes while connecting or reading."""

    wire: Wire | None = None
    """The connection, while there is one."""

    def __init__(self, hang_detector: HangDetector, patience: float | None) -> None:
        self.hang_detector = hang_detector
        self._patience = patience
        self._waiting: deque[Question] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._connects = inf  # when connecting began
        self._late = 0.0  # the `since` of a connection that the last look found overdue
        self._timer = Timer(self._look)

    # -- for engines ------------------------------------------------------------------------------------------------

    @abstractmethod
    async def reach(self) -> Wire:
        """Return a new connection that is ready for questions."""

    def failed(self, error: Exception) -> None:
        """React to an error while connecting."""
        return

    @abstractmethod
    def written(self, wire: Wire, questions: Sequence[Question]) -> bytes:
        """Return the questions as bytes."""

    @abstractmethod
    def check(self, question: Question, reply: Any) -> None:
        """Raise if this cannot be the question's next reply, or if it says that this connection is useless."""

    def before(self, wire: Wire) -> Question | None:
        """Return a question to be sent before all others of this turn, or None."""
        return None

    def left(self, wire: Wire, *, ours: bool) -> None:
        """React to the end of a connection. `ours` means that this process closed it, which says nothing about the
        server."""
        return

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def connecting(self) -> bool:
        # A task that is cancelled before it begins is done, and never sets this to None.
        return self._connecting is not None and not self._connecting.done()

    def ask(self, asked: Any, count: int, *, twice: bool = True) -> Question:
        """Return a question whose future ends when its replies are there. A caller that stops waiting disturbs no
        other."""
        loop = asyncio.get_running_loop()
        question = Question(asked, count, loop.create_future(), twice=twice)
        self._timer.start(loop)
        self._waiting.append(question)
        if len(self._waiting) == 1:  # for all that this turn asks
            loop.call_soon(self._flush)
        return question

    def _flush(self) -> None:
        if not self._waiting:
            return
        wire = self.wire
        if wire is None:
            if not self.connecting:
                self._waiting = deque(question for question in self._waiting if not question.future.done())
                if self._waiting:
                    self._connects = time.monotonic()
                    self._connecting = in_empty_context(asyncio.ensure_future, self._connect())
        elif not wire.current:
            wire.lose(ConnectionError("this server is not the master any more"))
        elif not wire.flying and wire.speaks():
            wire.lose(OutOfStep("the server sent something unasked, or closed the connection"))
        else:
            self._send(wire)

    def _send(self, wire: Wire) -> None:
        first = self.before(wire)
        asked = [question for question in self._waiting if not question.future.done()]
        if first is not None:
            asked.insert(0, first)
        idle = not wire.flying
        try:
            wire.flying.extend(asked)
            self._waiting.clear()
            if asked:
                wire.send(self.written(wire, asked), idle=idle)
        except BaseException:  # how much was sent is unknown
            wire.lose(ConnectionAbortedError(INTERRUPTED))
            raise

    def take_reply(self, wire: Wire, reply: Any) -> None:
        """Take one reply, and finish its question if it is the last."""
        flying = wire.flying
        if not flying:
            raise OutOfStep("the server sent more replies than there were questions")
        question = flying[0]
        self.check(question, reply)
        replies = question.replies
        replies.append(reply)
        if len(replies) == question.count:
            question.wire, question.reporter = wire, wire.reporter
            if question.on_replies is not None:
                question.on_replies()
            future = question.future
            if not future.done():
                future.set_result(None)
            flying.popleft()  # only now: if the connection breaks before this, it is asked again

    # -- the connection ---------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            late = self._timer.late
            try:
                wire = await self.reach()
            except (self.hung, TimeoutError):
                if self._timer.late - late < BLOCKED:
                    raise
                # The loop was blocked, for example by making the TLS contexts of many servers. This says nothing about
                # this one.
                wire = await self.reach()
            if wire.dead:
                raise OutOfStep("the server sent something unasked")
            await anext(wire.ended)
            self.wire = wire
        except self.known as error:
            self.failed(error)
            self._fail_waiting(error)
        except ODD as error:
            self._fail_waiting(out_of_step(error))
        except Exception:
            self._fail_waiting(ConnectionAbortedError("connecting failed"))
            raise
        finally:  # if all tasks of the loop were cancelled, the next look connects again for callers that go on
            self._connecting = None
        self._flush()

    def broken(self, wire: Wire, error: Exception) -> None:
        """Ask the questions under way once more on a new connection, where that is allowed."""
        flying, wire.flying = wire.flying, deque()
        if self.wire is not wire:  # it broke before it was shared
            for question in flying:
                question.fail(error)
            return
        self.wire = None
        again = []
        for question in flying:
            if question.again or not question.twice or isinstance(error, self.final):
                question.fail(error)
            elif not question.future.done():
                question.again, question.replies = True, []
                again.append(question)
        for question in self._waiting:
            if question.twice:
                again.append(question)
            else:
                question.fail(error)
        self._waiting = deque(dict.fromkeys(again))
        self._flush()

    def _look(self) -> bool:
        """Break a connection that owes a reply, if no byte has moved for as long as a reply may take. Return whether to
        look again."""
        wire, hang_detector = self.wire, self.hang_detector
        if wire is None:
            if hang_detector.hangs(self._connects):
                self._fail_waiting(self.hung(NOT_TO_OTHERS))  # later callers find out whether it has connected
        elif wire.flying and self._patience is not None:
            overdue, since = wire.left(self._patience) <= 0, wire.since
            if overdue or hang_detector.hangs(since):
                if since != self._late:  # perhaps the loop was blocked: it reads what has come before the next look
                    self._late = since
                elif overdue:
                    wire.lose(self.hung(f"no reply within {self._patience:g} s"))
                    hang_detector.ends(since, self._patience)
                else:
                    wire.lose(self.hung(NOT_TO_OTHERS))
        self._flush()  # for questions whose own turn was ended by an exception
        if self.wire is None:
            return self.connecting
        return bool(self._waiting or self.wire.flying)

    def _fail_waiting(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            question.fail(error)

    def close(self) -> None:
        """Close the connection, because the engine is closed or the loop ends."""
        wire, self.wire = self.wire, None
        error = ConnectionError("the connection was closed")
        self._fail_waiting(error)
        self._timer.stop()
        if self._connecting is not None and not self._connecting.get_loop().is_closed():
            self._connecting.cancel()
        if wire is not None:
            wire.close()
            for question in wire.flying:
                question.fail(error)

    def __del__(self) -> None:
        if self.wire is not None:
            self.wire.close()  # the loop was garbage-collected

    def disown(self) -> None:
        """Give up the connection in a forked child: it belongs to the parent."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.disown()


class Pipes(Generic[P]):
    """The pipes of one engine: for each event loop one to each `end`."""

    def __init__(self, made: Callable[[Any], P]) -> None:
        self._made = made
        self._pipes: PerLoop[dict[Hashable, P]] = PerLoop()

    def to(self, end: Hashable) -> P:
        """Return the pipe of the running loop to this end, a new one if necessary."""
        loop = asyncio.get_running_loop()
        pipes = self._pipes.get(loop)
        if pipes is None:
            self.close_dead()
            pipes = self._pipes.put(loop, {})
        pipe = pipes.get(end)
        if pipe is None:
            pipe = pipes[end] = self._made(end)
        return pipe

    def take_all(self, *, closed: bool = False) -> list[tuple[Loop, P]]:
        """Remove and return all pipes, with their loops. With `closed`, only those of closed loops."""
        return [(loop, pipe) for loop, pipes in self._pipes.take_all(closed=closed) for pipe in pipes.values()]

    def close(self) -> None:
        """Close the connections of all loops, also of those that run in other threads."""
        for loop, pipe in self.take_all():
            if loop.is_running() and loop is not asyncio._get_running_loop():
                try:
                    loop.call_soon_threadsafe(pipe.close)
                except RuntimeError:
                    pass  # the loop was closed meanwhile, and its connection with it
            else:
                pipe.close()

    def start_again(self) -> None:
        """Begin anew in a forked child: the connections belong to the parent."""
        forks.each(pipe.disown for _, pipe in self.take_all())

    def close_dead(self) -> None:
        """Close the connections of loops that were closed without cancelling their tasks first."""
        for _, pipe in self.take_all(closed=True):
            pipe.close()
