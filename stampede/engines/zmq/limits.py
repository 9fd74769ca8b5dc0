"""Limits on brokers, one port for each colour: each verb is one question."""

from __future__ import annotations

import json
from typing import Any

from stampede.colour import Colour
from stampede.engines.naming import shown
from stampede.engines.zmq import wire
from stampede.engines.zmq.locks import Links
from stampede.engines.zmq.wire import Word
from stampede.ports import Booked, Rate, Usage

__all__ = ["ZmqLimits"]


class ZmqLimits:
    """Limits of one colour."""

    def __init__(self, links: Links, colour: Colour) -> None:
        self._links = links
        self._colour = colour

    async def take(self, name: str, rate: Rate, cost: int, ahead: float, was: int = 0) -> Booked:
        _, payload = await self._ask(Word.TAKE, name, rate, cost, ahead, was)
        return Booked(*wire.BOOKED.unpack(payload))

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        await self._ask(Word.GIVE_BACK, name, rate, cost, at=at)

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        await self._ask(Word.PENALIZE, name, rate, seconds=seconds)

    async def used(self, name: str) -> Usage:
        raw = wire.name_of(name)
        _, payload = await self._links.of(raw).ask(self._colour, Word.USED, raw)
        return _usage(*json.loads(payload))

    async def listed(self) -> list[tuple[str, Usage]]:
        found = []
        for link in self._links.links:
            for name, *told in await link.listed(self._colour, Word.LIMITS):
                found.append((shown(bytes.fromhex(name)), _usage(*told)))
        return sorted(found)

    async def _ask(
        self, kind: int, name: str, rate: Rate, cost: int = 0, seconds: float = 0.0, at: int = 0
    ) -> tuple[int, bytes]:
        raw = wire.name_of(name)
        payload = wire.counting(raw, rate.most, rate.per, cost, seconds, at)
        return await self._links.of(raw).ask(self._colour, kind, payload)


def _usage(most: int, per: float, used: int, ahead: int, penalized: float, *_: Any) -> Usage:
    return Usage(Rate(most, per) if most else None, used, ahead, penalized)
