"""What a broker decides about locks. The time is an argument: this module does no I/O, never sleeps, reads no clock.

A lock has holders, and waiters in the order of arrival. A caller may enter if no earlier waiter remains, and if the
number of holders, itself included, is at most the room of each of them. A waiter that misses its turn, or is silent, is
passed over; when it asks again, it goes to the end of the queue. The cost of a question depends neither on the number
of locks nor on the number of waiters. Leaving a bulkhead scans all its holders.

Locks and places in queues belong to a client's session, and end with it. `Machine.notices` collects what other sessions
must be notified of: a turn that has come, or a lock that came free."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple, TypeAlias

__all__ = ["LIMITS", "TURN", "BrokerReply", "Capacity", "ClientSession", "Machine", "Notice", "Refused"]

TURN = 1.0
"""Seconds for which a lock that came free is reserved for the next waiter, after that was notified."""

_COMPACT = 1024


class Refused(Exception):
    """A request that the broker refuses, such as one beyond its capacity. The text is for people."""


class Capacity(NamedTuple):
    """The limits on what clients may ask of one broker."""

    longest: float = 30.0  # the longest lease, in seconds
    clients: int = 10_000
    locks: int = 1_000_000  # with holders or waiters; also the limit of leases
    queue: int = 10_000  # waiters for one lock, or of one client
    limits: int = 10_000  # rate limits in use


LIMITS = Capacity()


class BrokerReply(NamedTuple):
    """The answer to `acquire`: granted, with a fence; or refused, with a holder's token and the seconds left to it."""

    granted: bool
    fence: int
    token: bytes = b""
    left: float = 0.0


class Notice(NamedTuple):
    """A message that a session did not ask for. `what` is its token whose turn has come, or a name that came free."""

    session: ClientSession
    turn: bool  # false: `what` is a name
    what: bytes


class ClientSession:
    """A connected client process, with its leases and its places in queues."""

    __slots__ = ("gone", "holder", "holds", "id", "last_heard", "over", "waits")

    def __init__(self, id: bytes, holder: str, now: float) -> None:
        self.id = id
        self.holder = holder  # `host:pid`
        self.last_heard = now
        self.gone = inf  # the time when its connection was found closed
        self.over = False
        self.holds: set[_Lease] = set()
        self.waits: dict[_Waiter, _Lock] = {}

    @property
    def idle(self) -> bool:
        return not self.holds and not self.waits


@dataclass(slots=True, eq=False)
class _Lease:
    lock: _Lock | None  # None after its end
    token: bytes
    session: ClientSession
    room: float
    fence: int
    since: float
    ends: float
    taken: bool = False  # the holder knows that it has the lock


@dataclass(slots=True, eq=False)
class _Waiter:
    token: bytes
    session: ClientSession
    room: float


_Due: TypeAlias = tuple[float, int, _Lease]


class _Lock:
    __slots__ = ("inside", "least", "name", "queue", "watchers")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.inside: dict[bytes, _Lease] = {}
        self.least = inf  # the smallest room of all holders
        self.queue: OrderedDict[bytes, _Waiter] | None = None
        self.watchers: dict[ClientSession, None] | None = None

    def fits(self, room: float) -> bool:
        return len(self.inside) < min(room, self.least)

    def enter(self, lease: _Lease) -> None:
        self.inside[lease.token] = lease
        self.least = min(self.least, lease.room)

    def leave(self, lease: _Lease) -> None:
        del self.inside[lease.token]
        if lease.room == self.least < inf:  # readers have infinite room, and there may be many: no scan for them
            self.least = min((each.room for each in self.inside.values()), default=inf)

    @property
    def idle(self) -> bool:
        return not self.inside and not self.queue and not self.watchers


