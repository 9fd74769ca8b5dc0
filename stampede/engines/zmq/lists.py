"""What brokers tell people: who holds what, and how they are."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from stampede.colour import Colour
from stampede.engines.whereabouts import parts_of
from stampede.engines.zmq import wire
from stampede.engines.zmq.locks import Links
from stampede.engines.zmq.wire import Word
from stampede.errors import EngineError
from stampede.ports import Held

__all__ = ["ZmqLists"]


class ZmqLists:
    """Of one colour."""

    def __init__(self, links: Links, colour: Colour) -> None:
        self._links = links
        self._colour = colour

    async def held(self, prefix: str = "") -> list[Held]:
        found = []
        for link in self._links.links:
            found += [_held(*row) for row in await link.listed(self._colour, Word.HELD, prefix)]
        return found

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        raw = wire.name_of(name)
        _, payload = await self._links.of(raw).ask(self._colour, Word.HOLDER, raw)
        return list(wire.heard_inside(payload))

    async def grace(self) -> dict[str, float]:
        """Of each that is in its grace, the seconds that are left."""
        found = {}
        for link in self._links.links:
            _, payload = await link.ask(self._colour, Word.STATS)
            left = json.loads(payload)["quiet"]
            if left > 0:
                found[link.name] = left
        return found

    async def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """What each says of itself."""
        said: dict[str, Mapping[str, Any]] = {}
        for link in self._links.links:
            try:
                _, payload = await link.ask(self._colour, Word.STATS)
                said[link.name] = json.loads(payload)
            except EngineError as error:
                said[link.name] = {"down": str(error)}
        return said


def _held(name: str, token: str, holder: str, fence: int, held: float, left: float, waiting: int, *_: Any) -> Held:
    host, pid = parts_of(holder)
    known = bytes.fromhex(name).decode("utf-8", "backslashreplace")
    return Held(known, host, pid, None, fence, time.time() - held, held, left, True, waiting)
