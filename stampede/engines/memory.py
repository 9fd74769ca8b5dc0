"""The memory engine: values and leases of this process, each verb decided in one step under one lock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from stampede import early
from stampede.colour import BLOCKING, SUSPENDING, Bell, Colour
from stampede.engines.url import anything, options_of, text, whole
from stampede.entry import GRACE, Entry, Verdict
from stampede.errors import OptionError, TooLarge
from stampede.local import Resident, Tier
from stampede.ports import Ask, Busy, Failed, Found, Granted, Reply, Versioned

__all__ = ["MemoryEngine", "from_url"]

VERDICT = 5.0
"""Seconds for which a verdict is told to those who waited for its lease."""


class MemoryEngine:
    """Keeps at most `entries` values of this process; shared by its threads and event loops, dropped with it.

    `tier` is where the values are, for hits that need no claim. A resident comes in with `end = 0.0`: the cache
    draws the early moment. `store` puts a cachetools cache in its place: its policy evicts, every look takes a
    lock, and its `getsizeof` is given residents (measure their `value`).
    """

    scheme = "memory"
    fenced = True
    pushes = True
    coherent = False

    def __init__(
        self,
        entries: int = 10_000,
        *,
        store: Any = None,
        sealed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shared = sealed  # values are bytes then, as they would be in production
        shelf: Shelf = Tier(entries) if store is None else _Locked(store)
        self.tier = shelf if isinstance(shelf, Tier) and not sealed else None
        keys, names = _Keys(shelf, clock), _Names(clock)
        self.claims = self.store = _Verbs(keys, BLOCKING)
        self.aclaims = self.astore = _Verbs(keys, SUSPENDING)
        self.locks, self.alocks = _Locks(names, BLOCKING), _Locks(names, SUSPENDING)
        self._parts = keys, names
        _engines.add(self)

    def ping(self) -> float:
        start = time.perf_counter()
        self._parts[0].kept("")
        return time.perf_counter() - start

    def close(self) -> None:
        """Let every waiter go; the values go with the last reference to the engine."""
        for part in self._parts:
            part.let_go()

    def _start_again(self) -> None:
        for part in self._parts:
            part.start_again()


def from_url(url: str, **options: Any) -> MemoryEngine:
    """`memory://?entries=10000`; with a codec (`memory://?codec=sealed`) it holds bytes, as production would."""
    given = options_of(url, options, {"entries": whole, "codec": text, "store": anything, "clock": anything})
    sealed = given.pop("codec", None) is not None
    return MemoryEngine(**given, sealed=sealed)


# -- where values are ---------------------------------------------------------------------------------------------


class Shelf(Protocol):
    """What the engine asks of the place where residents live."""

    def get(self, key: str, /) -> Resident | None: ...
    def put(self, resident: Resident, /) -> object: ...
    def drop(self, key: str, /) -> Resident | None: ...
    def clear(self) -> None: ...


class _Locked:
    """A cachetools cache as a shelf. A look moves things there, so every one takes the lock."""

    def __init__(self, cache: Any) -> None:
        if not _is_cachetools(cache):
            raise OptionError(f"store is {type(cache).__name__!r}: give a cache of cachetools, such as LFUCache(1000)")
        self._cache = cache
        self._lock = RLock()

    def get(self, key: str) -> Resident | None:
        with self._lock:
            found = self._cache.get(key)
        return found if isinstance(found, Resident) else None

    def put(self, resident: Resident) -> None:
        with self._lock:
            self._cache.pop(resident.key, None)  # the older one goes also where the new one has no room
            try:
                self._cache[resident.key] = resident
            except ValueError as error:
                raise TooLarge(f"the value of {resident.key!r} is larger than the whole store") from error

    def drop(self, key: str) -> Resident | None:
        with self._lock:
            found = self._cache.pop(key, None)
        return found if isinstance(found, Resident) else None

    def clear(self) -> None:
        with self._lock:
            self._cache.clear()


def _is_cachetools(cache: object) -> bool:
    try:
        from cachetools import Cache
    except ImportError:
        return False
    return isinstance(cache, Cache)


def _kept(resident: Resident, now: float) -> Entry[Any]:
    """The entry with what is left of its times."""
    entry = resident.entry
    return Entry(
        entry.value, entry.id, entry.cost, entry.margin, entry.ttl,
        resident.fresh - now, resident.keep - now, entry.raised,
    )  # fmt: skip


def _good(resident: Resident, ask: Ask, now: float) -> bool:
    """Whether this caller need look no further."""
    if ask.force or resident.entry.id == ask.seen or resident.fresh - now <= -ask.since:
        return False
    if max(resident.keep, resident.fresh + GRACE) <= now:
        return False
    return ask.draw is None or not early.due(_kept(resident, now), ask.draw)


# -- who computes -------------------------------------------------------------------------------------------------


class _Lease:
    """A token that stands until `end`; the bell rings when it falls before."""

    __slots__ = ("bell", "end", "fence", "token")

    def __init__(self, token: bytes, end: float, fence: int) -> None:
        self.token = token
        self.end = end
        self.fence = fence
        self.bell = Bell()


class _Past:
    """What failed computations of one key have left: their verdicts, and the moment until which the key rests."""

    __slots__ = ("end", "rest", "verdicts", "why")

    def __init__(self) -> None:
        self.end = 0.0
        self.rest = 0.0
        self.why = Verdict("failed")
        self.verdicts: dict[bytes, tuple[Verdict, float]] = {}

    def add(self, token: bytes, verdict: Verdict | None, rest: float, now: float) -> None:
        self.verdicts = {old: left for old, left in self.verdicts.items() if left[1] > now}
        if verdict is not None:
            self.why = verdict
            self.verdicts[token] = verdict, now + VERDICT
            self.end = max(self.end, now + VERDICT)
        if rest > 0:
            self.rest = now + rest
            self.end = max(self.end, self.rest)

    def answer(self, awaited: bytes | None, entry: Entry[Any] | None, now: float) -> Failed | None:
        rest = max(self.rest - now, 0.0)
        verdict, end = self.verdicts.get(awaited or b"", (self.why, self.rest))
        return Failed(verdict, entry, rest) if end > now else None


E = TypeVar("E", _Lease, _Past)


class _Ending(Generic[E]):
    """Things by key that end by themselves; those of keys that nobody asks for again are swept now and then."""

    def __init__(self) -> None:
        self._things: dict[str, E] = {}
        self._roof = 64

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: str, now: float) -> E | None:
        thing = self._things.get(key)
        return thing if thing is not None and thing.end > now else None

    def put(self, key: str, thing: E, now: float) -> E | None:
        """Returns the one in whose place it comes."""
        if len(self._things) >= self._roof:
            self._things = {key: thing for key, thing in self._things.copy().items() if thing.end > now}
            self._roof = max(64, 2 * len(self._things))
        older = self._things.get(key)
        self._things[key] = thing
        return older

    def pop(self, key: str) -> E | None:
        return self._things.pop(key, None)

    def clear(self) -> list[E]:
        things, self._things = self._things, {}
        return list(things.values())


class _Names:
    """Leases by name, and the lock under which everything about them is decided.

    The lock is reentrant: a finalizer of somebody's value may run in the middle of a decision, and invalidate.
    Bells are rung outside it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lock = RLock()
        self.leases: _Ending[_Lease] = _Ending()
        self._fence = count(1)

    def standing(self, name: str, token: bytes) -> _Lease | None:
        """The lease of this name, if it stands and has this token."""
        lease = self.leases.get(name, self.clock())
        return lease if lease is not None and lease.token == token else None

    def grant(self, name: str, token: bytes, seconds: float, now: float) -> tuple[int, Bell | None]:
        """Let a lease stand from now on; returns its fence, and the bell of one that it ends."""
        lease = self.leases.get(name, now)
        if lease is not None and lease.token == token:
            lease.end = now + seconds
            return lease.fence, None
        lease = _Lease(token, now + seconds, next(self._fence))
        older = self.leases.put(name, lease, now)
        return lease.fence, None if older is None else older.bell

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        with self.lock:
            lease = self.standing(name, token)
            if lease is not None:
                lease.end = self.clock() + seconds
            return lease is not None

    def release(self, name: str, token: bytes) -> bool:
        with self.lock:
            lease = self.standing(name, token)
            if lease is not None:
                self.leases.pop(name)
        if lease is not None:
            lease.bell.ring()
        return lease is not None

    async def wait(self, name: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Until the lease that `busy` named falls or ends. One that has fallen since isn't there to be waited for."""
        with self.lock:
            lease = self.standing(name, busy.token)
            left = 0.0 if lease is None else lease.end - self.clock()
        if lease is not None:
            await colour.park(lease.bell, min(timeout, left))

    def let_go(self) -> None:
        with self.lock:
            leases = self.leases.clear()
        for lease in leases:
            lease.bell.ring()

    def start_again(self) -> None:
        """In a forked child: the leases are the parent's, and a thread that held the lock is not here to open it."""
        self.lock = RLock()
        self.leases = _Ending()


class _Keys(_Names):
    """The same with values: leases of keys, and what failed computations left."""

    def __init__(self, shelf: Shelf, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.shelf = shelf
        self.pasts: _Ending[_Past] = _Ending()
        self.bumps: dict[str, int] = {}
        self.great_bumps = 0

    def decide(self, key: str, token: bytes, ask: Ask) -> tuple[Reply, Bell | None]:
        """One claim's answer, and the bell of a lease that it ends."""
        now = self.clock()
        resident = self.shelf.get(key)
        if resident is not None and _good(resident, ask, now):
            return Found(_kept(resident, now)), None
        entry = _kept(resident, now) if resident is not None and resident.keep > now else None
        if not ask.force:
            past = self.pasts.get(key, now)
            failed = past and past.answer(ask.awaited, entry, now)
            if failed:
                return failed, None
            lease = self.leases.get(key, now)
            if lease is not None and lease.token != token:
                return Busy(lease.token, lease.end - now, entry), None
        fence, bell = self.grant(key, token, ask.lease, now)
        return Granted(entry, fence), bell

    def put(self, key: str, entry: Entry[Any]) -> _Lease | None:
        """Store, and forget what was going on; returns the lease that this ends."""
        now = self.clock()
        self.shelf.put(Resident(key, "", entry, 0.0, now + entry.fresh, now + entry.keep))
        return self.forget(key)

    def forget(self, key: str) -> _Lease | None:
        self.pasts.pop(key)
        return self.leases.pop(key)

    def kept(self, key: str) -> Entry[Any] | None:
        now, resident = self.clock(), self.shelf.get(key)
        return _kept(resident, now) if resident is not None and resident.keep > now else None

    def leave(self, key: str, token: bytes, verdict: Verdict | None, rest: float) -> None:
        """A verdict, or a rest, after a lease that has fallen."""
        now = self.clock()
        past = self.pasts.get(key, now) or _Past()
        past.add(token, verdict, rest, now)
        if past.end > now:
            self.pasts.put(key, past, now)

    def soften(self, key: str) -> bool:
        """Make what is fresh stale. A new resident, as a hit may be about to draw an end for the old one."""
        now, old = self.clock(), self.shelf.get(key)
        if old is None or old.fresh <= now:
            return False
        self.shelf.put(Resident(key, old.scope, old.entry, 0.0, now, old.keep))
        return True

    def start_again(self) -> None:
        super().start_again()
        self.pasts = _Ending()
        if isinstance(self.shelf, _Locked):
            self.shelf._lock = RLock()


# -- the ports ----------------------------------------------------------------------------------------------------


class _Verbs(Versioned):
    """Claims and Store. Only `wait` has a colour."""

    def __init__(self, keys: _Keys, colour: Colour) -> None:
        self._keys = keys
        self._colour = colour
        self.kept = keys.kept

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        with self._keys.lock:
            reply, bell = self._keys.decide(key, token, ask)
        if bell is not None:
            bell.ring()
        return reply

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        with self._keys.lock:
            lease = self._keys.standing(key, token)
            old = self._keys.shelf.get(key)  # outlives the lock, as its value's finalizer may be anything
            if lease is not None:
                self._keys.put(key, entry)
        del old
        return _rung(lease)

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> None:
        with self._keys.lock:
            lease = self._keys.standing(key, token)
            if lease is not None:
                self._keys.leases.pop(key)
                self._keys.leave(key, token, verdict, rest)
        _rung(lease)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        await self._keys.wait(key, busy, timeout, self._colour)
        return None

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        return self._keys.renew(key, token, lease)

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [self.kept(key) for key in keys]

    async def set(self, key: str, entry: Entry[Any]) -> None:
        with self._keys.lock:
            old = self._keys.shelf.get(key)
            lease = self._keys.put(key, entry)
        del old
        _rung(lease)

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        with self._keys.lock:
            kept = self.kept(key)
            if (None if kept is None else kept.id) != seen:
                return False
            lease = self._keys.put(key, entry)
        _rung(lease)
        return True

    async def expire(self, key: str) -> bool:
        with self._keys.lock:
            return self._keys.soften(key)

    async def invalidate(self, key: str) -> bool:
        with self._keys.lock:
            kept, old = self.kept(key), self._keys.shelf.drop(key)
            lease = self._keys.forget(key)
        del old
        _rung(lease)
        return kept is not None

    async def generation(self, scope: str) -> str:
        return f"{self._keys.great_bumps}.{self._keys.bumps.get(scope, 0)}"

    async def bump(self, scope: str) -> None:
        with self._keys.lock:
            if scope:
                self._keys.bumps[scope] = self._keys.bumps.get(scope, 0) + 1
                return
            self._keys.great_bumps += 1
            self._keys.bumps.clear()
            self._keys.pasts.clear()
            self._keys.shelf.clear()
            self._keys.let_go()


class _Locks:
    """Locks by name. Only `wait` has a colour."""

    def __init__(self, names: _Names, colour: Colour) -> None:
        self._names = names
        self._colour = colour

    async def acquire(self, name: str, token: bytes, lease: float) -> Granted | Busy:
        names = self._names
        with names.lock:
            now = names.clock()
            standing = names.leases.get(name, now)
            if standing is not None and standing.token != token:
                return Busy(standing.token, standing.end - now)
            fence, _ = names.grant(name, token, lease, now)
            return Granted(fence=fence)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return self._names.renew(name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return self._names.release(name, token)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        await self._names.wait(name, busy, timeout, self._colour)


def _rung(lease: _Lease | None) -> bool:
    """Whether there was a lease; those who waited for it are woken."""
    if lease is not None:
        lease.bell.ring()
    return lease is not None


_engines: WeakSet[MemoryEngine] = WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._start_again()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
