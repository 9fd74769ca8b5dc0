"""Many verbs at once, for blocking callers: what all of them ask next is put aside, and asked together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from stampede.errors import StampedeError
from stampede.runtime.threads import begun

__all__ = ["PutAside", "side_by_side", "together"]


class PutAside:
    """What one verb asks its server, put aside; awaited, it gives the answer."""

    __slots__ = ("asked",)

    def __init__(self, asked: Any) -> None:
        self.asked = asked

    def __await__(self) -> Generator[PutAside, Any, Any]:
        return (yield self)


def together(
    work: Sequence[Coroutine[Any, Any, Any]],
    answered: Callable[[dict[int, Any]], dict[int, Any]],
    errors: type[BaseException] = StampedeError,
) -> list[Any]:
    """What each verb returned, or the one of these errors that it raised.

    `answered` is given what they have asked, by numbers, and gives the answers, or errors.
    """
    results: list[Any] = [None] * len(work)
    answers: dict[int, Any] = dict.fromkeys(range(len(work)))
    answer: Any = None
    try:
        while answers:
            questions: dict[int, Any] = {}
            for number, answer in answers.items():
                coroutine = work[number]
                try:
                    wanted = coroutine.throw(answer) if isinstance(answer, BaseException) else coroutine.send(answer)
                    questions[number] = wanted.asked
                except StopIteration as end:
                    results[number] = end.value
                except errors as error:
                    results[number] = error
            answers = answered(questions) if questions else {}
        return results
    finally:
        for coroutine in work:
            coroutine.close()  # those that an interruption left waiting
        del results, answers, answer  # the errors in them refer to this frame


def side_by_side(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """What each gave, or the error of ours that it raised; so many at once, of which the caller does some."""
    results: list[Any] = [None] * len(tasks)
    left = deque(enumerate(tasks))

    def work() -> None:
        while left:
            try:
                number, task = left.popleft()
            except IndexError:
                return
            try:
                results[number] = task()
            except StampedeError as error:
                results[number] = error

    helpers = [begun("stampede-batch", work) for _ in range(min(len(tasks), threads) - 1)]
    try:
        work()
    finally:
        left.clear()  # who was interrupted asks for nothing more
        for helper in helpers:
            if helper is not None:
                helper.join()
    return results
