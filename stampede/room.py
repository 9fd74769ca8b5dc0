"""Who is inside a lock, who waits for it, and what each question makes of that: for locks with room for more than one.

One number says of everybody how many may be inside together as far as he is concerned, himself included: 1 for an
exclusive lock, `inf` for a shared one, n for a place of a bulkhead. Who asks may enter if with him they are no more
than the least of these numbers, his own and those of all inside; and nobody waits who came before him. So a writer
who waits is not passed by readers. Who doesn't wait has no place in the queue, and passes nobody in it.

When somebody leaves, the first of the queue are called, as many as may be inside together: what they need is kept for
each, for a moment. Who doesn't come then is passed over. So is the first who has to wait for those inside, if he was
not heard of lately, and doesn't answer when he is called. He keeps his place: as soon as he is heard of again, those
who came later are behind him. As in `record`, a transition gives the state that is there afterwards, the answer, and
whose waiters are to be woken; nothing is read, kept or sent here, and the time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, TypeAlias, TypeVar

from stampede.pace import FARTHEST
from stampede.ports import Busy, Granted

__all__ = [
    "EMPTY",
    "Change",
    "Inside",
    "Room",
    "Told",
    "Waiting",
    "acquire",
    "admitted",
    "ahead",
    "dump",
    "fits",
    "load",
    "release",
    "renew",
    "standing",
]

T = TypeVar("T")

TURN = 1.0
"""Seconds for which a place is kept for one who was called; its loop may be busy just now."""

SILENCE = 2.0
"""Seconds after which the first of the queue, who isn't heard of, is called to say that he lives: nobody is kept out
for the sake of the dead."""

FORGOTTEN = 4 * FARTHEST
"""Seconds after which one who waits, and isn't heard of, waits no more."""


@dataclass(slots=True)
class Inside:
    """A token that stands until `end`."""

    token: bytes
    end: float
    lease: float  # it was given for so many seconds, the last time
    room: float
    fence: int
    holder: str = ""


@dataclass(slots=True)
class Waiting:
    """One who waits, and was heard at that moment; `turn`: he has been called, and his place is kept until then; `due`:
    he was called, and has been passed over from then on."""

    token: bytes
    room: float
    heard: float
    turn: float | None = None
    due: float = inf


@dataclass(slots=True)
class Room:
    """All that is known of one lock."""

    inside: Sequence[Inside] = ()
    queue: Sequence[Waiting] = ()  # in the order of arrival
    fence: int = 0  # the last one

    @property
    def end(self) -> float:
        """The moment from which it is as good as nothing, but for its fence."""
        return max([-inf, *(each.end for each in self.inside), *(each.heard + FORGOTTEN for each in self.queue)])

    @property
    def idle(self) -> bool:
        return not self.inside and not self.queue


EMPTY = Room()


class Told(NamedTuple):
    """Whose waiters are to be woken."""

    called: Sequence[bytes] = ()  # those whose turn has come, or who are to say that they live, by their tokens
    left: Sequence[bytes] = ()  # those who are inside no more, or have missed their turn


Change: TypeAlias = tuple[Room, T, Told]


def fits(room: float, rooms: Iterable[float]) -> bool:
    """May one of this room join those of these?"""
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


def standing(room: Room, token: bytes, now: float) -> bool:
    """Is this token inside, or called?"""
    it = _passed(room, now)[0]
    return any(each.token == token for each in it.inside) or any(
        each.token == token and each.turn is not None for each in it.queue
    )


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
    """Enter, or hear who is inside. `least`: the fence of who enters is no less than this."""
    it, told = _passed(was, now)
    for mine in it.inside:
        if mine.token == token:  # its reply was lost
            again = replace(mine, end=now + lease, lease=lease)
            return replace(it, inside=_with(it.inside, mine, again)), Granted(fence=mine.fence), told
    own = next((each for each in it.queue if each.token == token), None)
    waiting = any(each.due > now for each in it.queue)
    if own is None and not waiting and fits(room, [each.room for each in it.inside]):
        after = _entered(it, token, lease, room, now, least, holder)
        return after, Granted(fence=after.fence), told
    if own is not None and own.turn is None:  # he may have been passed over, and be the first again
        it = replace(it, queue=_with(it.queue, own, replace(own, heard=now, due=inf)))
        it, called = _called(it, now)
        told = Told([*told.called, *called], told.left)
        own = next(each for each in it.queue if each.token == token)
    if own is not None and own.turn is not None:
        it = replace(it, queue=[each for each in it.queue if each is not own])
        after = _entered(it, token, lease, own.room, now, least, holder)
        return after, Granted(fence=after.fence), told
    if own is None and waits:
        it = replace(it, queue=[*it.queue, Waiting(token, room, now)])
    return it, _busy(it, now), told


def ahead(room: Room, token: bytes) -> int:
    """How many wait before this one."""
    return next((number for number, each in enumerate(room.queue) if each.token == token), 0)


def renew(was: Room, token: bytes, lease: float, now: float) -> Change[bool]:
    """Let it stand for so long from now. False: it is lost."""
    it, told = _passed(was, now)
    for mine in it.inside:
        if mine.token == token:
            again = replace(mine, end=now + lease, lease=lease)
            return replace(it, inside=_with(it.inside, mine, again)), True, told
    return it, False, told


