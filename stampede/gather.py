"""Many questions in one round trip, for blocking callers: coroutines of the algorithm that suspend at their engine.

An event loop does this by itself, as everything asked in one of its turns goes out together. Here the verbs of the
engine are put aside until every coroutine waits for one, and then asked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from stampede.entry import Entry, Verdict
from stampede.ports import Ask, Asked, Busy, Found, Looks, Reply

__all__ = ["Gathering", "run_together"]

T = TypeVar("T")


class _Question:
    """One verb of an engine, put aside."""

    __slots__ = ("asked",)

    def __init__(self, verb: str, *args: Any) -> None:
        self.asked = Asked(verb, args)

    def __await__(self) -> Generator[_Question, Any, Any]:
        return (yield self)


class Gathering(Looks):
    """`Claims` whose verbs wait to be asked by `run_together`."""

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        reply: Reply = await _Question("claim", key, token, ask)
        return reply

    async def look(self, key: str, patience: float) -> Found | None:
        found: Found | None = await _Question("look", key, patience)
        return found

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        stored: bool = await _Question("fill", key, token, entry)
        return stored

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        stood: bool = await _Question("abandon", key, token, verdict, rest)
        return stood

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        return None  # who asks for many waits for none of them

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        renewed: bool = await _Question("renew", key, token, lease)
        return renewed


def run_together(
    work: Sequence[Coroutine[Any, Any, T]], ask: Callable[[Sequence[Asked]], list[Any]]
) -> list[T | BaseException]:
    """What each coroutine returned or raised. `ask` answers questions, each with a result or an error."""
    results: list[Any] = [None] * len(work)
    answers: dict[int, Any] = dict.fromkeys(range(len(work)))
    answer: Any = None
    try:
        while answers:
            questions: dict[int, Asked] = {}
            for number, answer in answers.items():
                coroutine = work[number]
                try:
                    wanted = coroutine.throw(answer) if isinstance(answer, BaseException) else coroutine.send(answer)
                    questions[number] = wanted.asked
                except StopIteration as end:
                    results[number] = end.value
                except BaseException as error:
                    results[number] = error
            answers = dict(zip(questions, ask(list(questions.values())), strict=True)) if questions else {}
        return results
    finally:
        for coroutine in work:
            coroutine.close()  # those that an interruption left waiting
        del results, answers, answer  # the errors in them refer to this frame
