"""What a broker decides, as a machine that takes the time as an argument: nothing in here sends, sleeps or has a clock.

A lock is who is inside, and who waits, in the order of arrival. Who asks may enter if all who are inside then, itself
included, are no more than the room of each of them; and if nobody waits who came before it. Who misses its turn, or is
not heard of, is passed over, and is behind all others when it asks again. Each question
costs the same however many locks there are, and however many wait. Leaving a bulkhead looks at all who are inside.

What belongs to a client is bound to its session, and ends with that. `Machine.told` collects what others are to be told
of: whose turn has come, and what has come free.
"""

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
"""Seconds for which a lock that came free is kept for the one whose turn it is, and who has been told so."""

_COMPACT = 1024


class Refused(Exception):
    """More than there may be. The text is for people."""


class Capacity(NamedTuple):
    """What one broker bears."""

    longest: float = 30.0  # seconds of a lease
    clients: int = 10_000
    locks: int = 1_000_000  # in which somebody is, or for which somebody waits
    queue: int = 10_000  # who wait for one lock
    limits: int = 10_000  # that are in use


LIMITS = Capacity()


class BrokerReply(NamedTuple):
    """Granted, with a fence; or refused, with the token of one who is inside, and the seconds that one has left."""

    granted: bool
    fence: int
    token: bytes = b""
    left: float = 0.0


class Notice(NamedTuple):
    """What a session is told without having asked: of its token, whose turn has come; or of a name that came free."""

    session: ClientSession
    turn: bool
    what: bytes


class ClientSession:
    """A client's process."""

    __slots__ = ("gone", "heard", "holder", "holds", "id", "over", "waits")

    def __init__(self, id: bytes, holder: str, now: float) -> None:
        self.id = id
        self.holder = holder  # `host:pid`
        self.heard = now
        self.gone = inf  # when its connection was found closed
        self.over = False
        self.holds: set[_Lease] = set()
        self.waits: dict[_Waiter, _Lock] = {}

    @property
    def idle(self) -> bool:
        return not self.holds and not self.waits


@dataclass(slots=True, eq=False)
class _Lease:
    lock: _Lock | None  # None: it has ended
    token: bytes
    session: ClientSession
    room: float
    fence: int
    since: float
    ends: float
    taken: bool = False  # its holder knows of it


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
        self.least = inf  # the least room of those inside
        self.queue: OrderedDict[bytes, _Waiter] | None = None
        self.watchers: dict[ClientSession, None] | None = None

    def fits(self, room: float) -> bool:
        return len(self.inside) < min(room, self.least)

    def enter(self, lease: _Lease) -> None:
        self.inside[lease.token] = lease
        self.least = min(self.least, lease.room)

    def leave(self, lease: _Lease) -> None:
        del self.inside[lease.token]
        if lease.room == self.least < inf:  # readers set no limit, and may be many
            self.least = min((each.room for each in self.inside.values()), default=inf)

    @property
    def idle(self) -> bool:
        return not self.inside and not self.queue and not self.watchers


