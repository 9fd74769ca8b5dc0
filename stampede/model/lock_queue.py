"""The holders of a lock, its queue of waiters, and how each question changes them. Pure: the time is an argument.

Each caller names a number, its room: how many holders it allows inside together, itself included. The room is 1 for an
exclusive lock, `inf` for a shared one, n for a place of a bulkhead. A caller may enter if the number of holders does
not exceed the smallest of their rooms then, and if no waiter came before it. So readers do not pass a writer that
waits. A caller that does not wait has no place in the queue, and never passes a waiter.

When a place becomes free, the first waiters are called, as many as may be inside together. The place of each is
reserved for `TURN` seconds. A waiter that does not ask again in this time is passed over. The same happens to a first
waiter that has to wait for the holders, has not asked lately, and does not answer when it is called. A waiter that is
passed over keeps its place in the queue: as soon as it asks again, later ones are behind it.

A transition returns the next state, the answer, and the waiters to wake. An engine stores the state, and wakes them.
Postgres applies the same rules in its own functions, and a test compares the two."""

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
"""Seconds for which a place is reserved for a waiter that was called: its event loop may be busy at the moment."""

SILENCE = 2.0
"""Seconds after which a first waiter that has not asked is called, to see if it is alive. Otherwise a dead waiter would
keep out all callers that could join the holders."""

FORGOTTEN = 4 * FARTHEST
"""Seconds after which a waiter that has not asked loses its place in the queue."""


SAFETY = 1.0
"""Seconds between two looks of the first waiter, if it is not woken. Waiters behind it look more rarely."""

AFTER = 0.1
"""Seconds between the looks of the first waiter, the second and so on, after a lease has ended without a release."""


@dataclass(slots=True)
class Queued(Busy):
    """The answer Busy to a caller that has a place in the queue."""

    own: bytes = field(default=b"", kw_only=True)  # the caller's token


@dataclass(slots=True)
class Inside:
    """One holder of the lock."""

    token: bytes
    end: float  # of its lease
    lease: float  # the seconds for which the lease was last granted or renewed
    room: float
    fence: int
    holder: str = ""


@dataclass(slots=True)
class Waiting:
    """One waiter in the queue."""

    token: bytes
    room: float
    heard: float  # when it last asked
    turn: float | None = None  # if it was called to enter: the moment until which its place is reserved
    due: float = inf  # if it was called to answer: the moment from which it is passed over


@dataclass(slots=True)
class Room:
    """The state of one lock. Its holders and its queue are never changed in place."""

    inside: Sequence[Inside] = ()
    queue: Mapping[bytes, Waiting] = field(default_factory=dict)  # by token, in the order of arrival
    fence: int = 0  # the last one that was granted
    # Between these two moments time alone changes nothing. So a question need not read a queue of a thousand.
    looked: float = field(default=inf, compare=False)
    until: float = field(default=-inf, compare=False)

    @property
    def end(self) -> float:
        """The moment from which the lock has no holders and no waiters, so that only the fence has to be stored."""
        return max(
            [-inf, *(each.end for each in self.inside), *(each.heard + FORGOTTEN for each in self.queue.values())]
        )

    @property
    def idle(self) -> bool:
        return not self.inside and not self.queue


EMPTY = Room()


class Wakeups(NamedTuple):
    """The tokens whose waiters an engine has to wake."""

    called: Sequence[bytes] = ()  # waiters whose turn has come, or that have to answer
    left: Sequence[bytes] = ()  # holders that have left, and waiters that missed their turn


NOBODY = Wakeups()

Change: TypeAlias = tuple[Room, T, Wakeups]


def fits(room: float, rooms: Iterable[float]) -> bool:
    """Return whether a caller with this room may join holders with these rooms."""
    there = [room, *rooms]
    return len(there) <= min(there)


def admitted(rooms: Iterable[float]) -> int:
    """Return how many from the front of a queue may be inside together. `rooms` has the room of each."""
    least, count = inf, 0
    for room in rooms:
        least = min(least, room)
        if count >= least:
            break
        count += 1
    return count


