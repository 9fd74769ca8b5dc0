"""Limits: a window in a row, swapped for the next one until no other process was faster, by the server's clock."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from random import random

from stampede.engines.limits import T, WindowLimits, usage
from stampede.engines.postgres.line import Line
from stampede.engines.postgres.wire import key_of, names
from stampede.errors import EngineError
from stampede.ports import Usage
from stampede.window import Window, bytes_of, ends, window_of

__all__ = ["PostgresLimits"]

NOW = "floor(stampede.clock() * 1000000)::bigint"
READ = f"SELECT {NOW}, (SELECT starts FROM stampede.limits WHERE id = $1)"
INSERT = "INSERT INTO stampede.limits VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING true"
UPDATE = "UPDATE stampede.limits SET starts = $2, ends = $3 WHERE id = $1 AND starts = $4 RETURNING true"
ALL = f"SELECT name, starts, {NOW} FROM stampede.limits WHERE ends > {NOW}"
SWEEP = f"""DELETE FROM stampede.limits WHERE id IN (
    SELECT o.id FROM stampede.limits AS o WHERE o.ends < {NOW} ORDER BY o.id FOR UPDATE SKIP LOCKED)"""

TRIES = 100

SWEPT = 0.01  # of the new names so many look for those that are over: with a name for each user there may be many


class PostgresLimits(WindowLimits):
    """Limits of one colour."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        its = names(name, b"limit")
        for _ in range(TRIES):
            ((now, before),) = await self._line.ask((READ, (its.id,)))
            window = window_of(before)
            after, answer = change(window, now)
            if after is window:
                return answer
            data, end = bytes_of(after), now + ends(after)
            if before is None:
                swap = INSERT, (its.id, its.raw, data, end)
            else:
                swap = UPDATE, (its.id, data, end, before)
            if await self._line.ask(swap):
                if before is None and random() < SWEPT:
                    await self._line.ask((SWEEP, ()))
                return answer
        raise EngineError(f"postgres: others start in {name!r} faster than we can")

    async def listed(self) -> list[tuple[str, Usage]]:
        rows = await self._line.ask((ALL, ()))
        return sorted(((key_of(name), usage(window_of(starts), now)) for name, starts, now in rows), key=itemgetter(0))
