"""Records in cells, for one colour: read, decided by `record.py`, and swapped, until nobody was faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from random import random, uniform
from typing import TypeAlias, TypeVar

from stampede import record
from stampede.colour import Bell, Colour
from stampede.engines.cells import wire
from stampede.engines.cells.lookout import Lookout, Waiter
from stampede.engines.cells.protocol import Faster, Seen, Version
from stampede.engines.cells.sightings import Known, Sightings, age_of
from stampede.engines.cells.ways import OpenCell, Way
from stampede.engines.kit.owned import Owned
from stampede.engines.looking import Costs, pause
from stampede.errors import EngineError, TooLarge
from stampede.pace import Pace
from stampede.ports import Busy
from stampede.record import NOTHING, Change, Record

__all__ = ["Common", "Records"]

T = TypeVar("T")
Decide: TypeAlias = Callable[[Record, float], Change[T]]

TRIES = 50
"""How often a change is tried again because somebody else was faster."""

REMEMBERED = 86_400.0
"""Seconds for which the last fence of a lock that is free is kept, of cells whose versions don't grow."""

FREE = 60.0
"""Seconds for which a lock that is free is told from one that nobody has ever had: who has given up a question that is
late, and has released the lock since, is not granted it again by that question."""

SAFETY = 1.0
"""Seconds between two looks of a waiter that nobody woke, where cells tell of changes."""

OFTEN = 0.04
"""Seconds between two looks of a process at a key that it waits for, at most: the value is had so soon after it was
stored, however long it took. (Locks leave themselves a tenth of the time waited, as `looking` says.)"""


