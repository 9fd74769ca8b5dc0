"""The local tier: values kept as objects inside the process, evicted by SIEVE.

A hit takes no lock and moves nothing: it only counts itself on the resident, and the count is also SIEVE's
visited bit, since the hand remembers the count it saw last. The hand goes from the oldest to the newest, in rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from stampede.errors import OptionError
from stampede.model.entry import GRACE, Entry
from stampede.model.ports import ALWAYS, Ticket
from stampede.runtime import process_lock

__all__ = ["Resident", "Residents"]


class Resident:
    """An entry that lives in this process, with the moments (of `time.monotonic`) that a hit compares.

    A hit is `end > now and (stamp is None or (pulse.until > now and stamps[slot] == stamp))`, and counts in `hits`.
    """

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
        self.end = end  # until then a hit needs no thought: the early moment, or the end of fresh; 0 once killed
        self.value: Any = entry.value
        self.hits = 0
        self.stamps: Sequence[int] | None = None
        self.slot = 0
        self.stamp: int | None = None  # None: the engine can't tell when the entry changes
        self.pulse = ALWAYS
        if ticket is not None:
            self.stamps, self.slot, self.stamp, self.pulse = ticket
        self.entry = entry
        self.fresh = fresh
        self.keep = fresh if keep == fresh else keep  # one float object for both, which is most residents
        self.key = key
        self.scope = scope
        self.homes: tuple[Any, ...] = ()  # table, fast key, table, fast key ...: flat, as it is there for every entry
        self.mark = 0  # the hits that SIEVE's hand saw last
        self.round = 0  # of the hand, in which it saw this, or this came

    @property
    def gone(self) -> float:
        """The moment from which nobody has any use for it, nor has anybody who waited while it was fresh."""
        return max(self.keep, self.fresh + GRACE)

    def lives_in(self, table: Any) -> bool:
        """Does this table lead here? By one way: of several, as of a key that is no more than a part of the arguments,
        there may be ever more."""
        homes = self.homes
        for number in range(0, len(homes), 2):
            if homes[number] is table and table.get(homes[number + 1]) is self:
                return True
        return False

    def kill(self) -> None:
        """No hit from now on, by any way that leads here."""
        self.end = 0.0
        if self.homes:
            for table, fast in zip(self.homes[::2], self.homes[1::2], strict=True):
                if table.get(fast) is self:
                    table.pop(fast, None)
            self.homes = ()


class Residents:
    """At most so many residents by key. Reads take no lock; writes may come from any thread, finalizer or signal."""

    def __init__(self, entries: int = 10_000) -> None:
        if isinstance(entries, bool) or not isinstance(entries, int) or entries < 1:
            raise OptionError(f"entries is {entries!r}: give the number of values to keep at most, 1 or more")
        self.entries = entries
        self._residents: dict[str, Resident] = {}  # from the oldest to the newest
        self.get: Callable[[str], Resident | None] = self._residents.get  # what a method of our own would cost twice
        self._hits: defaultdict[str, int] = defaultdict(int)  # of residents that have left, by scope
        self._saved: defaultdict[str, float] = defaultdict(float)  # seconds of computing, likewise
        self._hand: Iterator[str] = iter(())  # the keys that are left of a round
        self._round = 0
        self._since: list[str] = []  # keys that have come in this round: their turn is in the next
        self._writing: Any = None  # the lock under which a write is under way
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._residents)

    def put(self, resident: Resident) -> None:
        """Make it the resident of its key: an older one is killed, and one is evicted where there is no room."""
        self._write(self._put, resident)

    def drop(self, key: str) -> Resident | None:
        """Kill and remove the resident of a key; it is returned."""
        resident = self._residents.get(key)
        if resident is not None:
            _end(resident)  # at once, even where the rest of this comes later
        self._write(self._drop, key)
        return resident

    def drop_scope(self, scope: str) -> None:
        """Kill and remove every resident of a function."""
        for resident in self.residents():
            if resident.scope == scope:
                _end(resident)
        self._write(self._drop_all, scope)

    def stop_hits(self, scope: str | None) -> None:
        """None of a function's, or of all, is hit without thought any more; they stay."""
        for resident in self.residents():
            if scope is None or resident.scope == scope:
                resident.kill()

    def clear(self) -> None:
        """Kill and remove all."""
        for resident in self.residents():
            _end(resident)
        self._write(self._drop_all, None)

    def adopt(self, resident: Resident, table: dict[Any, Resident], fast: Any) -> None:
        """Let `table[fast]` lead to the resident too, for as long as it lives in this tier."""
        self._write(self._adopt, resident, table, fast)

    def residents(self) -> list[Resident]:
        """All that live here now: a copy, as any allocation may run a finalizer that writes to this tier."""
        return list(self._residents.values())

    def served(self) -> tuple[dict[str, int], dict[str, float]]:
        """Hits so far by scope, and the seconds of computing that they saved; also of residents that have left."""
        with process_lock.lock:
            hits, saved, living = self._hits.copy(), self._saved.copy(), self.residents()
        for resident in living:  # outside the lock, as there may be many
            count, scope = resident.hits, resident.scope
            hits[scope] += count
            saved[scope] += count * resident.entry.cost
        return hits, saved

    def _write(self, act: Callable[..., None], *args: Any) -> None:
        """Do one write after the other. One that a finalizer or a signal handler makes in the middle of another one is
        left to that.
        """
        dead: list[object] = []  # outlives the lock, as a user's finalizer must not run inside it
        with process_lock.lock:
            self._later.append((act, args))
            if self._writing is process_lock.lock:  # by this very thread; a forked child has another lock
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
            if len(self._since) > 2 * self.entries:  # most were dropped again
                self._since = [key for key, there in self._residents.items() if there.round == self._round]
            self._since.append(resident.key)
            resident.round = self._round
        else:  # it keeps its place, and counts as hit: somebody has asked for it again
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
        left: list[Any] = []  # but for those that were emptied
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
        """Remove the next one that has not been hit since the hand came by last."""
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
    """Nobody is to see it any more; all three, for who is about to open it, and who looks for something stale."""
    resident.keep = resident.fresh = resident.end = 0.0
