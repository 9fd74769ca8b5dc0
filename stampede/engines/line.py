"""Locks by name inside one process, handed on in the order of arrival.

A lock that is asked for as an exclusive one is a lease, and a queue behind it. From the moment somebody comes with
another room until it is free again, all that is known of it is a `Room`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from stampede import decisions, room
from stampede.colour import Bell, Colour
from stampede.engines.leases import Ending, Hung, Names, ring
from stampede.engines.whereabouts import here, parts_of
from stampede.pace import look_again
from stampede.ports import Busy, Granted, Held
from stampede.record import Lease, Record
from stampede.room import FORGOTTEN, TURN, Change, Inside, Room, Waiting

__all__ = ["Queue"]

T = TypeVar("T")

SAFETY = 1.0
"""Seconds between two looks of a waiter that nobody woke."""


AFTER = 0.1
"""Seconds between the looks of the first, the second and so on, after a lease that has ended by itself."""


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and the place of the one who asked."""

    bell: Bell = field(default_factory=Bell)  # rings when its turn has come
    ahead: int = 0


@dataclass(slots=True)
class _Place:
    """In the order of arrival."""

    arrival: int
    bell: Bell
    end: float = 0.0  # of one whose turn has come: until then it is kept for him, also if he misses that


@dataclass(slots=True)
class _Shared:
    """A lock with room for more than one, and the bells of those who wait for it."""

    room: Room
    bells: dict[bytes, Bell]

    @property
    def end(self) -> float:
        return self.room.end


