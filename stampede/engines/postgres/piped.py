"""A connection of an event loop, and what was asked over it: callbacks of the loop write and read it.

What a signal's handler raises may come between any two steps of this. A question stays among those under way until it
was answered; a connection that was left in the midst of a step is given up, and each step of that can be done again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from psycopg import AsyncConnection, Error

from stampede.engines.kit.landing import Interrupted
from stampede.engines.kit.replies import OutOfStep
from stampede.engines.kit.transport import disown_number
from stampede.engines.kit.vigil import NOT_TO_OTHERS
from stampede.engines.kit.wire import until_the_end
from stampede.engines.postgres.connect import Server
from stampede.engines.postgres.line import Broken, Hung, is_refusal
from stampede.engines.postgres.talk import READ, Command, Row, Talk, Talking
from stampede.interruptions import of_a_caller, thrown
from stampede.stalls import NEXT, given_back

__all__ = ["BUSY", "Asking", "Piped", "Question"]

BUSY = 4
"""Questions under way over each, from which on one more connection is worth its while."""


class Question:
    """Some commands, which are answered in order, and the caller who waits."""

    __slots__ = ("again", "answers", "commands", "future", "then")

    def __init__(self, commands: Sequence[Command], future: asyncio.Future[None]) -> None:
        self.commands = commands
        self.future = future
        self.again = False  # it was sent before, over a connection that broke
        self.answers: list[list[Row] | Exception] = []
        self.then: list[Question] = []  # to be sent behind it

    @property
    def ids(self) -> set[bytes]:
        """Of the keys that it changes."""
        return {values[0] for _, values in self.commands if values and isinstance(values[0], bytes)}

    def answered(self) -> None:
        if not self.future.done():
            with suppress(RuntimeError):  # its loop was closed
                self.future.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            with suppress(RuntimeError):
                self.future.set_exception(error)


class Asking(Protocol):
    """Whose connection it is."""

    server: Server
    connects: float
    """When the last connection was begun to be made."""

    def lost(self, wire: Piped, flying: Sequence[Question], error: Broken) -> None:
        """It is of no use any more: whether it may be asked again says the error."""

    def idle(self, wire: Piped) -> None:
        """It takes more."""

    def over(self, question: Question) -> None:
        """It was answered."""

    def interrupted(self, error: BaseException) -> None:
        """Somebody's call has been, while we worked: give it to one who waits, or raise it."""


