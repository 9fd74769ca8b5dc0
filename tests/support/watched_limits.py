"""Records the requests of a limiter to its engine, and the starts that the engine granted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from stampede import Limiter
from stampede.limits.limiter import LimitsSide
from stampede.runtime.colour import BLOCKING


class Watched:
    """Wraps the limits of a blocking limiter. Each request and each answer takes `away` seconds on the way."""

    def __init__(self, limiter: Limiter, away: float = 0.0) -> None:
        self._limits: Any = limiter._blocking.limits
        self._away = away
        self.asked = 0
        self.starts: list[int] = []  # in microseconds, by the engine's clock
        limiter._blocking = LimitsSide(BLOCKING, self)  # type: ignore[arg-type]

    async def take(self, *asked: Any) -> Any:
        self.asked += 1
        time.sleep(self._away)
        answer = await self._limits.take(*asked)
        time.sleep(self._away)
        if answer.booked and not answer.delay:
            self.starts.append(answer.at)
        return answer

    async def give_back(self, *asked: Any) -> None:
        await self._limits.give_back(*asked)


def pairwise_by(number: int, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each start, with the start that comes `number` starts later."""
    return zip(starts, starts[number:], strict=False)
