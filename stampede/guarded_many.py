"""Many questions in one round trip, for a caller of little patience."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

from stampede.colour import BLOCKING, run_blocking
from stampede.errors import EngineError
from stampede.guarded import Guarded, Impatience
from stampede.outage import Outage
from stampede.ports import Asked, Many
from stampede.workers import Late

__all__ = ["GuardedMany"]


class GuardedMany(Many):
    """Asks within so many seconds in all. What is given up is an Impatience; what comes of it is given back."""

    def __init__(self, many: Many, outage: Outage, patience: float) -> None:
        self._many = many
        self._outage = outage
        self._end = time.monotonic() + patience
        self._guarded = Guarded(BLOCKING, outage)

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        parts: dict[Hashable, list[int]] = {}
        for number, question in enumerate(asked):
            parts.setdefault(self._outage.server_of(question.args[0]), []).append(number)
        answers: list[Any] = [None] * len(asked)
        for server, numbers in parts.items():
            found = self._ask([asked[number] for number in numbers], server)
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        return answers

    def _ask(self, asked: list[Asked], server: Hashable) -> list[Any]:
        """Those of one server: another one may hang."""

        async def work() -> list[Any]:
            return self._many.ask_many(asked)

        def late(answers: Any, error: BaseException | None) -> None:
            for number, question in enumerate(asked):
                self._ended(question, None if error is not None else answers[number], error)

        answers = run_blocking(self._guarded.ask(work, self._end - time.monotonic(), late, server=server))
        return [Impatience(answers) for _ in asked] if isinstance(answers, Late) else answers

    def _ended(self, question: Asked, answer: Any, error: BaseException | None) -> None:
        if isinstance(answer, EngineError):
            error = answer
        key, token = question.args[:2]
        if question.verb == "claim":
            self._outage.claimed(key, token, False, answer, error)
        elif question.verb not in ("look", "renew"):
            self._outage.filled(key, token, answer, error)