class Machine:
    """All locks of one broker. Until `quiet`, its predecessor's may stand: nothing is granted, but what a holder renews
    is its own again. `fence`: all that are granted are above it."""

    def __init__(self, now: float, *, quiet: float, fence: int, limits: Capacity = LIMITS) -> None:
        self.limits = limits
        self.told: list[Notice] = []
        self.sessions: dict[bytes, ClientSession] = {}
        self.fence = fence
        self.quiet = now + quiet
        self.leases = 0
        self.granted = 0  # since it began, for people
        self._locks: dict[bytes, _Lock] = {}
        self._due: list[_Due] = []
        self._number = 0
        self._hushed = quiet > 0

    # -- clients --------------------------------------------------------------------------------------------------

    def hello(self, id: bytes, holder: str, now: float) -> tuple[ClientSession, bool]:
        """The session of a client, and whether it was known: if not, nothing is its own here."""
        session = self.sessions.get(id)
        if session is not None:
            session.heard, session.gone = now, inf
            return session, True
        if len(self.sessions) >= self.limits.clients:
            raise Refused(f"it has {len(self.sessions)} clients, and may have no more: see --max-clients")
        session = self.sessions[id] = ClientSession(id, holder, now)
        return session, False

    def end(self, session: ClientSession, now: float) -> None:
        """Its process is no more: all that it had is free."""
        self.sessions.pop(session.id, None)
        session.over = True
        self.give_up(session, now)
        for lease in list(session.holds):
            if lease.lock is not None:
                self._free(lease.lock, lease, now)

    def give_up(self, session: ClientSession, now: float) -> None:
        """Nothing is heard of it: nobody waits behind it."""
        waits, session.waits = session.waits, {}
        for waiter, lock in waits.items():
            if lock.queue is not None and lock.queue.get(waiter.token) is waiter:
                del lock.queue[waiter.token]
        for lock in dict.fromkeys(waits.values()):  # not before: its own next one would be called
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
            raise Refused(f"it has {self.leases} leases, and may have no more: see --max-locks")
        if lock is None:
            lock = self._locks[name] = _Lock(name)
        if own is None and not lock.queue and now >= self.quiet and lock.fits(room):
            own = self._entered(lock, token, session, room, now)
        elif own is None and waits:
            self._queue(lock, token, session, room)
        if own is not None:
            self._take(own, session)
            self._last(own, now + lease)
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
            own = self._again(session, name, token, room, fence, now)
        if own is None:
            return False
        self._take(own, session)
        self._last(own, now + lease)
        return True

    def hand_over(self, name: bytes, token: bytes, lease: float, now: float) -> bool:
        """It stands without a client, for whoever has its token."""
        self._check(lease, 1.0)
        self.pass_time(now)
        lock = self._locks.get(name)
        own = None if lock is None else lock.inside.get(token)
        if own is None:
            return False
        self._take(own, own.session)
        own.session.holds.discard(own)
        self._last(own, now + lease)
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
        """Have it told when somebody leaves. False: this token isn't inside, by now."""
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
        """What is over is over."""
        due = self._due
        while due and due[0][0] <= now:
            _, _, lease = heapq.heappop(due)
            if lease.lock is None:
                continue
            if lease.ends > now:
                self._push(lease)
            else:
                self._free(lease.lock, lease, now)
        if self._hushed and now >= self.quiet:
            self._hushed = False
            for lock in list(self._locks.values()):
                self._advance(lock, now)
                self._tell_watchers(lock)
                self._drop_if_idle(lock)

    def next_due(self) -> float:
        """When to pass time, at the latest."""
        due = self._due[0][0] if self._due else inf
        return min(due, self.quiet) if self._hushed else due

    # -- for people -----------------------------------------------------------------------------------------------

    def inside(self, name: bytes, now: float) -> list[tuple[bytes, float]]:
        """Tokens, and when they end; at first, until it is known of all, one without a token."""
        lock = self._locks.get(name)
        unknown = [(b"", self.quiet)] if now < self.quiet else []
        return unknown if lock is None else unknown + [(lease.token, lease.ends) for lease in lock.inside.values()]

    def names(self, start: int, end: int) -> list[bytes]:
        return list(islice(self._locks, start, end))

    def rows(self, name: bytes, now: float) -> Iterator[tuple[bytes, str, int, float, float, int]]:
        """Of each who is inside: the token, the holder, the fence, seconds held and left, and how many wait."""
        lock = self._locks.get(name)
        if lock is not None:
            waiting = 0 if lock.queue is None else len(lock.queue)
            for each in lock.inside.values():
                yield each.token, each.session.holder, each.fence, now - each.since, each.ends - now, waiting

    # -- how ------------------------------------------------------------------------------------------------------

    def _check(self, lease: float, room: float) -> None:
        if not 0 < lease <= self.limits.longest:
            more = f": start it with stampede serve --longest {lease:g}s" if lease > 0 else ""
            raise Refused(f"a lease of {lease:g} s: it grants {self.limits.longest:g} s at most{more}")
        if not room >= 1:
            raise Refused(f"a room of {room}")

    def _entered(self, lock: _Lock, token: bytes, session: ClientSession, room: float, now: float) -> _Lease:
        self.fence += 1
        lease = _Lease(lock, token, session, room, self.fence, now, now)
        self._enter(lock, lease)
        return lease

    def _enter(self, lock: _Lock, lease: _Lease) -> None:
        lock.enter(lease)
        lease.session.holds.add(lease)
        self.leases += 1
        self.granted += 1

    def _again(
        self, session: ClientSession, name: bytes, token: bytes, room: float, fence: int, now: float
    ) -> _Lease | None:
        """What a predecessor has granted, if its holder says so in time. Of two who can't both be right it is the one
        who came later: the other's lease had ended, or it would not have come in."""
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

    def _take(self, lease: _Lease, session: ClientSession) -> None:
        """It is heard of."""
        lease.taken = True
        if lease.session is not session:  # its token was handed over
            lease.session.holds.discard(lease)
            lease.session = session
            session.holds.add(lease)

    def _last(self, lease: _Lease, ends: float) -> None:
        before, lease.ends = lease.ends, ends
        if ends < before or before == lease.since:  # else it is in the queue, and is looked at in time
            self._push(lease)

    def _push(self, lease: _Lease) -> None:
        self._number += 1
        heapq.heappush(self._due, (lease.ends, self._number, lease))
        if len(self._due) > 2 * self.leases + _COMPACT:  # what was given back would stay until its time
            latest = {id(each[2]): each for each in self._due if each[2].lock is not None and each[0] <= each[2].ends}
            self._due = list(latest.values())
            heapq.heapify(self._due)

    def _queue(self, lock: _Lock, token: bytes, session: ClientSession, room: float) -> None:
        """Give it its place."""
        queue = lock.queue
        if queue is None:
            queue = lock.queue = OrderedDict()
        waiter = queue.get(token)
        if waiter is not None and waiter.session is session:
            return
        if waiter is None and len(queue) >= self.limits.queue:
            raise Refused(f"{len(queue)} wait for this lock, and no more may: see --max-queue")
        if len(session.waits) >= self.limits.queue:
            raise Refused(f"this process waits for {len(session.waits)} locks, and for no more it may: see --max-queue")
        if waiter is not None:  # another process goes on waiting in this place
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
            self._tell_watchers(lock)
        self._drop_if_idle(lock)

    def _remove(self, lock: _Lock, lease: _Lease) -> None:
        lock.leave(lease)
        lease.lock = None
        lease.session.holds.discard(lease)
        self.leases -= 1

    def _advance(self, lock: _Lock, now: float) -> None:
        """Let in those whose turn it is, and tell them. They have a moment to say that they heard."""
        queue = lock.queue
        while queue and now >= self.quiet:
            first = next(iter(queue.values()))
            if not lock.fits(first.room):
                return
            del queue[first.token]
            first.session.waits.pop(first, None)
            lease = self._entered(lock, first.token, first.session, first.room, now)
            self._last(lease, now + TURN)
            self.told.append(Notice(first.session, True, first.token))

    def _tell_watchers(self, lock: _Lock) -> None:
        watchers, lock.watchers = lock.watchers, None
        for session in watchers or ():
            self.told.append(Notice(session, False, lock.name))

    def _drop_if_idle(self, lock: _Lock) -> None:
        if lock.idle and self._locks.get(lock.name) is lock:
            del self._locks[lock.name]
