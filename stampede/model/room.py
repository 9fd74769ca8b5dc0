"""Who is inside a lock, who waits for it, and what each question changes about that: pure, the time is an argument.

Each caller names a number, its room: how many may be inside together as far as that caller is concerned, itself
included. It is 1 for an exclusive lock, `inf` for a shared one, n for a place of a bulkhead. A caller may enter if all
that are inside then are no more than the least of their numbers, and if nobody waits who came before it. So readers do
not pass a writer that waits. A caller that does not wait has no place in the queue, and passes nobody in it.

When a place comes free, the first waiters are called, as many as may be inside together. For each of them the place is
kept for `TURN` seconds. A waiter that does not come by then is passed over. So is a first waiter that has to wait for
those inside, has not been heard of lately and does not answer when it is called. A waiter that is passed over keeps its
place in the queue: as soon as it asks again, those that came later are behind it.

A transition returns the state afterwards, the answer, and whose waiters are to be woken. An engine stores the state and
wakes the waiters. Postgres decides by the same rules in its own functions, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from math import inf
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, TypeAlias, TypeVar

from stampede.model.backoff import FARTHEST, look_again
from stampede.model.ports import Busy, Granted

__all__ = [
    "EMPTY",
    "Change",
    "Inside",
    "Queued",
    "Room",
    "Waiting",
    "Wakeups",
    "acquire",
    "admitted",
    "awaited",
    "dump",
    "find",
    "load",
    "release",
    "renew",
]  # fmt: skip

T = TypeVar("T")

TURN = 1.0
"""Seconds for which a place is kept for a waiter that was called: its event loop may be busy just now."""

SILENCE = 2.0
"""Seconds after which a first waiter that has not been heard of is called, to say that it lives. Otherwise a dead
waiter would keep out all that may enter beside those inside."""

FORGOTTEN = 4 * FARTHEST
"""Seconds after which a waiter that has not been heard of loses its place."""


SAFETY = 1.0
"""Seconds between two looks of a waiter that is not woken. Waiters behind it look more rarely."""

AFTER = 0.1
"""Seconds between the looks of the first waiter, the second and so on, after a lease that has ended by itself."""


@dataclass(slots=True)
class Queued(Busy):
    """Busy, and the caller has a place in the queue."""

    own: bytes = field(default=b"", kw_only=True)  # its token


@dataclass(slots=True)
class Inside:
    """A holder, by its token."""

    token: bytes
    end: float  # of its lease
    lease: float  # the seconds for which it was granted or renewed the last time
    room: float
    fence: int
    holder: str = ""


@dataclass(slots=True)
class Waiting:
    """A waiter, by its token."""

    token: bytes
    room: float
    heard: float  # when it asked last
    turn: float | None = None  # it was called, and its place is kept until then
    due: float = inf  # it was called, and is passed over from then on


@dataclass(slots=True)
class Room:
    """All that is known of one lock. Its holders and its queue are never changed in place."""

    inside: Sequence[Inside] = ()
    queue: Mapping[bytes, Waiting] = field(default_factory=dict)  # by token, in the order of arrival
    fence: int = 0  # the last one
    # Time changes nothing between these two moments: a queue of a thousand is not read at each question.
    looked: float = field(default=inf, compare=False)
    until: float = field(default=-inf, compare=False)

    @property
    def end(self) -> float:
        """The moment from which only the fence matters."""
        return max(
            [-inf, *(each.end for each in self.inside), *(each.heard + FORGOTTEN for each in self.queue.values())]
        )

    @property
    def idle(self) -> bool:
        return not self.inside and not self.queue


EMPTY = Room()


class Wakeups(NamedTuple):
    """Whose waiters are to be woken, by tokens."""

    called: Sequence[bytes] = ()  # waiters whose turn has come, or that are to say that they live
    left: Sequence[bytes] = ()  # those that are inside no more, or have missed their turn


NOBODY = Wakeups()

Change: TypeAlias = tuple[Room, T, Wakeups]


def fits(room: float, rooms: Iterable[float]) -> bool:
    """Return whether a caller with this room may join those with these."""
    there = [room, *rooms]
    return len(there) <= min(there)


def admitted(rooms: Iterable[float]) -> int:
    """Return how many of a queue may be inside together, where each has a room, and none passes another."""
    least, count = inf, 0
    for room in rooms:
        least = min(least, room)
        if count >= least:
            break
        count += 1
    return count


def find(those: Iterable[Inside], token: bytes) -> Inside | None:
    """Return the holder with this token."""
    for each in those:
        if each.token == token:
            return each
    return None


def acquire(
    was: Room,
    token: bytes,
    lease: float,
    room: float,
    now: float,
    *,
    waits: bool = False,
    least: int = 0,
    holder: str = "",
) -> Change[Granted | Busy]:
    """Enter, or learn who is inside. `least`: a new fence is no less than this."""
    it, told = _passed(was, now)
    queue = it.queue
    if it.inside or queue:  # else nobody has to be looked for
        mine, own = find(it.inside, token), queue.get(token)
        if mine is not None:  # the reply to an earlier question was lost
            return _renewed(it, mine, lease, now, holder), Granted(fence=mine.fence), told
        if own is None:
            enters = all(each.due <= now for each in queue.values()) and fits(room, [each.room for each in it.inside])
        else:
            if own.turn is None:  # it may have been passed over, and be the first again
                it = _with_queue(it, {**queue, token: Waiting(token, own.room, now)}, now)
                if own.due < inf:
                    it, called = _called(it, now)
                    told = Wakeups([*told.called, *called], told.left)
                own = it.queue[token]
            enters, room = own.turn is not None, own.room
        if not enters:
            busy = _busy(it, now)
            if own is None and not waits:
                return it, busy, told
            if own is None:
                it = _with_queue(it, {**queue, token: Waiting(token, room, now)}, now)
                it.until = min(it.until, now + SILENCE)
            return it, Queued(busy.token, busy.lease, own=token), told
        if own is not None:
            queue = _without(it.queue, token)
    fence = max(it.fence + 1, least)
    inside = [*it.inside, Inside(token, now + lease, lease, room, fence, holder)]
    return Room(inside, queue, fence, now, min(it.until, now + lease)), Granted(fence=fence), told


def renew(was: Room, token: bytes, lease: float, now: float, *, holder: str | None = None) -> Change[bool]:
    """Let the lease last for so long from now. `holder`: whose it is from now on. False: it is lost."""
    it, told = _passed(was, now)
    mine = find(it.inside, token)
    if mine is None:
        return it, False, told
    return _renewed(it, mine, lease, now, mine.holder if holder is None else holder), True, told


def release(was: Room, token: bytes, now: float) -> Change[bool]:
    """Leave, or give up the place in the queue. False: it was not inside."""
    it, told = _passed(was, now)
    mine = find(it.inside, token)
    if mine is not None:
        it = Room([each for each in it.inside if each is not mine], it.queue, it.fence, now, it.until)
    elif token in it.queue:
        it = _with_queue(it, _without(it.queue, token), now)
    else:
        return it, False, told
    called = list[bytes]()
    if it.queue:
        it, called = _called(it, now)
    return it, mine is not None, Wakeups([*told.called, *called], [*told.left, token])


def awaited(it: Room, busy: Busy, now: float) -> tuple[bytes, float] | None:
    """Return what a caller that was refused waits for: to be woken by this token, or so many seconds. None: it may ask
    again at once, since something has happened."""
    if not isinstance(busy, Queued):
        mine, own = find(it.inside, busy.token), it.queue.get(busy.token)
        stands = mine.end > now if mine is not None else own is not None and own.turn is not None
        return (busy.token, min(max(busy.lease, 0.0), SAFETY)) if stands else None
    own = it.queue.get(busy.own)
    if own is None or own.turn is not None or own.due < inf:
        return None
    ends = [each.end for each in it.inside] + [each.turn for each in it.queue.values() if each.turn]
    left = max(min(ends, default=now) - now, 0.0)
    return busy.own, look_again(list(it.queue).index(busy.own), left, AFTER, SAFETY)


# -- what time does -----------------------------------------------------------------------------------------------


def _passed(was: Room, now: float) -> tuple[Room, Wakeups]:
    """Drop those whose time is over, and call the next. A clock that was set back lengthens no lease or turn."""
    if was.looked <= now < was.until:
        return was, NOBODY
    it, left, queue = was, list[bytes](), was.queue.values()
    if not all(now < each.end <= now + each.lease for each in was.inside):
        inside = [replace(each, end=min(each.end, now + each.lease)) for each in was.inside if each.end > now]
        left = [each.token for each in was.inside if each.end <= now]
        it = Room(inside, was.queue, was.fence)
    soon, forgotten = now + TURN, now - FORGOTTEN
    for each in queue:
        turn, due = each.turn, each.due
        if not forgotten < each.heard <= now or (not now < turn <= soon if turn is not None else soon < due < inf):
            left += [each.token for each in queue if each.heard <= forgotten or _is_late(each, now)]
            it = Room(
                it.inside, {each.token: _in_time(each, now) for each in queue if each.heard > forgotten}, was.fence
            )
            break
    it.looked, it.until = (
        now,
        min([inf, *(each.end for each in it.inside), *(_next(each, now) for each in it.queue.values())]),
    )
    it, called = _called(it, now)
    return it, Wakeups(called, left) if called or left else NOBODY


def _next(each: Waiting, now: float) -> float:
    """Return when time changes something for this waiter, whoever is before it."""
    soonest = min(each.heard + FORGOTTEN, inf if each.turn is None else each.turn)
    return min(soonest, each.due) if each.due > now else soonest


def _is_late(each: Waiting, now: float) -> bool:
    return each.turn is not None and each.turn <= now


def _in_time(each: Waiting, now: float) -> Waiting:
    """Return the waiter as it is by now. One that did not come in its turn is passed over since."""
    heard, soon = min(each.heard, now), now + TURN
    if each.turn is None:
        return Waiting(each.token, each.room, heard, None, each.due if each.due == inf else min(each.due, soon))
    if each.turn <= now:
        return Waiting(each.token, each.room, heard, None, each.turn)
    return Waiting(each.token, each.room, heard, min(each.turn, soon))


def _called(it: Room, now: float) -> tuple[Room, list[bytes]]:
    """Call the first waiters, as many as may be inside together with those inside and those called before. If the first
    of the others has not been heard of lately, call it, too, to learn whether it lives."""
    new, called, until = dict[bytes, Waiting](), list[bytes](), it.until
    rooms = [each.room for each in it.inside]
    rooms += [each.room for each in it.queue.values() if each.turn is not None]
    for each in it.queue.values():
        if each.turn is not None or each.due <= now:
            continue
        fit = not rooms or fits(each.room, rooms)
        if fit:
            new[each.token] = Waiting(each.token, each.room, each.heard, now + TURN)
        elif each.due == inf and each.heard + SILENCE <= now:
            new[each.token] = Waiting(each.token, each.room, each.heard, None, now + TURN)
        else:
            until = min(until, each.heard + SILENCE) if each.due == inf else until
            break
        until = min(until, now + TURN)
        called.append(each.token)
        rooms.append(each.room)
        if not fit:
            break
    it = _with_queue(it, {**it.queue, **new}, now) if new else it
    it.until = until
    return it, called


def _busy(it: Room, now: float) -> Busy:
    """One that keeps the caller out: the first of those inside to end, or else the first that was called."""
    ends = [(each.end, each.token) for each in it.inside]
    ends = ends or [(each.turn, each.token) for each in it.queue.values() if each.turn is not None][:1]
    end, token = min(ends)  # if there were none, the caller would have been let in
    return Busy(token, end - now)


def _without(queue: Mapping[bytes, Waiting], token: bytes) -> Mapping[bytes, Waiting]:
    rest = dict(queue)
    del rest[token]
    return rest


def _with_queue(it: Room, queue: Mapping[bytes, Waiting], now: float) -> Room:
    return Room(it.inside, queue, it.fence, now, it.until)


def _renewed(it: Room, mine: Inside, lease: float, now: float, holder: str) -> Room:
    again = replace(mine, end=now + lease, lease=lease, holder=holder)
    inside = [again if each is mine else each for each in it.inside]
    return Room(inside, it.queue, it.fence, now, min(it.until, again.end))


# -- as bytes -----------------------------------------------------------------------------------------------------

_HEAD, _INSIDE, _WAITING = Struct(">BQII"), Struct(">HHdddQ"), Struct(">Hdddd")
_VERSION = 1


def dump(room: Room) -> bytes:
    """Return the state as bytes, for engines that store it whole."""
    parts = [_HEAD.pack(_VERSION, room.fence, len(room.inside), len(room.queue))]
    for one in room.inside:
        holder = one.holder.encode("utf-8", "replace")
        numbers = len(one.token), len(holder), one.end, one.lease, one.room, one.fence
        parts += [_INSIDE.pack(*numbers), one.token, holder]
    for each in room.queue.values():
        turn = -inf if each.turn is None else each.turn
        parts += [_WAITING.pack(len(each.token), each.room, each.heard, turn, each.due), each.token]
    return b"".join(parts)


def load(raw: bytes) -> Room:
    """Return the state that these bytes hold. ValueError: they are not from `dump`."""
    data = BytesIO(raw)

    def part(length: int) -> bytes:
        found = data.read(length)
        if len(found) < length:
            raise ValueError("they end too early")
        return found

    def inside() -> Inside:
        length, also, end, lease, room, fence = _INSIDE.unpack(data.read(_INSIDE.size))
        return Inside(part(length), end, lease, room, fence, part(also).decode())

    def waiting() -> Waiting:
        length, room, heard, turn, due = _WAITING.unpack(data.read(_WAITING.size))
        return Waiting(part(length), room, heard, None if turn == -inf else turn, due)

    try:
        version, fence, holders, waiters = _HEAD.unpack(data.read(_HEAD.size))
        if version != _VERSION:
            raise ValueError(f"their version is {version}")
        holding = [inside() for _ in range(holders)]
        queue = [waiting() for _ in range(waiters)]
        it = Room(holding, {each.token: each for each in queue}, fence)
    except (StructError, ValueError) as error:
        raise ValueError(f"these {len(raw)} bytes are not the state of a lock: {error}") from error
    if data.read(1):
        raise ValueError(f"these {len(raw)} bytes are more than the state of a lock")
    return it
