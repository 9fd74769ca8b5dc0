"""Locks with room for more than one: what is known of each is one row of bytes, from the moment somebody comes with
another room than for one until it is free again. `room` decides; here it is read and kept, inside a transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stampede import room
from stampede.engines.disk.trouble import Damaged
from stampede.ports import Busy, Granted
from stampede.record import Lease
from stampede.room import SILENCE, Change, Inside, Room

__all__ = ["ROOM", "Among", "enter", "load", "of_lease", "refusal", "room_of", "with_holder"]

ROOM = "SELECT state FROM rooms WHERE number = ?"


@dataclass(slots=True)
class Among(Busy):
    """Busy, and what was known of the lock when that was said."""

    seen: bytes = b""


def load(state: Any) -> Room:
    try:
        return room.load(state)
    except ValueError as error:
        raise Damaged("what it says of a lock is no room") from error


def room_of(write: Any, number: int) -> Room | None:
    rows = write.execute(ROOM, (number,)).fetchall()
    return load(rows[0][0]) if rows else None


def of_lease(lease: Lease, now: float) -> Room:
    """A lock for one, at the moment when it gets room for more."""
    return Room([Inside(lease.token, lease.end, lease.end - now, 1, lease.fence, lease.holder)], (), lease.fence)


def cleared(was: Room, now: float, lives: Callable[[str], bool]) -> tuple[Room, bool]:
    """Without those whose processes have ended; and whether there were any."""
    dead = {holder for holder in {each.holder for each in was.inside} if not lives(holder)}
    for each in [each for each in was.inside if each.holder in dead]:
        was, _, _ = room.release(was, each.token, now)
    return was, bool(dead)


def enter(
    was: Room,
    asks: Callable[[Room, int], Change[Granted | Busy]],
    now: float,
    lives: Callable[[str], bool],
    fence: Callable[[], int],
) -> tuple[Room, Granted | Busy, bool]:
    """What is so then, the answer, and whether others are to be told. The dead are looked for when somebody is refused
    for their sake."""
    after, reply, told = asks(was, 0)
    tells = bool(told.called or told.left)
    if isinstance(reply, Busy):
        was, died = cleared(was, now, lives)
        if died:
            after, reply, told = asks(was, 0)
            tells = True
    if isinstance(reply, Granted) and after.fence != was.fence:  # it came in just now
        after, reply, _ = asks(was, fence())
    return after, reply, tells


def refusal(
    state: bytes, token: bytes, its: float, waits: bool, now: float, lives: Callable[[str], bool]
) -> Among | None:
    """What one hears who asks, if nothing has to be written for it."""
    was = load(state)
    _, reply, told = room.acquire(was, token, 1.0, its, now)
    own = next((each for each in was.queue if each.token == token), None)
    if isinstance(reply, Granted) or told.called or told.left:
        return None
    if waits and (own is None or now - own.heard > SILENCE / 4):  # he takes a place, or says that he lives
        return None
    if not all(lives(each.holder) for each in was.inside):
        return None
    return Among(reply.token, reply.lease, seen=state)


def with_holder(it: Room, token: bytes, holder: str) -> Room:
    """The same, and this token is that process's."""
    return replace(it, inside=[replace(each, holder=holder) if each.token == token else each for each in it.inside])
