"""Locks by name inside one process, handed on in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from stampede import decisions
from stampede.colour import Bell, Colour
from stampede.engines.leases import Ending, Hung, Names, ring
from stampede.pace import look_again
from stampede.ports import Busy, Granted
from stampede.record import Lease, Record

__all__ = ["Queue"]

TURN = 1.0
"""Seconds for which a lock that came free is kept for the one whose turn it is; its loop may be busy just now."""

SAFETY = 1.0
"""Seconds between two looks of a waiter that nobody woke."""


AFTER = 0.1
"""Seconds between the looks of the first, the second and so on, after a lease that has ended by itself."""


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and the place of the one who asked."""

    bell: Bell = field(default_factory=Bell)  # rings when its turn has come
    ahead: int = 0


class Queue(Names):
    """Leases by name, and those who wait for each. A lock that comes free is kept for the first of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._fence = count(1)
        self._begin()

    def _begin(self) -> None:
        self._waiting: dict[str, dict[bytes, Bell]] = {}  # in the order of arrival
        self._turns: Ending[str, Hung] = Ending()

    def acquire(self, name: str, token: bytes, seconds: float, *, waits: bool) -> Granted | Busy:
        with decisions.lock:
            if self.closed:
                self.check()
            now = self.clock()
            lease, told = self.standing(name, now), None
            holder: Lease | Hung | None = lease or self._turns.living(name, now)
            if holder is None and name in self._waiting:  # its lease ended, or the one whose turn it was didn't come
                holder = told = self._hand_on(name, now)
            if holder is None or holder.token == token:
                self._turns.pop(name, None)
                if name in self._waiting:
                    self._leave(name, token)
                fence = next(self._fence) if lease is None else lease.fence
                self.records.put(name, Record(lease=Lease(token, now + seconds, fence)), now)
                return Granted(fence=fence)
            busy = Busy(holder.token, holder.end - now)
            if waits:
                busy = self._queue(name, token, busy)
        if told is not None:
            told.bell.ring()
        return busy

    def _queue(self, name: str, token: bytes, busy: Busy) -> _Queued:
        queue = self._waiting.setdefault(name, {})
        ahead = list(queue).index(token) if token in queue else len(queue)
        return _Queued(busy.token, busy.lease, bell=queue.setdefault(token, Bell()), ahead=ahead)

    def _hand_on(self, name: str, now: float) -> Hung | None:
        """Under the lock: keep it for who has waited longest. Its bell is to be rung, outside."""
        queue = self._waiting.get(name)
        if not queue:
            return None
        token = next(iter(queue))
        turn = Hung(token, now + TURN, queue[token])
        self._leave(name, token)
        self._turns.put(name, turn, now)
        return turn

    def _leave(self, name: str, token: bytes) -> None:
        queue = self._waiting.get(name)
        if queue is not None:
            queue.pop(token, None)
            if not queue:
                del self._waiting[name]

    def release(self, name: str, token: bytes) -> bool:
        with decisions.lock:
            if self.closed:
                self.check()
            now = self.clock()
            lease, turn = self.standing(name, now), self._turns.living(name, now)
            ours = lease is not None and lease.token == token
            if ours:
                self.records.pop(name, None)
            elif turn is not None and turn.token == token:
                self._turns.pop(name, None)
            else:
                self._leave(name, token)
                return False
            woken = self.waited.pop(token, None), self._hand_on(name, now) if name in self._waiting else None
        ring([hung for hung in woken if hung is not None])
        return ours

    async def wait(self, name: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Until it is the waiter's turn; without a place, until the lease falls or ends."""
        if isinstance(busy, _Queued):
            await colour.park(busy.bell, min(timeout, look_again(busy.ahead, max(busy.lease, 0.0), AFTER, SAFETY)))
        else:
            await super().wait(name, busy, timeout, colour)

    def let_go(self) -> None:
        with decisions.lock:
            self.closed = True  # or somebody could queue between this and the rest
            bells = [bell for queue in self._waiting.values() for bell in queue.values()]
            self._begin()
        for bell in bells:
            bell.ring()
        super().let_go()

    def start_again(self) -> None:
        super().start_again()
        self._begin()
