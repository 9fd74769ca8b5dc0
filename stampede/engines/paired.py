"""Claims made from any store and any lock: get, acquire, get again, compute, put, release.

The version makes this safe. It is the id of the stored entry, and a put replaces only the version that its claim saw
under the lock. A verb that must stop the computation under way from being stored changes the version: `set` stores a
new entry, and `invalidate` leaves a tombstone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.failures import decode_past, encode_past
from stampede.errors import EngineError, OptionError
from stampede.model import record
from stampede.model.entry import GRACE, Entry, Verdict, new_id
from stampede.model.ports import Ask, Busy, Engine, Found, Granted, Locks, Looked, Reply, Side, Store
from stampede.model.record import Kept, Past, Record
from stampede.runtime import forks

__all__ = ["Paired"]

MOMENT = 10.0
"""Seconds of the lease when a verb holds the lock for a moment, rather than for a computation."""

BUSY, PAST = "computing\x00", "\x00past\x00"  # prefixes of a key, for its lock and for the entry of its failures


class Paired(Engine):
    """An engine that stores values in one engine and takes its locks from another. `max_hold` is the longest time in
    seconds that a computation may take: a later fill is refused. An invalidation is remembered for the same time."""

    def __init__(
        self, store: Engine, locks: Engine, *, max_hold: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        values, avalues = _store(store, store.blocking.store), _store(store, store.suspending.store)
        named, anamed = locks.blocking.locks, locks.suspending.locks
        if named is None or anamed is None:
            raise OptionError(f"{locks.scheme}:// has no locks, so it can't be the lock of a pair")
        self.scheme = f"{store.scheme}+{locks.scheme}"
        self.shared = store.shared
        self.pushes = locks.pushes
        self.fair = locks.fair
        self.rooms = locks.rooms
        self.coherent = False
        self.timeless = store.timeless
        self.tick = store.tick
        self.recalls = store.recalls
        self._computations = _Computations(max_hold, clock)
        counts = store if store.blocking.limits else locks
        keys = _Verbs(values, named, self._computations)
        akeys = _Verbs(avalues, anamed, self._computations)
        # Generations belong to the store, and so does `softens`.
        self.blocking = Side(keys, keys, named, counts.blocking.limits, softens=store.blocking.softens)
        self.suspending = Side(akeys, akeys, anamed, counts.suspending.limits, softens=store.suspending.softens)
        self._engines = store, locks
        forks.in_child(self._start_again)

    @property
    def lock_engine(self) -> Engine:
        return self._engines[1].lock_engine

    def ping(self) -> float:
        return sum(engine.ping() for engine in self._engines)

    def advice(self) -> Sequence[str]:
        return [f"{engine.called}: {each}" for engine in self._engines for each in engine.advice()]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _start_again(self) -> None:
        self._computations.clear()


def _store(engine: Engine, store: Store | None) -> Store:
    if store is None:
        raise OptionError(f"{engine.scheme}:// stores no values, so it can't be the store of a pair")
    return store


# -- what is remembered between a claim and its fill --------------------------------------------------------------


@dataclass(slots=True)
class _Computation:
    """A computation of this process: the version that its claim saw, and the time until which it may be stored."""

    seen: bytes | None
    failed_before: bool
    end: float


class _Computations(Ending[tuple[str, bytes], _Computation]):
    """The computations of this process, by key and token. Both colours share them."""

    def __init__(self, max_hold: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self.max_hold, self.clock = max_hold, clock


# -- the verbs ----------------------------------------------------------------------------------------------------


class _Verbs:
    """Claims and Store over a store and a lock of one colour."""

    def __init__(self, store: Store, locks: Locks, computations: _Computations) -> None:
        self._store = store
        self._locks = locks
        self._computations = computations

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        there, past = await self._look(key, past=ask.awaited is not None)
        answer = _answer(there, past, token, ask)
        if not isinstance(answer, Granted):
            return answer
        reply, stolen = await self._acquire(key, token, ask)
        if isinstance(reply, Busy):
            if ask.awaited is None:  # after a forced claim, the key may rest while it is computed
                _, past = await self._look(key, past=True)
                answer = _answer(there, past, token, ask)
            return Busy(reply.token, reply.lease, answer.entry) if isinstance(answer, Granted) else answer
        try:
            # Look again: between our look and our lock, another process may have filled, or failed.
            there, past = await self._look(key, past=True)
            if stolen:
                there = await self._changed(key, there)
        except EngineError:
            await self._give_up(key, token)
            raise
        answer = _answer(there, past, token, ask)
        if not isinstance(answer, Granted):
            await self._locks.release(BUSY + key, token)
            return answer
        began = self._computations.clock()
        computation = _Computation(_version(there), past is not None, began + self._computations.max_hold)
        self._computations.put((key, token), computation, began)
        return Granted(answer.entry, reply.fence)

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        computation = self._take_back(key, token)
        if not await self._locks.renew(BUSY + key, token, MOMENT):
            (there,) = await self._store.get([key])
            return there is not None and there.id == entry.id  # stored already: this fill was sent twice
        stored = computation is not None and await self._put(key, computation.seen, _with_grace(entry))
        if stored and computation is not None and computation.failed_before:
            await self._store.invalidate(PAST + key)
        await self._locks.release(BUSY + key, token)
        return stored

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        self._take_back(key, token)
        if (verdict is not None or rest > 0) and await self._locks.renew(BUSY + key, token, MOMENT):
            (past,) = await self._store.get([PAST + key])
            failed = (_past(past) or Past()).with_failure(token, verdict, rest, 0.0)
            await self._store.set(PAST + key, _as_entry(failed))
        return await self._locks.release(BUSY + key, token)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        await self._locks.wait(BUSY + key, busy, timeout)
        return None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        computation = self._computations.living((key, token), self._computations.clock())
        if computation is None or not await self._locks.renew(BUSY + key, token, lease):
            return False
        (there,) = await self._store.get([key])
        if there is None or there.id == computation.seen:
            return True
        # Overruled by a process that can't release our lock (a kernel's lock): waiters need not wait for us any longer.
        await self._locks.release(BUSY + key, token)
        return False

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [_served(there) for there in await self._store.get(keys)]

    async def set(self, key: str, entry: Entry[Any]) -> None:
        _, past = await self._look(key, past=True)
        await self._overrule(key, _with_grace(entry), past)

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        there, past = await self._look(key, past=True)
        if _version(_served(there)) != seen or not await self._store.replace(key, _version(there), _with_grace(entry)):
            return False
        await self._end(key, past)
        return True

    async def expire(self, key: str) -> bool:
        (there,) = await self._store.get([key])
        if there is None or _is_tombstone(there):  # a computation under way must not be stored
            await self._overrule(key, _tombstone(self._computations.max_hold), None)
            return False
        stale = replace(there, id=new_id(), fresh=min(there.fresh, 0.0))  # a new version: fills under way are refused
        expired = await self._store.replace(key, there.id, stale)
        await self._end(key)
        return expired and there.fresh > 0

    async def invalidate(self, key: str) -> bool:
        there, past = await self._look(key, past=True)
        await self._overrule(key, _tombstone(self._computations.max_hold), past)
        return _served(there) is not None

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        found, generations = await self._store.look_too(keys, scopes)
        entries = {key: None if each is None else _served(each.entry) for key, each in found.items()}
        return {key: None if entry is None else Found(entry) for key, entry in entries.items()}, generations

    async def generations(self, scope: str) -> Sequence[str]:
        return await self._store.generations(scope)

    async def bump(self, scope: str) -> None:
        await self._store.bump(scope)

    # -- steps of the verbs

    async def _look(self, key: str, *, past: bool) -> tuple[Entry[Any] | None, Entry[Any] | None]:
        """Return the stored entry of a key (perhaps a tombstone, or in its grace), and the entry of its failures."""
        there, *more = await self._store.get([key, PAST + key] if past else [key])
        return there, more[0] if more else None

    async def _acquire(self, key: str, token: bytes, ask: Ask) -> tuple[Granted | Busy, bool]:
        """Return the reply of the lock, and whether the lock was taken from a computation under way."""
        reply = await self._locks.acquire(BUSY + key, token, ask.lease)
        stolen = False
        for _ in range(3 if ask.force else 0):  # other callers may force a claim at the same time
            if isinstance(reply, Granted):
                break
            stolen |= await self._locks.release(BUSY + key, reply.token)
            reply = await self._locks.acquire(BUSY + key, token, ask.lease)
        return reply, stolen

    def _take_back(self, key: str, token: bytes) -> _Computation | None:
        computation = self._computations.pop((key, token), None)
        return computation if computation is not None and computation.end > self._computations.clock() else None

    async def _changed(self, key: str, there: Entry[Any] | None) -> Entry[Any] | None:
        """Change only the version, so that the computation that lost its lock can't be stored."""
        for _ in range(3):
            other = _tombstone(self._computations.max_hold) if there is None else replace(there, id=new_id())
            if await self._store.replace(key, _version(there), other):
                return other
            (there,) = await self._store.get([key])
        return there

    async def _put(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        if await self._store.replace(key, seen, entry):
            return True
        # The stale entry may have expired meanwhile. A verb that overrules us always leaves an entry in its place, so
        # if there is none, we may store.
        return seen is not None and await self._store.replace(key, None, entry)

    async def _overrule(self, key: str, entry: Entry[Any], past: Entry[Any] | None) -> None:
        """Store `entry` whatever is there, and end the computation under way, whose put would be refused anyway."""
        await self._store.set(key, entry)
        await self._end(key, past)

    async def _end(self, key: str, past: Entry[Any] | None = None) -> None:
        """End the computation under way, if there is one, and forget past failures."""
        if past is not None:
            await self._store.invalidate(PAST + key)
        token = new_id()
        reply = await self._locks.acquire(BUSY + key, token, MOMENT)
        await self._locks.release(BUSY + key, token if isinstance(reply, Granted) else reply.token)

    async def _give_up(self, key: str, token: bytes) -> None:
        with suppress(EngineError):  # the lock ends by itself
            await self._locks.release(BUSY + key, token)


def _answer(there: Entry[Any] | None, past: Entry[Any] | None, token: bytes, ask: Ask) -> Reply:
    """Return the answer to a claim if it needs no lock. Granted means that the caller must take the lock to compute."""
    entry = _graced(there)
    kept = None if entry is None else Kept(entry, entry.fresh, entry.keep)
    return record.claim(Record(kept, None, _past(past)), token, ask, 0.0)[1]


# -- entries as they are in the store -----------------------------------------------------------------------------


def _version(there: Entry[Any] | None) -> bytes | None:
    return None if there is None else there.id


def _with_grace(entry: Entry[Any]) -> Entry[Any]:
    """Return the entry to store: it is kept for GRACE longer, for waiters, because a store's `get` knows no grace.
    `_graced` and `_served` subtract it again."""
    return replace(entry, keep=entry.keep + GRACE)


def _graced(there: Entry[Any] | None) -> Entry[Any] | None:
    """Return the entry without its grace, also if it is there for waiters only; None if there is no value."""
    return None if there is None or _is_tombstone(there) else replace(there, keep=there.keep - GRACE)


def _served(there: Entry[Any] | None) -> Entry[Any] | None:
    """Return the entry if it may be served: it is a value, and not in its grace."""
    entry = _graced(there)
    return entry if entry is not None and entry.keep > 0 else None


def _tombstone(seconds: float) -> Entry[bytes]:
    """Return an entry that only marks a new version. Its negative cost tells it from every real entry."""
    return Entry(b"", new_id(), cost=-1.0, ttl=0.0, fresh=0.0, keep=seconds)


def _is_tombstone(there: Entry[Any]) -> bool:
    return there.cost < 0


def _as_entry(past: Past) -> Entry[bytes]:
    """Return an entry that holds failures. Their times are counted from its end."""
    return Entry(
        encode_past(past, 0.0, past.end, 2000, record.MOST), new_id(), ttl=past.end, fresh=past.end, keep=past.end
    )


def _past(entry: Entry[Any] | None) -> Past | None:
    """Return the failures that an entry holds, with the times as they are now; None if it holds none."""
    try:
        return None if entry is None else decode_past(entry.value, entry.keep)
    except (ValueError, TypeError):
        return None
