"""Locks: each is an item that is added with a token, and removed only with it. On the server that gave it, the CAS
number identifies the holder as well as the token does: a holder that knows the number removes the item without reading
it. (A renewal changes the number.)"""

from __future__ import annotations

import time

from stampede.engines.kit.polling import pause
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.servers import TRIES, MemcachedLine
from stampede.engines.memcached.verbs import Number, Numbers, changed
from stampede.errors import EngineError
from stampede.model import record
from stampede.model.ports import Busy, Granted
from stampede.runtime.chance import random
from stampede.runtime.colour import Bell, Colour

__all__ = ["MemcachedLocks"]

SKIPPED = 1
"""Seconds that the server's clock may skip at once. Its ticks come a little later than every second, by tenths on a
busy machine, and only whole seconds count. A lock that was taken just before such a tick would end that much too early,
and its holder, which uses its own clock, would not know."""


class MemcachedLocks:
    """Locks of one colour. The engine's docstring says what they cannot promise."""

    def __init__(self, line: MemcachedLine, numbers: Numbers, colour: Colour) -> None:
        self._line = line
        self._numbers = numbers
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        item, seconds = items.name_of(name, b"l"), _seconds(lease)
        server, body = self._line.servers.of(item), items.leased(token, seconds)
        for _ in range(TRIES):
            (stored,), at = await self._line.ask(server, meta.add(item, *body))
            if stored.code != b"HD":
                (seen,), at = await self._line.ask(server, meta.look(item))
                held = items.read(seen).lease
                if held is not None and held.token != token:
                    return Busy(held.token, items.left_of(held.end - SKIPPED))
                if seen.code == b"EN":
                    continue
                # It is our own lock, and the reply to an earlier `add` was lost; or the item is no lock.
                (stored,), at = await self._line.ask(server, meta.put(item, *body, seen.cas), since=at)
            if stored.code == b"HD":
                self._numbers.put((item, token), Number(stored.cas, at, at + seconds), at)
                return Granted(fence=int(stored.cas))
        raise EngineError(f"other clients keep changing the lock {name!r} faster than this one can: try again later")

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        item = items.name_of(name, b"l")
        self._numbers.pop((item, token), None)
        return await changed(self._line, item, lambda was: record.renew(was, token, _seconds(lease), 0.0))

    async def release(self, name: str, token: bytes) -> bool:
        item = items.name_of(name, b"l")
        number = self._numbers.pop((item, token), None)
        if number is not None:
            server = self._line.servers.of(item)
            (reply,), _ = await self._line.ask(server, meta.delete(item, number.cas), since=number.at)
            if reply.code != b"EX":
                return reply.code == b"HD"
        return await changed(self._line, item, lambda was: record.abandon(was, token, None, 0.0, 0.0))

    hand_over = renew

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        item = items.name_of(name, b"l")
        (seen,), _ = await self._line.ask(self._line.servers.of(item), meta.look(item))
        lease = items.read(seen).lease
        return [] if lease is None else [(lease.token, items.left_of(lease.end - SKIPPED))]

    async def held(self, prefix: str = "") -> None:
        """Return None: memcached cannot list its items."""

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        item, began = items.name_of(name, b"l"), time.monotonic()
        server = self._line.servers.of(item)
        while True:
            waited = time.monotonic() - began
            await self._colour.park(Bell(), min(pause(waited, 0.0, random()), max(timeout - waited, 0.0)))
            if time.monotonic() - began >= timeout:
                return  # the caller asks for the lock now: no look is needed
            (seen,), _ = await self._line.ask(server, meta.look(item))
            if not record.standing(items.read(seen).lease, busy.token, 0.0):
                return


def _seconds(lease: float) -> int:
    return items.whole_seconds(lease) + SKIPPED
