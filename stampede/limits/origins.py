"""The caps of origins across the whole fleet, on the engine of the cache whose functions ask the origin. A place at an
origin is a place of a bulkhead: it has a lease that is renewed, and ends if its holder dies. While the engine can't be
asked, each process keeps the caps by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf

from stampede.engines.memory import MemoryEngine
from stampede.errors import EngineError, LockLost, OriginFull, SettingsError
from stampede.limits.limiter import Limiter
from stampede.locks.bulkhead import Bulkhead
from stampede.locks.holding import Holding
from stampede.model.adaptive import Adaptive
from stampede.model.ports import Engine
from stampede.runtime.colour import Colour
from stampede.runtime.watch import watch
from stampede.settings import OriginSettings
from stampede.settings.options import nearest

__all__ = ["OriginGate", "Origins"]

_clock = time.monotonic
_log = logging.getLogger("stampede")

DOWN = 1.0
"""Seconds for which an engine that did not answer is not asked again."""

STALLED = 5.0
"""Seconds without the end of any computation after which a caller that waits for a place is reported in the log."""


class Origins:
    """The origins of one cache."""

    def __init__(self, settings: Mapping[str, OriginSettings], engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._gates: dict[str, OriginGate] = {}

    def gate_of(self, name: str) -> OriginGate | None:
        """Return the caps of an origin, or None if it has none. Raise SettingsError if the settings lack the origin."""
        gate = self._gates.get(name)
        if gate is not None:
            return gate
        origin = self._settings.get(name)
        if origin is None:
            hint = nearest(name, list(self._settings)) if self._settings else "the settings have no origins"
            raise SettingsError(f"origin is {name!r}, and there is no [origins.{name}]: {hint}")
        if origin.concurrency is None and origin.rate is None:
            return None
        return self._gates.setdefault(name, OriginGate(name, origin, self._engine))

    def close(self) -> None:
        for gate in [*self._gates.values()]:
            gate.close()


class OriginGate:
    """The caps of one origin, kept on the engine for the whole fleet, or in this process while the engine is down."""

    def __init__(self, name: str, settings: OriginSettings, engine: Engine) -> None:
        self.name, self.when_full = name, settings.when_full
        self._settings = settings
        most = settings.concurrency
        self.adaptive = Adaptive(most, settings.at_least) if settings.adaptive and most is not None else None
        self._fleet, self._local = _Caps(name, settings, engine), _Caps(name, settings, MemoryEngine())
        self._down_until = 0.0  # the engine did not answer, and is not asked before this moment
        self._entering: dict[object, float] = {}  # callers that wait for a place, and since when
        self._inside: set[_Place] = set()  # the places that this process has
        self._last_end = 0.0  # when one of them last ended
        self._watched = self._warned = False

    @property
    def room(self) -> int | None:
        """The number of computations that may run there now. None: there is no cap."""
        return self._settings.concurrency if self.adaptive is None else self.adaptive.room

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> _Place:
        """Return a place for one computation. Raise OriginFull if there is none within `wait` seconds."""
        me, began = object(), _clock()
        self._entering[me] = began
        if wait > 0 and not self._watched:
            self._watched = watch.add(self, began + STALLED)
        try:
            room, holding = await self._find_place(colour, began + wait, lease, longest)
        finally:
            del self._entering[me]
        place = _Place(self, room, holding, colour)
        self._inside.add(place)
        return place

    async def _find_place(
        self, colour: Colour, end: float, lease: float, longest: float
    ) -> tuple[int | None, Holding | None]:
        """Return the room that was asked for, and the place. The engine is asked twice before it counts as down, so
        that one failed question does not open the cap."""
        for _ in range(2):
            if _clock() < self._down_until:
                break
            room = self.room
            with suppress(EngineError):
                return room, await self._fleet.enter(colour, room, max(end - _clock(), 0.0), lease, longest)
        else:
            self._down_until = _clock() + DOWN
        room = self.room
        return room, await self._local.enter(colour, room, max(end - _clock(), 0.0), lease, longest)

    def left(self, place: _Place) -> None:
        """Take note that a computation of this process has ended."""
        self._inside.discard(place)
        self._last_end = _clock()

    def look(self, now: float) -> float | None:
        """Warn, once, if callers may wait for a computation that waits for them. Return when to look again."""
        since = max(min(list(self._entering.values()), default=inf), self._last_end)
        if since == inf or self._warned:
            self._watched = False
            return None
        if now < since + STALLED:
            return since + STALLED
        if self._inside:
            self._warned = True
            _log.warning(
                "a computation has waited %.3g s for a place at the origin %r, and none of the %d that this process "
                "runs there has ended meanwhile. If one of them calls the other in a thread of its own, it waits "
                "for itself: start the thread with contextvars.copy_context().run, so that both share one place",
                now - since,
                self.name,
                len(self._inside),
            )
        return now + STALLED

    def close(self) -> None:
        self._local.engine.close()


class _Caps:
    """The caps of one origin on one engine."""

    def __init__(self, name: str, settings: OriginSettings, engine: Engine) -> None:
        self.engine = engine
        self._name, self._settings = name, settings
        rate = settings.rate
        self._rate = Limiter(f"origin/{name}", engine, max=rate.count, per=rate.per) if rate is not None else None

    async def enter(
        self, colour: Colour, room: int | None, wait: float, lease: float, longest: float
    ) -> Holding | None:
        """Return a place, or None if the origin has no cap on places. Raise OriginFull after `wait` seconds. The place
        comes first, and the start of the rate limit second, because a start has to be used at once."""
        began, place = _clock(), None
        if room is not None:
            bulkhead = Bulkhead(f"origin/{self._name}", self.engine, concurrency=room, lease=lease, max_hold=longest)
            place = await bulkhead._ask_until_granted(bulkhead._current_access().side(colour), wait)
            if place.refusal is not None:
                raise self._full(f"at most {room} may run at once", wait)
            if colour.suspending:
                place.ends_with_loop()
        if self._rate is not None:
            try:
                left = max(wait - (_clock() - began), 0.0)
                if not await self._rate._acquired(self._rate._side(colour), left):
                    raise self._full(f"at most {self._rate.max} may start in {self._rate.per:g} s", wait)
            except BaseException:
                if place is not None:
                    place.let_go()
                raise
        return place

    def _full(self, how: str, wait: float) -> OriginFull:
        waited = f"; no place was free within {wait:.3g} s" if wait > 0 else ""
        full = OriginFull(f"the origin {self._name!r} is full: {how}{waited}")
        full.may_be_covered = self._settings.when_full != "raise"
        return full


class _Place:
    """A place at the origin, held by one computation."""

    def __init__(self, gate: OriginGate, room: int | None, holding: Holding | None, colour: Colour) -> None:
        self.origin = gate.name
        self._gate, self._room, self._holding, self._colour = gate, room, holding, colour

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        # A caller that waits asks for the room of the moment when it came. So a new room applies from the first place
        # that was asked for with it. Computations that enter before that still follow the old room, and do not count.
        adaptive = self._gate.adaptive
        if adaptive is not None and adaptive.room == self._room:
            adaptive.ended(name, seconds, _clock(), failed=failed)

    async def leave(self) -> None:
        self._gate.left(self)
        if self._holding is not None:
            with suppress(EngineError, LockLost):  # the place ends with its lease
                await self._holding.released(self._holding.access.side(self._colour))

    def drop(self) -> None:
        self._gate.left(self)
        if self._holding is not None:
            self._holding.let_go()
