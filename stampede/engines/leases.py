"""Who computes, and who has failed to: leases by key or name inside one process. Callers bring the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Generic, TypeVar

from stampede import decisions
from stampede.colour import Bell, Colour
from stampede.entry import Entry, Verdict
from stampede.errors import EngineClosed
from stampede.ports import Busy, Failed

__all__ = ["Ending", "Lease", "Names", "Past", "ring"]

VERDICT = 5.0
"""Seconds for which a verdict is told to those who waited for its lease."""


class Lease:
    """A token that stands until `end`; the bell rings when it falls before."""

    __slots__ = ("bell", "end", "fence", "token")

    def __init__(self, token: bytes, end: float, fence: int) -> None:
        self.token = token
        self.end = end
        self.fence = fence
        self.bell = Bell()


class Past:
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
        verdict, end = self.verdicts.get(awaited or b"", (self.why, 0.0))
        if end > now:
            return Failed(verdict, entry, rest)
        return Failed(self.why, entry, rest) if rest > 0 else None


def ring(leases: Iterable[Lease | None]) -> None:
    """Wake those who wait for these leases."""
    for lease in leases:
        if lease is not None:
            lease.bell.ring()


E = TypeVar("E", Lease, Past)


class Ending(Generic[E]):
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
            for old, ended in [each for each in self._things.copy().items() if each[1].end <= now]:
                if self._things.get(old) is ended:  # a finalizer may have run since the copy
                    del self._things[old]
            self._roof = max(64, 2 * len(self._things))
        older = self._things.get(key)
        self._things[key] = thing
        return older

    def pop(self, key: str) -> E | None:
        return self._things.pop(key, None)

    def clear(self) -> list[E]:
        things, self._things = self._things, {}
        return list(things.values())


class Names:
    """Leases by name; everything about them is decided under the one lock, and bells are rung outside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.leases: Ending[Lease] = Ending()
        self.closed = False
        self._fence = count(1)

    def standing(self, name: str, token: bytes) -> Lease | None:
        """The lease of this name, if it stands and has this token."""
        lease = self.leases.get(name, self.clock())
        return lease if lease is not None and lease.token == token else None

    def grant(self, name: str, token: bytes, seconds: float, now: float) -> tuple[int, Bell | None]:
        """Let a lease stand from now on; returns its fence, and the bell of one that it ends."""
        lease = self.leases.get(name, now)
        if lease is not None and lease.token == token:
            lease.end = now + seconds
            return lease.fence, None
        if self.closed:
            self.check()
        lease = Lease(token, now + seconds, next(self._fence))
        older = self.leases.put(name, lease, now)
        return lease.fence, None if older is None else older.bell

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        with decisions.lock:
            lease = self.standing(name, token)
            if lease is not None:
                lease.end = self.clock() + seconds
            return lease is not None

    def release(self, name: str, token: bytes) -> bool:
        with decisions.lock:
            lease = self.standing(name, token)
            if lease is not None:
                self.leases.pop(name)
        ring([lease])
        return lease is not None

    def check(self) -> None:
        """EngineClosed, once it is."""
        if self.closed:
            raise EngineClosed("memory")

    async def wait(self, name: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Until the lease that `busy` named falls or ends. One that has fallen since isn't there to be waited for."""
        with decisions.lock:
            lease = self.standing(name, busy.token)
            left = 0.0 if lease is None else lease.end - self.clock()
        if lease is not None:
            await colour.park(lease.bell, min(timeout, left))

    def let_go(self) -> None:
        """For good: whoever waits is woken, and refused."""
        with decisions.lock:
            self.closed = True
            leases = self.leases.clear()
        ring(leases)

    def start_again(self) -> None:
        """In a forked child: the leases are the parent's."""
        self.leases = Ending()
