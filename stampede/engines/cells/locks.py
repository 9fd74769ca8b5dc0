"""Locks over cells: the record of a lock contains only a lease."""

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
    """Locks of one colour. If the versions of the cells only grow, they are the fences. Otherwise the fence is a number
    in the record, which is stored also while the lock is free. If that record has expired, the fence is taken from the
    clock. So it always grows, unless the clocks of two machines differ by a day."""

    def __init__(self, records: CellRecords) -> None:
        self._records = records
        self._grows = records.open.cell.grows

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        def decide(stored: Record, now: float) -> Change[Granted | Busy]:
            after, answer, fallen = record.claim(
                stored, token, Ask(lease), now, fence=self._next(stored), holder=here()
            )
            assert isinstance(answer, (Granted, Busy))
            return after, answer, fallen

        cell_name = name_of(name, b"l").decode()
        answer, version, stored = await self._records.change(cell_name, decide)
        if isinstance(answer, Granted):
            self._records.owned.put((cell_name, token), Written(version, stored), self._records.clock())
            if self._grows:
                answer.fence = version
        return answer

    def _next(self, stored: Record) -> int:
        return 0 if self._grows else max(stored.lease.fence + 1 if stored.lease else 0, time.time_ns() // 1_000_000)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self._records.renew(name_of(name, b"l").decode(), token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        def decide(stored: Record, now: float) -> Change[bool]:
            after, released, fallen = record.abandon(stored, token, None, 0.0, now)
            if released and stored.lease is not None:
                after = Record(lease=Lease(b"", now, stored.lease.fence))  # not an empty record: see `FREE`
            return after, released, fallen

        cell_name = name_of(name, b"l").decode()
        return await self._records.answer(cell_name, decide, self._records.owned.pop((cell_name, token), None))

    hand_over = renew

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        _, stored, now = await self._records.look(name_of(name, b"l").decode())
        lease = stored.lease
        return [] if lease is None or not lease.token or lease.end <= now else [(lease.token, lease.end - now)]

    async def held(self, prefix: str = "") -> None:
        """Return None: the names of locks are stored as hashes only."""

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        await self._records.wait(name_of(name, b"l").decode(), busy, timeout)
