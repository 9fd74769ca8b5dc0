"""Locks and their record, one port for each colour.

A queue on the server makes them fair. A waiter takes a place, in the order of arrival, when it is first refused, and
gives it up when it leaves. A lock that comes free is reserved for the first waiter for a fifth of a second, and only
this waiter is notified. So a holder that comes back at once finds the lock taken. A dead waiter costs no time if the
end of its connection shows that it is dead; a frozen one costs a fifth of a second. A caller that does not wait
(`try_lock`) has no place in the queue, and no lock is reserved for it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from time import monotonic

from stampede.engines.postgres.line import PostgresLine
from stampede.engines.postgres.news import PostgresNews
from stampede.engines.postgres.sweep import Sweeper
from stampede.engines.postgres.tell import Teller
from stampede.engines.postgres.verbs import LOOK, SAFETY
from stampede.engines.postgres.wire import names
from stampede.model.backoff import FARTHEST, look_again
from stampede.model.ports import Busy, Granted, Held, Problem, Records, Released, Reports
from stampede.runtime import forks
from stampede.runtime.chance import uniform
from stampede.runtime.colour import Colour

__all__ = ["History", "PostgresLocks", "PostgresReports", "lock_id"]

TURN = 0.2  # seconds for which a free lock is reserved for the waiter whose turn it is; as in locks.sql

_REMEMBERED = 1 << 16

ACQUIRE = "SELECT * FROM stampede.acquire($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)"
RENEW = "SELECT stampede.renew($1, $2, $3, $4, $5)"
RELEASE = "SELECT * FROM stampede.release($1, $2, $3, $4, $5, $6, $7)"
STANDING = "SELECT * FROM stampede.standing($1, $2, $3, $4)"


RELEASED = """SELECT number, name, host, process, program, fence, date_part('epoch', taken),
        date_part('epoch', released), problem, exception, message, traceback
    FROM stampede.past
    WHERE (problem <> '' OR NOT $1) AND date_part('epoch', released) > stampede.clock() - $2
    ORDER BY number DESC LIMIT $3"""

HELD = """SELECT l.name, l.host, l.process, l.program, l.fence, l.taken, now.now - l.taken, l.ends - now.now,
        l.pid IS NOT NULL, (SELECT count(*) FROM stampede.waiting AS w WHERE w.id = l.id)
    FROM stampede.locks AS l, (SELECT stampede.clock() AS now OFFSET 0) AS now
    WHERE l.fence IS NOT NULL AND l.ends > now.now AND NOT stampede.dead(l)
        AND substr(l.name, 1, length($1::bytea)) = $1::bytea"""

HOLDER = """SELECT l.token, l.ends - now.now
    FROM stampede.locks AS l, (SELECT stampede.clock() AS now OFFSET 0) AS now
    WHERE l.id = $1 AND l.fence IS NOT NULL AND l.ends > now.now AND NOT stampede.dead(l)"""


Details = tuple[bytes | None, bytes | None, bytes | None]

_MOST = 10_000
_LONGEST = 64


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, with the caller's place in the queue."""

    mine: bytes = b""
    ahead: int = 0


