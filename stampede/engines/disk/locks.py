"""Locks in the directory's database: a row for each held lock, whose state `model/lock_queue.py` decides about."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from stampede.engines.disk.database import Locked, Write
from stampede.engines.disk.rows import Awaited, Port, bell_of, lock_number
from stampede.engines.kit.boot_clock import clock
from stampede.engines.kit.flock import dead, pid_here, process
from stampede.engines.kit.wake import SINGLE
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.model import lock_queue
from stampede.model.lock_queue import EMPTY, SAFETY, Change, Inside, Queued, Room
from stampede.model.ports import Busy, Granted, Held

__all__ = ["DiskLocks"]

T = TypeVar("T")

HANDED = ""
"""The holder of a lock that was handed over: it does not end with any process."""

_ROOM = "SELECT state FROM rooms WHERE number = ?"
_ROOMS = "SELECT number, CAST(name AS BLOB), state FROM rooms"


class DiskLocks(Port):
    """`Locks`, `Holds` and `Handover` of one colour in one directory."""

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        try:
            busy = self._refusal(name, token, room)
        except Locked:
            busy = None
        if busy is not None:
            return busy
        reply = await self.run(self._acquire, name, token, lease, waits, room)
        number = lock_number(name)[0]
        if isinstance(reply, Granted) and self.rows.wake_files.listens(_bell(number)):
            await self.read(self.rows.expect, number)  # others still wait: the release woke one, and cleared the note
        return reply

    def _refusal(self, name: str, token: bytes, limit: float) -> Busy | None:
        """Return the refusal if a plain read decides it, as for most callers of an exclusive lock. None: it needs a
        transaction. `limit` is the room of this caller."""
        now, state = clock(), self._room(name)
        first = state.inside[0] if state.inside and not state.queue else None
        if first is None or limit != 1 or first.room != 1 or first.token == token or not self._is_valid(first, now):
            return None
        return Busy(first.token, first.end - now)

    def _acquire(self, name: str, token: bytes, lease: float, waits: bool, limit: float) -> Granted | Busy:
        holder = process()

        def ask(was: Room, now: float, write: Write) -> Change[Granted | Busy]:
            fence = _last_fence(write) + 1
            # If all callers are exclusive, they do not queue: passing the lock to the next process in a queue takes
            # much longer than taking a free lock.
            queues = waits and (limit != 1 or bool(was.queue) or any(each.room != 1 for each in was.inside))

            def decide(was: Room) -> Change[Granted | Busy]:
                return lock_queue.acquire(was, token, lease, limit, now, waits=queues, least=fence, holder=holder)

            after, reply, wakeups = decide(was)
            if isinstance(reply, Busy) and (dead := [each.token for each in was.inside if not self._lives(each)]):
                living = [each for each in was.inside if each.token not in dead]
                after, reply, wakeups = decide(Room(living, was.queue, was.fence))
                wakeups = wakeups._replace(left=[*wakeups.left, *dead])
            if isinstance(reply, Granted) and reply.fence >= fence:
                write.execute("UPDATE fences SET last = ?", (reply.fence,))
            return after, reply, wakeups

        return self._change(name, ask)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self.run(self._change, name, lambda was, now, _: lock_queue.renew(was, token, lease, now))

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        def ask(was: Room, now: float, _: Write) -> Change[bool]:
            return lock_queue.renew(was, token, lease, now, holder=HANDED)

        return await self.run(self._change, name, ask)

    async def release(self, name: str, token: bytes) -> bool:
        return await self.run(self._change, name, lambda was, now, _: lock_queue.release(was, token, now))

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        number = _number(busy.own) if isinstance(busy, Queued) else lock_number(name)[0]
        await self.park(number, _bell(number), timeout, self._awaited, name, busy)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        now, state = clock(), await self.read(self._room, name)
        return [(each.token, each.end - now) for each in state.inside if self._is_valid(each, now)]

    async def held(self, prefix: str = "") -> list[Held]:
        return await self.read(self._held, prefix)

    def _change(self, name: str, ask: Callable[[Room, float, Write], Change[T]]) -> T:
        """Return the answer of `ask`. By then the lock's row has changed, and waiters of all processes are woken."""
        number, raw = lock_number(name)
        with self.rows.database.writing() as write:
            was = _load(write.execute(_ROOM, (number,)).fetchall())
            after, answer, wakeups = ask(was, clock(), write)
            if after.idle and was is not EMPTY:
                write.execute("DELETE FROM rooms WHERE number = ?", (number,))
            elif after is not was and not after.idle:
                values = number, raw, lock_queue.dump(after), after.end
                write.execute("INSERT OR REPLACE INTO rooms VALUES (?, ?, ?, ?)", values)
        for each in [*map(_number, wakeups.called), *([number] if wakeups.left else [])]:
            self.rows.wake(write.opened, each, _bell(each))
        return answer

    def _awaited(self, name: str, busy: Busy) -> Awaited:
        now, state = clock(), self._room(name)
        awaited = lock_queue.awaited(state, busy, now)
        if awaited is None:
            return None
        return min(awaited[1], SAFETY) if busy.token == awaited[0] else awaited[1], {
            each.holder for each in state.inside
        } - {HANDED}

    def _held(self, prefix: str) -> list[Held]:
        with self.rows.database.reading() as (_, connection):
            locks = {_name(raw): (number, _load([(state,)])) for number, raw, state in connection.execute(_ROOMS)}
        now, host, found = clock(), parts_of(here())[0], []
        for name, (number, state) in locks.items():
            if lock_number(name)[0] == number and name.startswith(prefix):
                for each in [each for each in state.inside if self._is_valid(each, now)]:
                    pid, left, waiting = pid_here(each.holder), each.end - now, len(state.queue)
                    found.append(Held(name, host, pid, None, each.fence, None, None, left, True, waiting))
        return found

    def _room(self, name: str) -> Room:
        """Return the state of a lock. Raise `Locked` if the database can't be read just now."""
        opened = self.rows.database.opened(clock())
        row = self.rows.database.row(opened, _ROOM, lock_number(name)[:1])
        try:
            return EMPTY if row is None else _load([row])
        except sqlite3.DatabaseError as error:
            raise self.rows.database.trouble(error, opened) from error

    def _is_valid(self, each: Inside, now: float) -> bool:
        return each.end > now and self._lives(each)

    def _lives(self, each: Inside) -> bool:
        return each.holder == HANDED or not dead(each.holder)


def _number(token: bytes) -> int:
    """Return the number by which a waiter with a place in the queue is woken. Other waiters use the lock's number."""
    return int.from_bytes(token[:8], "little")


def _bell(number: int) -> int:
    """Return the number of the bell for the number of a lock or of a token."""
    return SINGLE + bell_of(number)


def _name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _load(rows: list[Any]) -> Room:
    try:
        return lock_queue.load(rows[0][0]) if rows else EMPTY
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError("the state of a lock can't be read") from error


def _last_fence(write: Write) -> int:
    rows = write.execute("SELECT last FROM fences").fetchall()
    if not rows or type(rows[0][0]) is not int:
        raise sqlite3.DatabaseError(f"its fences are {rows!r}")
    return rows[0][0]
