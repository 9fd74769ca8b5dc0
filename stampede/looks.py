"""A look at the engine: what is there and good, by one plain question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stampede.entry import Entry
from stampede.errors import EngineClosed, EngineError
from stampede.outage import Outage
from stampede.ports import Found, Looks

__all__ = ["Looking"]


class Looking(Looks):
    """`Looks` of entries, of one function and colour, over an engine's of bytes. All in one step, as it is a hit."""

    def __init__(self, port: Looks, decoded: Callable[[str, Entry[Any]], Entry[Any] | None], outage: Outage) -> None:
        self._port = port
        self._decoded = decoded
        self._outage = outage
        self._breaker = outage.breaker

    async def look(self, key: str) -> Found | None:
        """Return what is there and fresh. None, too, if the engine is down: what is to be done then is the claim's."""
        outage = self._outage
        if outage.closed or self._breaker.outage is not None:
            return None
        try:
            found = await self._port.look(key)
        except EngineClosed:
            return None
        except EngineError as error:
            outage.failed(error)
            return None
        if found is None:
            return None
        entry = self._decoded(key, found.entry)
        if entry is None or entry.fresh <= 0:
            return None
        if outage.used:
            outage.outlived(key)
        found.entry = entry
        return found