class Piped:
    """What is asked is sent at once, behind all that was asked before; over a pooler's, one by one."""

    _connection: Any = None
    _pid = 0

    def __init__(self, asking: Asking, connection: AsyncConnection[Row], loop: asyncio.AbstractEventLoop) -> None:
        self._asking = asking
        self._loop = loop
        self._pg = connection.pgconn
        self._fd = connection.fileno()
        self._vigil, self._patience = asking.server.vigil, asking.server.timeout
        self.pipes = connection.prepare_threshold is not None  # a pooler may lose its place
        self._talk = Talk(connection, named=self.pipes)
        self.flying: deque[Question] = deque()
        self._talking: Talking | None = None
        self._since = 0.0  # when bytes last moved, or the first of the questions was sent
        self._late = self._writing = self._flushing = False
        self._whole = True  # what was being sent has been
        self._lost: Broken | None = None
        self.busy = BUSY if self.pipes else 1
        self.ended = until_the_end(self)
        self.born = asking.connects
        self._connection, self._pid = connection, os.getpid()

    def stand(self) -> None:
        """From now on it can be asked."""
        if self.pipes:
            self._pg.enter_pipeline_mode()
        self._loop.add_reader(self._fd, self._guarded, self._read)

    @property
    def takes(self) -> bool:
        return self._lost is None and (self.pipes or not self.flying)

    @property
    def load(self) -> int:
        return len(self.flying)

    def has(self, question: Question) -> bool:
        """Is it under way here?"""
        return question in self.flying

    def send(self, question: Question) -> None:
        if not self.flying:
            self._since = time.monotonic()
            self._late = False
        try:
            if not self.pipes:
                self.flying.append(question)
                self._next()
                return
            self._whole = False
            for command in question.commands:
                self._talk.put(command, question)
            self.flying.append(question)
            self._whole = True
            if len(self.flying) == 1:
                self._flush()
            elif not self._flushing:  # with what this turn of the loop asks yet
                self._flushing = True
                self._loop.call_soon(self._guarded, self._flush)
        except Exception as error:
            if thrown(error) is not None:
                self.end(Broken(Interrupted()), question)
                raise
            if not isinstance(error, (Error, OSError)):
                question.fail(error)  # it can't be said
            self.end(Broken(error), question)
        except BaseException:
            self.end(Broken(Interrupted()), question)
            raise

    # -- a pooler's: one by one ---------------------------------------------------------------------------------

    def _next(self) -> None:
        question = self.flying[0]
        ask = self._talk.apart if self._connection.isolation_level or self._asking.server.apart else self._talk.ask
        self._talking = ask(question.commands[len(question.answers)])
        self._step()

    def _step(self) -> None:
        assert self._talking is not None
        question = self.flying[0]
        try:
            wanted = next(self._talking)
            self._write(wanted != READ)
            return
        except StopIteration as end:
            question.answers += end.value
        except Exception as error:
            if not is_refusal(error):
                self._asking.server.hear(error)
                raise
            question.answers.append(error)
        self._talking = None
        if len(question.answers) < len(question.commands):
            self._next()
            return
        self._answered(question)
        self._asking.idle(self)

    # -- callbacks ----------------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            if self._lost is None:
                act()
        except Exception as error:
            own = of_a_caller(error)
            if own is None:
                self.end(Broken(error))
                return
            try:
                self._asking.interrupted(own)  # first: who has been told isn't asked for any more
            finally:
                self.end(Broken(Interrupted()))
        except BaseException:
            self.end(Broken(Interrupted()))
            raise

    def _flush(self) -> None:
        self._flushing = False
        self._write(bool(self._pg.flush()))

    def _write(self, more: bool) -> None:
        if more and not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._guarded, self._written)
        elif self._writing and not more:
            self._loop.remove_writer(self._fd)
            self._writing = False

    def _written(self) -> None:
        self._since = time.monotonic()
        if self._talking is not None:
            self._step()
        else:
            self._flush()

    def _read(self) -> None:
        self._vigil.heard = self._since = time.monotonic()
        if self._talking is not None:
            self._step()
            return
        if not self._whole:
            raise Interrupted
        self._pg.consume_input()
        for question, answer in self._talk.heard():
            if not self.flying or question is not self.flying[0]:
                raise OutOfStep("it has answered what was not asked")
            question.answers.append(answer)
            if isinstance(answer, Exception) and not is_refusal(answer):
                raise answer
            if len(question.answers) == len(question.commands):
                self._answered(question)
        if self.flying:
            self._flush()

    def _answered(self, question: Question) -> None:
        question.answered()
        self.flying.popleft()  # not before: until it is answered, it is asked again on another connection
        self._asking.over(question)

    # -- a server that hangs ------------------------------------------------------------------------------------

    def look(self) -> float | None:
        """Do what was left undone. Seconds until it is to be called hung; below zero: it is overdue for so many, and to
        be looked at again, as it may be our loop that was. None: nothing is under way."""
        if self._lost is None and not self._whole:
            self._lost = Broken(Interrupted())
        if self._lost is not None:
            self.end(self._lost)
        if self._lost is not None or not self.flying:
            return None
        if self._talking is None:
            self._guarded(self._flush)
        since, patience, late = self._since, self._patience, self._late
        left = since + patience - time.monotonic()
        if left > 0:
            self._late = self._vigil.hangs(since)
            if self._late and late:
                self.end(Hung(TimeoutError(NOT_TO_OTHERS)))
                return None
            return -NEXT if self._late else left
        self._late = True
        if not late:
            return -given_back(-left, patience)
        self._vigil.ends(since, patience)
        self.end(Hung(TimeoutError(f"it has said nothing for {patience:g} s")))
        return None

    # -- its end ------------------------------------------------------------------------------------------------

    def end(self, error: Broken, asked: Question | None = None) -> None:
        """What is under way needs another one."""
        if self._lost is None:
            self._lost = error
        flying = list(self.flying)
        self._asking.lost(self, flying if asked is None or asked in flying else [*flying, asked], self._lost)
        self.close()

    def loop_ends(self) -> None:
        """A loop that is shut down closes its generators, and not always its tasks."""
        self.end(Broken(ConnectionError("the loop has ended")))

    def close(self) -> None:
        if self._lost is None:
            self._lost = Broken(ConnectionError("the connection was closed"))
        self.flying.clear()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        if os.getpid() == self._pid:
            self._pg.finish()

    def disown(self) -> None:
        """In a forked child: it is the parent's."""
        if self._connection is not None:
            disown_number(self._fd)
        self._lost, self._connection = Broken(ConnectionError("the connection is the parent's")), None
        self.flying.clear()

    def __del__(self) -> None:
        """Its loop is gone."""
        if self._connection is not None and os.getpid() == self._pid:
            self._pg.finish()
