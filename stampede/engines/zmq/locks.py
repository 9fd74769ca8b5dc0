"""Locks and limits of brokers, a port of each for each colour.

Who waits for a lock has a place there, and is told when its turn has come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Any

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.naming import shown
from stampede.engines.kit.whereabouts import parts_of
from stampede.engines.zmq import wire
from stampede.engines.zmq.client import BrokerLink
from stampede.engines.zmq.wire import Word
from stampede.model.ports import Booked, Busy, Granted, Held, Rate, Usage
from stampede.runtime.colour import Bell, Colour

__all__ = ["Links", "ZmqLimits", "ZmqLocks"]

SAFETY = 10.0
"""Seconds after which who waits asks once more, though nobody has told it anything."""


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and one has a place: what rings when its turn has come."""

    turn: Bell | None = None


@dataclass(slots=True)
class _Own:
    """A lock that this process has, as it tells a broker that has lost its memory."""

    fence: int
    room: float
    end: float


class Links:
    """All brokers of one URL. Each name has one of them: the one that draws the highest number for it."""

    def __init__(self, links: Sequence[BrokerLink]) -> None:
        self.links = tuple(links)
        self._draws = [blake2b(str(link.place).encode(), digest_size=16).digest() for link in links]
        self.owned: Ending[tuple[bytes, bytes], _Own] = Ending()

    def of(self, name: bytes) -> BrokerLink:
        if len(self.links) == 1:
            return self.links[0]
        drawn = [blake2b(name, digest_size=8, key=draw).digest() for draw in self._draws]
        return self.links[drawn.index(max(drawn))]

    def start_again(self) -> None:
        self.owned.clear()
        for link in self.links:
            link.start_again()

    def close(self) -> None:
        for link in self.links:
            link.close()


class ZmqLocks:
    """Locks of one colour."""

    def __init__(self, links: Links, colour: Colour) -> None:
        self._links = links
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1.0
    ) -> Granted | Busy:
        raw = wire.name_of(name)
        link = self._links.of(raw)
        turn = link.queued(token) if waits else None
        asked = monotonic()
        kind, payload = await link.ask(self._colour, Word.ACQUIRE, wire.asking(raw, token, lease, room, waits=waits))
        if kind == Word.GRANTED:
            (fence,) = wire.GRANTED.unpack(payload)
            link.left(token)
            link.fence = max(link.fence, fence)
            self._has(link, raw, token, _Own(fence, room, asked + lease))
            return Granted(fence=fence)
        left, holder = wire.heard_busy(payload)
        grace = not holder
        return Busy(holder, left, grace=grace) if turn is None else _Queued(holder, left, turn=turn, grace=grace)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        raw = wire.name_of(name)
        link, own, asked = self._links.of(raw), self._links.owned.get((raw, token)), monotonic()
        fence, room = (0, 1.0) if own is None else (own.fence, own.room)
        kind, _ = await link.ask(self._colour, Word.RENEW, wire.asking(raw, token, lease, room, fence))
        if kind == Word.YES:
            if own is not None:
                own.end = asked + lease
            return True
        self._has_not(link, raw, token)
        return False

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        raw = wire.name_of(name)
        link = self._links.of(raw)
        kind, _ = await link.ask(self._colour, Word.HAND_OVER, wire.asking(raw, token, lease))
        self._has_not(link, raw, token)
        return kind == Word.YES

    async def release(self, name: str, token: bytes) -> bool:
        raw = wire.name_of(name)
        link = self._links.of(raw)
        self._has_not(link, raw, token)
        kind, _ = await link.ask(self._colour, Word.RELEASE, wire.asking(raw, token))
        return kind == Word.YES

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        raw, end = wire.name_of(name), monotonic() + timeout
        link = self._links.of(raw)
        turn = busy.turn if isinstance(busy, _Queued) else None
        if turn is not None:
            await self._colour.park(turn, min(timeout, SAFETY))
            return
        with link.listen(raw) as bell:
            if timeout > 0:
                kind, _ = await link.ask(self._colour, Word.WATCH, wire.asking(raw, busy.token))
                if kind == Word.YES:
                    await self._colour.park(bell, min(max(end - monotonic(), 0.0), SAFETY))

    def _has(self, link: BrokerLink, name: bytes, token: bytes, own: _Own) -> None:
        if self._links.owned.get((name, token)) is None:
            link.held += 1
        self._links.owned.put((name, token), own, monotonic())

    def _has_not(self, link: BrokerLink, name: bytes, token: bytes) -> None:
        link.left(token)
        if self._links.owned.pop((name, token), None) is not None:
            link.held -= 1

    async def held(self, prefix: str = "") -> list[Held]:
        found = []
        for link in self._links.links:
            found += [_held(*row) for row in await link.listed(self._colour, Word.HELD, prefix)]
        return found

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        raw = wire.name_of(name)
        _, payload = await self._links.of(raw).ask(self._colour, Word.HOLDER, raw)
        return [(bytes.fromhex(token), left) for token, left in json.loads(payload)]


def _held(name: str, token: str, holder: str, fence: int, held: float, left: float, waiting: int, *_: Any) -> Held:
    host, pid = parts_of(holder)
    known = bytes.fromhex(name).decode("utf-8", "backslashreplace")
    return Held(known, host, pid, None, fence, time.time() - held, held, left, True, waiting)


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
