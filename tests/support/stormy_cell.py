"""A cell that loses, delays and reorders requests, and a wrapper that repeats requests until they are answered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from stampede.engines.cells import CellEngine, Faster, Seen, Version
from stampede.engines.kit.naming import name_of
from stampede.errors import EngineClosed, EngineError
from stampede.model.ports import Asked, Side
from stampede.testing.cells import MemoryCell

__all__ = ["Insistent", "StormyCell", "insisting"]


class Lost(Exception):
    """Stands in for any error of a client library."""


class StormyCell(MemoryCell):
    """A seed decides the fate of each request. A third of all swaps get no answer: half of those are never made, some
    are made and their reply is lost, and some are made shortly after the caller was told of the loss. (A swap of a
    missing record is never made late: it could create a lease again that its holder has already given back.)"""

    def __init__(self, seed: int, **can: Any) -> None:
        super().__init__(**can)
        self._random = Random(seed)
        self._drawing = threading.Lock()
        self.careful: Counter[str] = Counter()  # names whose replies are never lost: the caller needs the exact reply
        self._late: list[threading.Thread] = []

    def _drawn(self) -> tuple[float, float, float]:
        with self._drawing:
            return self._random.random(), self._random.random(), self._random.random()

    def read(self, names: Sequence[str]) -> list[Seen]:
        loss, before, behind = self._drawn()
        time.sleep(before * 0.002)
        if loss < 0.1:
            raise Lost("the question of a read")
        seen = super().read(names)
        time.sleep(behind * 0.002)
        if loss < 0.2:
            raise Lost("the answer of a read")
        return seen

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        loss, before, behind = self._drawn()
        time.sleep(before * 0.003)  # requests that were sent later may overtake this one
        if loss < 0.16:
            raise Lost("the question of a swap")
        if loss < 0.24 and version is not None and not self.careful[name]:
            late = threading.Timer(behind * 0.01, super().swap, (name, version, data, ttl))
            late.start()
            self._late.append(late)
            raise Lost("a swap, for now")
        swapped = super().swap(name, version, data, ttl)
        time.sleep(behind * 0.002)
        if loss < 0.32 and not self.careful[name]:
            raise Lost("the answer of a swap")
        return swapped

    def close(self) -> None:
        for late in self._late:
            late.join()


def insisting(engine: CellEngine, cell: StormyCell) -> CellEngine:
    """Let every verb of the engine repeat until it is answered. A verb may then run twice."""

    def side(side: Side) -> Side:
        values: Any = {
            name: Insistent(getattr(side, name), cell, "s") for name in ("claims", "store", "shows", "softens")
        }
        named: Any = {name: Insistent(getattr(side, name), cell, "l") for name in ("locks", "holds", "handover")}
        return replace(side, **values, **named)

    engine.blocking, engine.suspending = side(engine.blocking), side(engine.suspending)
    engine.many = InsistentMany(engine.many, cell)  # type: ignore[assignment]
    engine.ping = lambda: 0.0  # type: ignore[method-assign]
    return engine


class Insistent:
    """One port. Replies of verbs that say whether they ended something are never lost: a second try would differ."""

    _EXACT = ("abandon", "release", "expire", "invalidate")

    def __init__(self, port: Any, cell: StormyCell, kind: str) -> None:
        self._port = port
        self._cell = cell
        self._kind = kind

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        async def insist(*args: Any, **options: Any) -> Any:
            name = name_of(args[0], self._kind.encode()).decode() if verb in self._EXACT else ""
            self._cell.careful[name] += verb in self._EXACT
            try:
                for _ in range(100):
                    try:
                        return await getattr(self._port, verb)(*args, **options)
                    except EngineClosed:
                        raise
                    except EngineError as error:
                        if not isinstance(error.__cause__, Lost):
                            raise
                raise AssertionError("it is never answered")
            finally:
                self._cell.careful[name] -= verb in self._EXACT

        return insist


class InsistentMany:
    """The port of batches. Each request repeats only the verbs that are not answered yet."""

    def __init__(self, port: Any, cell: StormyCell) -> None:
        self._port = port
        self._cell = cell

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        exact = Counter(name_of(args[0]).decode() for verb, args in asked if verb in Insistent._EXACT)
        return self._insist(self._port.ask_many, asked, exact)

    def _insist(self, ask: Callable[[Any], list[Any]], asked: Sequence[Any], exact: Counter[str]) -> list[Any]:
        self._cell.careful.update(exact)
        answers: dict[int, Any] = {}
        while len(answers) < len(asked):
            left = [number for number in range(len(asked)) if number not in answers]
            for number, answer in zip(left, ask([asked[number] for number in left]), strict=True):
                if not (isinstance(answer, EngineError) and isinstance(answer.__cause__, Lost)):
                    answers[number] = answer
        self._cell.careful.subtract(exact)
        return [answers[number] for number in range(len(asked))]