class PostgresLocks:
    """Locks of one colour."""

    def __init__(
        self, line: PostgresLine, news: PostgresNews, teller: Teller, history: History, sweeper: Sweeper, colour: Colour
    ) -> None:
        self._line = line
        self._news = news
        self._teller = teller
        self._colour = colour
        self._history = history
        self._sweeper = sweeper
        self._arrivals: dict[bytes, int] = {}  # places of waiting tokens: one that missed its turn gets its place again

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        ids = names(name, b"lock")
        if self._news.home_backend is None:
            await self._news.at_home(self._colour)
        home = "" if self._news.mute else self._news.home
        arrival = self._arrivals.get(token) if waits else None
        life = self._news.life
        holder = *this_process(), *life
        terms = ids.id, ids.raw, token, float(lease), *holder, waits, home, arrival, *self._history.bounds, float(room)
        (row,) = await self._line.ask((ACQUIRE, terms))
        granted, number, other, rest, place, ahead, called, homes = row
        if homes:
            self._tell(ids.channel, called, homes)
        if granted:
            self._arrivals.pop(token, None)
            self._sweeper.took()
            self._unbind_if_gone(life)
            return Granted(fence=number)
        if not waits:
            return Busy(other, rest)
        self._remember(token, place)
        return _Queued(other, rest, mine=token, ahead=ahead)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        life = self._news.life
        rows = await self._line.ask((RENEW, (lock_id(name), token, float(lease), *life)))
        self._unbind_if_gone(life)
        return bool(rows[0][0])

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        """Renew the lock, and bind it to no connection from now on."""
        rows = await self._line.ask((RENEW, (lock_id(name), token, float(lease), None, None)))
        return bool(rows[0][0])

    async def release(self, name: str, token: bytes) -> bool:
        self._arrivals.pop(token, None)
        details = self._history.details(token)
        problem, details = ("", (None, None, None)) if details is None else ("failed", details)
        (row,) = await self._line.ask((RELEASE, (lock_id(name), token, os.urandom(8), problem, *details)))
        self._history.forget(token)
        stood, called, homes = row
        if homes:
            self._tell(names(name, b"lock").channel, called, homes)
        return bool(stood)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(token, left) for token, left in await self._line.ask((HOLDER, (lock_id(name),)))]

    async def held(self, prefix: str = "") -> list[Held]:
        rows = await self._line.ask((HELD, (prefix.encode("utf-8", "surrogatepass"),)))
        return [Held(name_of(name), *others) for name, *others in rows]

    def _tell(self, channel: bytes, called: Sequence[bytes], homes: Sequence[str]) -> None:
        """Notify the process of each waiter whose turn has come. An empty token wakes all that wait in this process."""
        for token, home in zip(called, homes, strict=True):
            if home:
                self._teller.tell([home], channel, token)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        # Not longer than FARTHEST: asking again shows the server that this waiter is still there.
        end = monotonic() + min(timeout, FARTHEST * uniform(0.9, 1.1))
        ids, mine, ahead = names(name, b"lock"), None, 0
        if isinstance(busy, _Queued):
            mine, ahead = busy.mine, busy.ahead
        with self._news.listen(ids.channel, mine or b"") as listener:
            # Without notifications, a waiter far back in the queue looks less often, but often enough for its turn.
            look = LOOK * (1 + min(ahead // 10, 9))
            ready = await self._colour.park(listener.ready, min(timeout, look * uniform(0.9, 1.1)))
            while (left := end - monotonic()) > 0:
                hears = ready and listener.hears
                # A release before we listened did not notify this process, and no message tells that a holder's
                # connection is gone. (A waiter with a place is notified when its turn has come. It need not ask
                # again only because the lock has passed from one holder to another.)
                home = self._news.home if hears else ""
                ((stands, rest, ahead),) = await self._line.ask((STANDING, (ids.id, busy.token, mine, home)))
                if not stands:
                    return
                seconds = look * uniform(0.9, 1.1)
                if hears:
                    seconds = look_again(ahead, rest, TURN, (LOOK if self._news.bound else SAFETY) * uniform(0.9, 1.1))
                if await self._colour.park(listener.bell, min(left, seconds)):
                    return

    def _unbind_if_gone(self, life: tuple[int, float] | tuple[None, None]) -> None:
        """Unbind this process again if the connection ended while a lock was being bound to it."""
        if life[0] is not None and life != self._news.home_backend:
            self._sweeper.unbind(life)

    def _remember(self, token: bytes, arrival: int) -> None:
        if len(self._arrivals) >= _REMEMBERED:
            for old in list(self._arrivals)[: _REMEMBERED // 2]:
                self._arrivals.pop(old, None)
        self._arrivals[token] = arrival


def lock_id(name: str) -> bytes:
    """Return the id of a lock in every table."""
    return names(name, b"lock").id


# -- the record of how they were held -----------------------------------------------------------------------------


class History(Records):
    """The record of how locks were held. It covers so many seconds (None: all) and rows."""

    def __init__(self, seconds: float | None, rows: int) -> None:
        self.bounds = seconds, rows
        self._problems: dict[bytes, Problem] = {}

    def failed(self, token: bytes, problem: Problem) -> None:
        while len(self._problems) >= _MOST:
            self._problems.pop(next(iter(self._problems)), None)
        self._problems[token] = problem

    def details(self, token: bytes) -> Details | None:
        """Return exception, message and traceback of the lock's problem. None: it had no problem."""
        problem = self._problems.get(token)
        return (
            None
            if problem is None
            else (readable(problem.exception), readable(problem.message), readable(problem.traceback))
        )

    def forget(self, token: bytes) -> None:
        """Forget the lock's problem: the server has answered its release."""
        self._problems.pop(token, None)


@cache
def this_process() -> tuple[str, int, str]:
    """Return host, pid and program of this process, for people."""
    program = PurePath(sys.argv[0] if sys.argv else "").name
    return _plain(socket.gethostname()), os.getpid(), _plain(program)


forks.in_child(lambda: this_process.cache_clear())


def _plain(text: str) -> str:
    """Return the text in ASCII, which databases of every encoding can store."""
    return text.encode("ascii", "backslashreplace").decode().replace("\0", "\\0")[:_LONGEST]


def readable(text: str) -> bytes:
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace")


class PostgresReports(Reports):
    """The record of locks in one database."""

    def __init__(self, line: PostgresLine) -> None:
        self._line = line

    async def released(self, *, failed: bool, since: float, most: int) -> list[Released]:
        rows = await self._line.ask((RELEASED, (failed, float(since), most)))
        released = [Released(number, name_of(name), *others) for number, name, *others in rows]
        return sorted(released, key=lambda each: each.released, reverse=True)


def name_of(raw: bytes) -> str:
    """Return a lock's name for people to read."""
    return raw.decode("utf-8", "backslashreplace")
