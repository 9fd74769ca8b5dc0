"""Questions to an engine, none of which keeps its caller for longer than the caller's patience."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Hashable
from math import inf
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from stampede import stalls
from stampede.colour import Bell, Colour
from stampede.errors import EngineClosed, EngineError
from stampede.workers import Late, Told, within

__all__ = ["GRACE", "Guarded", "Impatience", "Questions", "or_late"]

T = TypeVar("T")

_clock = time.monotonic

GRACE = 0.06
"""Seconds that a caller waits for an engine beyond its `wait`: with 0 nobody could be answered."""

EVERY = 0.5
"""Seconds between two callers who ask one that seems to hang all the same: each pays with its own patience."""

ALONE = 1.0
"""Seconds of waiting that are worth being kept by nothing but the engine."""


class Impatience(EngineError):
    """Many questions that were asked together were given up together. No more is known of the engine."""

    def __init__(self, late: Late) -> None:
        super().__init__("it has not answered in time")
        self.late = late


async def or_late(work: Coroutine[Any, Any, T]) -> T | Late:
    """The same of one of them, as `Guarded.ask` says it."""
    try:
        return await work
    except Impatience as given_up:
        return given_up.late


class _Pending:
    """One under way: as long as somebody has it. What interrupts its caller may come before it can be ended."""

    __slots__ = ("__weakref__", "began")

    def __init__(self) -> None:
        self.began = _clock()


class _Server:
    """What is known of one that may hang: which questions were found to have no answer in time, and have none yet.

    Found by who asked, whose thread or loop has run then. What nobody reads, as its loop is blocked, says nothing. And
    what it answers to one it says to all: that another has no answer is a matter of its connection, or of its loop. No
    lock: each step is one of Python's, and what two of them lose between them is one caller's moment.
    """

    __slots__ = ("_due", "_heard", "_late")

    def __init__(self) -> None:
        self._late: dict[ReferenceType[_Pending], float] = {}  # and when they began
        self._heard = 0.0  # when the last question that was answered began
        self._due = 0.0  # when the next one asks all the same

    def answered(self, question: _Pending) -> None:
        if question.began > self._heard:
            self._heard = question.began

    def late(self, question: _Pending) -> None:
        if question.began > self._heard:
            self._late[ref(question)] = question.began

    def ended(self, question: _Pending) -> None:
        self._late.pop(ref(question), None)

    def hangs_for(self, seconds: float) -> bool:
        """Whether there has been no answer for so long."""
        while self._late:
            try:
                question, began = next(iter(self._late.items()))
            except (RuntimeError, StopIteration):  # another thread has found one in this moment, or ended it
                continue
            if question() is not None and began > self._heard:
                return _clock() - began >= seconds
            self._late.pop(question, None)
        return False

    @property
    def tried(self) -> float:
        """When somebody has asked it last, all the same."""
        return self._due - EVERY

    def is_due(self) -> bool:
        """Whether it is the caller who finds out if it hangs still."""
        now = _clock()
        if now < self._due:
            return False
        self._due = now + EVERY
        return True


class Questions:
    """What is known of an engine that may hang: of each of its servers by itself."""

    def __init__(self, silence: float) -> None:
        self.silence = silence  # seconds for which one may keep its caller
        self._servers: dict[Hashable, _Server] = {}

    def failed(self, error: EngineError) -> None:
        """The engine couldn't be asked."""

    def at(self, server: Hashable) -> _Server:
        found = self._servers.get(server)
        return found if found is not None else self._servers.setdefault(server, _Server())


class Guarded:
    """Asks in one colour, for callers of little patience."""

    def __init__(self, colour: Colour, questions: Questions) -> None:
        self._colour = colour
        self._questions = questions

    async def ask(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        patience: float,
        late: Told,
        grace: float = GRACE,
        *,
        server: Hashable = None,
    ) -> T | Late:
        """What it answers. LATE if it doesn't in time, UNASKED if the `server` has given others no answer for so long
        (as the engine names it)."""
        questions, seconds = self._questions, max(patience + grace, grace / 2)
        if seconds >= questions.silence:
            return await work()
        its = questions.at(server)
        spent = patience <= -grace / 2  # by a look that had no answer, most likely: that was this caller's try
        if its.hangs_for(seconds) and (spent or not its.is_due()):
            until = min(_clock() + seconds, its.tried + stalls.LATE)  # by then, who has just asked has its answer
            while True:
                await self._colour.park(Bell(), stalls.NEXT)  # a reply may be there, to be read
                if not its.hangs_for(seconds):
                    break
                if _clock() >= until:
                    return Late.UNASKED
        question = _Pending()

        def ended(result: Any, error: BaseException | None) -> None:
            its.ended(question)
            if error is None:
                its.answered(question)
            if isinstance(error, EngineClosed):
                return
            if isinstance(error, EngineError):
                questions.failed(error)
            late(result, error)

        answer = await within(self._colour, work(), seconds, ended)
        if answer is Late.LATE:
            its.late(question)
        elif answer is not Late.UNASKED:
            its.answered(question)
        return answer

    async def wait(
        self, work: Callable[[float], Coroutine[Any, Any, T]], patience: float, grace: float = GRACE
    ) -> T | Late:
        """The same of what takes as long as somebody computes, `patience` at most, which is no hanging question. It may
        look now and then, and be kept by that. It may end early: there is time for more. UNASKED: there is no place to
        wait in."""
        questions = self._questions
        if patience == inf or not questions.silence:
            return await work(patience)
        if patience - questions.silence > ALONE:
            return await work(patience - questions.silence)  # whatever keeps it, it is back in time

        def ended(_: Any, error: BaseException | None) -> None:
            if isinstance(error, EngineError) and not isinstance(error, EngineClosed):
                questions.failed(error)

        return await within(self._colour, work(patience), patience + grace, ended, waits=True)
