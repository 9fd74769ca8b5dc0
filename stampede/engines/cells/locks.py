"""Locks over cells: a record that holds nothing but a lease."""

from __future__ import annotations

import time

from stampede.engines.cells.records import CellRecords, Written
from stampede.engines.kit.naming import name_of
from stampede.engines.kit.whereabouts import here
from stampede.model import record
from stampede.model.ports import Ask, Busy, Granted
from stampede.model.record import Change, Lease, Record

__all__ = ["CellLocks"]


class CellLocks:
    """Locks of one colour.

    A fence is the version of its cell, where those only grow. Elsewhere it stands in the record, also of a lock that is
    free, and is told from the clock where that has gone: it grows, unless the clocks of two machines are a day apart.
    """

    def __init__(self, records: CellRecords) -> None:
        self._records = records
        self._grows = records.open.cell.grows

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        def decide(there: Record, now: float) -> Change[Granted | Busy]:
            after, answer, fallen = record.claim(there, token, Ask(lease), now, fence=self._next(there), holder=here())
            assert isinstance(answer, (Granted, Busy))
            return after, answer, fallen

        its = name_of(name, b"l").decode()
        answer, version, there = await self._records.change(its, decide)
        if isinstance(answer, Granted):
            self._records.owned.put((its, token), Written(version, there), self._records.clock())
            if self._grows:
                answer.fence = version
        return answer

    def _next(self, there: Record) -> int:
        return 0 if self._grows else max(there.lease.fence + 1 if there.lease else 0, time.time_ns() // 1_000_000)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self._records.renew(name_of(name, b"l").decode(), token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        def decide(there: Record, now: float) -> Change[bool]:
            after, released, fallen = record.abandon(there, token, None, 0.0, now)
            if released and there.lease is not None:
                after = Record(lease=Lease(b"", now, there.lease.fence))  # and not nothing: see `FREE`
            return after, released, fallen

        its = name_of(name, b"l").decode()
        return await self._records.answer(its, decide, self._records.owned.pop((its, token), None))

    hand_over = renew

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        _, there, now = await self._records.look(name_of(name, b"l").decode())
        lease = there.lease
        return [] if lease is None or not lease.token or lease.end <= now else [(lease.token, lease.end - now)]

    async def held(self, prefix: str = "") -> None:
        """Of the names there are only hashes."""

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        await self._records.wait(name_of(name, b"l").decode(), busy, timeout)
