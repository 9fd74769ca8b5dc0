"""The suspending side: what tasks ask goes out at once, over the connection of their loop that has least to do.

Callbacks of the loop do all of it: no task waits for an answer but the caller's own, and one that is cancelled leaves
its question to be answered, and nobody hears it. Only connecting takes a task; and one looks, as long as there are
questions, whether the server hangs, and does what an interruption has left undone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from math import inf

from psycopg.errors import ConnectionTimeout

from stampede.engines.kit.attendant import Attendant
from stampede.engines.kit.landing import Interrupted
from stampede.engines.kit.pipe import Pipes
from stampede.engines.kit.pool import is_once
from stampede.engines.kit.vigil import NOT_TO_OTHERS
from stampede.engines.postgres.connect import Server
from stampede.engines.postgres.line import Broken, Hung, ServerLine
from stampede.engines.postgres.piped import Piped, Question
from stampede.engines.postgres.talk import Command, Row, rows_of
from stampede.errors import EngineClosed, StampedeError
from stampede.interruptions import of_a_caller
from stampede.loops import nobodys
from stampede.stalls import unhurried

__all__ = ["Suspending"]

MOST = 4
"""Connections of a loop. One does for most: what is asked meanwhile is sent behind, without waiting."""

REST = 1.0
"""Seconds for which those that are there have to do, after the server has taken no more."""


class Suspending(ServerLine):
    """Asks a server, from any task of any event loop."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._desks = Pipes[_Desk](lambda _: _Desk(server))

    async def sent(self, commands: Sequence[Command]) -> list[list[Row]]:
        question = Question(commands, asyncio.get_running_loop().create_future())
        question.again = is_once(commands)
        desk = self._desks.to(None)
        try:
            desk.ask(question)
            await question.future
        except BaseException:
            question.future.cancel()
            desk.leave(question)
            raise
        return rows_of(question.answers)

    def close(self) -> None:
        self._desks.close()

    def start_again(self) -> None:
        self._desks.start_again()

    def close_dead(self) -> None:
        self._desks.close_dead()


