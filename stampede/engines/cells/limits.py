"""Limits over cells: a window, which is swapped for the next one, again and again until no other process was faster.

The version that was seen last is tried first. So a start takes one round trip unless another process came in between.
The time is that of the machine that asks. If its clock is behind that of the last writer, the window's time stands
still until it has caught up."""

from __future__ import annotations

from collections.abc import Callable

from stampede.engines.cells.protocol import Faster, Version
from stampede.engines.cells.records import TRIES, CellRecords
from stampede.engines.kit.limits import T, WindowLimits
from stampede.engines.kit.naming import name_of
from stampede.errors import EngineError
from stampede.model.limit_window import SECOND, Window, bytes_of, ends, window_of

__all__ = ["CellLimits"]

REMEMBERED = 1000


class CellLimits(WindowLimits):
    """Limits of one colour."""

    def __init__(self, records: CellRecords, seen: dict[str, tuple[Version, Window]]) -> None:
        self._records = records
        self._seen = seen

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        records, cell_name = self._records, name_of(name, b"w").decode()
        for tried in range(TRIES):
            known = self._seen.pop(cell_name, None)
            version, window = known or await self._read(cell_name)
            after, answer = change(window, self._now())
            if after is window and known is not None:  # refuse only by the present state, not by the remembered one
                version, window = await self._read(cell_name)
                after, answer = change(window, self._now())
            if after is window:
                return answer
            left = ends(after) / SECOND + 1.0
            swapped = await records.swap(cell_name, version, b"\x00" + bytes_of(after), left)
            if not isinstance(swapped, Faster):
                if len(self._seen) < REMEMBERED:
                    self._seen[cell_name] = swapped, after
                return answer
            if known is None:
                await records.pause(tried)
        raise EngineError(f"{records.open.scheme}: other processes change the limit {name!r} too often: try again")

    async def _read(self, cell_name: str) -> tuple[Version, Window]:
        (known,) = await self._records.known([cell_name])
        return known.version, window_of(None if known.body is None else bytes(known.body[1:]))

    def _now(self) -> int:
        return int(self._records.open.wall() * SECOND)
