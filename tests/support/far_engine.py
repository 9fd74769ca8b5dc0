"""A memory engine that acts as a distant one, for tests that count the round trips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stampede.engines.memory import MemoryEngine
from stampede.model.ports import Asked
from stampede.runtime.colour import run_blocking


class Far(MemoryEngine):
    """A memory engine that records the verbs of each round trip."""

    def __init__(self) -> None:
        super().__init__(sealed=True)
        self.trips: list[list[str]] = []
        self.breaks: BaseException | None = None
        self.many = self  # type: ignore[assignment]

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        self.trips.append([question.verb for question in asked])
        if isinstance(self.breaks, KeyboardInterrupt):
            raise self.breaks
        return [self.breaks or run_blocking(getattr(self.blocking.claims, verb)(*args)) for verb, args in asked]
