"""The local tier: values kept as objects inside the process, evicted by SIEVE.

A hit takes no lock and moves nothing: it only counts itself on the resident, and the count is also SIEVE's
visited bit, since the hand remembers the count it saw last.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from threading import RLock
from time import monotonic
from typing import Any
from weakref import WeakSet

from stampede.entry import Entry
from stampede.errors import OptionError
from stampede.ports import Ticket

__all__ = ["Resident", "Tier"]


class Resident:
    """An entry that lives in this process, with the moments (of `time.monotonic`) that a hit compares.

    A hit is `end > now and (stamp is None or stamps[slot] == stamp)`; whoever serves it does `hits += 1`.
    """

    __slots__ = (
        "end", "value", "hits", "stamp", "stamps", "slot", "entry", "fresh", "keep", "key", "scope", "homes",
        "mark", "older", "newer",
    )  # fmt: skip

    older: Resident  # neighbours in the queue; unset outside it, so that a dead resident holds nobody else
    newer: Resident

    def __init__(
        self,
        key: str,
        scope: str,
        entry: Entry[Any],
        end: float,
        fresh: float,
        keep: float,
        ticket: Ticket | None = None,
    ) -> None:
        self.end = end  # until then a hit needs no thought: the early moment, or the end of fresh; 0 once killed
        self.value: Any = entry.value
        self.hits = 0
        self.stamps: Sequence[int] | None = None
        self.slot = 0
        self.stamp: int | None = None  # None: the engine can't tell when the entry changes
        if ticket is not None:
            self.stamps, self.slot, self.stamp = ticket
        self.entry = entry
        self.fresh = fresh
        self.keep = fresh if keep == fresh else keep  # one float object for both, which is most residents
        self.key = key
        self.scope = scope
        self.homes: tuple[Any, ...] = ()  # table, fast key, table, fast key ...: flat, as it is there for every entry
        self.mark = 0  # the hits that SIEVE's hand saw last

    def kill(self) -> None:
        """No hit from now on, by any way that leads here."""
        self.end = 0.0
        homes, self.homes = self.homes, ()
        for table, fast in zip(homes[::2], homes[1::2], strict=True):
            if table.get(fast) is self:
                table.pop(fast, None)


class Tier:
    """At most so many residents by key. Reads take no lock; writes may come from any thread, finalizer or signal."""

    def __init__(self, entries: int = 10_000) -> None:
        self.entries = _bound(entries)
        self.evictions = 0
        self._residents: dict[str, Resident] = {}
        self.get: Callable[[str], Resident | None] = self._residents.get  # what a method of our own would cost twice
        self._past: Counter[str] = Counter()  # hits of those who have left, by scope
        self._end = _queue()
        self._hand = self._end
        self._lock = RLock()
        self._writing = False
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        _tiers.add(self)

    def __len__(self) -> int:
        return len(self._residents)

    def put(self, resident: Resident) -> None:
        """Make it the resident of its key: an older one is killed, and one is evicted where there is no room."""
        self._write(self._put, resident)

    def drop(self, key: str) -> Resident | None:
        """Kill and remove the resident of a key; it is returned."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.fresh = resident.end = 0.0  # at once, even where the rest comes later, and for who is opening it
        self._write(self._drop, key)
        return resident

    def drop_scope(self, scope: str) -> None:
        """Kill and remove every resident of a function."""
        self._write(self._drop_all, scope)

    def clear(self) -> None:
        """Kill and remove all."""
        self._write(self._drop_all, None)

    def adopt(self, resident: Resident, table: dict[Any, Resident], fast: Any) -> None:
        """Let `table[fast]` lead to the resident too, for as long as it lives in this tier."""
        self._write(self._adopt, resident, table, fast)

    @property
    def hits(self) -> int:
        """Hits served so far, also by residents that have left."""
        with self._lock:
            return self._past.total() + sum([resident.hits for resident in self._living()])

    def hits_of(self, scope: str) -> int:
        """The same for one function."""
        with self._lock:
            return self._past[scope] + sum([resident.hits for resident in self._living() if resident.scope == scope])

    def _living(self) -> list[Resident]:
        return list(self._residents.values())  # a copy: any allocation may run a finalizer that writes to this tier

    def _write(self, act: Callable[..., None], *args: Any) -> None:
        """One write after the other, also where a finalizer or a signal handler writes in the middle of a write.

        That one is left to the write it interrupts: waiting for it would be a deadlock, going ahead would find the
        queue half linked.
        """
        dead: list[object] = []  # outlives the lock, as a user's finalizer must not run inside it
        with self._lock:
            self._later.append((act, args))
            if self._writing:
                return
            self._writing = True
            try:
                while self._later:
                    job = self._later.pop(0)
                    dead.append(job)
                    job[0](dead, *job[1])
            finally:
                self._writing = False

    def _put(self, dead: list[object], resident: Resident) -> None:
        older = self._residents.get(resident.key)
        if older is resident:
            return
        if older is None:
            while len(self._residents) >= self.entries:
                self._evict(dead)
            self._link(resident)
        else:
            self._replace(older, resident)
            self._bury(dead, older)
        self._residents[resident.key] = resident

    def _drop(self, dead: list[object], key: str) -> None:
        resident = self._residents.get(key)
        if resident is not None:
            self._remove(dead, resident)

    def _drop_all(self, dead: list[object], scope: str | None) -> None:
        for resident in self._living():
            if scope is None or resident.scope == scope:
                self._remove(dead, resident)

    def _adopt(self, dead: list[object], resident: Resident, table: dict[Any, Resident], fast: Any) -> None:
        if self._residents.get(resident.key) is not resident:
            return  # evicted or invalidated meanwhile: nothing would remove it from the table again
        homes = resident.homes
        if not any(home is table and key == fast for home, key in zip(homes[::2], homes[1::2], strict=True)):
            resident.homes = (*homes, table, fast)
        dead.append(table.get(fast))
        table[fast] = resident

    def _remove(self, dead: list[object], resident: Resident) -> None:
        self._unlink(resident)
        self._bury(dead, resident)
        del self._residents[resident.key]

    def _bury(self, dead: list[object], resident: Resident) -> None:
        dead.append(resident)
        resident.kill()
        self._past[resident.scope] += resident.hits

    # -- SIEVE: a queue from the oldest to the newest, and a hand that walks it and evicts whom nobody has hit since
    # it came by last. No calls inside the next three: a signal can't be served between two of their assignments.

    def _link(self, resident: Resident) -> None:
        end, newest = self._end, self._end.older
        resident.older, resident.newer = newest, end
        newest.newer = end.older = resident

    def _unlink(self, resident: Resident) -> None:
        older, newer = resident.older, resident.newer
        older.newer, newer.older = newer, older
        if self._hand is resident:
            self._hand = newer
        del resident.older, resident.newer

    def _replace(self, older: Resident, resident: Resident) -> None:
        """A new value of a key keeps its place, and counts as a hit: somebody has asked for it again."""
        resident.older, resident.newer = older.older, older.newer
        resident.older.newer = resident.newer.older = resident
        resident.mark = -1
        if self._hand is older:
            self._hand = resident
        del older.older, older.newer

    def _evict(self, dead: list[object]) -> None:
        now, resident = monotonic(), self._hand
        while resident is self._end or (resident.hits != resident.mark and resident.keep > now):
            resident.mark = resident.hits
            resident = resident.newer
        self._hand = resident.newer
        self.evictions += 1
        self._remove(dead, resident)

    def _start_again(self) -> None:
        """After a fork: another thread may have been inside a write, and is not here to end it."""
        self._lock = RLock()
        if self._writing:
            self._writing = False
            self._end = self._hand = _queue()
            for resident in self._living():
                self._link(resident)


def _bound(entries: object) -> int:
    if isinstance(entries, bool) or not isinstance(entries, int) or entries < 1:
        raise OptionError(f"entries is {entries!r}: give the number of values to keep at most, 1 or more")
    return entries


def _queue() -> Resident:
    """The end of an empty queue: a resident that is nobody's value, its own neighbour on both sides."""
    end = Resident("", "", Entry(None, b""), 0.0, 0.0, 0.0)
    end.older = end.newer = end
    return end


_tiers: WeakSet[Tier] = WeakSet()


def _after_fork() -> None:
    for tier in list(_tiers):
        tier._start_again()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
