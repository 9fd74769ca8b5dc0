"""The local tier: values kept as objects inside the process, evicted by SIEVE. A hit takes no lock and moves nothing.
It only increments the resident's count, which is also SIEVE's visited bit, because the hand remembers the count that it
saw last. The hand goes from the oldest to the newest, in rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from stampede.errors import OptionError
from stampede.local_tier.pulses import TagStamps
from stampede.model.entry import GRACE, Entry
from stampede.model.ports import ALWAYS, Ticket
from stampede.runtime import process_lock

__all__ = ["Resident", "Residents"]


class Resident:
    """An entry that lives in this process, with the moments (of `time.monotonic`) that a hit compares. A hit is `end >
    now and (stamp is None or (pulse.until > now and stamps[slot] == stamp))`, and counts in `hits`."""

    __slots__ = (
        "end", "value", "hits", "stamp", "stamps", "slot", "pulse", "entry", "fresh", "keep", "key", "scope",
        "homes", "mark", "round",
    )  # fmt: skip

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
        self.end = end  # no hit after this: the early moment, or the end of freshness; 0 if killed, or not opened yet
        self.value: Any = entry.value
        self.hits = 0
        self.stamps: Sequence[int] | None = None
        self.slot = 0
        self.stamp: int | None = None  # None: the engine cannot tell when the entry changes
        self.pulse = ALWAYS
        if ticket is not None:
            self.stamps, self.slot, self.stamp, self.pulse, _ = ticket
        self.entry = entry
        self.fresh = fresh
        self.keep = fresh if keep == fresh else keep  # one float object for both, in most residents
        self.key = key
        self.scope = scope
        self.homes: tuple[Any, ...] = ()  # table, key, table, key ...: flat, to save memory
        self.mark = 0  # `hits` when SIEVE's hand passed last
        self.round = 0  # the round of the hand in which it passed last, or in which this was added

    @property
    def gone(self) -> float:
        """The moment from which no caller can use it, not even one that waited while it was fresh."""
        return max(self.keep, self.fresh + GRACE)

    def lives_in(self, table: Any) -> bool:
        """Return whether the table leads here by some key, so that no other key is needed. If the cache's key is made
        from a part of the arguments, there may be any number of such keys."""
        homes = self.homes
        for number in range(0, len(homes), 2):
            if homes[number] is table and table.get(homes[number + 1]) is self:
                return True
        return False

    def kill(self) -> None:
        """Stop all hits, by every table that leads here."""
        self.end = 0.0
        if self.homes:
            for table, fast in zip(self.homes[::2], self.homes[1::2], strict=True):
                if table.get(fast) is self:
                    table.pop(fast, None)
            self.homes = ()


class Residents:
    """At most `entries` residents by key. Reads take no lock; writes may come from any thread, finalizer or signal."""

    def __init__(self, entries: int = 10_000) -> None:
        if isinstance(entries, bool) or not isinstance(entries, int) or entries < 1:
            raise OptionError(f"entries is {entries!r}: give the largest number of values to keep, at least 1")
        self.entries = entries
        self.tag_stamps = TagStamps()
        self._residents: dict[str, Resident] = {}  # from the oldest to the newest
        self.get: Callable[[str], Resident | None] = self._residents.get  # a method would cost twice as much
        self._hits: defaultdict[str, int] = defaultdict(int)  # of residents that were removed, by scope
        self._saved: defaultdict[str, float] = defaultdict(float)  # seconds of computing saved by those, by scope
        self._hand: Iterator[str] = iter(())  # the keys left in this round
        self._round = 0
        self._since: list[str] = []  # keys that were added in this round, and are looked at in the next
        self._writing: Any = None  # the lock under which a write is under way
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._residents)

    def put(self, resident: Resident) -> None:
        """Make this the resident of its key. An older one is killed; another is evicted if the tier is full."""
        self._write(self._put, resident)

    def drop(self, key: str) -> Resident | None:
        """Kill and remove the resident of a key, and return it."""
        resident = self._residents.get(key)
        if resident is not None:
            _end(resident)  # at once, although the rest may be done later
        self._write(self._drop, key)
        return resident

    def drop_scope(self, scope: str) -> None:
        """Kill and remove all residents of a function."""
        for resident in self.residents():
            if resident.scope == scope:
                _end(resident)
        self._write(self._drop_all, scope)

    def stop_hits(self, scope: str | None) -> None:
        """Stop direct hits on all residents of a function, or on all (None), without removing them."""
        for resident in self.residents():
            if scope is None or resident.scope == scope:
                resident.kill()

    def clear(self) -> None:
        """Kill and remove all residents."""
        for resident in self.residents():
            _end(resident)
        self._write(self._drop_all, None)

    def adopt(self, resident: Resident, table: dict[Any, Resident], fast: Any) -> None:
        """Let `table[fast]` lead to the resident, too, for as long as it lives in this tier."""
        self._write(self._adopt, resident, table, fast)

    def residents(self) -> list[Resident]:
        """Return a copy of all residents, because any allocation may run a finalizer that writes to this tier."""
        return list(self._residents.values())

    def served(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return hits, and the seconds of computing that they saved, by scope. Removed residents count, too."""
        with process_lock.lock:
            hits, saved, living = self._hits.copy(), self._saved.copy(), self.residents()
        for resident in living:  # outside the lock, as there may be many
            count, scope = resident.hits, resident.scope
            hits[scope] += count
            saved[scope] += count * resident.entry.cost
        return hits, saved

    def _write(self, act: Callable[..., None], *args: Any) -> None:
        """Do one write after another. If a finalizer or signal handler writes in the middle of a write, that one does
        both."""
        dead: list[object] = []  # outlives the lock, so that no user's finalizer runs inside it
        with process_lock.lock:
            self._later.append((act, args))
            if self._writing is process_lock.lock:  # by this thread; a forked child has another lock
                return
            self._writing = process_lock.lock
            try:
                while self._later:
                    job = self._later.pop(0)
                    dead.append(job)
                    job[0](dead, *job[1])
            finally:
                self._writing = None

    def _put(self, dead: list[object], resident: Resident) -> None:
        older = self._residents.get(resident.key)
        if older is resident:
            return
        if older is None:
            while len(self._residents) >= self.entries:
                self._evict(dead)
            if len(self._since) > 2 * self.entries:  # most of them were dropped again
                self._since = [key for key, there in self._residents.items() if there.round == self._round]
            self._since.append(resident.key)
            resident.round = self._round
        else:  # it takes the older one's place, and counts as hit, because a caller asked again
            resident.mark, resident.round = -1, older.round
            self._retire(dead, older)
        self._residents[resident.key] = resident

    def _drop(self, dead: list[object], key: str) -> None:
        resident = self._residents.get(key)
        if resident is not None:
            self._remove(dead, resident)

    def _drop_all(self, dead: list[object], scope: str | None) -> None:
        for resident in self.residents():
            if scope is None or resident.scope == scope:
                self._remove(dead, resident)

    def _adopt(self, dead: list[object], resident: Resident, table: dict[Any, Resident], fast: Any) -> None:
        if self._residents.get(resident.key) is not resident:
            return  # evicted or invalidated meanwhile: nothing would remove it from the table again
        left: list[Any] = []  # without keys that lead elsewhere by now
        for home, key in zip(resident.homes[::2], resident.homes[1::2], strict=True):
            if home.get(key) is resident and not (home is table and key == fast):
                left += home, key
        resident.homes = (*left, table, fast)
        dead.append(table.get(fast))
        table[fast] = resident

    def _remove(self, dead: list[object], resident: Resident) -> None:
        self._retire(dead, resident)
        del self._residents[resident.key]

    def _retire(self, dead: list[object], resident: Resident) -> None:
        dead.append(resident)
        resident.kill()
        self._hits[resident.scope] += resident.hits
        self._saved[resident.scope] += resident.hits * resident.entry.cost

    def _evict(self, dead: list[object]) -> None:
        """Remove the next resident that was not hit since the hand passed it last."""
        now = monotonic()
        while True:
            for key in self._hand:
                resident = self._residents.get(key)
                if resident is None or resident.round == self._round:
                    continue
                if resident.hits == resident.mark or resident.keep <= now:
                    self._remove(dead, resident)
                    return
                resident.mark, resident.round = resident.hits, self._round
            self._hand, self._since = iter(self._since or list(self._residents)), []
            self._round += 1


def _end(resident: Resident) -> None:
    """Make the resident useless at once, for hits, for a caller about to open it, and as a stale value."""
    resident.keep = resident.fresh = resident.end = 0.0
