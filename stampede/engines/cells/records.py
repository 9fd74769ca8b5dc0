"""Records in cells, for one colour: read, decide by `model/record.py`, swap, and repeat if another swap was faster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
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
from stampede.runtime.chance import random, uniform
from stampede.runtime.colour import Bell, Colour

__all__ = ["CellRecords", "OpenCell", "Written", "written_of"]

T = TypeVar("T")
Decide: TypeAlias = Callable[[Record, float], Change[T]]

TRIES = 50
"""How often a change is tried before EngineError, if other processes are always faster."""

REMEMBERED = 86_400.0
"""Seconds for which the last fence of a free lock is stored, in cells whose versions do not grow."""

FREE = 60.0
"""Seconds for which a released lock keeps its cell, so that it differs from a lock that was never taken. Otherwise an
`acquire` whose caller has given up, and has released since, could still arrive and take the lock."""

SAFETY = 1.0
"""Seconds between two reads of a waiter that was not woken, if the cell reports changes."""

OFTEN = 0.04
"""The most seconds between two reads of a waiter for a key: it gets the value so soon after the fill, however long the
computation took. (Waiters for locks may pause for a tenth of the time waited, see `polling.pause`.)"""


class Written(NamedTuple):
    """A record as it was last read or written. With it, this process fills and renews without reading first."""

    version: Version
    record: Record

    @property
    def end(self) -> float:
        return self.record.lease.end if self.record.lease else -inf


class OpenCell:
    """A cell that is in use, and the state that both colours share."""

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
        """Call `ring` when the engine is closed while the block runs."""
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
        """Lend the cell to a block, and raise EngineError for any exception that the author's code raises."""
        self._check()
        try:
            yield self.cell
        except StampedeError:
            raise
        except Exception as error:
            self._check()  # the cell may have been closed meanwhile, and may then raise anything
            raise EngineError(f"{self.scheme}: {type(error).__name__}: {error}") from error

    def portions(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """Split the names into lists that are short enough for one read each."""
        most = self.cell.at_once or len(names)
        for at in range(0, len(names), most or 1):
            yield names[at : at + most]

    def close(self) -> None:
        self._closed = True
        for ring in list(self._waiting.values()):
            ring()
        self.cell.close()

    def start_again(self) -> None:
        """Forget, in a forked child, the waiters, leases and connections: they are the parent's."""
        self._waiting = {}
        self.owned.clear()
        self.cell.start_again()


class CellRecords:
    """The records of one engine, for callers of one colour. `run` executes the methods of the cell, which block."""

    def __init__(self, opened: OpenCell, colour: Colour, run: Run) -> None:
        self.open = opened
        self.owned = opened.owned
        self._colour = colour
        self._run = run
        self.clock = opened.clock
        self._ages = opened.cell.ages

    # -- requests to the cell

    async def seen(self, names: Sequence[str]) -> list[Seen]:
        """Return the state of each name. No name may occur twice; their number is not limited."""
        with self.open.asking() as cell:
            return [seen for some in self.open.portions(names) for seen in await self._run(cell.read, some)]

    async def swapped(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self.open.asking() as cell:
            return await self._run(cell.swap, name, version, data, ttl)

    async def _watched(self, name: str, notify: Callable[[], object]) -> Callable[[], object]:
        """Watch a name, and return what ends the watch. The cell must be a WatchingCell."""
        with self.open.asking() as cell:
            assert isinstance(cell, WatchingCell)
            end = await self._run(cell.watch, name, notify)
        return end if self._run is here else lambda: self._aside(end)

    def _aside(self, end: Callable[[], object]) -> None:
        """Run a blocking step beside the event loop, without waiting for its end."""
        asyncio.ensure_future(self._run(end)).add_done_callback(_ignore_failure)

    @property
    def _longest(self) -> float:
        return self.open.cell.longest or inf  # read each time: some cells learn their limit at the first request

    # -- read

    async def known(self, names: Sequence[str]) -> list[KnownAge]:
        """Return what is stored under each name, and when it was written."""
        sent = self.clock()
        found = await self.seen(names)
        received = self.clock()
        return [self._known(name, seen, sent, received) for name, seen in zip(names, found, strict=True)]

    async def look(self, name: str) -> tuple[Version, Record, float]:
        """Return the version and the record of a name, and the time after the read."""
        (known,) = await self.known([name])
        return *written_of(known), self.clock()

    async def looks(self, names: Sequence[str]) -> tuple[list[Record], float]:
        """Return the record of each name, and the time after the read. Names may occur twice."""
        different = list(dict.fromkeys(names))
        found = dict(zip(different, await self.known(different), strict=True)) if different else {}
        return [written_of(found[name])[1] for name in names], self.clock()

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
        """Return the answer of `decide`. The changed record is stored by then."""
        return (await self.change(name, decide, known))[0]

    async def change(self, name: str, decide: Decide[T], known: Written | None = None) -> tuple[T, Version, Record]:
        """Return the answer of `decide`, and the version and the record afterwards. `known` saves the first read; if it
        is out of date, the swap is refused, and the record is read."""

        for tried in range(TRIES):
            version, stored = known or (await self.look(name))[:2]
            now = self.clock()
            after, answer, _ = decide(stored, now)
            if after is stored:
                return answer, version, stored
            swapped = await self.swap(name, version, *self._written(after, now))
            if not isinstance(swapped, Faster):
                return answer, swapped, after
            known = None if swapped.seen is None else written_of(self._known(name, swapped.seen, now, self.clock()))
            await self.pause(tried)
        raise EngineError(f"{self.open.scheme}: other processes change this key too often: try again")

    def _written(self, stored: Record, now: float) -> tuple[bytes | None, float]:
        """Return the body of a record and its ttl. The body is None if nothing in the record is valid any more."""
        left = stored.end - now
        if stored.lease is not None and not stored.lease.token:
            left = FREE if self.open.cell.grows else REMEMBERED
        return (wire.body_of(stored, now, self._longest) if left > 0 else None), left

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        """Extend a lease: with one swap if this process knows what it has written last. False: the lease is lost."""
        known = self.owned.get((name, token))
        try:
            renewed, version, stored = await self.change(
                name, lambda old, now: record.renew(old, token, lease, now), known
            )
        except BaseException:
            self.owned.pop((name, token), None)  # the swap may have been done, so the version may be another one
            raise
        if not renewed:
            self.owned.pop((name, token), None)
        elif known is not None and self.owned.get((name, token)) is known:  # else it was filled meanwhile
            self.owned.put((name, token), Written(version, stored), self.clock())
        return renewed

    async def swap(self, name: str, version: Version, body: bytes | None, ttl: float) -> Version | Faster:
        """Write a body, or remove the name if `body` is None. Return the new version, or Faster."""
        if body is None and version is None:
            return None
        sent = self.clock()
        data = None if body is None else wire.sealed(name, body, self.open.wall())
        swapped = await self.swapped(name, version, data, max(ttl, 0.001))
        if not isinstance(swapped, Faster) and (not self._ages or (body is not None and wire.leased(body))):
            self.open.ages.wrote(name, None if data is None else swapped, sent, self.clock())
        return swapped

    async def pause(self, tried: int) -> None:
        """Pause for a random time after a lost swap, so that the losers do not all try again at once."""
        await self._colour.park(Bell(), random() * min(0.001 * 1.5**tried, 0.03))

    def fits(self, size: int) -> None:
        """Raise TooLarge if a value of this size does not fit into a cell."""
        if size + wire.ROOM > self._longest:
            most = self._longest - wire.ROOM
            raise TooLarge(f"{size} bytes are more than {self.open.scheme} can store in one cell: at most {most:.0f}")

    # -- wait

    async def wait(
        self, name: str, busy: Busy, timeout: float, cost: float = 0.0, longest: float = inf
    ) -> tuple[Record, float, float]:
        """Wait until the lease that `busy` names has ended, or until the time-out. Return the record (empty after a
        time-out), the seconds waited, and the present time. `cost` is the likely length of the computation, and
        `longest` the most seconds between two reads."""
        began, waiter, opened, backoff = time.monotonic(), _Waiter(), self.open, Backoff()
        waited = took = last = 0.0
        left = busy.lease
        with opened.waiting(waiter.ring):
            end = await self._watched(name, waiter.ring) if opened.watches else None
            try:
                while True:
                    bell = waiter.fresh_bell()  # before the read: a change during the read must ring it
                    if end is not None or waited:
                        sent = time.monotonic()
                        _, stored, now = await self.look(name)
                        last, took = took, time.monotonic() - sent
                        lease = stored.lease
                        if lease is None or not record.standing(lease, busy.token, now):
                            return stored, waited, now
                        left = lease.end - now
                    rest = SAFETY * uniform(0.9, 1.1) if end is not None else pause(waited, cost, random(), longest)
                    rest = max(rest, min(took, last))  # if two reads were slow, pause as long as they took
                    await self._colour.park(bell, max(min(rest, left, timeout - waited), 0.001))
                    if end is not None and (crowded := backoff.rest(time.monotonic())):
                        await self._colour.park(Bell(), crowded)
                    waited = time.monotonic() - began
                    if waited >= timeout:
                        return NOTHING, waited, self.clock()
            finally:
                if end is not None:
                    end()


def _ignore_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # a watch that can't be ended ends with its connection


class _Waiter:
    """A waiter that can be woken many times: each ring needs a new bell."""

    def __init__(self) -> None:
        self._bell = Bell()

    def ring(self) -> None:
        self._bell.ring()

    def fresh_bell(self) -> Bell:
        if self._bell.rung:
            self._bell = Bell()
        return self._bell


def written_of(known: KnownAge) -> Written:
    """Return the record that these bytes are, with its version."""
    # Foreign bytes are a record that can't be read, not NOTHING: removing them takes a write.
    stored = NOTHING if known.body is None else wire.record_of(known.body, known.written, known.latest)
    return Written(known.version, stored)


_FOREIGN = memoryview(b"")  # the body of bytes that another program has written
