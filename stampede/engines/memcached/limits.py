"""Limits: each is an item that is replaced under its CAS number. A change is first tried on the item that was last
seen, together with a read of the present one. So it takes one round trip, and one more for each time that another
client was faster. Times are by the clients' clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from stampede.engines.kit.limits import T, WindowLimits
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.meta import MetaReply
from stampede.engines.memcached.servers import TRIES, MemcachedLine, MemcachedNode
from stampede.errors import EngineError
from stampede.model.limit_window import NOTHING, SECOND, Window, bytes_of, ends, window_of
from stampede.runtime.chance import random
from stampede.runtime.colour import Bell, Colour

__all__ = ["MemcachedLimits", "Seen"]

_Known: TypeAlias = tuple[bytes | None, Window, float]
"""An item's CAS number, its window, and a moment before it was asked for."""

Seen: TypeAlias = dict[bytes, _Known]

FLAGS = b"1470758915"
REMEMBERED = 1000
CALM = 3
"""Tries without a pause. After these, clients pause at random, so that they do not all try again together."""


class MemcachedLimits(WindowLimits):
    """Limits of one colour."""

    def __init__(self, line: MemcachedLine, colour: Colour, seen: Seen) -> None:
        self._line = line
        self._colour = colour
        self._seen = seen

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        item = items.name_of(name, b"w")
        server, look = self._line.servers.of(item), meta.look(item)
        known = self._seen.pop(item, None)
        for tried in range(TRIES):
            sure = known is None or tried > 0
            if known is None:
                known = await self._looked(server, look)
            cas, window, at = known
            after, answer = change(window, int(time.time() * SECOND))
            if after is window and not sure:  # only the present item counts for a refusal
                known = await self._looked(server, look)
                continue
            if after is window:
                return answer
            body, ttl = bytes_of(after), min(ends(after) // SECOND + 3, meta.MONTH)
            swap = meta.add(item, body, FLAGS, ttl) if cas is None else meta.put(item, body, FLAGS, ttl, cas)
            (stored, there), sent = await self._line.ask(server, swap, look, since=at)
            if stored.code == b"HD":
                if len(self._seen) < REMEMBERED:
                    self._seen[item] = stored.cas, after, sent
                return answer
            known = _seen(there, sent) if there is not meta.OTHER else None
            if tried > CALM:
                await self._colour.park(Bell(), random() * 0.002 * min(tried, 10))
        raise EngineError(f"other clients keep changing the limit {name!r} faster than this one can: try again later")

    async def _looked(self, server: MemcachedNode, look: bytes) -> _Known:
        (reply,), at = await self._line.ask(server, look)
        return _seen(reply, at)


def _seen(reply: MetaReply, at: float) -> _Known:
    return (reply.cas, window_of(reply.value), at) if reply.code == b"VA" else (None, NOTHING, at)
