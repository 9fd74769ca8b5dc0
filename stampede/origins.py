"""The caps of origins, over the whole fleet: on the engine of the cache that computes there.

A place is one of a bulkhead's, under a lease that is renewed, and ends with who has it. An engine that can't be asked
caps nothing: then this process keeps the caps by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from stampede import decisions
from stampede.adaptive import Adaptive
from stampede.bulkhead import Bulkhead
from stampede.colour import Colour
from stampede.engines.memory import MemoryEngine
from stampede.errors import EngineError, LockLost, OriginFull, SettingsError
from stampede.limiter import Limiter
from stampede.policy import nearest
from stampede.ports import Engine
from stampede.settings import OriginSettings

__all__ = ["OriginGate", "Origins"]

_clock = time.monotonic


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
    """One origin, as who computes there has to do with it."""

    def __init__(self, name: str, settings: OriginSettings, engine: Engine) -> None:
        self.name, self.when_full = name, settings.when_full
        self._settings = settings
        most = settings.concurrency
        self.adaptive = Adaptive(most, settings.at_least) if settings.adaptive and most is not None else None
        self._fleet = _Caps(name, settings, engine)
        self._own: _Caps | None = None

    @property
    def _here(self) -> _Caps:
        """The same caps, of this process alone, and of all its threads together."""
        if self._own is None:
            made = _Caps(self.name, self._settings, MemoryEngine())
            with decisions.lock:
                if self._own is None:
                    self._own = made
        return self._own

    @property
    def room(self) -> int | None:
        """How many may be inside now."""
        return self._settings.concurrency if self.adaptive is None else self.adaptive.room

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> _Place:
        began = _clock()
        try:
            bulkhead = await self._fleet.enter(colour, self.room, wait, lease, longest)
        except EngineError:
            left = max(wait - (_clock() - began), 0.0)
            bulkhead = await self._here.enter(colour, self.room, left, lease, longest)
        return _Place(self, bulkhead, colour)

    def close(self) -> None:
        if self._own is not None:
            self._own.engine.close()


class _Caps:
    """On one engine."""

    def __init__(self, name: str, settings: OriginSettings, engine: Engine) -> None:
        self.engine = engine
        self._name, self._settings = name, settings
        rate = settings.rate
        self._rate = Limiter(f"origin/{name}", engine, max=rate.count, per=rate.per) if rate is not None else None

    async def enter(
        self, colour: Colour, room: int | None, wait: float, lease: float, longest: float
    ) -> Bulkhead | None:
        """First the place, then the moment: who has that starts at once."""
        began, bulkhead = _clock(), None
        if room is not None:
            bulkhead = Bulkhead(f"origin/{self._name}", self.engine, concurrency=room, lease=lease, max_hold=longest)
            if await bulkhead._taking(colour, wait) is not None:
                raise self._full(f"computes {room} at once", wait)
            for grip in bulkhead._grips.values():
                grip.belongs_to(bulkhead)  # until its loop is closed: else it is its lock's, whatever becomes of that
        if self._rate is not None:
            try:
                left = max(wait - (_clock() - began), 0.0)
                if not await self._rate._acquire(colour, left):
                    raise self._full(f"has begun {self._rate.max} in {self._rate.per:g} s", wait)
            except GeneratorExit:  # its loop was closed: nothing can be awaited any more
                if bulkhead is not None:
                    _let_go(bulkhead)
                raise
            except BaseException:
                if bulkhead is not None:
                    await colour.shielded(_given_back(bulkhead, colour))
                raise
        return bulkhead

    def _full(self, how: str, wait: float) -> OriginFull:
        waited = f", and there was none within {wait:.3g} s" if wait > 0 else ""
        full = OriginFull(f"the origin {self._name!r} {how}, which is all that it may{waited}")
        full.may_be_covered = self._settings.when_full != "raise"
        return full


class _Place:
    """In the hands of one computation."""

    def __init__(self, gate: OriginGate, bulkhead: Bulkhead | None, colour: Colour) -> None:
        self.origin = gate.name
        self._gate, self._bulkhead, self._colour = gate, bulkhead, colour

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        if self._gate.adaptive is not None:
            self._gate.adaptive.ended(name, seconds, _clock(), failed=failed)

    async def leave(self) -> None:
        if self._bulkhead is not None:
            await _given_back(self._bulkhead, self._colour)

    def drop(self) -> None:
        if self._bulkhead is not None:
            _let_go(self._bulkhead)


async def _given_back(bulkhead: Bulkhead, colour: Colour) -> None:
    with suppress(EngineError, LockLost):  # its lease ends it
        await bulkhead._releasing(colour)


def _let_go(bulkhead: Bulkhead) -> None:
    for grip in list(bulkhead._grips.values()):
        grip.let_go()