def find(holders: Iterable[Inside], token: bytes) -> Inside | None:
    """Return the holder with this token."""
    for each in holders:
        if each.token == token:
            return each
    return None


def acquire(
    before: Room,
    token: bytes,
    lease: float,
    room: float,
    now: float,
    *,
    waits: bool = False,
    least: int = 0,
    holder: str = "",
) -> Change[Granted | Busy]:
    """Enter, or learn which holder keeps the caller out. A new fence is at least `least`."""
    state, wakeups = _passed(before, now)
    queue = state.queue
    if state.inside or queue:
        mine, own = find(state.inside, token), queue.get(token)
        if mine is not None:  # the reply to an earlier question was lost
            return _renewed(state, mine, lease, now, holder), Granted(fence=mine.fence), wakeups
        if own is None:
            enters = all(each.due <= now for each in queue.values()) and fits(
                room, [each.room for each in state.inside]
            )
        else:
            if own.turn is None:  # it may have been passed over, and become the first again now
                state = _with_queue(state, {**queue, token: Waiting(token, own.room, now)}, now)
                if own.due < inf:
                    state, called = _called(state, now)
                    wakeups = Wakeups([*wakeups.called, *called], wakeups.left)
                own = state.queue[token]
            enters, room = own.turn is not None, own.room
        if not enters:
            busy = _busy(state, now)
            if own is None and not waits:
                return state, busy, wakeups
            if own is None:
                state = _with_queue(state, {**queue, token: Waiting(token, room, now)}, now)
                state.until = min(state.until, now + SILENCE)
            return state, Queued(busy.token, busy.lease, own=token), wakeups
        if own is not None:
            queue = _without(state.queue, token)
    fence = max(state.fence + 1, least)
    inside = [*state.inside, Inside(token, now + lease, lease, room, fence, holder)]
    return Room(inside, queue, fence, now, min(state.until, now + lease)), Granted(fence=fence), wakeups


def renew(before: Room, token: bytes, lease: float, now: float, *, holder: str | None = None) -> Change[bool]:
    """Extend the lease to so many seconds from now. The answer is False if it is lost. `holder` is the new holder's
    name. None: it stays the same."""
    state, wakeups = _passed(before, now)
    mine = find(state.inside, token)
    if mine is None:
        return state, False, wakeups
    return _renewed(state, mine, lease, now, mine.holder if holder is None else holder), True, wakeups


def release(before: Room, token: bytes, now: float) -> Change[bool]:
    """Leave the lock, or the queue. The answer is False if this token was not inside."""
    state, wakeups = _passed(before, now)
    mine = find(state.inside, token)
    if mine is not None:
        state = Room([each for each in state.inside if each is not mine], state.queue, state.fence, now, state.until)
    elif token in state.queue:
        state = _with_queue(state, _without(state.queue, token), now)
    else:
        return state, False, wakeups
    called = list[bytes]()
    if state.queue:
        state, called = _called(state, now)
    return state, mine is not None, Wakeups([*wakeups.called, *called], [*wakeups.left, token])


def awaited(state: Room, busy: Busy, now: float) -> tuple[bytes, float] | None:
    """Return what a refused caller waits for: a wake-up of this token, at most for so many seconds. None means that the
    caller may ask again at once, because something has changed."""
    if not isinstance(busy, Queued):
        mine, own = find(state.inside, busy.token), state.queue.get(busy.token)
        stands = mine.end > now if mine is not None else own is not None and own.turn is not None
        return (busy.token, min(max(busy.lease, 0.0), SAFETY)) if stands else None
    own = state.queue.get(busy.own)
    if own is None or own.turn is not None or own.due < inf:
        return None
    ends = [each.end for each in state.inside] + [each.turn for each in state.queue.values() if each.turn]
    left = max(min(ends, default=now) - now, 0.0)
    return busy.own, look_again(list(state.queue).index(busy.own), left, AFTER, SAFETY)


# -- what changes as time passes ----------------------------------------------------------------------------------


