"""The ports of locks and limits over brokers, one of each per colour. A waiter has a place in the queue of its broker,
which notifies it when its turn has come."""

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
"""Seconds after which a waiter asks again without a notice, in case that one was lost."""


@dataclass(slots=True)
class _Queued(Busy):
    """A Busy reply to a waiter that has a place in the queue. `turn` rings when its turn has come."""

    turn: Bell | None = None


@dataclass(slots=True)
class _OwnedLock:
    """What this process tells a broker that was restarted about a lock that it holds."""

    fence: int
    room: float
    end: float


class Links:
    """The links to all brokers of one URL. Each name belongs to one broker: the one with the highest hash for it."""

    def __init__(self, links: Sequence[BrokerLink]) -> None:
        self.links = tuple(links)
        self._seeds = [blake2b(str(link.place).encode(), digest_size=16).digest() for link in links]
        self.owned: Ending[tuple[bytes, bytes], _OwnedLock] = Ending()

    def of(self, name: bytes) -> BrokerLink:
        if len(self.links) == 1:
            return self.links[0]
        scores = [blake2b(name, digest_size=8, key=seed).digest() for seed in self._seeds]
        return self.links[scores.index(max(scores))]

    def start_again(self) -> None:
        self.owned.clear()
        for link in self.links:
            link.start_again()

    def close(self) -> None:
        for link in self.links:
            link.close()


class ZmqLocks:
    """The Locks port of one colour."""

    def __init__(self, links: Links, colour: Colour) -> None:
        self._links = links
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1.0
    ) -> Granted | Busy:
        raw = wire.name_of(name)
        link = self._links.of(raw)
        turn = link.turn_bell(token) if waits else None
        asked = monotonic()
        kind, payload = await link.ask(self._colour, Word.ACQUIRE, wire.pack_lock(raw, token, lease, room, waits=waits))
        if kind == Word.GRANTED:
            (fence,) = wire.GRANTED.unpack(payload)
            link.forget_turn(token)
            link.fence = max(link.fence, fence)
            self._note_owned(link, raw, token, _OwnedLock(fence, room, asked + lease))
            return Granted(fence=fence)
        left, holder = wire.unpack_busy(payload)
        grace = not holder
        return Busy(holder, left, grace=grace) if turn is None else _Queued(holder, left, turn=turn, grace=grace)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        raw = wire.name_of(name)
        link, owned, asked = self._links.of(raw), self._links.owned.get((raw, token)), monotonic()
        fence, room = (0, 1.0) if owned is None else (owned.fence, owned.room)
        kind, _ = await link.ask(self._colour, Word.RENEW, wire.pack_lock(raw, token, lease, room, fence))
        if kind == Word.YES:
            if owned is not None:
                owned.end = asked + lease
            return True
        self._forget_owned(link, raw, token)
        return False

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        raw = wire.name_of(name)
        link = self._links.of(raw)
        kind, _ = await link.ask(self._colour, Word.HAND_OVER, wire.pack_lock(raw, token, lease))
        self._forget_owned(link, raw, token)
        return kind == Word.YES

    async def release(self, name: str, token: bytes) -> bool:
        raw = wire.name_of(name)
        link = self._links.of(raw)
        self._forget_owned(link, raw, token)
        kind, _ = await link.ask(self._colour, Word.RELEASE, wire.pack_lock(raw, token))
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
                kind, _ = await link.ask(self._colour, Word.WATCH, wire.pack_lock(raw, busy.token))
                if kind == Word.YES:
                    await self._colour.park(bell, min(max(end - monotonic(), 0.0), SAFETY))

    def _note_owned(self, link: BrokerLink, name: bytes, token: bytes, owned: _OwnedLock) -> None:
        if self._links.owned.get((name, token)) is None:
            link.held += 1
        self._links.owned.put((name, token), owned, monotonic())

    def _forget_owned(self, link: BrokerLink, name: bytes, token: bytes) -> None:
        link.forget_turn(token)
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
    """The Limits port of one colour."""

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
            for name, *row in await link.listed(self._colour, Word.LIMITS):
                found.append((shown(bytes.fromhex(name)), _usage(*row)))
        return sorted(found)

    async def _ask(
        self, kind: int, name: str, rate: Rate, cost: int = 0, seconds: float = 0.0, at: int = 0
    ) -> tuple[int, bytes]:
        raw = wire.name_of(name)
        payload = wire.pack_limit(raw, rate.most, rate.per, cost, seconds, at)
        return await self._links.of(raw).ask(self._colour, kind, payload)


def _usage(most: int, per: float, used: int, ahead: int, penalized: float, *_: Any) -> Usage:
    return Usage(Rate(most, per) if most else None, used, ahead, penalized)