class Common:
    """What both colours of one engine know."""

    def __init__(self, opened: OpenCell, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.open = opened
        self.cell = opened.cell
        self.clock = clock
        self.wall = wall
        self.sightings = Sightings()
        self.lookout = Lookout()
        self.costs: Costs[str] = Costs()
        self.owned = Owned[str, tuple[Version, Record]](lambda own: _is_over(own[1], clock()))

    def start_again(self) -> None:
        """In a forked child: what is being computed is the parent's, and so are those who wait."""
        self.owned.clear()
        self.lookout = Lookout()


def _is_over(there: Record, now: float) -> bool:
    return there.lease is None or there.lease.end <= now


class Records:
    """Records of one colour."""

    def __init__(self, way: Way, common: Common, colour: Colour) -> None:
        self.common = common
        self.owned = common.owned
        self._way = way
        self._colour = colour
        self.clock = common.clock
        self._ages = common.cell.ages

    @property
    def _longest(self) -> float:
        return self.common.cell.longest or inf  # which some know when they have been asked

    # -- read

    async def known(self, names: Sequence[str]) -> list[Known]:
        """What each name has."""
        sent = self.clock()
        found = await self._way.read(names)
        received = self.clock()
        return [self._known(name, seen, sent, received) for name, seen in zip(names, found, strict=True)]

    async def look(self, name: str) -> tuple[Version, Record, float]:
        """What it has, and now."""
        (known,) = await self.known([name])
        return *_read(known), self.clock()

    async def looks(self, names: Sequence[str]) -> tuple[dict[str, Record], float]:
        """What each has, and now."""
        different = list(dict.fromkeys(names))
        found = await self.known(different) if different else []
        return {name: _read(known)[1] for name, known in zip(different, found, strict=True)}, self.clock()

    def _known(self, name: str, seen: Seen, sent: float, received: float) -> Known:
        data, version, age = seen
        if data is None:
            if not self._ages:
                self.common.sightings.saw(name, version, sent, received)
            return Known(version, None, sent, received)
        ours = wire.opened(name, data)
        if ours is None:
            return Known(version, _FOREIGN, received, received)
        body, wall = ours
        if age is not None and age >= 0 and not wire.leased(body):
            return Known(version, body, sent - age, received - age)
        sighting = self.common.sightings.saw(name, version, sent, received)
        if age is None or not age >= 0:
            age = age_of(sighting, self.common.wall() - wall, sent, received)
            return Known(version, body, sent - age, sighting.first)
        return Known(version, body, sent - age, min(received - age, sighting.first))

    # -- change

    async def answer(self, name: str, decide: Decide[T], known: tuple[Version, Record] | None = None) -> T:
        """What is answered. By then what that has made of the record is there."""
        return (await self.change(name, decide, known))[0]

    async def change(
        self, name: str, decide: Decide[T], known: tuple[Version, Record] | None = None
    ) -> tuple[T, Version, Record]:
        """What is answered, and what is there behind it. `known` saves the first look, where it is true still."""

        for tried in range(TRIES):
            version, there = known or (await self.look(name))[:2]
            now = self.clock()
            after, answer, _ = decide(there, now)
            if after is there:
                return answer, version, there
            swapped = await self.swap(name, version, *self._written(after, now))
            if not isinstance(swapped, Faster):
                return answer, swapped, after
            known = None if swapped.seen is None else _read(self._known(name, swapped.seen, now, self.clock()))
            await self.pause(tried)
        raise EngineError(f"{self.common.open.scheme}: others change this key faster than we can")

    def _written(self, there: Record, now: float) -> tuple[bytes | None, float]:
        """A body, and for how long it is of use; none for what is as good as nothing."""
        left = there.end - now
        if there.lease is not None and not there.lease.token:
            left = FREE if self.common.cell.grows else REMEMBERED
        return (wire.body_of(there, now, self._longest) if left > 0 else None), left

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        """By one swap, where we know what we have written last."""
        known = self.owned.get(name, token)
        try:
            stands, version, there = await self.change(name, lambda it, now: record.renew(it, token, lease, now), known)
        except BaseException:
            self.owned.pop(name, token)  # it may have been written, so that there is another version now
            raise
        if not stands:
            self.owned.pop(name, token)
        elif known is not None and self.owned.get(name, token) is known:  # or it was filled meanwhile
            self.owned.put(name, token, (version, there))
        return stands

    async def swap(self, name: str, version: Version, body: bytes | None, ttl: float) -> Version | Faster:
        """Write a body, or nothing."""
        if body is None and version is None:
            return None
        sent = self.clock()
        data = None if body is None else wire.sealed(name, body, self.common.wall())
        swapped = await self._way.swap(name, version, data, max(ttl, 0.001))
        if not isinstance(swapped, Faster) and (not self._ages or (body is not None and wire.leased(body))):
            self.common.sightings.wrote(name, None if data is None else swapped, sent, self.clock())
        return swapped

    async def pause(self, tried: int) -> None:
        """Others were faster: not all of those who have lost try again at once."""
        await self._colour.park(Bell(), random() * min(0.001 * 1.5**tried, 0.03))

    def fits(self, size: int) -> None:
        """TooLarge where it doesn't."""
        if size + wire.ROOM > self._longest:
            most = self._longest - wire.ROOM
            raise TooLarge(f"{size} bytes are more than a cell of {self.common.open.scheme} has room for: {most:.0f}")

    # -- wait

    async def wait(
        self, name: str, busy: Busy, timeout: float, cost: float = 0.0, longest: float = inf
    ) -> tuple[Record, float, float]:
        """Until its lease has fallen or ended, or the time is over: what is there, how long that took, and now."""
        began, mine, opened, pace = time.monotonic(), Waiter(name), self.common.open, Pace()
        waited = took = last = 0.0
        left = busy.lease
        with opened.waiting(mine.ring), self.common.lookout.has(mine):
            end = await self._way.watch(name, mine.ring) if opened.watches else None
            try:
                while True:
                    bell = mine.fresh()
                    if end is not None or waited:
                        last, (there, took) = took, await self._seen(mine)
                        lease, now = there.lease, self.clock()
                        if lease is None or not record.standing(lease, busy.token, now):
                            return there, waited, now
                        left = lease.end - now
                    rest = SAFETY * uniform(0.9, 1.1) if end is not None else pause(waited, cost, random(), longest)
                    rest = max(rest, min(took, last))  # one that is slow, and not for once, has as long a rest
                    rest = max(min(rest, left, timeout - waited), 0.001)
                    mine.due = time.monotonic() + rest
                    await self._colour.park(bell, rest)
                    if end is not None and (crowded := pace.rest(time.monotonic())):
                        await self._colour.park(Bell(), crowded)
                    elif (asked := mine.due - time.monotonic()) > 0:  # by another, just now
                        await self._colour.park(bell, min(asked, timeout - waited))
                    waited = time.monotonic() - began
                    if waited >= timeout:
                        return NOTHING, waited, self.clock()
            finally:
                if end is not None:
                    end()

    async def _seen(self, mine: Waiter) -> tuple[Record, float]:
        """What its name has, and how long the question took: another's, or its own, by which it asks for others too."""
        known, mine.seen, took = mine.seen, None, 0.0
        if known is None:
            sent = time.monotonic()
            those = self.common.lookout.taken_along(mine, sent, OFTEN)
            names = list({each.name: None for each in those})
            found = dict(zip(names, await self.known(names), strict=True))
            self.common.lookout.tell((each for each in those if each is not mine), found)
            known, took = found[mine.name], time.monotonic() - sent
        return _read(known)[1], took


def _read(known: Known) -> tuple[Version, Record]:
    # What is none of ours is no NOTHING: who takes it away writes.
    there = NOTHING if known.body is None else wire.record_of(known.body, known.written, known.stood)
    return known.version, there


_FOREIGN = memoryview(b"")
