"""The locks of the memory engine, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from stampede.engines.kit.expiring import Ending
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.errors import EngineClosed
from stampede.model import lock_queue as rooms
from stampede.model.lock_queue import EMPTY, Change, Inside, Room
from stampede.model.ports import Busy, Granted, Held
from stampede.runtime import process_lock
from stampede.runtime.colour import Bell, Colour

__all__ = ["LockTable", "MemoryLocks"]

T = TypeVar("T")


@dataclass(slots=True)
class _Lock:
    room: Room
    bells: dict[bytes, Bell] = field(default_factory=dict)  # by the tokens that `Wakeups` names

    @property
    def end(self) -> float:
        return self.room.end


class LockTable:
    """The locks of this process. `model/lock_queue.py` decides, under the process lock; bells ring outside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.fences = count(1)
        self._closed = False
        self.start_again()

    def start_again(self) -> None:
        """Forget, in a forked child, all locks: they are the parent's."""
        self.locks: Ending[str, _Lock] = Ending()  # free locks are swept now and then

    def let_go(self) -> None:
        """Close for good: wake all waiters, and refuse all later calls."""
        with process_lock.lock:
            self._closed = True
            bells = [bell for lock in self.locks.values() for bell in lock.bells.values()]
            self.start_again()
        for bell in bells:
            bell.ring()

    def change(self, name: str, question: Callable[..., Change[T]], *asked: Any, **terms: Any) -> T:
        """Return the answer of a function of `model/lock_queue.py`. By then the lock is changed, and waiters woken."""
        bells: list[Bell | None] = []
        with process_lock.lock:
            while True:
                if self._closed:
                    raise EngineClosed("memory")
                now, lock = self.clock(), self.locks.get(name)
                if lock is None:
                    lock = _Lock(EMPTY)
                    self.locks.put(name, lock, now)
                was = lock.room
                room, answer, wakeups = question(was, *asked, now, **terms)
                if lock.room is was and self.locks.get(name) is lock:  # else a finalizer has changed it meanwhile
                    break
            lock.room = room
            if lock.bells:
                bells = [lock.bells.pop(token, None) for tokens in wakeups for token in tokens]
        for bell in bells:
            if bell is not None:
                bell.ring()
        return answer

    def awaited(self, name: str, busy: Busy) -> tuple[Bell, float] | None:
        """Return the bell of a caller that was refused, and the seconds until it must ask again. None: ask at once."""
        with process_lock.lock:
            lock = self.locks.get(name)
            awaited = None if lock is None else rooms.awaited(lock.room, busy, self.clock())
            if lock is None or awaited is None:
                return None
            return lock.bells.setdefault(awaited[0], Bell()), awaited[1]

    def inside(self, prefix: str) -> list[tuple[str, Room, Inside, float]]:
        """Return the holders of the locks whose names begin with this, and the seconds that each has left."""
        with process_lock.lock:
            if self._closed:
                raise EngineClosed("memory")
            now, some = self.clock(), [(name, its.room) for name, its in self.locks.items() if name.startswith(prefix)]
        return [(name, room, each, each.end - now) for name, room in some for each in room.inside if each.end > now]


class MemoryLocks:
    """`Locks`, `Holds` and `Handover` of one colour. Only `wait` suspends."""

    def __init__(self, table: LockTable, colour: Colour) -> None:
        self._table = table
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        fence = next(self._table.fences)
        return self._table.change(name, rooms.acquire, token, lease, room, waits=waits, least=fence)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return self._table.change(name, rooms.renew, token, lease)

    hand_over = renew  # no more is needed: a lock belongs to no thread, and no other process can take it

    async def release(self, name: str, token: bytes) -> bool:
        return self._table.change(name, rooms.release, token)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        awaited = self._table.awaited(name, busy)
        if awaited is not None:
            await self._colour.park(awaited[0], min(timeout, awaited[1]))

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(holder.token, left) for found, _, holder, left in self._table.inside(name) if found == name]

    async def held(self, prefix: str = "") -> list[Held]:
        host, pid = parts_of(here())
        return [
            Held(name, host, pid, None, holder.fence, None, None, left, True, len(room.queue))
            for name, room, holder, left in self._table.inside(prefix)
        ]
