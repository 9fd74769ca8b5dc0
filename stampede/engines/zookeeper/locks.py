"""Locks of one colour: who waits watches the one before it, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from random import uniform
from time import monotonic

from stampede.colour import Bell, Colour
from stampede.engines.kit.errands import Run
from stampede.engines.zookeeper.desk import Desk, Queued
from stampede.errors import EngineError
from stampede.pace import look_again
from stampede.ports import Busy, Granted, Held

__all__ = ["ZooKeeperLocks"]

SAFETY = 1.0
"""Seconds after which the next one in the queue asks again, though nobody has told it of anything."""

LOOK = 0.1
"""The same of one that nobody can tell."""


class ZooKeeperLocks:
    """Locks of one colour: `run` has blocking steps done."""

    def __init__(self, desk: Desk, run: Run, colour: Colour) -> None:
        self._desk, self._run, self._colour = desk, run, colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        return await self._run(self._desk.acquire, name, token, lease, waits, room)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self._run(self._desk.renew, name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return await self._run(self._desk.release, name, token)

    async def held(self, prefix: str = "") -> list[Held]:
        return await self._run(self._desk.held, prefix)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return await self._run(self._desk.holder, name)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        end, bell = monotonic() + timeout, Bell()
        unwatch, rest = None, LOOK
        if isinstance(busy, Queued):
            with suppress(EngineError):  # then we look
                unwatch = await self._run(self._desk.watch, busy, bell.ring)
                rest = look_again(busy.ahead - 1, -1.0, 0.0, SAFETY) * uniform(0.9, 1.1)
        try:
            if not bell.rung and (left := min(end - monotonic(), rest)) > 0:
                await self._colour.park(bell, left)
        finally:
            if unwatch is not None:
                unwatch()
        self._desk.check()
