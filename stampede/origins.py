"""The caps of origins, over the whole fleet: on the engine of the cache that computes there.

A place is one of a bulkhead's, under a lease that is renewed, and ends with who has it. An engine that can't be asked
caps nothing: then this process keeps the caps by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from stampede.adaptive import Adaptive
from stampede.bulkhead import Bulkhead
from stampede.colour import Colour
from stampede.engines.memory import MemoryEngine
from stampede.errors import EngineError, LockLost, OriginFull, SettingsError
from stampede.holding import Holding
from stampede.limiter import Limiter
from stampede.policy import nearest
from stampede.ports import Engine
from stampede.settings import OriginSettings

__all__ = ["OriginGate", "Origins"]

_clock = time.monotonic

DOWN = 1.0
"""Seconds for which an engine that had no answer is not asked again."""


class Origins:
    """Those of one cache."""

    def __init__(self, settings: Mapping[str, OriginSettings], engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._gates: dict[str, OriginGate] = {}

    def gate_of(self, name: str) -> OriginGate | None:
        """Its caps. None: it has none. SettingsError: nobody wrote of it."""
        gate = self._gates.get(name)
        if gate is not None:
            return gate
        its = self._settings.get(name)
        if its is None:
            hint = nearest(name, list(self._settings)) if self._settings else "the settings have no origins"
            raise SettingsError(f"origin is {name!r}, and there is no [origins.{name}]: {hint}")
        if its.concurrency is None and its.rate is None:
            return None
        return self._gates.setdefault(name, OriginGate(name, its, self._engine))

    def close(self) -> None:
        for gate in [*self._gates.values()]:
            gate.close()


class OriginGate:
    """The caps of one origin: those of the fleet, on the engine, or those of this process while the engine is down."""

    def __init__(self, name: str, settings: OriginSettings, engine: Engine) -> None:
        self.name, self.when_full = name, settings.when_full
        self._settings = settings
        most = settings.concurrency
        self.adaptive = Adaptive(most, settings.at_least) if settings.adaptive and most is not None else None
        self._fleet, self._here = _Caps(name, settings, engine), _Caps(name, settings, MemoryEngine())
        self._down_until = 0.0  # the engine had no answer

    @property
    def room(self) -> int | None:
        """How many may be inside now."""
        return self._settings.concurrency if self.adaptive is None else self.adaptive.room

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> _Place:
        """A place for one computation. OriginFull: there was none within `wait` seconds."""
        end = _clock() + wait
        for _ in range(2):  # one question that fails opens no cap
            if _clock() < self._down_until:
                break
            room = self.room
            with suppress(EngineError):
                holding = await self._fleet.enter(colour, room, max(end - _clock(), 0.0), lease, longest)
                return _Place(self, room, holding, colour)
        else:
            self._down_until = _clock() + DOWN
        room = self.room
        holding = await self._here.enter(colour, room, max(end - _clock(), 0.0), lease, longest)
        return _Place(self, room, holding, colour)

    def close(self) -> None:
        self._here.engine.close()


class _Caps:
    """On one engine."""

    def __init__(self, name: str, settings: OriginSettings, engine: Engine) -> None:
        self.engine = engine
        self._name, self._settings = name, settings
        rate = settings.rate
        self._rate = Limiter(f"origin/{name}", engine, max=rate.count, per=rate.per) if rate is not None else None

    async def enter(
        self, colour: Colour, room: int | None, wait: float, lease: float, longest: float
    ) -> Holding | None:
        """First the place, then the moment: who has that starts at once."""
        began, place = _clock(), None
        if room is not None:
            bulkhead = Bulkhead(f"origin/{self._name}", self.engine, concurrency=room, lease=lease, max_hold=longest)
            place = await bulkhead._taken(bulkhead._now().way(colour), wait)
            if place.refusal is not None:
                raise self._full(f"computes {room} at once", wait)
            if colour.suspending:
                place.ends_with_loop()
        if self._rate is not None:
            try:
                left = max(wait - (_clock() - began), 0.0)
                if not await self._rate._acquired(self._rate._way(colour), left):
                    raise self._full(f"has begun {self._rate.max} in {self._rate.per:g} s", wait)
            except BaseException:
                if place is not None:
                    place.let_go()
                raise
        return place

    def _full(self, how: str, wait: float) -> OriginFull:
        waited = f", and there was none within {wait:.3g} s" if wait > 0 else ""
        full = OriginFull(f"the origin {self._name!r} {how}, which is all that it may{waited}")
        full.may_be_covered = self._settings.when_full != "raise"
        return full


class _Place:
    def __init__(self, gate: OriginGate, room: int | None, holding: Holding | None, colour: Colour) -> None:
        self.origin = gate.name
        self._gate, self._room, self._holding, self._colour = gate, room, holding, colour

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        # A caller that waits keeps the room for which it has asked. So a new room holds from the first place on that
        # was asked for it. The computations that come in before are as many as the old room allows: they say nothing.
        adaptive = self._gate.adaptive
        if adaptive is not None and adaptive.room == self._room:
            adaptive.ended(name, seconds, _clock(), failed=failed)

    async def leave(self) -> None:
        if self._holding is not None:
            with suppress(EngineError, LockLost):  # its lease ends it
                await self._holding.released(self._holding.access.way(self._colour))

    def drop(self) -> None:
        if self._holding is not None:
            self._holding.let_go()