class Queue(Names):
    """Leases by name, and those who wait for each. A lock that comes free is kept for the first of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._fence, self._arrivals = count(1), count()
        self._begin()

    def _begin(self) -> None:
        self._waiting: dict[str, dict[bytes, _Place]] = {}  # in the order of arrival
        self._turns: Ending[str, Hung] = Ending()
        self._called: Ending[tuple[str, bytes], _Place] = Ending()
        self._shared: Ending[str, _Shared] = Ending()

    def acquire(self, name: str, token: bytes, seconds: float, *, waits: bool, room: float = 1) -> Granted | Busy:
        if room != 1 or name in self._shared:
            return self._enter(name, token, seconds, waits, room)
        with decisions.lock:
            if self.closed:
                self.check()
            if name in self._shared:  # by now
                return self._enter(name, token, seconds, waits, room)
            now = self.clock()
            lease, told = self.standing(name, now), None
            holder: Lease | Hung | None = lease or self._turns.living(name, now)
            if holder is None and name in self._waiting:  # its lease ended, or the one whose turn it was didn't come
                if waits and (name, token) in self._called:
                    self._queue(name, token)  # it is he, late: the first again
                holder = told = self._hand_on(name, now)
            if holder is None or holder.token == token:
                self._turns.pop(name, None)
                self._leave(name, token)
                fence = next(self._fence) if lease is None else lease.fence
                self.records.put(name, Record(lease=Lease(token, now + seconds, fence)), now)
                return Granted(fence=fence)
            busy = Busy(holder.token, holder.end - now)
            if waits:
                place, ahead = self._queue(name, token)
                busy = _Queued(busy.token, busy.lease, bell=place.bell, ahead=ahead)
        if told is not None:
            told.bell.ring()
        return busy

    def _queue(self, name: str, token: bytes) -> tuple[_Place, int]:
        """Its place, and how many are before it. Who has missed his turn has his place again."""
        queue = self._waiting.setdefault(name, {})
        if token in queue:
            return queue[token], list(queue).index(token)
        missed = self._called.pop((name, token), None)
        place = queue[token] = _Place(next(self._arrivals) if missed is None else missed.arrival, Bell())
        if missed is None:
            return place, len(queue) - 1
        for other in [each for each, its in queue.items() if its.arrival > place.arrival]:
            queue[other] = queue.pop(other)
        return place, list(queue).index(token)

    def _hand_on(self, name: str, now: float) -> Hung | None:
        """Under the lock: keep it for who has waited longest. Its bell is to be rung, outside."""
        queue = self._waiting.get(name)
        if not queue:
            return None
        token, place = next(iter(queue.items()))
        turn = Hung(token, now + TURN, place.bell)
        self._leave(name, token)
        self._turns.put(name, turn, now)
        place.end = now + FORGOTTEN
        self._called.put((name, token), place, now)
        return turn

    def _leave(self, name: str, token: bytes) -> None:
        if self._called:
            self._called.pop((name, token), None)
        queue = self._waiting.get(name)
        if queue is not None:
            queue.pop(token, None)
            if not queue:
                del self._waiting[name]

    def release(self, name: str, token: bytes) -> bool:
        if name in self._shared and (left := self._ask(name, lambda was, now: room.release(was, token, now))):
            return left[0]
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
                self._leave(name, token)
            else:
                self._leave(name, token)
                return False
            woken = self.waited.pop(token, None), self._hand_on(name, now) if name in self._waiting else None
        ring([hung for hung in woken if hung is not None])
        return ours

    def renew(self, name: str, token: bytes, seconds: float) -> bool:
        if name in self._shared and (kept := self._ask(name, lambda was, now: room.renew(was, token, seconds, now))):
            return kept[0]
        return super().renew(name, token, seconds)

    # -- with room for more than one ------------------------------------------------------------------------------

    def _enter(self, name: str, token: bytes, seconds: float, waits: bool, its: float) -> Granted | Busy:
        with decisions.lock:
            if self.closed:
                self.check()
            if name not in self._shared:
                self._share(name)
            fence = next(self._fence)
            answer, bells = self._changed(
                name, lambda was, now: room.acquire(was, token, seconds, its, now, waits=waits, least=fence)
            )
            if waits and isinstance(answer, Busy):
                shared = self._shared[name]
                bell = shared.bells.setdefault(token, Bell())
                answer = _Queued(answer.token, answer.lease, bell=bell, ahead=room.ahead(shared.room, token))
        for each in bells:
            each.ring()
        return answer

    def _ask(self, name: str, question: Callable[[Room, float], Change[T]]) -> tuple[T] | None:
        """The answer. None: it is an exclusive lock by now."""
        with decisions.lock:
            if self.closed:
                self.check()
            if name not in self._shared:
                return None
            answer, bells = self._changed(name, question)
        for each in bells:
            each.ring()
        return (answer,)

    def _share(self, name: str) -> None:
        """Under the lock: what is known of an exclusive lock, as a room."""
        now = self.clock()
        lease, turn = self.standing(name, now), self._turns.living(name, now)
        inside = () if lease is None else (Inside(lease.token, lease.end, lease.end - now, 1, lease.fence),)
        bells = {token: place.bell for token, place in self._waiting.pop(name, {}).items()}
        queue = [Waiting(token, 1, now) for token in bells]
        if turn is not None:
            queue.insert(0, Waiting(turn.token, 1, now, turn.end))
            bells[turn.token] = turn.bell
        self.records.pop(name, None)
        self._turns.pop(name, None)
        self._shared.put(name, _Shared(Room(inside, queue), bells), now)

    def _changed(self, name: str, question: Callable[[Room, float], Change[T]]) -> tuple[T, list[Bell]]:
        """Under the lock: the answer, as `room` has it, and the bells that are to be rung outside."""
        now, shared = self.clock(), self._shared[name]
        shared.room, answer, told = question(shared.room, now)
        bells = [bell for token in told.called if (bell := shared.bells.pop(token, None)) is not None]
        for token in told.left:
            bells += [bell for bell in (shared.bells.pop(token, None),) if bell is not None]
            bells += [hung.bell for hung in (self.waited.pop(token, None),) if hung is not None]
        if isinstance(answer, Granted) and shared.bells:
            for inside in shared.room.inside:
                shared.bells.pop(inside.token, None)
        if shared.room.idle:
            self._shared.pop(name, None)
        else:
            self._shared.put(name, shared, now)
        return answer, bells

    # -- who has what ---------------------------------------------------------------------------------------------

    def holder(self, name: str) -> list[tuple[bytes, float]]:
        with decisions.lock:
            self.check()
            now = self.clock()
            return [(each.token, each.end - now) for each in self._all_of(name, now)]

    def held(self, prefix: str) -> list[Held]:
        host, pid = parts_of(here())
        with decisions.lock:
            self.check()
            now = self.clock()
            found = []
            for name in [each for each in {**self.records, **self._shared} if each.startswith(prefix)]:
                queue = self._shared[name].room.queue if name in self._shared else self._waiting.get(name, ())
                for each in self._all_of(name, now):
                    left = each.end - now
                    found.append(Held(name, host, pid, None, each.fence, None, None, left, True, len(queue)))
            return found

    def _all_of(self, name: str, now: float) -> list[Lease | Inside]:
        """Under the lock: who is inside."""
        shared = self._shared.get(name)
        if shared is not None:
            return [each for each in shared.room.inside if each.end > now]
        lease = self.standing(name, now)
        return [] if lease is None else [lease]

    async def wait(self, name: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Until it is the waiter's turn; without a place, until the lease falls or ends."""
        if isinstance(busy, _Queued):
            await colour.park(busy.bell, min(timeout, look_again(busy.ahead, max(busy.lease, 0.0), AFTER, SAFETY)))
        elif name in self._shared:
            await self._left(name, busy, timeout, colour)
        else:
            await super().wait(name, busy, timeout, colour)

    async def _left(self, name: str, busy: Busy, timeout: float, colour: Colour) -> None:
        """Without a place: until the one that keeps it out is no longer inside."""
        with decisions.lock:
            now, shared, token = self.clock(), self._shared.get(name), busy.token
            if shared is None or not room.standing(shared.room, token, now):
                return
            hung = self.waited.living(token, now) or Hung(token, now + max(busy.lease, 0.0), Bell())
            hung.end = max(hung.end, now + max(busy.lease, 0.0))
            self.waited.put(token, hung, now)
        await colour.park(hung.bell, min(timeout, max(busy.lease, 0.0)))

    def let_go(self) -> None:
        with decisions.lock:
            self.closed = True  # or somebody could queue between this and the rest
            bells = [place.bell for queue in self._waiting.values() for place in queue.values()]
            bells += [bell for shared in self._shared.values() for bell in shared.bells.values()]
            self._begin()
        for bell in bells:
            bell.ring()
        super().let_go()

    def start_again(self) -> None:
        super().start_again()
        self._begin()
