"""Limits, one port for each colour: each verb calls one SQL function, and times are by the server's clock."""

from __future__ import annotations

from stampede.engines.kit.limits import usage
from stampede.engines.postgres.line import PostgresLine
from stampede.engines.postgres.talk import Row
from stampede.engines.postgres.wire import key_of, names
from stampede.model.limit_window import SECOND, WIDTH, Booking, Window, checked, ends, micros, slack
from stampede.model.ports import Booked, Rate, Usage

__all__ = ["PostgresLimits", "window_of_row"]

TAKE = "SELECT * FROM stampede.limit_take($1, $2, $3, $4, $5, $6, $7, $8, $9)"
BACK = "SELECT stampede.limit_back($1, $2, $3)"
REST = "SELECT stampede.limit_rest($1, $2, $3, $4, $5, $6)"
NOW = "SELECT * FROM stampede.limits_now($1)"


class PostgresLimits:
    """Limits of one colour."""

    def __init__(self, line: PostgresLine) -> None:
        self._line = line

    async def take(self, name: str, rate: Rate, cost: int, ahead: float, was: int = 0) -> Booked:
        checked(cost, rate.most)
        ids, per, most_ahead = names(name, b"limit"), micros(rate.per), -1 if ahead < 0 else micros(ahead)
        terms = ids.id, ids.raw, rate.most, per, per + slack(per), per // WIDTH, cost, most_ahead, was
        ((delay, moment),) = await self._line.ask((TAKE, terms))
        return Booked(delay / SECOND, moment is not None, moment or 0)

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        await self._line.ask((BACK, (names(name, b"limit").id, cost, at)))

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        ids, per = names(name, b"limit"), micros(rate.per)
        await self._line.ask((REST, (ids.id, ids.raw, rate.most, per, per + slack(per), micros(seconds))))

    async def used(self, name: str) -> Usage:
        rows = await self._line.ask((NOW, (names(name, b"limit").id,)))
        return usage(window_of_row(rows[0]), rows[0][1]) if rows else Usage(None)

    async def listed(self) -> list[tuple[str, Usage]]:
        rows = await self._line.ask((NOW, (None,)))
        found = [(key_of(row[0]), window_of_row(row), row[1]) for row in rows]
        return sorted((name, usage(window, now)) for name, window, now in found if window.seen + ends(window) > now)


def window_of_row(row: Row) -> Window:
    """Return the window in a row of `limits_now`."""
    _, _, most, per, long, until, rest, seen, *lists = row
    firsts, lasts, costs = ([int(each) for each in text.strip("{}").split(",") if each] for text in lists)
    booked = tuple(Booking(*each) for each in zip(firsts, lasts, costs, strict=True))
    return Window(most, per, long, until, rest, seen, booked)
