"""A look at the engine: what is there and good, by one plain question, for as long as its caller likes to wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from stampede.entry import Entry
from stampede.errors import EngineClosed, EngineError
from stampede.guarded import Guarded, or_late
from stampede.outage import Outage
from stampede.ports import Found, Looks
from stampede.workers import Late

__all__ = ["Looking"]


class Looking(Looks):
    """`Looks` of entries, of one function and colour, over an engine's of bytes. All in one step, as it is a hit."""

    def __init__(
        self,
        port: Looks,
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None],
        outage: Outage,
        guarded: Guarded | None,
    ) -> None:
        self._port = port
        self._decoded = decoded
        self._outage = outage
        self._breaker = outage.breaker
        self._guarded = guarded

    async def look(self, key: str, patience: float) -> Found | None:
        """None, too, of an engine that is down, or doesn't answer in time: what is to be done then is the claim's."""
        outage, guarded = self._outage, self._guarded
        if outage.closed or self._breaker.outage is not None:
            return None
        found: Found | Late | None
        try:
            if guarded is None:
                found = await or_late(self._port.look(key, patience))
            elif patience == inf:
                found = await self._port.look(key, patience)
            else:
                work = partial(self._port.look, key, patience)
                found = await guarded.ask(work, patience, _unheard, server=outage.server_of(key))
        except EngineClosed:
            return None
        except EngineError as error:
            outage.failed(error)
            return None
        if found is None or isinstance(found, Late):
            return None
        entry = self._decoded(key, found.entry)
        if entry is None or entry.fresh <= 0:
            return None
        if outage.used:
            outage.outlived(key)
        found.entry = entry
        return found


def _unheard(found: object, error: BaseException | None) -> None:
    """What was there is nothing to who has gone on."""
