"""The connection of an event loop: what one turn of the loop asks goes out together.

Replies come in the order of the questions, so that many callers share the connection without waiting for each other,
and nobody is refused for being one too many. A server is called hung when it owes a reply and no byte was sent or
received for the time of a time-out. An engine says in a `Pipe` of its own how it connects, writes and reads.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from stampede import forks
from stampede.engines.kit.attendant import Attendant
from stampede.engines.kit.landing import Interrupted
from stampede.engines.kit.replies import OutOfStep
from stampede.engines.kit.vigil import NOT_TO_OTHERS, Vigil
from stampede.engines.kit.wire import Question, Wire
from stampede.interruptions import of_a_caller
from stampede.loops import Loop, PerLoop, nobodys
from stampede.stalls import NEXT, given_back, unhurried

__all__ = ["Pipe", "Pipes"]

P = TypeVar("P", bound="_Ends")


class _Ends(Protocol):
    """What a loop has of an engine."""

    def close(self) -> None: ...
    def disown(self) -> None: ...


class Pipe(ABC):
    """One event loop's way to one server, and the questions before and in it. It connects when there are some.

    What a signal's handler raises may come between any two steps of this. So a question waits, or is on its way,
    until it has been answered; it may be in both places, and each step can be done again. As long as there are
    questions, a task looks at what there is, and does what was left undone.
    """

    hung: type[Exception] = TimeoutError
    """What says that there was no reply in time: who was waiting doesn't ask again."""

    final: tuple[type[Exception], ...] = (TimeoutError,)
    """What ends a question that was under way; all else that ends its connection has it asked once more."""

    known: tuple[type[Exception], ...] = (OSError,)
    """What a server, or the way to it, makes connecting fail with."""

    wire: Wire | None = None
    """The connection that stands."""

    def __init__(self, vigil: Vigil, patience: float | None) -> None:
        self.vigil = vigil
        self._patience = patience
        self._waiting: deque[Question] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._connects = inf  # since when
        self._odd = False  # the last connection failed in a way that no server makes it fail
        self._attendant = Attendant()

    # -- what an engine says ----------------------------------------------------------------------------------------

    @abstractmethod
    async def reach(self, made: list[Wire]) -> Wire:
        """A connection that stands. It is noted in `made` before it keeps anything: who is interrupted closes it."""

    def failed(self, error: Exception) -> None:
        """There is none to be had."""
        return

    @abstractmethod
    def written(self, wire: Wire, questions: Sequence[Question]) -> bytes:
        """As they are sent."""

    @abstractmethod
    def check(self, question: Question, reply: Any) -> None:
        """Raise if that can't be its next reply; or if it says that nothing is to be had over this connection."""

    def current(self, wire: Wire) -> bool:
        """Whether it leads where a new one would."""
        return True

    def before(self, wire: Wire) -> Question | None:
        """What is to be asked before all else that this turn asks."""
        return None

    def unheard(self, question: Question) -> None:
        """The replies are there, and who asked is gone."""
        return

    def left(self, wire: Wire, *, ours: bool) -> None:
        """Nothing is asked on it any more. `ours`: we close it, so this says nothing of the server."""
        return

    # -- questions --------------------------------------------------------------------------------------------------

    @property
    def connecting(self) -> bool:
        return self._connecting is not None and not self._connecting.done()

    def ask(self, asked: Any, count: int, *, twice: bool = True) -> Question:
        """A question whose future ends with its replies. Who stops waiting for them bothers nobody else."""
        loop = asyncio.get_running_loop()
        question = Question(asked, count, loop.create_future(), twice=twice)
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
        wire = self.wire
        if wire is None:
            if not self.connecting:
                self._connecting = nobodys(asyncio.ensure_future, self._connect())
                self._connecting.add_done_callback(self._connected)
            return
        if not self.current(wire):
            wire.lose(ConnectionError("this is not the master any more"))
            return
        if not wire.flying and wire.speaks():
            wire.lose(OutOfStep("it has said what nobody had asked for, or goodbye"))
            return
        try:
            asked = [question for question in self._waiting if not question.future.done()]
            first = self.before(wire)
            if first is not None:
                asked.insert(0, first)
            idle = not wire.flying
            wire.flying.extend(asked)
            self._waiting.clear()
            if asked:
                wire.send(self.written(wire, asked), idle=idle)
        except BaseException as error:  # nobody else would tell those who wait
            wire.stumbled(error)

    def heard(self, wire: Wire, reply: Any) -> None:
        """Any reply."""
        flying = wire.flying
        if not flying:
            raise OutOfStep("it has said more than it was asked for")
        question = flying[0]
        self.check(question, reply)
        replies = question.replies
        replies.append(reply)
        if len(replies) == question.count:
            question.wire, question.told = wire, wire.told
            if question.heard is not None:
                question.heard()
            future = question.future
            if not future.done():
                future.set_result(None)
            else:
                self.unheard(question)
            flying.popleft()  # not before: until it is answered, it is asked again on another connection

    def interrupted(self, error: BaseException) -> None:
        """What a signal's handler raises comes out of the call of one who waits, as if it had come there. If nobody
        does it is the loop's to tell."""
        for question in [*(self.wire.flying if self.wire is not None else ()), *self._waiting]:
            if question.awaited and not question.future.done():
                question.fail(error)
                return
        raise error

    # -- the connection ---------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        made: list[Wire] = []
        self._connects = time.monotonic()
        try:
            wire = await unhurried(lambda: self.reach(made), (self.hung, TimeoutError))
            await anext(wire.ended)
            if self.wire is None:  # or whoever began this was interrupted before it had it, and another has come
                self.wire = wire
            self._odd = False
        except asyncio.CancelledError:  # the loop ends, or the engine is closed
            self._fail_waiting(ConnectionError("the connection was closed"))
            raise
        except Interrupted:
            pass  # by ourselves: that says nothing of the server
        except Exception as error:
            if isinstance(error, self.known):
                self.failed(error)
                self._fail_waiting(error)
            else:  # what it stumbles over; or thrown in by whom we don't know: once more tells which
                if self._odd:
                    self._fail_waiting(_odd(error))
                self._odd = not self._odd
        finally:
            self._connecting = None
            for wire in made:
                if wire is not self.wire:
                    wire.close()
        self._flush()

    def _connected(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        own = None if error is None else of_a_caller(error)
        if own is not None:
            self._flush()
            self.interrupted(own)

    def broken(self, wire: Wire, error: Exception) -> None:
        """What was under way is asked once more on a new connection, if it may be."""
        if self.wire is not wire:
            for question in wire.flying:
                if not question.twice:  # of one that is to stand yet
                    question.fail(error)
            return
        if not isinstance(error, (*self.known, self.hung)):  # what a parser has stumbled over
            error = _odd(error)
        again, ours = [], isinstance(error, Interrupted)
        for question in wire.flying:
            first = question.again in (None, wire) or (ours and question.again is not self)
            if isinstance(error, self.final) or not first or not question.twice:
                question.fail(error)
            elif not question.future.done():
                question.again, question.replies = question.again if ours else wire, []
                again.append(question)
        for question in self._waiting:
            if question.twice:
                again.append(question)
            else:
                question.fail(error)
        self._waiting = deque(dict.fromkeys(again))
        self.wire = None  # not before: until here, all of this is done again if it is interrupted
        self._flush()

    def look(self, sure: bool) -> float | None:
        """Do what was left undone; break a connection that owes a reply, and on which nothing has moved for as long as
        a reply may take. Seconds until it is to be called hung."""
        if self.wire is not None:
            self.wire.look_for_missed()
        if self.wire is not None and self.wire.lost:
            self.wire.lose(ConnectionError("the server closed the connection"))
        self._flush()
        wire, patience, vigil = self.wire, self._patience, self.vigil
        if wire is None and vigil.hangs(self._connects):
            self._fail_waiting(self.hung(NOT_TO_OTHERS))  # who comes later finds out whether it has connected
        if wire is None or not wire.flying:
            return inf if self._waiting else None
        if patience is None:
            return inf
        left, since = wire.left(patience), wire.since
        if left > 0 and vigil.hangs(since):
            if sure:
                wire.lose(self.hung(NOT_TO_OTHERS))
            return -NEXT
        if left <= 0 and sure:
            wire.lose(self.hung(f"no reply within {patience:g} s"))
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
        for question in self.wire.flying if self.wire is not None else ():
            question.fail(error)
        self.wire = None
        self._fail_waiting(error)
        with suppress(RuntimeError):  # its loop was closed
            self._attendant.leave()

    def close(self) -> None:
        if self._connecting is not None and not self._connecting.get_loop().is_closed():
            self._connecting.cancel()
        if self.wire is not None:
            self.wire.close()
        self.gone()

    def __del__(self) -> None:
        if self.wire is not None:
            self.wire.close()  # its loop was collected

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.disown()


def _odd(error: Exception) -> OutOfStep:
    return OutOfStep(f"{type(error).__name__}: {error}")


class Pipes(Generic[P]):
    """Those of one engine: for each event loop one to each `end`."""

    def __init__(self, made: Callable[[Any], P]) -> None:
        self._made = made
        self._pipes: PerLoop[dict[Hashable, P]] = PerLoop()

    def to(self, end: Hashable) -> P:
        """The one of the loop that runs."""
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
        """Whatever there is, and it is there no more; or only what belongs to loops that are closed."""
        return [(loop, pipe) for loop, pipes in self._pipes.take_all(closed=closed) for pipe in pipes.values()]

    def close(self) -> None:
        """Close the connections of all loops, also of those that run in other threads."""
        for loop, pipe in self.take_all():
            if loop.is_running() and loop is not asyncio._get_running_loop():
                try:
                    loop.call_soon_threadsafe(pipe.close)
                except RuntimeError:
                    pass  # closed meanwhile, and its connection with it
            else:
                pipe.close()

    def start_again(self) -> None:
        """In a forked child: the connections are the parent's."""
        forks.each(pipe.disown for _, pipe in self.take_all())

    def close_dead(self) -> None:
        """Close the connections of loops that were closed without cancelling their tasks, as a loop should."""
        for _, pipe in self.take_all(closed=True):
            pipe.close()
