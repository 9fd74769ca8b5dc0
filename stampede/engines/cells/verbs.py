"""The verbs of a cache over cells. Each verb reads one record, decides, and swaps it.

A hit takes one read. A miss takes a read, a swap, and the swap of its fill. The fill does not read: it swaps against
the version that its own claim has written, and fails if any other one is there. If a refused swap returns the present
state (`Cell.tells`), a hit is found by `look`, and a claim swaps without reading first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stampede.engines.cells.generations import CellGenerations
from stampede.engines.cells.records import OFTEN, CellRecords, Written
from stampede.engines.kit.naming import name_of
from stampede.engines.kit.whereabouts import here
from stampede.model import record
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Busy, Found, Granted, Looked, Reply, Shown, Ticket
from stampede.model.record import NOTHING, Record

__all__ = ["CellKeys"]

UNSEEN = Written(None, NOTHING)
"""What a claim assumes before it has read. A swap against it is refused, with the present state, if it is wrong."""


class CellKeys:
    """`Claims`, `Store`, `Looks`, `Shows` and `Softens` of one colour."""

    def __init__(self, records: CellRecords, generations: CellGenerations) -> None:
        self._records = records
        self._generations = generations
        self._owned, self._costs = records.owned, records.open.costs
        self._grows, self._tells = records.open.cell.grows, records.open.cell.tells

    # -- claims -------------------------------------------------------------------------------------------------

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        name = _named(key)
        blind = self._tells and not (ask.force or ask.seen or ask.awaited or ask.since)
        reply, version, stored = await self._records.change(
            name,
            lambda old, now: record.claim(old, token, ask, now, holder=here()),
            UNSEEN if blind else None,
        )
        if stored.kept is not None:
            self._costs.learn(name, stored.kept.entry)
        if isinstance(reply, Granted):
            self._owned.put((name, token), Written(version, stored), self._records.clock())
            if self._grows:
                reply.fence = version
        return reply

    async def look(self, key: str) -> Found | None:
        name = _named(key)
        _, stored, now = await self._records.look(name)
        return self._hit(name, stored, now)

    def _hit(self, name: str, stored: Record, now: float) -> Found | None:
        if stored.kept is None:
            return None
        self._costs.learn(name, stored.kept.entry)
        return record.hit(stored.kept, Ask(0.0), now)

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        self._records.fits(len(entry.value))
        name = _named(key)
        self._costs.learn(name, entry)
        known = self._owned.pop((name, token), None)
        return await self._records.answer(name, lambda old, now: record.fill(old, token, entry, now), known)

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        name = _named(key)
        known = self._owned.pop((name, token), None)
        return await self._records.answer(name, lambda old, now: record.abandon(old, token, verdict, rest, now), known)

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return await self._records.renew(_named(key), token, lease)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        name = _named(key)
        stored, waited, now = await self._records.wait(name, busy, timeout, self._costs.get(name, 0.0), OFTEN)
        kept = stored.kept
        if kept is None or (busy.entry is not None and busy.entry.id == kept.entry.id):
            return None
        self._costs.learn(name, kept.entry)
        return record.hit(kept, Ask(0.0, since=waited), now)

    # -- store --------------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        found, now = await self._records.looks([_named(key) for key in keys])
        return [record.served(each.kept, now) for each in found]

    async def show(self, key: str) -> Shown:
        _, stored, now = await self._records.look(_named(key))
        entry, lease = record.served(stored.kept, now), stored.lease
        if lease is None or lease.end <= now:
            return Shown(entry, b"")
        return Shown(entry, lease.token, lease.end - now, lease.holder)

    async def set(self, key: str, entry: Entry[Any]) -> None:
        self._records.fits(len(entry.value))
        await self._records.answer(_named(key), lambda old, now: record.set(old, entry, now))

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        self._records.fits(len(entry.value))
        return await self._records.answer(_named(key), lambda old, now: record.replace(old, seen, entry, now))

    async def expire(self, key: str) -> bool:
        return await self._records.answer(_named(key), record.expire)

    async def invalidate(self, key: str) -> bool:
        return await self._records.answer(_named(key), record.invalidate)

    # -- generations --------------------------------------------------------------------------------------------

    def generation_at_hand(self, scope: str) -> str | None:
        return self._generations.at_hand(scope)

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        return None  # no cell reports the next one

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        names = [_named(key) for key in keys]
        records, generations = await self._generations.ask(self._records, scopes, names)
        now = self._records.clock()
        found = {key: self._hit(name, each, now) for key, name, each in zip(keys, names, records, strict=True)}
        return found, [current for current, *_ in generations]

    async def generations(self, scope: str) -> Sequence[str]:
        _, (generations,) = await self._generations.ask(self._records, [scope])
        return generations

    async def bump(self, scope: str) -> None:
        await self._generations.change(self._records, scope, soft=False)

    async def soften(self, scope: str) -> None:
        await self._generations.change(self._records, scope, soft=True)


def _named(key: str) -> str:
    return name_of(key).decode()
