"""Limits in the directory's database: one write transaction each. Their clock counts from the machine's start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stampede.engines.disk.database import DiskDatabase
from stampede.engines.kit.boot_clock import clock
from stampede.engines.kit.limits import T, WindowLimits, usage
from stampede.engines.kit.worker_threads import Run
from stampede.model.limit_window import SECOND, Window, bytes_of, ends, window_of
from stampede.model.ports import Usage
from stampede.runtime.chance import random

__all__ = ["DiskLimits"]

SWEPT = 0.01  # the share of new names that remove expired limits: with a name for each user there may be many


class DiskLimits(WindowLimits):
    """Limits of one colour."""

    def __init__(self, database: DiskDatabase, run: Run) -> None:
        self._database = database
        self._run = run

    async def listed(self) -> list[tuple[str, Usage]]:
        return await self._run(self._all)

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        return await self._run(partial(self._written, name.encode("utf-8", "surrogatepass"), change))

    def _written(self, name: bytes, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        with self._database.writing() as write:
            now = int(clock() * SECOND)
            row = write.execute("SELECT starts FROM limits WHERE name = ?", (name,)).fetchone()
            window = window_of(None if row is None else row[0])
            after, answer = change(window, now)
            if after is not window:
                if row is None and random() < SWEPT:
                    write.execute("DELETE FROM limits WHERE ends < ?", (now,))
                values = name, bytes_of(after), now + ends(after)
                write.execute("INSERT OR REPLACE INTO limits VALUES (?, ?, ?)", values)
        return answer

    def _all(self) -> list[tuple[str, Usage]]:
        with self._database.writing() as write:
            now = int(clock() * SECOND)
            rows = write.execute("SELECT name, starts FROM limits WHERE ends >= ? ORDER BY name", (now,)).fetchall()
        return [(bytes(name).decode("utf-8", "surrogatepass"), usage(window_of(starts), now)) for name, starts in rows]
