"""What is told people of locks: who holds them, and how they were held."""

from __future__ import annotations

from stampede.engines.postgres.line import Line
from stampede.engines.postgres.wire import names
from stampede.ports import Held, Holds, Released, Reports

__all__ = ["PostgresHolds", "PostgresReports"]

HELD = """SELECT l.name, l.host, l.process, l.program, l.fence, l.taken, now.now - l.taken, l.ends - now.now,
        l.pid IS NOT NULL, (SELECT count(*) FROM stampede.waiting AS w WHERE w.id = l.id)
    FROM stampede.locks AS l, (SELECT stampede.clock() AS now OFFSET 0) AS now
    WHERE l.fence IS NOT NULL AND l.ends > now.now AND NOT stampede.dead(l)
        AND substr(l.name, 1, length($1::bytea)) = $1::bytea"""

HOLDER = """SELECT l.token, l.ends - now.now
    FROM stampede.locks AS l, (SELECT stampede.clock() AS now OFFSET 0) AS now
    WHERE l.id = $1 AND l.fence IS NOT NULL AND l.ends > now.now AND NOT stampede.dead(l)"""

RELEASED = """SELECT number, kind, name, host, process, program, fence, date_part('epoch', taken),
        date_part('epoch', released), problem, exception, message, traceback
    FROM stampede.past
    WHERE (problem <> '' OR NOT $1) AND date_part('epoch', released) > stampede.clock() - $2
    ORDER BY number DESC LIMIT $3"""


class PostgresHolds(Holds):
    """Of one database, and one colour."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(token, left) for token, left in await self._line.ask((HOLDER, (names(name, b"lock").id,)))]

    async def held(self, prefix: str = "") -> list[Held]:
        rows = await self._line.ask((HELD, (prefix.encode("utf-8", "surrogatepass"),)))
        return [Held(_name(name), *others) for name, *others in rows]


class PostgresReports(Reports):
    """Of one database."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def released(self, *, failed: bool, since: float, most: int) -> list[Released]:
        rows = await self._line.ask((RELEASED, (failed, float(since), most)))
        released = [Released(number, kind, _name(name), *others) for number, kind, name, *others in rows]
        return sorted(released, key=lambda each: each.released, reverse=True)


def _name(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
