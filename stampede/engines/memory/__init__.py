"""The memory engine: values, leases and locks of this process. Each verb is decided in one step, under one lock."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import modules
from typing import Any, TypeVar

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.limits import NamedLimits
from stampede.engines.kit.url import anything, integer, options_of, text
from stampede.engines.kit.whereabouts import here
from stampede.engines.memory.locks import LockTable, MemoryLocks
from stampede.errors import EngineClosed, OptionError, TooLarge
from stampede.local_tier.residents import Resident, Residents
from stampede.model import record
from stampede.model.entry import Entry, Verdict
from stampede.model.ports import Ask, Busy, Engine, Found, Looked, Reply, Shown, Side, Ticket
from stampede.model.record import NOTHING, Change, Keeps, Record
from stampede.runtime import forks, process_lock
from stampede.runtime.colour import BLOCKING, SUSPENDING, Bell, Colour
from stampede.settings.options import nearest

__all__ = ["MemoryEngine", "check_url", "from_url"]

T = TypeVar("T")


class MemoryEngine(Engine):
    """At most `entries` values in the memory of this process, shared by its threads and event loops. `tier` contains
    the values, for hits that need no claim. A resident enters it with `end = 0.0`: the cache draws the moment of its
    early refresh. `store` is a cachetools cache that is used instead. Its policy then evicts, each read takes a lock,
    and its `getsizeof` gets the values. `sealed` stores bytes instead of objects."""

    scheme = "memory"
    pushes = True
    fair = True
    rooms = True
    codec: str | None = None
    """The codec that the URL names. A cache uses it if the cache itself names none."""

    def __init__(
        self,
        entries: int = 10_000,
        *,
        store: Any = None,
        sealed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shared = sealed  # values are then bytes, as in production
        self.prompt = not sealed
        shelf = Residents(entries) if store is None else _LockedStore(store)
        self.tier = shelf if isinstance(shelf, Residents) and not sealed else None
        keys, locks = _Keys(shelf, clock), LockTable(clock)
        limits = NamedLimits(clock)
        self.recalls = verbs = _Verbs(keys, BLOCKING)
        self.blocking = _side(verbs, MemoryLocks(locks, BLOCKING), limits)
        self.suspending = _side(_Verbs(keys, SUSPENDING), MemoryLocks(locks, SUSPENDING), limits)
        self._parts = keys, locks, limits
        forks.in_child(self._start_again)

    def ping(self) -> float:
        start = time.perf_counter()
        self._parts[0].check()
        self._parts[0].kept("", self._parts[0].clock())
        return time.perf_counter() - start

    def close(self) -> None:
        """Drop all values and wake all waiters. From then on each verb raises EngineClosed."""
        for part in self._parts:
            part.let_go()

    def _start_again(self) -> None:
        forks.each(part.start_again for part in self._parts)


def _side(verbs: _Verbs, locks: MemoryLocks, limits: NamedLimits) -> Side:
    return Side(verbs, verbs, locks, limits, lists=verbs, softens=verbs, shows=verbs, holds=locks, handover=locks)


def from_url(url: str, **options: Any) -> MemoryEngine:
    """Open `memory://?entries=10000`. With a codec (`memory://?codec=sealed`) it stores bytes, as in production."""
    given = options_of(url, options, _KINDS)
    codec = given.pop("codec", None)
    engine = MemoryEngine(**given, sealed=codec is not None)
    engine.codec = codec
    return engine


def check_url(url: str) -> None:
    """Raise OptionError for a wrong URL; open nothing."""
    options_of(url, {}, _KINDS)


def _codec(name: str, value: Any) -> str:
    if text(name, value) not in _CODECS:
        raise OptionError(f"{name} is {value!r}: {nearest(value, _CODECS)}")
    return str(value)


_CODECS = ("sealed", "msgpack", "json", "pickle")
_KINDS = {"entries": integer, "codec": _codec, "store": anything, "clock": anything}


# -- where values are ---------------------------------------------------------------------------------------------


class _LockedStore:
    """A cachetools cache instead of `Residents`. Even a read changes its order, so each call takes the lock."""

    def __init__(self, cache: Any) -> None:
        cachetools = modules.get("cachetools")  # imported already, if the caller has a cache of it
        if cachetools is None or not isinstance(cache, cachetools.Cache):
            raise OptionError(f"store is {type(cache).__name__!r}: give a cache of cachetools, such as LFUCache(1000)")
        if hasattr(cache, "ttu"):
            raise OptionError(
                "a TLRUCache can't be a store: its ttu would get internal objects instead of values. Give an LRUCache, "
                "and ttl= a function"
            )
        cache.getsizeof = _size_of_value(cache.getsizeof)
        self._cache = cache

    def get(self, key: str) -> Resident | None:
        with process_lock.lock:
            found = self._cache.get(key)
        return found if isinstance(found, Resident) else None

    def put(self, resident: Resident) -> None:
        with process_lock.lock:
            self._cache.pop(resident.key, None)  # drop the old value even if the new one does not fit
            try:
                self._cache[resident.key] = resident
            except ValueError as error:
                raise TooLarge(f"the value of {resident.key!r} is larger than the whole store") from error

    def drop(self, key: str) -> Resident | None:
        with process_lock.lock:
            found = self._cache.pop(key, None)
        return found if isinstance(found, Resident) else None

    def clear(self) -> None:
        with process_lock.lock:
            self._cache.clear()

    def residents(self) -> list[Resident]:
        from cachetools import Cache

        with process_lock.lock:  # by the base class: the `__getitem__` of a policy would count this as a use
            return [Cache.__getitem__(self._cache, key) for key in self._cache]


def _size_of_value(size: Callable[[Any], float]) -> Callable[[Any], float]:
    """Return a `getsizeof` that measures the user's value, not the Resident that contains it."""
    return lambda stored: size(stored.value if isinstance(stored, Resident) else stored)


