"""A connection of an event loop, and what was asked over it: callbacks of the loop write and read it."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from psycopg import AsyncConnection, Error

from stampede.engines.kit import wire as kit
from stampede.engines.kit.replies import ODD, OutOfStep
from stampede.engines.kit.transport import disown_number
from stampede.engines.kit.vigil import NOT_TO_OTHERS
from stampede.engines.postgres.connect import Server
from stampede.engines.postgres.line import Broken, Hung, is_refusal
from stampede.engines.postgres.talk import READ, Command, Row, Talk, Talking

__all__ = ["BUSY", "Asking", "Piped", "Question"]

BUSY = 4
"""Questions under way over each, from which on one more connection is worth its while."""


class Question(kit.Question):
    """Some commands, which are answered in order."""

    __slots__ = ("then",)

    def __init__(self, commands: Sequence[Command], count: int, future: asyncio.Future[None]) -> None:
        super().__init__(commands, count, future)
        self.then: list[Question] = []  # to be sent behind it

    @property
    def ids(self) -> set[bytes]:
        """Of the keys that it changes."""
        return {values[0] for _, values in self.asked if values and isinstance(values[0], bytes)}


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
        self._late = 0.0  # that moment, where a look found it to be too long ago
        self._writing = self._flushing = False
        self._lost = False
        self.busy = BUSY if self.pipes else 1
        self.ended = kit.until_the_end(self)
        self.born = asking.connects
        self._connection, self._pid = connection, os.getpid()

    def stand(self) -> None:
        """From now on it can be asked."""
        if self.pipes:
            self._pg.enter_pipeline_mode()
        self._loop.add_reader(self._fd, self._guarded, self._read)

    @property
    def takes(self) -> bool:
        return not self._lost and (self.pipes or not self.flying)

    def send(self, question: Question) -> None:
        if not self.flying:
            self._since = time.monotonic()
        self.flying.append(question)
        try:
            if not self.pipes:
                self._next()
                return
            for command in question.asked:
                self._talk.put(command, question)
            if len(self.flying) == 1:
                self._flush()
            elif not self._flushing:  # with what this turn of the loop asks yet
                self._flushing = True
                self._loop.call_soon(self._guarded, self._flush)
        except (Error, OSError) as error:
            self.end(Broken(error))
        except Exception as error:  # it holds a value that can't be sent
            question.fail(error)
            self.end(Broken(error))
        except BaseException:
            self.end(Broken(ConnectionAbortedError(kit.INTERRUPTED)))
            raise

    # -- a pooler's: one by one ---------------------------------------------------------------------------------

    def _next(self) -> None:
        question = self.flying[0]
        ask = self._talk.apart if self._connection.isolation_level or self._asking.server.apart else self._talk.ask
        self._talking = ask(question.asked[len(question.replies)])
        self._step()

    def _step(self) -> None:
        assert self._talking is not None
        question = self.flying[0]
        try:
            wanted = next(self._talking)
            self._write(wanted != READ)
            return
        except StopIteration as end:
            question.replies += end.value
        except Error as error:
            if not is_refusal(error):
                self._asking.server.hear(error)
                raise
            question.replies.append(error)
        self._talking = None
        if len(question.replies) < question.count:
            self._next()
            return
        self._answered(question)
        self._asking.idle(self)

    # -- callbacks ----------------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            act()
        except (Error, OSError, *ODD) as error:
            self.end(Broken(error))
        except BaseException:
            self.end(Broken(ConnectionAbortedError(kit.INTERRUPTED)))
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
        self._pg.consume_input()
        for question, answer in self._talk.heard():
            if not self.flying or question is not self.flying[0]:
                raise OutOfStep("it has answered what was not asked")
            question.replies.append(answer)
            if isinstance(answer, Exception) and not is_refusal(answer):
                raise answer
            if len(question.replies) == question.count:
                self._answered(question)
        if self.flying:
            self._flush()

    def _answered(self, question: Question) -> None:
        question.answer()
        self.flying.popleft()  # not before: until it is answered, it is asked again on another connection
        self._asking.over(question)

    # -- a server that hangs ------------------------------------------------------------------------------------

    def look(self) -> None:
        """End it if nothing has moved for as long as an answer may take."""
        if self._lost or not self.flying:
            return
        since, patience = self._since, self._patience
        overdue = since + patience <= time.monotonic()
        if not overdue and not self._vigil.hangs(since):
            return
        if since != self._late:  # the loop may have been blocked: it reads what has come before the next look
            self._late = since
        elif overdue:
            self._vigil.ends(since, patience)
            self.end(Hung(TimeoutError(f"it has said nothing for {patience:g} s")))
        else:
            self.end(Hung(TimeoutError(NOT_TO_OTHERS)))

    # -- its end ------------------------------------------------------------------------------------------------

    def end(self, error: Broken) -> None:
        """What is under way needs another one."""
        if not self._lost:
            flying = list(self.flying)
            self.close()
            self._asking.lost(self, flying, error)

    def loop_ends(self) -> None:
        self.end(Broken(ConnectionError("the loop has ended")))

    def close(self) -> None:
        self._lost = True
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
        self._lost, self._connection = True, None
        self.flying.clear()

    def __del__(self) -> None:
        """Its loop is gone."""
        if self._connection is not None and os.getpid() == self._pid:
            self._pg.finish()
