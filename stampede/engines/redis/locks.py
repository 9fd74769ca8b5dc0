"""Locks that are no cache, one port for each colour.

Fair by a queue on the server. Who comes again after waiting has a place in it; a release keeps the lock for the first
of the queue that was heard of lately, for TURN seconds, and its message names it. So a holder that comes back at once
finds the lock taken, each waiter's turn comes after those before it, and one that died costs TURN once.
Who never waits (`try_lock`) has no place, and the lock is kept from nobody for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b
from random import uniform
from time import monotonic
from typing import NamedTuple

from stampede.colour import Colour
from stampede.engines.redis.news import News
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.verbs import LOOK, SAFETY, Line
from stampede.engines.redis.wire import ms
from stampede.ports import Busy, Granted

__all__ = ["LockPort", "tag_of"]

TURN = 0.2
"""Seconds for which a released lock is kept for the one whose turn it is."""

HEARD = 2.5
"""Seconds after which a waiter that was not heard of is gone: it asks again after SAFETY at the latest."""

QUEUE = 60.0

_REMEMBERED = 4096


class _Names(NamedTuple):
    """The keys of one lock, all in one slot of a cluster."""

    lock: bytes
    fence: bytes
    queue: bytes
    heard: bytes
    turn: bytes
    done: bytes
    channel: bytes


def tag_of(name: str) -> bytes:
    """What all keys of a lock have in common, between braces."""
    raw = name.encode("utf-8", "surrogatepass")
    return blake2b(raw, digest_size=12, person=b"lock").hexdigest().encode()


def _names(name: str) -> _Names:
    raw = name.encode("utf-8", "surrogatepass")
    tag = b"{%s}" % tag_of(name)
    return _Names(tag + b"L:" + raw, *(tag + part for part in (b"F", b"Q", b"H", b"T", b"D", b"C")))


@dataclass(slots=True)
class _Refused(Busy):
    """Busy, and whose question it answered."""

    mine: bytes = b""


class LockPort:
    """Locks of one colour."""

    def __init__(self, line: Line, scripts: Scripts, news: News, colour: Colour) -> None:
        self._line = line
        self._scripts = scripts
        self._news = news
        self._colour = colour
        self._waited: dict[bytes, None] = {}  # tokens that have waited; they may never come again

    async def acquire(self, name: str, token: bytes, lease: float) -> Granted | Busy:
        its = _names(name)
        waited = b"1" if token in self._waited else b""
        keys = (its.lock, its.fence, its.queue, its.heard, its.turn)
        taken, what, *left = await self._line.ask(self._scripts.acquire(keys, token, ms(lease), waited, ms(QUEUE)))
        if not taken:
            return _Refused(what, left[0] / 1000, mine=token)
        self._waited.pop(token, None)
        return Granted(fence=what)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return bool(await self._line.ask(self._scripts.renew([_names(name).lock], token, ms(lease))))

    async def release(self, name: str, token: bytes) -> bool:
        its = _names(name)
        self._waited.pop(token, None)
        keys = (its.lock, its.queue, its.heard, its.turn, its.done)
        command = self._scripts.release(keys, token, ms(TURN), ms(HEARD), its.channel, os.urandom(8))
        return bool(await self._line.ask(command))

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        its, mine = _names(name), busy.mine if isinstance(busy, _Refused) else b""
        end = monotonic() + min(timeout, busy.lease)
        queued = mine in self._waited  # until then it is no one's turn, and hears of everybody's
        self._remember(mine)
        with self._news.listen(its.channel, mine if queued else b"") as ear:
            ready = await self._colour.park(ear.ready, min(timeout, LOOK))
            # What was released before we listened was told to nobody here.
            if await self._line.ask(self._scripts.standing((its.lock, its.turn), busy.token)):
                longest = (SAFETY if ready and ear.hears else LOOK) * uniform(0.9, 1.1)
                await self._colour.park(ear.bell, min(end - monotonic(), longest))

    def _remember(self, token: bytes) -> None:
        if len(self._waited) >= _REMEMBERED:
            for old in list(self._waited)[: _REMEMBERED // 2]:
                self._waited.pop(old, None)
        self._waited[token] = None
