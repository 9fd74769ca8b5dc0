"""Limits over cells: a window, swapped for the next one until nobody was faster.

What was seen last is tried first, so that a start is one round trip unless another process came between. The time is
told by the clocks of those who ask: where that of a machine is behind the others', time stands still for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from stampede.engines.cells.protocol import Faster, Version
from stampede.engines.cells.records import TRIES, CellRecords
from stampede.engines.kit.limits import T, WindowLimits
from stampede.engines.kit.naming import name_of
from stampede.errors import EngineError
from stampede.model.window import SECOND, Window, bytes_of, ends, window_of

__all__ = ["CellLimits"]

REMEMBERED = 1000


class CellLimits(WindowLimits):
    """Limits of one colour."""

    def __init__(self, records: CellRecords, seen: dict[str, tuple[Version, Window]]) -> None:
        self._records = records
        self._seen = seen

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        records, its = self._records, name_of(name, b"w").decode()
        for tried in range(TRIES):
            known = self._seen.pop(its, None)
            version, window = known or await self._read(its)
            after, answer = change(window, self._now())
            if after is window and known is not None:  # a refusal is one of what is there now
                version, window = await self._read(its)
                after, answer = change(window, self._now())
            if after is window:
                return answer
            left = ends(after) / SECOND + 1.0
            swapped = await records.swap(its, version, b"\x00" + bytes_of(after), left)
            if not isinstance(swapped, Faster):
                if len(self._seen) < REMEMBERED:
                    self._seen[its] = swapped, after
                return answer
            if known is None:
                await records.pause(tried)
        raise EngineError(f"{records.open.scheme}: others start in {name!r} faster than we can")

    async def _read(self, its: str) -> tuple[Version, Window]:
        (known,) = await self._records.known([its])
        return known.version, window_of(None if known.body is None else bytes(known.body[1:]))

    def _now(self) -> int:
        return int(self._records.open.wall() * SECOND)
