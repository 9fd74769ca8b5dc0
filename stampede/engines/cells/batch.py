"""Many verbs at once over cells: their reads are combined into one, and a few threads send their swaps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from stampede.engines.cells.generations import CellGenerations
from stampede.engines.cells.protocol import Faster, Seen, Version
from stampede.engines.cells.records import CellRecords
from stampede.engines.cells.verbs import CellKeys
from stampede.engines.kit.many_at_once import PutAside, side_by_side, together
from stampede.engines.kit.worker_threads import here
from stampede.errors import EngineError
from stampede.model.ports import Asked, Many
from stampede.runtime.colour import BLOCKING, run_blocking

__all__ = ["CellBatch"]

AT_ONCE = 8
"""The most swaps of one batch that are under way at the same time."""


class _Swap(NamedTuple):
    """The arguments of a swap."""

    name: str
    version: Version
    data: bytes | None
    ttl: float


class _Aside(CellRecords):
    """Records whose reads and swaps are not sent, but put aside, so that a batch can send them together."""

    async def seen(self, names: Sequence[str]) -> list[Seen]:
        seen: list[Seen] = await PutAside(names)
        return seen

    async def swapped(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        return await PutAside(_Swap(name, version, data, ttl))


class CellBatch(Many):
    """The verbs of `Claims` and `Store` for many keys, in as few round trips as possible."""

    def __init__(self, records: CellRecords, generations: CellGenerations) -> None:
        self._records = records
        self._keys = CellKeys(_Aside(records.open, BLOCKING, here), generations)

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        return together([getattr(self._keys, verb)(*args) for verb, args in asked], self._answered)

    def _answered(self, questions: dict[int, Any]) -> dict[int, Any]:
        swaps = {number: asked for number, asked in questions.items() if isinstance(asked, _Swap)}
        reads = {number: asked for number, asked in questions.items() if number not in swaps}
        done = side_by_side([partial(self._swapped, *args) for args in swaps.values()], AT_ONCE)
        return self._read(reads) | dict(zip(swaps, done, strict=True))

    def _swapped(self, *args: Any) -> Version | Faster:
        return run_blocking(self._records.swapped(*args))

    def _read(self, reads: dict[int, Sequence[str]]) -> dict[int, Any]:
        names = list(dict.fromkeys(name for names in reads.values() for name in names))
        if not names:
            return {}
        try:
            seen = dict(zip(names, run_blocking(self._records.seen(names)), strict=True))
        except EngineError as error:
            return dict.fromkeys(reads, error)
        return {number: [seen[name] for name in names] for number, names in reads.items()}
