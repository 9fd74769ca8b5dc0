"""Locks that are no cache, one port for each colour.

Fair by a queue on the server: who waits takes a place with the first refusal, in the order of arrival, and gives it up
when it goes. Whenever the lock comes free it is kept for the first of the queue, for a fifth of a second, and only that
one is told. So a holder that comes back at once finds the lock taken, a waiter costs three commands however many there
are, one whose process died costs nothing, and one that is frozen a fifth of a second.
Who never waits (`try_lock`) has no place, and the lock is kept from nobody for it.
Where those inside have room for others, the first of the queue is told that fits among them, and once it is inside the
next.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf
from random import uniform
from time import monotonic
from typing import NamedTuple

from stampede import decisions
from stampede.colour import Colour
from stampede.engines.naming import shown
from stampede.engines.redis.news import News
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.verbs import LOOK, PAGE, SAFETY, Line
from stampede.engines.redis.wire import ms
from stampede.engines.whereabouts import here, parts_of
from stampede.pace import FARTHEST, look_again
from stampede.ports import Busy, Granted, Held

__all__ = ["RedisLocks", "listed", "tag_of"]

TURN = 0.2
"""Seconds for which a lock that came free is kept for the one whose turn it is (as queue.lua says)."""

FENCED = 10.0
"""Seconds for which the server remembers a fence beyond its lease: after that, its clock keeps fences growing, and what
the process that takes the lock has seen."""

QUEUE = 4 * FARTHEST
"""Seconds for which a queue stands of which nobody is heard."""

_REMEMBERED = 1 << 16


class _Names(NamedTuple):
    """The keys of one lock, all in one slot of a cluster."""

    lock: bytes
    fence: bytes
    queue: bytes
    homes: bytes
    turn: bytes
    done: bytes
    inside: bytes
    rooms: bytes
    terms: bytes
    whose: bytes
    channel: bytes


def tag_of(name: str) -> bytes:
    """What all keys of a lock have in common, between braces."""
    raw = name.encode("utf-8", "surrogatepass")
    return blake2b(raw, digest_size=12, person=b"lock").hexdigest().encode()


async def listed(line: Line, kind: bytes, prefix: str = "") -> list[str]:
    """The names that begin with this and have a key of this kind, on one server."""
    names, cursor, start = set(), b"0", prefix.encode("utf-8", "surrogatepass")
    pattern = b"{%b}%b:%b*" % (24 * b"?", kind, re.sub(rb"[][*?\\]", rb"\\\g<0>", start))
    ours = re.compile(rb"\{[0-9a-f]{24}\}%b:(%b.*)" % (kind, re.escape(start)), re.DOTALL)
    while True:
        cursor, found = await line.ask((b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % PAGE))
        names |= {shown(its[1]) for each in found if (its := ours.fullmatch(each))}
        if cursor == b"0":
            return sorted(names)


@lru_cache(1024)
def _names(name: str) -> _Names:
    raw = name.encode("utf-8", "surrogatepass")
    tag = b"{%s}" % tag_of(name)
    return _Names(
        tag + b"L:" + raw, *(tag + part for part in (b"F", b"Q", b"H", b"T", b"D", b"I", b"R", b"E", b"W", b"C"))
    )


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, and the place of the one who asked."""

    mine: bytes = b""
    ahead: int = 0


