"""Questions to an engine, none of which keeps its caller for longer than the caller's patience."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from stampede import forks, stalls
from stampede.colour import Bell, Colour
from stampede.errors import EngineClosed, EngineError
from stampede.workers import Late, Told, within

__all__ = ["GRACE", "Guarded", "Questions"]

T = TypeVar("T")

_clock = time.monotonic

GRACE = 0.06
"""Seconds that a caller waits for an engine beyond its `wait`: with 0 nobody could be answered."""

FORGOTTEN = 5.0
"""Seconds for which a question that has no answer says that the engine hangs, to those who are as impatient."""

ALONE = 1.0
"""Seconds of waiting that are worth being kept by nothing but the engine."""


class _Question:
    """One under way: as long as somebody has it. What interrupts its caller may come before it can be ended."""


class Questions:
    """What is known of an engine that may hang: which questions have no answer yet."""

    def __init__(self, silence: float) -> None:
        self.silence = silence  # seconds for which one may keep its caller
        self._ask_again()
        forks.in_child(self._ask_again)

    def _ask_again(self) -> None:
        """In a forked child: who asked is not here."""
        # Questions under way, of callers that don't wait to the end; and since when.
        self._asked: dict[ReferenceType[_Question], float] = {}

    def failed(self, error: EngineError) -> None:
        """The engine couldn't be asked."""

    def begin(self) -> _Question:
        """A question is asked, whose caller doesn't wait for its answer to the end."""
        question = _Question()
        self._asked[ref(question)] = _clock()
        return question

    def end(self, question: _Question) -> None:
        self._asked.pop(ref(question), None)

    def hangs_for(self, seconds: float) -> bool:
        """Whether such a question has been without an answer for so long."""
        now = _clock()
        try:
            while (first := next(iter(self._asked.items()), None)) is not None:
                question, began = first
                if question() is not None and now - began < seconds + FORGOTTEN:
                    return now - began >= seconds
                self._asked.pop(question, None)  # its loop rests, or is gone: it would keep callers from the engine
        except RuntimeError:  # another thread has asked one in this moment
            pass
        return False


class Guarded:
    """Asks in one colour, for callers of little patience."""

    def __init__(self, colour: Colour, questions: Questions) -> None:
        self._colour = colour
        self._questions = questions

    async def ask(
        self, work: Callable[[], Coroutine[Any, Any, T]], patience: float, late: Told, grace: float = GRACE
    ) -> T | Late:
        """What it answers. LATE if it doesn't in time, UNASKED if another question is without an answer for so long."""
        questions, seconds = self._questions, patience + grace
        if seconds >= questions.silence:
            return await work()
        if questions.hangs_for(seconds):
            await self._colour.park(Bell(), stalls.NEXT)  # its reply may be there, and we have not run since it came
            if questions.hangs_for(seconds):
                return Late.UNASKED
        question = questions.begin()

        def ended(result: Any, error: BaseException | None) -> None:
            questions.end(question)
            if isinstance(error, EngineClosed):
                return
            if isinstance(error, EngineError):
                questions.failed(error)
            late(result, error)

        answer: T | Late | None = None
        try:
            answer = await within(self._colour, work(), seconds, ended)
            return answer
        finally:
            if answer is not Late.LATE:
                questions.end(question)

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
