"""Limits, one port for each colour: one script decides, by the server's clock."""

from __future__ import annotations

from typing import Any

from stampede.engines.kit.limits import usage
from stampede.engines.redis.locks import listed, tag_of
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.verbs import RedisLine
from stampede.model.limit_window import SECOND, WIDTH, checked, micros, slack, window_of
from stampede.model.ports import Booked, Rate, Usage

__all__ = ["RedisLimits"]


class RedisLimits:
    """Limits of one colour, on one server."""

    def __init__(self, line: RedisLine, scripts: Scripts) -> None:
        self._line = line
        self._scripts = scripts

    async def _ask(self, name: str, verb: bytes, *numbers: int) -> Any:
        command = self._scripts.limit([_key(name)], verb, *(b"%d" % number for number in numbers))
        return await self._line.ask(command)

    async def take(self, name: str, rate: Rate, cost: int, ahead: float, was: int = 0) -> Booked:
        per, most_ahead = micros(rate.per), -1 if ahead < 0 else micros(ahead)
        span = per + slack(per)
        checked(cost, rate.most)
        terms = rate.most, per, span, per // WIDTH, cost, most_ahead, was
        delay, booked, at = await self._ask(name, b"take", *terms)
        return Booked(delay / SECOND, bool(booked), at)

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        await self._ask(name, b"back", cost, at)

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        per = micros(rate.per)
        await self._ask(name, b"rest", rate.most, per, per + slack(per), micros(seconds))

    async def used(self, name: str) -> Usage:
        now, text = await self._ask(name, b"used")
        return usage(window_of(text), now)

    async def listed(self) -> list[tuple[str, Usage]]:
        all_of = [(name, await self.used(name)) for name in await listed(self._line, b"W")]
        return [(name, found) for name, found in all_of if found.rate is not None]


def _key(name: str) -> bytes:
    return b"{%s}W:%s" % (tag_of(name), name.encode("utf-8", "surrogatepass"))