class RedisLocks:
    """Locks of one colour."""

    def __init__(self, line: Line, scripts: Scripts, news: News, colour: Colour) -> None:
        self._line = line
        self._scripts = scripts
        self._news = news
        self._colour = colour
        self._arrivals: dict[bytes, bytes] = {}  # of tokens that wait: who missed its turn is the next again

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        its = _names(name)
        home, arrival = (self._news.home.encode(), self._arrivals.get(token, b"")) if waits else (b"", b"")
        keys = (its.lock, its.fence, its.queue, its.homes, its.turn, its.inside, its.rooms, its.terms, its.whose)
        places = b"inf" if room == inf else b"%d" % room
        terms = token, ms(lease), its.channel, home, arrival, ms(QUEUE), places, here().encode("utf-8", "replace")
        command = self._scripts.acquire(keys, *terms, b"%d" % self._scripts.fence)
        taken, what, *place = await self._line.ask(command)
        if taken:
            self._arrivals.pop(token, None)
            with decisions.lock:
                self._scripts.fence = max(self._scripts.fence, what)
            return Granted(fence=what)
        left, arrival, ahead = place
        if not waits:
            return Busy(what, left / 1000)
        self._remember(token, b"%d" % arrival)
        return _Queued(what, left / 1000, mine=token, ahead=ahead)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        its = _names(name)
        keys = (its.lock, its.fence, its.inside, its.rooms, its.terms, its.whose)
        return bool(await self._line.ask(self._scripts.renew(keys, token, ms(lease), ms(lease + FENCED))))

    async def release(self, name: str, token: bytes) -> bool:
        its = _names(name)
        self._arrivals.pop(token, None)
        keys = (
            its.lock,
            its.queue,
            its.homes,
            its.turn,
            its.done,
            its.fence,
            its.inside,
            its.rooms,
            its.terms,
            its.whose,
        )
        return bool(await self._line.ask(self._scripts.release(keys, token, its.channel, os.urandom(8))))

    hand_over = renew

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(token, left / 1000) for token, left, *_ in (await self._inside(name))[1]]

    async def held(self, prefix: str = "") -> list[Held]:
        found = []
        for name in await listed(self._line, b"L", prefix):
            (waiting, now), those = await self._inside(name)
            for _, left, fence, home in those:
                host, pid = parts_of(home.decode("utf-8", "replace"))
                since = (
                    fence / 1e6 if 0 < fence <= now else None
                )  # that is when it was given, or the clock was set back
                seconds = None if since is None else now / 1e6 - since
                found.append(Held(name, host, pid, None, fence or None, since, seconds, left / 1000, False, waiting))
        return found

    async def _inside(self, name: str) -> tuple[tuple[int, int], list[tuple[bytes, int, int, bytes]]]:
        """How many wait and the server's microseconds; and of each who is inside token, ms left, fence, who it is."""
        its = _names(name)
        keys = its.lock, its.inside, its.fence, its.terms, its.queue, its.whose
        waiting, now, *told = await self._line.ask(self._scripts.holder(keys))
        return (waiting, now), list(zip(told[::4], told[1::4], told[2::4], told[3::4], strict=True))

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        its, end, ahead = _names(name), monotonic() + timeout, 0
        channel, mine = its.channel, b""
        if isinstance(busy, _Queued):
            channel, mine, ahead = its.channel + self._news.home.encode(), busy.mine, busy.ahead
        # Without news one that is far back may look more rarely, too, but not so that it would miss its turn.
        look = LOOK * (1 + min(ahead // 10, 9)) * uniform(0.9, 1.1)
        with self._news.listen(channel, mine) as ear:
            ready = await self._colour.park(ear.ready, min(timeout, look))
            if monotonic() >= end:
                return  # who asks for it now needs no look
            # What was released before we listened was told to nobody here. (Who has a place is told when its turn has
            # come: that the lock has gone from hand to hand since then is no reason to ask again.)
            keys = (its.lock, its.turn, its.queue, its.homes, its.inside, its.rooms)
            if await self._line.ask(self._scripts.standing(keys, busy.token, mine)):
                hears = ready and ear.hears
                ahead, safety = (ahead, SAFETY * uniform(0.9, 1.1)) if hears else (0, look)
                longest = look_again(ahead, busy.lease, TURN, safety)
                await self._colour.park(ear.bell, min(end - monotonic(), longest))

    def _remember(self, token: bytes, arrival: bytes) -> None:
        if len(self._arrivals) >= _REMEMBERED:
            for old in list(self._arrivals)[: _REMEMBERED // 2]:
                self._arrivals.pop(old, None)
        self._arrivals[token] = arrival
