"""The suspending side: what tasks ask goes out at once, over the connection of their loop that has least to do.

Callbacks of the loop do all of it: no task waits for an answer but the caller's own, and one that is cancelled leaves
its question to be answered, and nobody hears it. Only connecting takes a task; and a timer looks, as long as there are
questions, whether the server hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from math import inf

from psycopg import Error
from psycopg.errors import ConnectionTimeout

from stampede.engines.kit.pipe import Pipes
from stampede.engines.kit.pool import is_once
from stampede.engines.kit.replies import ODD
from stampede.engines.kit.timer import Timer
from stampede.engines.kit.vigil import NOT_TO_OTHERS
from stampede.engines.postgres.connect import Server
from stampede.engines.postgres.line import Broken, Hung, ServerLine
from stampede.engines.postgres.piped import Piped, Question
from stampede.engines.postgres.talk import Command, Row, rows_of
from stampede.errors import EngineClosed, StampedeError
from stampede.loops import nobodys

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
        question = Question(commands, len(commands), asyncio.get_running_loop().create_future())
        question.again = is_once(commands)
        desk = self._desks.to(None)
        try:
            desk.ask(question)
            await question.future
        except BaseException:
            question.drop()
            desk.leave(question)
            raise
        return rows_of(question.replies)

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
        self._timer = Timer(self._look)
        self._closed = False

    # -- questions ----------------------------------------------------------------------------------------------

    def ask(self, question: Question) -> None:
        self._timer.start(self._loop)
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
        if any(question in wire.flying for wire in self._wires):
            self._left.append(question)

    def over(self, question: Question) -> None:
        """It was answered, or never will be."""
        if question in self._left:
            self._left.remove(question)
            self._waiting.extendleft(reversed(question.then))
            self._go_on()

    def idle(self, wire: Piped) -> None:
        """It takes more."""
        while wire.takes:
            # What broke one may have broken them all, and nobody has noticed yet.
            fresh = wire.born >= self._broke
            question = next((each for each in self._waiting if fresh or not each.again), None)
            if question is None:
                return
            self._waiting.remove(question)
            if not question.future.done():
                wire.send(question)

    def lost(self, wire: Piped, flying: Sequence[Question], error: Broken) -> None:
        """A connection has ended: what it was asked is asked once more, on another one."""
        if wire in self._wires:
            self._wires.remove(wire)
        again = []
        for question in flying:
            if self._closed or isinstance(error, Hung) or question.again:
                question.fail(error)
            elif not question.future.done():
                question.again, question.replies = True, []
                again.append(question)
        if again:
            self._broke = time.monotonic()
        self._waiting.extendleft(reversed(again))
        for question in flying:
            self.over(question)
        if isinstance(error, Hung) and not self._wires:
            self._fail(error)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._waiting[0].future.done():
            self._waiting.popleft()
        if self._waiting and (not self._wires or self._needs_a_new_one()):
            self._connect()
        for wire in list(self._wires):
            self.idle(wire)

    def _needs_a_new_one(self) -> bool:
        return self._waiting[0].again and all(wire.born < self._broke for wire in self._wires)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            question.fail(error)

    def _look(self) -> bool:
        """End connections that are hung. Return whether to look again."""
        for wire in list(self._wires):
            wire.look()
        if self.connecting and not self._wires and self.server.vigil.hangs(self.connects):
            self._fail(Hung(TimeoutError(NOT_TO_OTHERS)))  # who comes later finds out whether it has connected
        self._go_on()
        return bool(self._waiting or any(wire.flying for wire in self._wires))

    # -- connecting ---------------------------------------------------------------------------------------------

    @property
    def connecting(self) -> bool:
        return self._connecting is not None and not self._connecting.done()  # as one is that never began

    def _connect(self) -> None:
        if not self.connecting and not self._closed:
            self._connecting = nobodys(self._loop.create_task, self._connected())

    async def _connected(self) -> None:
        self.connects = time.monotonic()
        try:
            self._wires.append(await self._reach())
        except (StampedeError, Error, OSError, *ODD) as error:
            if self._wires:
                self._rests, self._broke = time.monotonic() + REST, 0.0
            elif self.connects >= self._broke:  # or what broke the others has broken this one, too
                self._failed(error)
        except Exception:
            self._fail(Broken(ConnectionAbortedError("connecting failed")))
            raise
        finally:  # if all tasks of the loop were cancelled, the next look has those that go on begin another one
            self._connecting = None
        self._go_on()

    async def _reach(self) -> Piped:
        wire = Piped(self, await self.server.suspending_connection(), self._loop)
        try:
            await anext(wire.ended)
            wire.stand()
        except BaseException:
            wire.close()
            raise
        return wire

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
        self._timer.stop()
        if self._connecting is not None and not self._loop.is_closed():
            self._connecting.cancel()
        for wire in list(self._wires):
            wire.end(Broken(EngineClosed(self.server.name)))
        for left in self._left:
            self._waiting.extend(left.then)
        self._fail(EngineClosed(self.server.name))

    def disown(self) -> None:
        """In a forked child: they are the parent's."""
        self._closed = True
        for wire in self._wires:
            wire.disown()
        self._wires.clear()


def _load(wire: Piped) -> int:
    return len(wire.flying)
