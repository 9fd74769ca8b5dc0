"""What all functions of a cache share: the engine, what is kept in this process, and the flights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from stampede import events
from stampede.algorithm.call import Gates
from stampede.algorithm.flight import Flights
from stampede.errors import EngineError
from stampede.local_tier.tier import LocalTier
from stampede.model.ports import Engine
from stampede.outages.keeper import Hold, keeper
from stampede.outages.outage import Outage
from stampede.runtime.colour import run_blocking

__all__ = ["Core"]


class Core:
    """One cache's engine and its health, what it keeps in this process, and its flights; its scopes share them."""

    def __init__(
        self,
        engine: Engine,
        local_tier: LocalTier,
        outage: Outage | None,
        note: events.Note,
        gates: Gates | None = None,
    ) -> None:
        self.engine = engine
        self.local_tier = local_tier
        self.outage = outage
        self.note = note
        self.gates = gates
        self.closed = False
        if engine.audience is not None:
            engine.audience.add(self)
        self.flights = Flights()
        self._epochs = itertools.count(1)
        self.epoch = 0  # another one after every invalidate_all and clear of this process
        self.ended: dict[str | None, int] = {}  # the epoch that the last of these began: of a scope, of all by None

    def untold(self, server: str, how: str) -> None:
        self.note(events.Untold, "", "", server, how)

    def close(self) -> Callable[[], object] | None:
        """Close this before the engine. Return what is left to do by then, if there is anything: the leases of its
        computations are given back, or others would wait for their end. It may take a moment."""
        self.closed, outage = True, self.outage
        if self.gates is not None:
            self.gates.close()
        held = keeper.disown(self)
        if outage is None:
            return None
        outage.closed = True
        held = [hold for hold in held if hold.token not in outage.refuge_leases]
        return partial(self._give_back, held) if held and not outage.down else None

    def _give_back(self, held: Sequence[Hold]) -> None:
        claims = self.engine.blocking.claims
        assert claims is not None
        with suppress(EngineError):  # what is left ends by itself
            for hold in held:
                run_blocking(claims.abandon(hold.key, hold.token))

    def is_down(self) -> bool:
        return self.outage is not None and self.outage.down

    def answered(self, was_down: bool) -> None:
        """A change was made: an engine that counted as down when it was asked for is up, and has what was set."""
        if was_down and self.outage is not None:
            self.outage.answered()

    def forget(self, key: str, *, hard: bool = True) -> None:
        """From now on nobody in this process gets what is kept here, nor (if hard) what is being computed."""
        if hard:
            self.flights.detach(key)
        if self.outage is not None:
            self.outage.forget(key)
        self.local_tier.drop(key)

    def drop_older(self, key: str) -> None:
        """The same for a key of an older generation: nobody asks for it, but its resident may still be at home."""
        self.forget(key)
        self.local_tier.drop_older(key)

    def forget_all(self, prefix: str = "", scope: str | None = None) -> None:
        """The same for the keys with this prefix, of this scope; or for all."""
        self.epoch = self.ended[scope] = next(self._epochs)
        self.local_tier.drop_all(scope)  # before thousands are woken: meanwhile others call
        if self.outage is not None:
            self.outage.forget_all()
        self.flights.detach_all(prefix)

    def soften_all(self, scope: str | None = None) -> None:
        """From now on nobody in this process takes what is kept for fresh."""
        self.epoch = next(self._epochs)
        self.local_tier.soften_all(scope)
        if self.outage is not None:
            self.outage.forget_all()
