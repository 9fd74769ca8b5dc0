"""Records in cells, for one colour: read, decided by `record.py`, and swapped, until nobody was faster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from random import random, uniform
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stampede.engines.cells import wire
from stampede.engines.cells.ages import Ages, KnownAge, age_of
from stampede.engines.cells.protocol import Cell, Faster, Seen, Version, WatchingCell
from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.polling import Costs, pause
from stampede.engines.kit.worker_threads import Run, here
from stampede.errors import EngineClosed, EngineError, StampedeError, TooLarge
from stampede.model import record
from stampede.model.backoff import Backoff
from stampede.model.ports import Busy
from stampede.model.record import NOTHING, Change, Record
from stampede.runtime.colour import Bell, Colour

__all__ = ["CellRecords", "OpenCell", "Written"]

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
"""Seconds between two looks of a waiter at its key, at most: the value is had so soon after it was
stored, however long it took. (Locks leave themselves a tenth of the time waited, as `looking` says.)"""


class Written(NamedTuple):
    """A record as it was read or written last. One with a lease of this process ends without another look."""

    version: Version
    record: Record

    @property
    def end(self) -> float:
        return self.record.lease.end if self.record.lease else -inf


class OpenCell:
    """A cell, and what both colours know of it; as long as it is not closed."""

    def __init__(self, cell: Cell, scheme: str, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.cell = cell
        self.scheme = scheme
        self.watches = isinstance(cell, WatchingCell)
        self.clock = clock
        self.wall = wall
        self.ages = Ages()
        self.costs: Costs[str] = Costs()
        self.owned: Ending[tuple[str, bytes], Written] = Ending()
        self._closed = False
        self._waiting: dict[object, Callable[[], object]] = {}

    @contextmanager
    def waiting(self, ring: Callable[[], object]) -> Iterator[None]:
        """Have who waits woken when the engine is closed."""
        number = object()
        self._waiting[number] = ring
        try:
            self._check()
            yield
        finally:
            self._waiting.pop(number, None)

    def _check(self) -> None:
        if self._closed:
            raise EngineClosed(self.scheme)

    @contextmanager
    def asking(self) -> Iterator[Cell]:
        """Whatever its author's code raises is trouble of the store."""
        self._check()
        try:
            yield self.cell
        except StampedeError:
            raise
        except Exception as error:
            self._check()  # it may have been closed under our hands, which may raise anything
            raise EngineError(f"{self.scheme}: {type(error).__name__}: {error}") from error

    def portions(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """As many names as one read may have."""
        most = self.cell.at_once or len(names)
        for at in range(0, len(names), most or 1):
            yield names[at : at + most]

    def close(self) -> None:
        self._closed = True
        for ring in list(self._waiting.values()):
            ring()
        self.cell.close()

    def start_again(self) -> None:
        """In a forked child: who waits or computes is the parent's, and so are connections."""
        self._waiting = {}
        self.owned.clear()
        self.cell.start_again()


class CellRecords:
    """Records of one colour. `run` has the cell's verbs done."""

    def __init__(self, opened: OpenCell, colour: Colour, run: Run) -> None:
        self.open = opened
        self.owned = opened.owned
        self._colour = colour
        self._run = run
        self.clock = opened.clock
        self._ages = opened.cell.ages

    # -- what the cell is asked

    async def seen(self, names: Sequence[str]) -> list[Seen]:
        """What each has; names are different, and as many as you like."""
        with self.open.asking() as cell:
            return [seen for some in self.open.portions(names) for seen in await self._run(cell.read, some)]

    async def swapped(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self.open.asking() as cell:
            return await self._run(cell.swap, name, version, data, ttl)

    async def _watched(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        """Of a cell that tells of changes."""
        with self.open.asking() as cell:
            assert isinstance(cell, WatchingCell)
            end = await self._run(cell.watch, name, told)
        return end if self._run is here else lambda: self._aside(end)

    def _aside(self, end: Callable[[], object]) -> None:
        """A blocking step of which nobody waits for the end."""
        asyncio.ensure_future(self._run(end)).add_done_callback(_heard)

    @property
    def _longest(self) -> float:
        return self.open.cell.longest or inf  # which some know when they have been asked

    # -- read

    async def known(self, names: Sequence[str]) -> list[KnownAge]:
        """What each name has."""
        sent = self.clock()
        found = await self.seen(names)
        received = self.clock()
        return [self._known(name, seen, sent, received) for name, seen in zip(names, found, strict=True)]

    async def look(self, name: str) -> tuple[Version, Record, float]:
        """What it has, and now."""
        (known,) = await self.known([name])
        return *_read(known), self.clock()

    async def looks(self, names: Sequence[str]) -> tuple[list[Record], float]:
        """What each has, and now."""
        different = list(dict.fromkeys(names))
        found = dict(zip(different, await self.known(different), strict=True)) if different else {}
        return [_read(found[name])[1] for name in names], self.clock()

    def _known(self, name: str, seen: Seen, sent: float, received: float) -> KnownAge:
        data, version, age = seen
        if data is None:
            if not self._ages:
                self.open.ages.saw(name, version, sent, received)
            return KnownAge(version, None, sent, received)
        ours = wire.opened(name, data)
        if ours is None:
            return KnownAge(version, _FOREIGN, received, received)
        body, wall = ours
        if age is not None and age >= 0 and not wire.leased(body):
            return KnownAge(version, body, sent - age, received - age)
        sighting = self.open.ages.saw(name, version, sent, received)
        if age is None or not age >= 0:
            age = age_of(sighting, self.open.wall() - wall, sent, received)
            return KnownAge(version, body, sent - age, sighting.first)
        return KnownAge(version, body, sent - age, min(received - age, sighting.first))

    # -- change

    async def answer(self, name: str, decide: Decide[T], known: Written | None = None) -> T:
        """What is answered. By then what that has made of the record is there."""
        return (await self.change(name, decide, known))[0]

    async def change(self, name: str, decide: Decide[T], known: Written | None = None) -> tuple[T, Version, Record]:
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
        raise EngineError(f"{self.open.scheme}: others change this key faster than we can")

    def _written(self, there: Record, now: float) -> tuple[bytes | None, float]:
        """A body, and for how long it is of use; none for what is as good as nothing."""
        left = there.end - now
        if there.lease is not None and not there.lease.token:
            left = FREE if self.open.cell.grows else REMEMBERED
        return (wire.body_of(there, now, self._longest) if left > 0 else None), left

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        """By one swap, where we know what we have written last."""
        known = self.owned.get((name, token))
        try:
            stands, version, there = await self.change(name, lambda it, now: record.renew(it, token, lease, now), known)
        except BaseException:
            self.owned.pop((name, token), None)  # it may have been written, so that there is another version now
            raise
        if not stands:
            self.owned.pop((name, token), None)
        elif known is not None and self.owned.get((name, token)) is known:  # or it was filled meanwhile
            self.owned.put((name, token), Written(version, there), self.clock())
        return stands

    async def swap(self, name: str, version: Version, body: bytes | None, ttl: float) -> Version | Faster:
        """Write a body, or nothing."""
        if body is None and version is None:
            return None
        sent = self.clock()
        data = None if body is None else wire.sealed(name, body, self.open.wall())
        swapped = await self.swapped(name, version, data, max(ttl, 0.001))
        if not isinstance(swapped, Faster) and (not self._ages or (body is not None and wire.leased(body))):
            self.open.ages.wrote(name, None if data is None else swapped, sent, self.clock())
        return swapped

    async def pause(self, tried: int) -> None:
        """Others were faster: not all of those who have lost try again at once."""
        await self._colour.park(Bell(), random() * min(0.001 * 1.5**tried, 0.03))

    def fits(self, size: int) -> None:
        """TooLarge where it doesn't."""
        if size + wire.ROOM > self._longest:
            most = self._longest - wire.ROOM
            raise TooLarge(f"{size} bytes are more than a cell of {self.open.scheme} has room for: {most:.0f}")

    # -- wait

    async def wait(
        self, name: str, busy: Busy, timeout: float, cost: float = 0.0, longest: float = inf
    ) -> tuple[Record, float, float]:
        """Until its lease has fallen or ended, or the time is over: what is there, how long that took, and now."""
        began, mine, opened, pace = time.monotonic(), _Waiter(), self.open, Backoff()
        waited = took = last = 0.0
        left = busy.lease
        with opened.waiting(mine.ring):
            end = await self._watched(name, mine.ring) if opened.watches else None
            try:
                while True:
                    bell = mine.fresh()
                    if end is not None or waited:
                        sent = time.monotonic()
                        _, there, now = await self.look(name)
                        last, took = took, time.monotonic() - sent
                        lease = there.lease
                        if lease is None or not record.standing(lease, busy.token, now):
                            return there, waited, now
                        left = lease.end - now
                    rest = SAFETY * uniform(0.9, 1.1) if end is not None else pause(waited, cost, random(), longest)
                    rest = max(rest, min(took, last))  # one that is slow, and not for once, has as long a rest
                    await self._colour.park(bell, max(min(rest, left, timeout - waited), 0.001))
                    if end is not None and (crowded := pace.rest(time.monotonic())):
                        await self._colour.park(Bell(), crowded)
                    waited = time.monotonic() - began
                    if waited >= timeout:
                        return NOTHING, waited, self.clock()
            finally:
                if end is not None:
                    end()


def _heard(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # a watch that can't be ended ends with its connection


class _Waiter:
    """Rings as often as it is told to: each time for a bell that was made since the last."""

    def __init__(self) -> None:
        self._bell = Bell()

    def ring(self) -> None:
        self._bell.ring()

    def fresh(self) -> Bell:
        if self._bell.rung:
            self._bell = Bell()
        return self._bell


def _read(known: KnownAge) -> Written:
    # What is none of ours is no NOTHING: who takes it away writes.
    there = NOTHING if known.body is None else wire.record_of(known.body, known.written, known.stood)
    return Written(known.version, there)


_FOREIGN = memoryview(b"")