class _Desk:
    """The connections of one loop, and those who wait for one."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._wires: list[Piped] = []
        self._waiting: deque[Question] = deque()
        self._left: list[Question] = []  # by those who asked; the answers are yet to come
        self._connecting: asyncio.Task[None] | None = None
        self.connects = inf  # since when
        self._broke = 0.0  # when one has last ended with questions under way
        self._rests = 0.0  # until when no more connections are made than there are
        self._attendant = Attendant()
        self._closed = False

    # -- questions ----------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        self._attendant.attend(self._loop, self)
        if self._left:
            for left in self._left:
                if left.ids & question.ids:
                    left.then.append(question)
                    return
        wire = min(self._wires, key=_load, default=None)
        if wire is not None and wire.takes:
            wire.send(question)
        else:
            self._waiting.append(question)
        if wire is None or (_load(wire) >= wire.busy and len(self._wires) < self._most()):
            self._connect()

    def _most(self) -> int:
        if time.monotonic() < self._rests:
            return 0
        return min(self.server.max_connections, self.server.max_connections if self.server.pooled else MOST)

    def leave(self, question: Question) -> None:
        """Who asked it is gone, and is about to take it back: over another connection that would come too early."""
        if any(wire.has(question) for wire in self._wires):
            self._left.append(question)

    def over(self, question: Question) -> None:
        """It was answered, or never will be."""
        if question in self._left:
            self._wait_again(question.then)
            self._left.remove(question)
            self._go_on()

    def idle(self, wire: Piped) -> None:
        """It takes more."""
        while self._waiting and wire.takes:
            # What broke one may have broken them all, and nobody has noticed yet.
            fresh = wire.born >= self._broke
            question = next((each for each in self._waiting if fresh or not each.again), None)
            if question is None:
                return
            if not self._has(question):
                wire.send(question)
            if self._has(question) and question in self._waiting:
                self._waiting.remove(question)  # not before: it would be lost, if this is interrupted

    def _has(self, question: Question) -> bool:
        """Need it not be sent?"""
        return question.future.done() or any(wire.has(question) for wire in self._wires)

    def interrupted(self, error: BaseException) -> None:
        for question in [each for wire in self._wires for each in wire.flying] + [*self._waiting]:
            if not question.future.done():
                question.fail(error)
                return
        raise error

    def lost(self, wire: Piped, flying: Sequence[Question], error: Broken) -> None:
        """A connection has ended: what it was asked is asked once more, on another one."""
        again, ours = [], isinstance(error.why, Interrupted)
        for question in flying:
            if self._closed or isinstance(error, Hung) or (question.again and not ours):
                question.fail(error)
            elif not question.future.done():
                question.again, question.answers = question.again or not ours, []
                again.append(question)
        if again and not ours:
            self._broke = time.monotonic()
        self._wait_again(again)
        if wire in self._wires:
            self._wires.remove(wire)  # not before: until here, all of this is done again if it is interrupted
        for question in flying:
            self.over(question)
        if isinstance(error, Hung) and not self._wires:
            self._fail(error)
        self._go_on()

    def _wait_again(self, questions: Sequence[Question]) -> None:
        self._waiting = deque(dict.fromkeys([*questions, *self._waiting]))

    def _go_on(self) -> None:
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        if self._waiting and (not self._wires or self._needs_a_new_one()):
            self._connect()
        for wire in list(self._wires):
            self.idle(wire)

    def _needs_a_new_one(self) -> bool:
        return self._waiting[0].again and all(wire.born < self._broke for wire in self._wires)

    def _resume(self) -> None:
        """The same as a callback, of which a loop only logs what comes out of it."""
        try:
            self._go_on()
        except BaseException as error:
            own = of_a_caller(error)
            if own is None:
                raise
            self.interrupted(own)

    def _fail(self, error: Exception) -> None:
        for question in self._waiting:
            question.fail(error)
        self._waiting.clear()

    def look(self, sure: bool) -> float | None:
        """Do what was left undone. Seconds until one of the connections is to be called hung."""
        lefts = [left for wire in list(self._wires) if (left := wire.look()) is not None]
        for question in list(self._left):
            if not any(wire.has(question) for wire in self._wires):
                self.over(question)
        if self._connecting is not None and self._connecting.done():
            self._connecting = None
        if self._connecting is not None and not self._wires and self.server.vigil.hangs(self.connects):
            self._fail(Hung(TimeoutError(NOT_TO_OTHERS)))  # who comes later finds out whether it has connected
        self._go_on()
        return min(lefts, default=inf if self._waiting else None)

    # -- connecting ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connecting is None and not self._closed:
            self._connecting = nobodys(self._begun)

    def _begun(self) -> asyncio.Task[None]:
        task = self._loop.create_task(self._connected(), name="stampede-guard")
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a loop may be closed without its tasks
        task.add_done_callback(self._ended)
        return task

    async def _connected(self) -> None:
        made: list[Piped] = []
        self.connects = time.monotonic()
        try:
            wire = await unhurried(lambda: self._reach(made), (ConnectionTimeout, TimeoutError))
            await anext(wire.ended)
            wire.stand()
            if not self._closed:
                self._wires.append(wire)
        finally:
            for wire in made:
                if wire not in self._wires:
                    wire.close()

    async def _reach(self, made: list[Piped]) -> Piped:
        wire = Piped(self, await self.server.suspending_connection(), self._loop)
        made.append(wire)
        return wire

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        error = None if task.cancelled() else task.exception()
        own = None if error is None else of_a_caller(error)
        if task.cancelled():  # whoever cancels all tasks may ask something yet
            self._loop.call_soon(self._resume)
        elif error is None or not isinstance(error, Exception):
            self._resume()
        elif own is not None:
            self._loop.call_soon(self._resume)
            self.interrupted(own)
        elif self._wires:
            self._rests, self._broke = time.monotonic() + REST, 0.0
            self._resume()
        elif self.connects < self._broke:  # what broke the others has broken this one, too
            self._resume()
        else:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, StampedeError):
            self._fail(error)
        elif isinstance(error, (ConnectionTimeout, TimeoutError)):
            self.server.vigil.ends(self.connects, self.server.timeout)
            self._fail(Hung(error))
        else:
            self._fail(Broken(error))

    # -- its end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closed = True
        if self._connecting is not None and not self._loop.is_closed():
            self._connecting.cancel()
        for wire in list(self._wires):
            wire.end(Broken(EngineClosed(self.server.name)))
        for left in self._left:
            self._wait_again(left.then)
        self._fail(EngineClosed(self.server.name))
        if not self._loop.is_closed():
            self._attendant.leave()

    def disown(self) -> None:
        """In a forked child: they are the parent's."""
        self._closed = True
        for wire in self._wires:
            wire.disown()
        self._wires.clear()


def _load(wire: Piped) -> int:
    return wire.load