def release(was: Room, token: bytes, now: float) -> Change[bool]:
    """Leave, or give up the place in the queue. False: it wasn't inside."""
    it, told = _passed(was, now)
    inside = [each for each in it.inside if each.token != token]
    queue = [each for each in it.queue if each.token != token]
    stood = len(inside) < len(it.inside)
    if not stood and len(queue) == len(it.queue):
        return it, False, told
    it, called = _called(replace(it, inside=inside, queue=queue), now)
    return it, stood, Told([*told.called, *called], [*told.left, token])


# -- what time does -----------------------------------------------------------------------------------------------


def _passed(was: Room, now: float) -> tuple[Room, Told]:
    """Those whose time is over have gone. A clock that was set back gives nobody more than he was given."""
    inside = [
        each if each.end - now <= each.lease else replace(each, end=now + each.lease)
        for each in was.inside
        if each.end > now
    ]
    queue, late, soon = [], set(), now + TURN
    for each in was.queue:
        if each.heard > now or (each.turn or -inf) > soon or soon < each.due < inf:
            turn = None if each.turn is None else min(each.turn, soon)
            each = replace(each, heard=min(each.heard, now), turn=turn, due=each.due if each.due == inf else soon)
        if each.turn is not None and each.turn <= now:
            late.add(each.token)
            each = replace(each, turn=None, due=each.turn)
        if each.heard + FORGOTTEN > now:
            queue.append(each)
    it, called = _called(Room(inside, queue, was.fence), now)
    if len(inside) == len(was.inside) and len(queue) == len(was.queue) and not late:
        return it, Told(called)
    staying = {each.token for each in inside} | {each.token for each in queue} - late
    before = [each.token for each in was.inside] + [each.token for each in was.queue]
    return it, Told(called, [token for token in before if token not in staying])


def _called(it: Room, now: float) -> tuple[Room, list[bytes]]:
    """Call as many of the first as may be inside together with those who are, or will be; or the first who can't yet
    be, if nobody knows whether he lives."""
    queue, called = list(it.queue), []
    rooms = [each.room for each in it.inside] + [each.room for each in queue if each.turn is not None]
    for number, each in enumerate(queue):
        if each.turn is not None or each.due <= now:
            continue
        fit = fits(each.room, rooms)
        if fit or (each.due == inf and each.heard + SILENCE <= now):
            queue[number] = replace(each, turn=now + TURN, due=inf) if fit else replace(each, due=now + TURN)
            called.append(each.token)
        if not fit:
            break
        rooms.append(each.room)
    return (replace(it, queue=queue), called) if called else (it, called)


def _entered(it: Room, token: bytes, lease: float, room: float, now: float, least: int, holder: str) -> Room:
    fence = max(it.fence + 1, least)
    return Room([*it.inside, Inside(token, now + lease, lease, room, fence, holder)], it.queue, fence)


def _busy(it: Room, now: float) -> Busy:
    """One who keeps others out: the first inside to end, or else the first who was called."""
    if it.inside:
        first = min(it.inside, key=lambda each: each.end)
        return Busy(first.token, first.end - now)
    ends = {each.token: each.turn for each in it.queue if each.turn is not None}
    token = next(iter(ends))  # or this one would have been let in
    return Busy(token, ends[token] - now)


def _with(many: Sequence[T], old: T, new: T) -> list[T]:
    return [new if each is old else each for each in many]


# -- as bytes -----------------------------------------------------------------------------------------------------

_HEAD, _INSIDE, _WAITING = Struct(">BQII"), Struct(">HHdddQ"), Struct(">Hdddd")
_VERSION = 1


def dump(room: Room) -> bytes:
    """For engines that keep it whole."""
    parts = [_HEAD.pack(_VERSION, room.fence, len(room.inside), len(room.queue))]
    for one in room.inside:
        holder = one.holder.encode("utf-8", "replace")
        parts += [
            _INSIDE.pack(len(one.token), len(holder), one.end, one.lease, one.room, one.fence),
            one.token,
            holder,
        ]
    for each in room.queue:
        turn = -inf if each.turn is None else each.turn
        parts += [_WAITING.pack(len(each.token), each.room, each.heard, turn, each.due), each.token]
    return b"".join(parts)


def load(raw: bytes) -> Room:
    """ValueError: it is none of ours."""
    try:
        return _Reader(raw).room()
    except (StructError, ValueError) as error:
        raise ValueError(f"these {len(raw)} bytes are no room") from error


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def room(self) -> Room:
        version, fence, inside, queue = self._take(_HEAD)
        if version != _VERSION:
            raise ValueError(version)
        room = Room(self._each(inside, self._inside), self._each(queue, self._waiting), fence)
        if self._at != len(self._raw):
            raise ValueError("there is more")
        return room

    def _each(self, count: int, one: Callable[[], T]) -> list[T]:
        if count > len(self._raw):
            raise ValueError(count)
        return [one() for _ in range(count)]

    def _inside(self) -> Inside:
        length, also, end, lease, room, fence = self._take(_INSIDE)
        return Inside(self._bytes(length), end, lease, room, fence, self._bytes(also).decode())

    def _waiting(self) -> Waiting:
        length, room, heard, turn, due = self._take(_WAITING)
        return Waiting(self._bytes(length), room, heard, None if turn == -inf else turn, due)

    def _take(self, shape: Struct) -> tuple[int, ...]:
        start, self._at = self._at, self._at + shape.size
        return shape.unpack_from(self._raw, start)

    def _bytes(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if self._at > len(self._raw):
            raise ValueError(length)
        return self._raw[start : self._at]
