"""Limits: an item that is swapped for the next one, by its CAS number.

What was seen last is tried first, and what is there now is asked for along with it: one round trip if nobody else was
faster, and one more for each who was. The time is told by the clocks of those who ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import random

from stampede.colour import Bell, Colour
from stampede.engines.limits import T, WindowLimits
from stampede.engines.memcached import items, meta
from stampede.engines.memcached.holds import TRIES, Line, taken
from stampede.engines.memcached.meta import Reply
from stampede.errors import EngineError
from stampede.window import NOTHING, SECOND, Window, bytes_of, ends, window_of

__all__ = ["MemcachedLimits", "Seen"]

Seen = dict[bytes, tuple[bytes | None, Window]]
"""What was there last, and its number."""

FLAGS = b"1470758915"
REMEMBERED = 1000
CALM = 3
"""So often the next try comes at once; then not all who have lost try again together."""


class MemcachedLimits(WindowLimits):
    """Limits of one colour."""

    def __init__(self, line: Line, colour: Colour, seen: Seen) -> None:
        self._line = line
        self._colour = colour
        self._seen = seen

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        its = items.name_of(name, b"w")
        known = self._seen.pop(its, None)
        async with taken(self._line, its) as link:
            for tried in range(TRIES):
                sure = known is None or tried > 0
                cas, window = known or _seen((await link.ask(meta.look(its), twice=True))[0])
                after, answer = change(window, int(time.time() * SECOND))
                if after is window and not sure:  # a refusal is one of what is there now
                    known = _seen((await link.ask(meta.look(its), twice=True))[0])
                    continue
                if after is window:
                    return answer
                body, ttl = bytes_of(after), min(ends(after) // SECOND + 3, meta.MONTH)
                swap = meta.add(its, body, FLAGS, ttl) if cas is None else meta.put(its, body, FLAGS, ttl, cas)
                stored, there = await link.ask(swap + meta.look(its), 2)
                if stored.code == b"HD":
                    if len(self._seen) < REMEMBERED:
                        self._seen[its] = stored.cas, after
                    return answer
                known = _seen(there)
                if tried > CALM:
                    await self._colour.park(Bell(), random() * 0.002 * min(tried, 10))
        raise EngineError(f"others start in {name!r} faster than it can be asked for")


def _seen(reply: Reply) -> tuple[bytes | None, Window]:
    return (reply.cas, window_of(reply.value)) if reply.code == b"VA" else (None, NOTHING)