def _passed(before: Room, now: float) -> tuple[Room, Wakeups]:
    """Drop holders and waiters whose time is over, and call the next. If the clock was set back, no lease or turn
    becomes longer than it was granted."""
    if before.looked <= now < before.until:
        return before, NOBODY
    state, left, queue = before, list[bytes](), before.queue.values()
    if not all(now < each.end <= now + each.lease for each in before.inside):
        inside = [replace(each, end=min(each.end, now + each.lease)) for each in before.inside if each.end > now]
        left = [each.token for each in before.inside if each.end <= now]
        state = Room(inside, before.queue, before.fence)
    soon, forgotten = now + TURN, now - FORGOTTEN
    for each in queue:
        turn, due = each.turn, each.due
        if not forgotten < each.heard <= now or (not now < turn <= soon if turn is not None else soon < due < inf):
            left += [each.token for each in queue if each.heard <= forgotten or _is_late(each, now)]
            state = Room(
                state.inside,
                {each.token: _in_time(each, now) for each in queue if each.heard > forgotten},
                before.fence,
            )
            break
    state.looked, state.until = (
        now,
        min([inf, *(each.end for each in state.inside), *(_next(each, now) for each in state.queue.values())]),
    )
    state, called = _called(state, now)
    return state, Wakeups(called, left) if called or left else NOBODY


def _next(each: Waiting, now: float) -> float:
    """Return the next moment that changes something for this waiter, regardless of the waiters before it."""
    soonest = min(each.heard + FORGOTTEN, inf if each.turn is None else each.turn)
    return min(soonest, each.due) if each.due > now else soonest


def _is_late(each: Waiting, now: float) -> bool:
    return each.turn is not None and each.turn <= now


def _in_time(each: Waiting, now: float) -> Waiting:
    """Return the waiter's state at `now`. If it missed its turn, it is passed over from the end of the turn."""
    heard, soon = min(each.heard, now), now + TURN
    if each.turn is None:
        return Waiting(each.token, each.room, heard, None, each.due if each.due == inf else min(each.due, soon))
    if each.turn <= now:
        return Waiting(each.token, each.room, heard, None, each.turn)
    return Waiting(each.token, each.room, heard, min(each.turn, soon))


def _called(state: Room, now: float) -> tuple[Room, list[bytes]]:
    """Call the first waiters, as many as may be inside with the holders and with waiters that were called before. If
    the next waiter has not asked lately, call it, too, to see if it is alive."""
    new, called, until = dict[bytes, Waiting](), list[bytes](), state.until
    rooms = [each.room for each in state.inside]
    rooms += [each.room for each in state.queue.values() if each.turn is not None]
    for each in state.queue.values():
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
    state = _with_queue(state, {**state.queue, **new}, now) if new else state
    state.until = until
    return state, called


def _busy(state: Room, now: float) -> Busy:
    """Return what keeps the caller out: the holder whose lease ends first, or else the first waiter that was called."""
    ends = [(each.end, each.token) for each in state.inside]
    ends = ends or [(each.turn, each.token) for each in state.queue.values() if each.turn is not None][:1]
    end, token = min(ends)  # never empty: without holders and called waiters the caller would have entered
    return Busy(token, end - now)


def _without(queue: Mapping[bytes, Waiting], token: bytes) -> Mapping[bytes, Waiting]:
    rest = dict(queue)
    del rest[token]
    return rest


def _with_queue(state: Room, queue: Mapping[bytes, Waiting], now: float) -> Room:
    return Room(state.inside, queue, state.fence, now, state.until)


def _renewed(state: Room, mine: Inside, lease: float, now: float, holder: str) -> Room:
    again = replace(mine, end=now + lease, lease=lease, holder=holder)
    inside = [again if each is mine else each for each in state.inside]
    return Room(inside, state.queue, state.fence, now, min(state.until, again.end))


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
    """Return the state that these bytes hold. Raise ValueError if they are not from `dump`."""
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
        state = Room(holding, {each.token: each for each in queue}, fence)
    except (StructError, ValueError) as error:
        raise ValueError(f"these {len(raw)} bytes are not the state of a lock: {error}") from error
    if data.read(1):
        raise ValueError(f"these {len(raw)} bytes are more than the state of a lock")
    return state