class Machine:
    """All locks of one broker. The first `quiet` seconds are its grace period: leases of an earlier broker may still be
    valid. Nothing is granted then, but a holder that renews its lease has it again. All fences that it grants are above
    `fence`."""

    def __init__(self, now: float, *, quiet: float, fence: int, limits: Capacity = LIMITS) -> None:
        self.limits = limits
        self.notices: list[Notice] = []
        self.sessions: dict[bytes, ClientSession] = {}
        self.fence = fence
        self.quiet = now + quiet
        self.leases = 0
        self.granted = 0  # since the start, for statistics
        self._locks: dict[bytes, _Lock] = {}
        self._due: list[_Due] = []
        self._number = 0
        self._in_grace = quiet > 0

    # -- clients --------------------------------------------------------------------------------------------------

    def hello(self, id: bytes, holder: str, now: float) -> tuple[ClientSession, bool]:
        """Return the session of a client, and whether it was known. A client that was not known holds nothing here."""
        session = self.sessions.get(id)
        if session is not None:
            session.last_heard, session.gone = now, inf
            return session, True
        if len(self.sessions) >= self.limits.clients:
            raise Refused(f"it has {len(self.sessions)} clients already, its maximum: see --max-clients")
        session = self.sessions[id] = ClientSession(id, holder, now)
        return session, False

    def end(self, session: ClientSession, now: float) -> None:
        """End a session whose process has died: free its locks and its places in queues."""
        self.sessions.pop(session.id, None)
        session.over = True
        self.give_up(session, now)
        for lease in list(session.holds):
            if lease.lock is not None:
                self._free(lease.lock, lease, now)

    def give_up(self, session: ClientSession, now: float) -> None:
        """Drop a silent session's places in queues, so that no waiter is stuck behind it."""
        waits, session.waits = session.waits, {}
        for waiter, lock in waits.items():
            if lock.queue is not None and lock.queue.get(waiter.token) is waiter:
                del lock.queue[waiter.token]
        for lock in dict.fromkeys(waits.values()):  # only now: before, a turn could go to another place of this session
            self._advance(lock, now)
            self._drop_if_idle(lock)

    # -- the verbs ------------------------------------------------------------------------------------------------

    def acquire(
        self, session: ClientSession, name: bytes, token: bytes, lease: float, room: float, waits: bool, now: float
    ) -> BrokerReply:
        self._check(lease, room)
        self.pass_time(now)
        lock = self._locks.get(name)
        own = None if lock is None else lock.inside.get(token)
        if own is None and max(len(self._locks), self.leases) >= self.limits.locks:
            raise Refused(f"it has {self.leases} leases already, its maximum: see --max-locks")
        if lock is None:
            lock = self._locks[name] = _Lock(name)
        if own is None and not lock.queue and now >= self.quiet and lock.fits(room):
            own = self._let_in(lock, token, session, room, now)
        elif own is None and waits:
            self._queue(lock, token, session, room)
        if own is not None:
            self._confirm(own, session)
            self._set_end(own, now + lease)
            return BrokerReply(True, own.fence)
        reply = self._busy(lock, now)
        self._drop_if_idle(lock)
        return reply

    def renew(
        self, session: ClientSession, name: bytes, token: bytes, lease: float, room: float, fence: int, now: float
    ) -> bool:
        self._check(lease, room)
        self.pass_time(now)
        lock = self._locks.get(name)
        own = None if lock is None else lock.inside.get(token)
        if own is None and now < self.quiet and fence > 0:
            own = self._restore(session, name, token, room, fence, now)
        if own is None:
            return False
        self._confirm(own, session)
        self._set_end(own, now + lease)
        return True

    def hand_over(self, name: bytes, token: bytes, lease: float, now: float) -> bool:
        """Detach a lease from its session: it stays valid, and any client that presents the token takes it over."""
        self._check(lease, 1.0)
        self.pass_time(now)
        lock = self._locks.get(name)
        own = None if lock is None else lock.inside.get(token)
        if own is None:
            return False
        self._confirm(own, own.session)
        own.session.holds.discard(own)
        self._set_end(own, now + lease)
        return True

    def release(self, session: ClientSession, name: bytes, token: bytes, now: float) -> bool:
        self.pass_time(now)
        lock = self._locks.get(name)
        if lock is None:
            return False
        own = lock.inside.get(token)
        if own is not None:
            taken = own.taken
            self._free(lock, own, now)
            return taken
        if lock.queue is not None:
            waiter = lock.queue.pop(token, None)
            if waiter is not None:
                waiter.session.waits.pop(waiter, None)
                self._advance(lock, now)
                self._drop_if_idle(lock)
        return False

    def watch(self, session: ClientSession, name: bytes, token: bytes, now: float) -> bool:
        """Notify this session when a holder leaves. Return false if `token` has left already: ask again at once."""
        self.pass_time(now)
        lock = self._locks.get(name)
        if lock is None or (token not in lock.inside and not (token == b"" and now < self.quiet)):
            return False
        if lock.watchers is None:
            lock.watchers = {}
        lock.watchers[session] = None
        return True

    # -- time -----------------------------------------------------------------------------------------------------

    def pass_time(self, now: float) -> None:
        """Free all leases that have ended by `now`, and end the grace period if it is over."""
        due = self._due
        while due and due[0][0] <= now:
            _, _, lease = heapq.heappop(due)
            if lease.lock is None:
                continue
            if lease.ends > now:
                self._push(lease)
            else:
                self._free(lease.lock, lease, now)
        if self._in_grace and now >= self.quiet:
            self._in_grace = False
            for lock in list(self._locks.values()):
                self._advance(lock, now)
                self._notify_watchers(lock)
                self._drop_if_idle(lock)

    def next_due(self) -> float:
        """Return the time at which `pass_time` must be called again, at the latest."""
        due = self._due[0][0] if self._due else inf
        return min(due, self.quiet) if self._in_grace else due

    # -- for people -----------------------------------------------------------------------------------------------

    def inside(self, name: bytes, now: float) -> list[tuple[bytes, float]]:
        """Return the holders' tokens and ends. In the grace period, an empty token stands for holders still unknown."""
        lock = self._locks.get(name)
        unknown = [(b"", self.quiet)] if now < self.quiet else []
        return unknown if lock is None else unknown + [(lease.token, lease.ends) for lease in lock.inside.values()]

    def names(self, start: int, end: int) -> list[bytes]:
        return list(islice(self._locks, start, end))

    def rows(self, name: bytes, now: float) -> Iterator[tuple[bytes, str, int, float, float, int]]:
        """Return a row per holder: token, `host:pid`, fence, seconds held, seconds left, and the number of waiters."""
        lock = self._locks.get(name)
        if lock is not None:
            waiting = 0 if lock.queue is None else len(lock.queue)
            for each in lock.inside.values():
                yield each.token, each.session.holder, each.fence, now - each.since, each.ends - now, waiting

    # -- steps ------------------------------------------------------------------------------------------------------

    def _check(self, lease: float, room: float) -> None:
        if not 0 < lease <= self.limits.longest:
            more = f": start it with stampede serve --longest {lease:g}s" if lease > 0 else ""
            raise Refused(f"a lease of {lease:g} s: it grants {self.limits.longest:g} s at most{more}")
        if not room >= 1:
            raise Refused(f"a room of {room}: it must be at least 1")

    def _let_in(self, lock: _Lock, token: bytes, session: ClientSession, room: float, now: float) -> _Lease:
        self.fence += 1
        lease = _Lease(lock, token, session, room, self.fence, now, now)
        self._enter(lock, lease)
        return lease

    def _enter(self, lock: _Lock, lease: _Lease) -> None:
        lock.enter(lease)
        lease.session.holds.add(lease)
        self.leases += 1
        self.granted += 1

    def _restore(
        self, session: ClientSession, name: bytes, token: bytes, room: float, fence: int, now: float
    ) -> _Lease | None:
        """Restore a lease that an earlier broker granted, because its holder renews it in the grace period. If two
        holders exclude each other, the higher fence wins: the other lease must have ended before that grant."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = _Lock(name)
        while not lock.fits(room):
            oldest = min(lock.inside.values(), key=lambda lease: lease.fence)
            if oldest.fence > fence:
                return None
            self._remove(lock, oldest)
        if lock.queue is not None and (waiter := lock.queue.pop(token, None)) is not None:
            waiter.session.waits.pop(waiter, None)
        lease = _Lease(lock, token, session, room, fence, now, now)
        self._enter(lock, lease)
        self.fence = max(self.fence, fence)
        return lease

    def _confirm(self, lease: _Lease, session: ClientSession) -> None:
        """Note that the holder knows of its lease, and bind it to its session."""
        lease.taken = True
        if lease.session is not session:  # another process presents the token: it was handed over
            lease.session.holds.discard(lease)
            lease.session = session
            session.holds.add(lease)

    def _set_end(self, lease: _Lease, ends: float) -> None:
        before, lease.ends = lease.ends, ends
        if ends < before or before == lease.since:  # otherwise it is in the heap already, at an earlier time
            self._push(lease)

    def _push(self, lease: _Lease) -> None:
        self._number += 1
        heapq.heappush(self._due, (lease.ends, self._number, lease))
        if len(self._due) > 2 * self.leases + _COMPACT:  # released leases would stay in the heap until their ends
            latest = {id(each[2]): each for each in self._due if each[2].lock is not None and each[0] <= each[2].ends}
            self._due = list(latest.values())
            heapq.heapify(self._due)

    def _queue(self, lock: _Lock, token: bytes, session: ClientSession, room: float) -> None:
        """Give this token a place in the queue, unless it has one."""
        queue = lock.queue
        if queue is None:
            queue = lock.queue = OrderedDict()
        waiter = queue.get(token)
        if waiter is not None and waiter.session is session:
            return
        if waiter is None and len(queue) >= self.limits.queue:
            raise Refused(f"{len(queue)} wait for this lock already, the maximum: see --max-queue")
        if len(session.waits) >= self.limits.queue:
            raise Refused(f"this process waits for {len(session.waits)} locks already, the maximum: see --max-queue")
        if waiter is not None:  # another process takes over this place
            waiter.session.waits.pop(waiter, None)
        waiter = queue[token] = _Waiter(token, session, room)
        session.waits[waiter] = lock

    def _busy(self, lock: _Lock, now: float) -> BrokerReply:
        if lock.inside:
            latest = next(reversed(lock.inside.values()))
            return BrokerReply(False, 0, latest.token, max(latest.ends - now, 0.0))
        if now < self.quiet:
            return BrokerReply(False, 0, b"", self.quiet - now)
        first = next(iter(lock.queue.values()), None) if lock.queue else None
        return BrokerReply(False, 0, b"" if first is None else first.token, TURN)

    def _free(self, lock: _Lock, lease: _Lease, now: float) -> None:
        self._remove(lock, lease)
        if lock.queue:
            self._advance(lock, now)
        if lock.watchers:
            self._notify_watchers(lock)
        self._drop_if_idle(lock)

    def _remove(self, lock: _Lock, lease: _Lease) -> None:
        lock.leave(lease)
        lease.lock = None
        lease.session.holds.discard(lease)
        self.leases -= 1

    def _advance(self, lock: _Lock, now: float) -> None:
        """Let in the waiters whose turn it is, and notify them. They have TURN seconds to confirm."""
        queue = lock.queue
        while queue and now >= self.quiet:
            first = next(iter(queue.values()))
            if not lock.fits(first.room):
                return
            del queue[first.token]
            first.session.waits.pop(first, None)
            lease = self._let_in(lock, first.token, first.session, first.room, now)
            self._set_end(lease, now + TURN)
            self.notices.append(Notice(first.session, True, first.token))

    def _notify_watchers(self, lock: _Lock) -> None:
        watchers, lock.watchers = lock.watchers, None
        for session in watchers or ():
            self.notices.append(Notice(session, False, lock.name))

    def _drop_if_idle(self, lock: _Lock) -> None:
        if lock.idle and self._locks.get(lock.name) is lock:
            del self._locks[lock.name]
