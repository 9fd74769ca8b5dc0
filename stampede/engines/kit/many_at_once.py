"""Many verbs at once for blocking callers: their next questions are collected, and asked together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from stampede.errors import StampedeError
from stampede.runtime.threads import begun

__all__ = ["PutAside", "asked_together", "side_by_side", "together"]


class PutAside:
    """One verb's question, set aside. Awaiting it gives the answer."""

    __slots__ = ("asked",)

    def __init__(self, asked: Any) -> None:
        self.asked = asked

    def __await__(self) -> Generator[PutAside, Any, Any]:
        return (yield self)


async def asked_together(
    work: Sequence[Coroutine[Any, Any, Any]], errors: type[BaseException] = StampedeError
) -> list[Any]:
    """Return what each verb returned, or the error (one of `errors`) that it raised. What they ask next is put aside as
    one question: a dict of theirs, by the number of the verb. Its answer is a dict of answers, or errors."""
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
            answers = (await PutAside(questions)) if questions else {}
        return results
    finally:
        for coroutine in work:
            coroutine.close()  # a no-op, unless an interruption left it waiting
        del results, answers, answer  # the errors in them refer to this frame


def together(
    work: Sequence[Coroutine[Any, Any, Any]],
    answered: Callable[[dict[int, Any]], dict[int, Any]],
    errors: type[BaseException] = StampedeError,
) -> list[Any]:
    """Return what `asked_together` returns. `answered` takes the questions of one round, and returns the answers."""
    whole, answers = asked_together(work, errors), None
    try:
        while True:
            try:
                answers = answered(whole.send(answers).asked)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
    finally:
        whole.close()
        del answers  # the errors in it refer to this frame


def side_by_side(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """Return what each task returned, or the StampedeError that it raised. At most `threads` run at once, the caller's
    among them."""
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
        left.clear()  # after an interruption, no further task begins
        for helper in helpers:
            if helper is not None:
                helper.join()
    return results
