"""Locks by name: an item that is added with a token, and removed only with it.

Its CAS number is as good as the token while the server is the one that gave it: who knows the number removes the item
without a look. (Renewed, it has another one.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import random

from stampede import record
from stampede.colour import Colour
from stampede.engines.looking import pause
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.holds import TRIES, Line, OwnLease, OwnLeases, taken
from stampede.engines.memcached.meta import Reply
from stampede.engines.memcached.servers import Unasked
from stampede.engines.memcached.verbs import changed
from stampede.errors import EngineError
from stampede.ports import Busy, Granted
from stampede.record import Change, Lease, Record

__all__ = ["MemcachedLocks"]

SKIPPED = 1
"""Seconds that the server's clock may leap over at once: each of its ticks comes a little more than a second after the
last, on a busy machine by tenths, and it is the whole seconds at a tick that count. A lock that was taken just before
would end that much sooner, and its holder, who goes by his own clock, not know of it."""


class MemcachedLocks:
    """Locks of one colour. What they cannot promise is in the engine's docstring."""

    def __init__(self, line: Line, owned: OwnLeases, colour: Colour) -> None:
        self._line = line
        self._owned = owned
        self._colour = colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        its = items.name_of(name, b"l")
        async with taken(self._line, its) as link:
            for _ in range(TRIES):
                body, sent = items.write(_held(token, lease)), time.monotonic()
                added = (await link.ask(meta.add(its, *body), twice=True))[0]
                if added.code == b"HD":
                    own = OwnLease(its, token, lease)
                    own.stands(
                        added.cas, max(sent, link.born + 1e-6), lease
                    )  # it may have been sent again, as in `Keys`
                    self._owned.put(its, token, own)
                    return Granted(fence=int(added.cas))
                seen = (await link.ask(meta.look(its), twice=True))[0]
                held = items.read(seen).lease
                if held is not None and held.token != token:
                    return Busy(held.token, items.left_of(held.end - SKIPPED))
                if seen.code == b"VA":  # our own, whose reply was lost; or nobody's
                    again = (await link.ask(meta.put(its, *body, seen.cas)))[0]
                    if again.code == b"HD":
                        return Granted(fence=int(again.cas))
            raise EngineError(f"others take and leave the lock {name!r} faster than it can be asked for")

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        self._owned.pop(items.name_of(name, b"l"), token)
        return await self._changed(name, lambda was, _: record.renew(was, token, _seconds(lease), 0.0))

    async def release(self, name: str, token: bytes) -> bool:
        its = items.name_of(name, b"l")
        own, doubt = self._owned.pop(its, token), None
        if own is not None:
            try:
                gone = await self._removed(own)
                if gone is not None:
                    return gone
            except EngineError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                doubt = error
        gone = await self._changed(name, lambda was, _: record.abandon(was, token, None, 0.0, 0.0))
        if doubt is not None and not gone and not isinstance(doubt.__cause__, Unasked):
            raise doubt  # it had ended before, or the reply was lost
        return gone

    async def _removed(self, own: OwnLease) -> bool | None:
        """By its number. None: somebody has to look whose it is."""
        async with taken(self._line, own.name) as link:
            if not own.known_to(link):
                return None
            code = (await link.ask(meta.delete(own.name, own.cas)))[0].code
        return None if code == b"EX" else code == b"HD"

    async def _changed(self, name: str, ask: Callable[[Record, Reply], Change[bool]]) -> bool:
        its = items.name_of(name, b"l")
        async with taken(self._line, its) as link:
            return await changed(link, its, ask)

    hand_over = renew

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        its = items.name_of(name, b"l")
        async with taken(self._line, its) as link:
            lease = items.read((await link.ask(meta.look(its), twice=True))[0]).lease
        return [] if lease is None else [(lease.token, items.left_of(lease.end - SKIPPED))]

    async def held(self, prefix: str = "") -> None:
        """A server can't be asked what it has."""

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        its, began = items.name_of(name, b"l"), time.monotonic()
        with self._line.servers.pausing() as closing:
            while True:
                waited = time.monotonic() - began
                await self._colour.park(closing, min(pause(waited, 0.0, random()), max(timeout - waited, 0.0)))
                if time.monotonic() - began >= timeout:
                    return  # who asks for it now needs no look
                async with taken(self._line, its) as link:
                    seen = (await link.ask(meta.look(its), twice=True))[0]
                if not record.standing(items.read(seen).lease, busy.token, 0.0):
                    return


def _held(token: bytes, lease: float) -> Record:
    return Record(lease=Lease(token, _seconds(lease)))


def _seconds(lease: float) -> int:
    return items.standing(lease) + SKIPPED
