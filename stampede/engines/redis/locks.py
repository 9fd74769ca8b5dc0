"""Locks that are not part of a cache, one port for each colour.

A queue on the server keeps them fair. A waiter takes a place with its first refusal and gives it up when it leaves.
Whenever there is room for the first waiter of the queue, the server keeps its place for a fifth of a second, and
notifies only that waiter; once it is inside, the next. So a holder that comes back at once finds the lock taken. A
waiter costs three commands however many there are. One whose process died costs nothing, and one that is frozen costs a
fifth of a second. A caller that never waits (`try_lock`) has no place in the queue."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from time import monotonic
from typing import NamedTuple

from stampede.engines.kit.naming import shown
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.engines.redis.news import RedisNews
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.verbs import LOOK, PAGE, SAFETY, RedisLine
from stampede.engines.redis.wire import ms
from stampede.model.backoff import FARTHEST, look_again
from stampede.model.ports import Busy, Granted, Held
from stampede.runtime import process_lock
from stampede.runtime.chance import uniform
from stampede.runtime.colour import Colour

__all__ = ["RedisLocks", "listed", "tag_of"]

TURN = 0.2
"""Seconds for which a free lock is kept for the waiter whose turn it is (as in lock.lua)."""

QUEUE = 4 * FARTHEST
"""Seconds for which a queue is kept while none of its waiters asks."""


class _Names(NamedTuple):
    """The keys of one lock, all in one slot of a cluster, and its channel."""

    lock: bytes
    queue: bytes
    notes: bytes
    channel: bytes


def tag_of(name: str) -> bytes:
    """Return the part that all keys of a lock share, between braces."""
    raw = name.encode("utf-8", "surrogatepass")
    return blake2b(raw, digest_size=12, person=b"lock").hexdigest().encode()


async def listed(line: RedisLine, kind: bytes, prefix: str = "") -> list[str]:
    """Return the names that begin with `prefix` and have a key of this kind, on one server."""
    names, cursor, start = set(), b"0", prefix.encode("utf-8", "surrogatepass")
    pattern = b"{%b}%b:%b*" % (24 * b"?", kind, re.sub(rb"[][*?\\]", rb"\\\g<0>", start))
    ours = re.compile(rb"\{[0-9a-f]{24}\}%b:(%b.*)" % (kind, re.escape(start)), re.DOTALL)
    while True:
        cursor, found = await line.ask((b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % PAGE))
        names |= {shown(match[1]) for each in found if (match := ours.fullmatch(each))}
        if cursor == b"0":
            return sorted(names)


@lru_cache(1024)
def _names(name: str) -> _Names:
    raw = name.encode("utf-8", "surrogatepass")
    tag = b"{%s}" % tag_of(name)
    return _Names(tag + b"L:" + raw, tag + b"Q", tag + b"H", tag + b"C")


@dataclass(slots=True)
class _Queued(Busy):
    """Busy, with the waiter's own place in the queue."""

    mine: bytes = b""
    ahead: int = 0


class RedisLocks:
    """Locks of one colour."""

    def __init__(self, line: RedisLine, scripts: Scripts, news: RedisNews, colour: Colour) -> None:
        self._line = line
        self._scripts = scripts
        self._news = news
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        names, home = _names(name), self._news.home.encode() if waits else b""
        terms = token, ms(lease), b"%.0f" % room, here().encode("utf-8", "replace"), names.channel, home, ms(QUEUE)
        command = self._scripts.acquire(names[:3], *terms, b"%d" % self._scripts.fence)
        taken, what, *place = await self._line.ask(command)
        if taken:
            with process_lock.lock:
                self._scripts.fence = max(self._scripts.fence, what)
            return Granted(fence=what)
        left, ahead = place
        if not waits:
            return Busy(what, left / 1000)
        return _Queued(what, left / 1000, mine=token, ahead=ahead)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return bool(await self._line.ask(self._scripts.renew(_names(name)[:1], token, ms(lease))))

    async def release(self, name: str, token: bytes) -> bool:
        names = _names(name)
        return bool(await self._line.ask(self._scripts.release(names[:3], token, names.channel, os.urandom(8))))

    hand_over = renew

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return [(token, left / 1000) for token, left, *_ in (await self._inside(name))[1]]

    async def held(self, prefix: str = "") -> list[Held]:
        found = []
        for name in await listed(self._line, b"L", prefix):
            (waiting, now), holders = await self._inside(name)
            for _, left, fence, home in holders:
                host, pid = parts_of(home.decode("utf-8", "replace"))
                # A fence is the moment at which it was given, unless the clock was set back.
                since = fence / 1e6 if fence <= now else None
                seconds = None if since is None else now / 1e6 - since
                found.append(Held(name, host, pid, None, fence, since, seconds, left / 1000, False, waiting))
        return found

    async def _inside(self, name: str) -> tuple[tuple[int, int], list[tuple[bytes, int, int, bytes]]]:
        """Return the number of waiters and the server's microseconds; and of each holder the token, ms left, fence and
        process."""
        waiting, now, *parts = await self._line.ask(self._scripts.holder(_names(name)[:2]))
        return (waiting, now), list(zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True))

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        names, end, ahead = _names(name), monotonic() + timeout, 0
        channel, mine = names.channel, b""
        if isinstance(busy, _Queued):
            channel, mine, ahead = names.channel + self._news.home.encode(), busy.mine, busy.ahead
        # Without news, a waiter far back in the queue may look more rarely, but must not miss its turn.
        look = LOOK * (1 + min(ahead // 10, 9)) * uniform(0.9, 1.1)
        with self._news.listen(channel, mine) as listener:
            ready = await self._colour.park(listener.ready, min(timeout, look))
            if monotonic() >= end:
                return  # the caller asks again now, which needs no look
            # Releases before we listened were not announced here. (A waiter with a place is notified when its turn
            # comes, so it need not ask again when only the holder has changed.)
            if await self._line.ask(self._scripts.standing(names[:2], busy.token, mine)):
                hears = ready and listener.hears
                ahead, safety = (ahead, SAFETY * uniform(0.9, 1.1)) if hears else (0, look)
                longest = look_again(ahead, busy.lease, TURN, safety)
                await self._colour.park(listener.bell, min(end - monotonic(), longest))