# -- decisions under the lock -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Awaited:
    """The bell of the waiters for one lease."""

    end: float
    bell: Bell


class _Keys:
    """The values, leases and failures of keys. Everything is decided under the process lock; bells ring outside it."""

    def __init__(self, shelf: Residents | _LockedStore, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.shelf = shelf
        self.bumps, self.softer = Counter[str](), Counter[str]()  # by scope; "" counts those of all scopes
        self.generations: dict[str, str] = {}  # a cache of their texts; each bump replaces the dict
        self.fading: deque[tuple[float, str]] = deque()
        self.closed = False
        self.start_again()

    def start_again(self) -> None:
        """Forget, in a forked child, the leases: they are the parent's."""
        self.records: Ending[str, Record] = Ending()  # without their entries, which are on the shelf
        self.awaited: Ending[bytes, _Awaited] = Ending()  # by the token of the lease

    def check(self) -> None:
        """Raise EngineClosed if the engine is closed."""
        if self.closed:
            raise EngineClosed("memory")

    def let_go(self) -> None:
        """Close for good: wake all waiters, and refuse all later calls."""
        self.closed = True
        self.clear()

    def count(self, changes: Counter[str], scope: str) -> None:
        """Count one more bump, or one more softening, of a scope."""
        with process_lock.lock:
            self.check()
            changes[scope] += 1
            self.generations = {}

    def clear(self) -> None:
        """Forget all keys, and wake all waiters."""
        with process_lock.lock:
            awaited = self.awaited
            self.start_again()
            self.shelf.clear()
        for each in awaited.values():
            each.bell.ring()

    def change(self, key: str, question: Callable[..., Change[T]], *asked: Any) -> T:
        """Return the answer of a function of `model/record.py`. By then the key has changed, and waiters are woken."""
        with process_lock.lock:
            now = self.clock()
            kept, noted = self.shelf.get(key), self.records.get(key, NOTHING)
            was = noted if kept is None else Record(kept, noted.lease, noted.past)
            after, answer, fallen = question(was, *asked, now)
            if after is not was:
                if self.closed:  # checked only here: a fill that lost its lease by `close` is no error
                    self.check()
                if after.kept is not kept:
                    self._keep(key, after.kept, kept, now)
                    if self.records.get(key, NOTHING) is not noted:
                        # The finalizer of an evicted value has changed this key during our put: decide again.
                        self.shelf.drop(key)
                        return self.change(key, question, *asked)
                if after.lease is None and after.past is None:
                    self.records.pop(key, None)
                else:
                    lasting = after if after.kept is None else Record(None, after.lease, after.past)
                    self.records.put(key, lasting, now)
            awaited = self.awaited.pop(fallen, None) if fallen is not None else None
        if awaited is not None:
            awaited.bell.ring()
        return answer  # the old value lives until here, because its finalizer may call anything

    async def wait(self, key: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Wait until the lease that `busy` names is filled, abandoned, cancelled or expired."""
        with process_lock.lock:
            now, lease = self.clock(), self.records.get(key, NOTHING).lease
            if lease is None or not record.standing(lease, busy.token, now):
                return
            awaited = self.awaited.get(busy.token) or _Awaited(lease.end, Bell())
            awaited.end = lease.end
            self.awaited.put(busy.token, awaited, now)
        await colour.park(awaited.bell, min(timeout, lease.end - now))

    def _keep(self, key: str, kept: Keeps | None, older: Resident | None, now: float) -> None:
        if kept is None:
            self.shelf.drop(key)
            return
        scope = older.scope if older is not None and older.entry is kept.entry else ""
        self.shelf.put(Resident(key, scope, kept.entry, 0.0, kept.fresh, kept.keep))
        while self.fading and self.fading[0][0] <= now:
            self._fade(self.fading.popleft()[1], now)
        if kept.keep <= now:
            self.fading.append((kept.gone, key))

    def _fade(self, key: str, now: float) -> None:
        """Drop an entry with ttl 0, which was stored only for the callers that were waiting, after its short grace."""
        resident = self.shelf.get(key)
        if resident is not None and resident.gone <= now:
            self.shelf.drop(key)

    def kept(self, key: str, now: float) -> Entry[Any] | None:
        """Return the entry of a key, fresh or stale."""
        return record.served(self.shelf.get(key), now)


# -- the ports ----------------------------------------------------------------------------------------------------


class _Verbs:
    """`Claims`, `Store`, `Lists`, `Softens` and `Shows` of one colour. Only `wait` suspends."""

    def __init__(self, keys: _Keys, colour: Colour) -> None:
        self._keys = keys
        self._colour = colour

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        keys = self._keys
        resident = keys.shelf.get(key) if key not in keys.records else None
        if resident is not None:  # most claims end here: they need no record
            with process_lock.lock:
                found = record.hit(resident, ask, keys.clock())
            if found is not None:
                return found
        return keys.change(key, record.claim, token, ask)

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        return self._keys.change(key, record.fill, token, entry)

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        return self._keys.change(key, record.abandon, token, verdict, rest)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        await self._keys.wait(key, busy, timeout, self._colour)
        return None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return self._keys.change(key, record.renew, token, lease)

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        self._keys.check()
        now = self._keys.clock()
        return [self._keys.kept(key, now) for key in keys]

    async def show(self, key: str) -> Shown:
        with process_lock.lock:
            self._keys.check()
            now = self._keys.clock()
            entry, lease = self._keys.kept(key, now), self._keys.records.get(key, NOTHING).lease
        if lease is None or lease.end <= now:
            return Shown(entry, b"")
        return Shown(entry, lease.token, lease.end - now, here())

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        self._keys.check()
        now, kept = self._keys.clock(), self._keys.shelf.residents()
        return [each.key for each in kept if each.keep > now and each.key.startswith(prefix)], None

    async def set(self, key: str, entry: Entry[Any]) -> None:
        return self._keys.change(key, record.set, entry)

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        self._keys.check()
        return self._keys.change(key, record.replace, seen, entry)

    async def expire(self, key: str) -> bool:
        self._keys.check()
        return self._keys.change(key, record.expire)

    async def invalidate(self, key: str) -> bool:
        self._keys.check()
        return self._keys.change(key, record.invalidate)

    def generation_at_hand(self, scope: str) -> str:
        texts = self._keys.generations  # taken before the counts are read: a bump drops the dict, with what we add
        generation = texts.get(scope)
        if generation is None:
            bumps, softer = self._keys.bumps, self._keys.softer
            generation = f"{bumps['']}.{bumps[scope]}"
            if softer[""] or softer[scope]:
                generation += f"~{softer['']}.{softer[scope]}"
            texts[scope] = generation
        return generation

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        return None  # hits in this process need none

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        self._keys.check()
        now = self._keys.clock()
        entries = {key: self._keys.kept(key, now) for key in keys}
        found = {key: None if entry is None or entry.fresh <= 0 else Found(entry) for key, entry in entries.items()}
        return found, [self.generation_at_hand(scope) for scope in scopes]

    async def generations(self, scope: str) -> Sequence[str]:
        return [self.generation_at_hand(scope)]

    async def soften(self, scope: str) -> None:
        self._keys.count(self._keys.softer, scope)

    async def bump(self, scope: str) -> None:
        self._keys.count(self._keys.bumps, scope)
        if not scope:
            self._keys.clear()
