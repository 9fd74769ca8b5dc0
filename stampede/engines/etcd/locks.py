"""Locks of one colour."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from stampede.colour import Colour
from stampede.engines.etcd.desk import SAFETY, Desk, Queued
from stampede.engines.etcd.gateway import Gateway
from stampede.engines.kit.errands import Run
from stampede.errors import EngineClosed, EngineError
from stampede.ports import Busy, Granted, Held

__all__ = ["EtcdLocks"]

LOOK = 0.1
"""Seconds between two looks of a waiter that nobody can tell."""


class EtcdLocks:
    """Locks of one colour: `run` has blocking steps done."""

    def __init__(self, desk: Desk, gateway: Gateway, run: Run, colour: Colour) -> None:
        self._desk, self._gateway, self._run, self._colour = desk, gateway, run, colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        if waits and (answer := self._desk.at_hand(name, token, lease)) is not None:
            return answer
        return await self._run(self._desk.acquire, name, token, lease, waits, room)

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self._run(self._desk.renew, name, token, lease)

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        return await self._run(self._desk.hand_over, name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return await self._run(self._desk.release, name, token)

    async def held(self, prefix: str = "") -> list[Held]:
        return await self._run(self._desk.held, prefix)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return await self._run(self._desk.holder, name)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        end, queue = monotonic() + timeout, self._desk.queue(name)
        mine, revision = (busy.mine, busy.revision) if isinstance(busy, Queued) else (b"", 0)
        token, turn = mine or busy.token, bool(mine)
        with queue.waiter(token, turn, revision) as bell:
            if not queue.hears or monotonic() - queue.heard >= SAFETY:
                with suppress(EngineError):  # a member may be down: then we look, at another
                    await self._run(queue.open)
            left = min(end - monotonic(), SAFETY if queue.hears else LOOK)
            known = queue.hears and queue.worth_asking(token, turn, revision)
            if left > 0 and not known and not self._gateway.closed:
                await self._colour.park(bell, left)
        if self._gateway.closed:
            raise EngineClosed(self._gateway.called)
