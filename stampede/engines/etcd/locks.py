"""Locks of one colour: who waits watches the one before it, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import inf
from random import uniform
from time import monotonic

from stampede.colour import Bell, Colour
from stampede.engines.etcd.desk import Desk, Queued, turn_has_come
from stampede.engines.etcd.gateway import Gateway
from stampede.engines.etcd.hub import Ear, Hub
from stampede.engines.kit.errands import Run
from stampede.errors import EngineClosed, EngineError
from stampede.ports import Busy, Granted, Held

__all__ = ["EtcdLocks"]

SAFETY = 1.0
"""Seconds between two looks of one who waits, and whom nobody tells that there is something; a tenth of what it has
waited, if that is more."""

LOOK = 0.1
"""The same of one that nobody can tell."""

LONGEST = 10.0
"""Seconds between two looks, at most."""


class EtcdLocks:
    """Locks of one colour: `run` has blocking steps done."""

    def __init__(self, desk: Desk, hub: Hub, gateway: Gateway, run: Run, colour: Colour) -> None:
        self._desk, self._hub, self._gateway, self._run, self._colour = desk, hub, gateway, run, colour

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        desk = self._desk
        return await self._run(desk.acquire, name, token, lease, waits, room, undo=lambda: desk.release(name, token))

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
        began, end, bell = monotonic(), monotonic() + timeout, Bell()
        if not isinstance(busy, Queued):
            await self._colour.park(bell, min(timeout, LOOK))
            return
        before = list(busy.before)

        def told(key: bytes | None) -> None:
            if key is not None and before:
                before[:] = [each for each in before if each.key != key]
                if not turn_has_come(before, busy.room):
                    return  # others are to go yet
            bell.ring()

        ear: Ear | None = None
        unhear = self._desk.hear(busy.span[0], told) if busy.near else None
        try:
            if unhear is None:
                watch = partial(self._hub.watch, busy.span, told, revision=busy.revision + 1)
                with suppress(EngineError):  # a member may be down: then we look, at another
                    ear = await self._run(watch)
            elif not self._desk.has(name, busy.near):  # it went before we listened
                return
            while not bell.rung and (left := end - monotonic()) > 0:
                hears = unhear is not None or (ear is not None and ear.hears)
                waited = monotonic() - began
                rest = max(SAFETY, min(waited / 10, LONGEST)) * uniform(0.9, 1.1) if hears else LOOK
                due = self._desk.left(name, busy.mine) if busy.mine else inf
                if await self._colour.park(bell, min(left, rest, due)) or self._gateway.closed:
                    break
                if monotonic() >= end:
                    break  # who asks for it now needs no look
                if due <= rest:
                    if not await self._run(self._desk.keep_waiting, name, busy.mine):
                        break  # our place has gone, and we ask for another
                elif before:
                    break
                elif await self._run(self._desk.gone, busy.span):
                    if ear is not None:
                        ear.doubt()
                    break
        finally:
            if unhear is not None:
                unhear()
            if ear is not None:
                ear.close()
        if self._gateway.closed:
            raise EngineClosed(self._gateway.called)
