"""Leases by key or name inside one process, and the bells of those who wait for one. Callers bring the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stampede import decisions, record
from stampede.colour import Bell, Colour
from stampede.errors import EngineClosed
from stampede.ports import Busy, Granted, Held
from stampede.record import NOTHING, Lease, Record

__all__ = ["Ending", "HandedLocks", "Hung", "NamedLocks", "Names", "ring"]

K = TypeVar("K")


class _Ends(Protocol):
    @property
    def end(self) -> float: ...


E = TypeVar("E", bound=_Ends)


@dataclass(slots=True)
class Hung:
    """A bell that hangs until `end`, for who has this token."""

    token: bytes
    end: float
    bell: Bell


def ring(hung: Iterable[Hung]) -> None:
    for each in hung:
        each.bell.ring()


class Ending(dict[K, E]):
    """Things that end by themselves; those that nobody asks for again are swept now and then."""

    roof = 64

    def put(self, key: K, thing: E, now: float) -> None:
        if len(self) >= self.roof:
            for old, ended in [each for each in self.copy().items() if each[1].end <= now]:
                if self.get(old) is ended:  # a finalizer may have run since the copy
                    del self[old]
            self.roof = max(64, 2 * len(self))
        self[key] = thing

    def living(self, key: K, now: float) -> E | None:
        thing = self.get(key)
        return thing if thing is not None and thing.end > now else None


class Names:
    """Leases by name; everything about them is decided under the one lock, and bells are rung outside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.records: Ending[str, Record] = Ending()  # without what is kept
        self.waited: Ending[bytes, Hung] = Ending()  # by the token of the lease, once somebody waits for it
        self.closed = False

    def standing(self, name: str, now: float) -> Lease | None:
        """The lease of this name, if there is one."""
        lease = self.records.get(name, NOTHING).lease
        return lease if lease is not None and lease.end > now else None

    def note(self, name: str, after: Record, now: float) -> None:
        """All of a record but what is kept."""
        if after.lease is None and after.past is None:
            self.records.pop(name, None)
        else:
            self.records.put(name, after if after.kept is None else Record(None, after.lease, after.past), now)

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        with decisions.lock:
            now = self.clock()
            after, stands, _ = record.renew(self.records.get(name, NOTHING), token, seconds, now)
            if stands:
                self.note(name, after, now)
            return stands

    def check(self) -> None:
        """EngineClosed, once it is."""
        if self.closed:
            raise EngineClosed("memory")

    async def wait(self, name: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Until the lease that `busy` named falls or ends. One that has fallen since isn't there to be waited for."""
        with decisions.lock:
            now, token = self.clock(), busy.token
            lease = self.standing(name, now)
            if lease is None or lease.token != token:
                return
            hung = self.waited.living(token, now) or Hung(token, lease.end, Bell())
            hung.end = max(hung.end, lease.end)
            self.waited.put(token, hung, now)
        await colour.park(hung.bell, min(timeout, lease.end - now))

    def let_go(self) -> None:
        """For good: whoever waits is woken, and refused."""
        with decisions.lock:
            self.closed = True
            self.records, waited, self.waited = Ending(), self.waited, Ending()
        ring(waited.values())

    def start_again(self) -> None:
        """In a forked child: the leases are the parent's."""
        self.records, self.waited = Ending(), Ending()


class Holders(Protocol):
    """Who decides about locks by their names, for both colours."""

    def acquire(self, name: str, token: bytes, lease: float, /, *, waits: bool, room: float) -> Granted | Busy: ...
    def renew(self, name: str, token: bytes, lease: float, /) -> bool: ...
    def release(self, name: str, token: bytes, /) -> bool: ...
    def holder(self, name: str, /) -> list[tuple[bytes, float]]: ...
    def held(self, prefix: str, /) -> list[Held]: ...
    async def wait(self, name: str, busy: Busy, timeout: float, colour: Colour, /) -> None: ...


class NamedLocks:
    """`Locks` and `Holds` of one colour, of whoever decides at once. Only `wait` has a colour."""

    def __init__(self, holders: Holders, colour: Colour) -> None:
        self._holders = holders
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        return self._holders.acquire(name, token, lease, waits=waits, room=room)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return self._holders.renew(name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return self._holders.release(name, token)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return self._holders.holder(name)

    async def held(self, prefix: str = "") -> list[Held]:
        return self._holders.held(prefix)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        await self._holders.wait(name, busy, timeout, self._colour)


class HandedLocks(NamedLocks):
    """The same, of locks that belong to no process."""

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        return self._holders.renew(name, token, lease)
