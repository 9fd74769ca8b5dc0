"""What all functions of a cache share: the engine, the local tier, and the flights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from stampede import events
from stampede.algorithm.call import Gates
from stampede.algorithm.flight import Flights
from stampede.errors import EngineError
from stampede.leases.keeper import Hold, keeper
from stampede.local_tier.tier import LocalTier
from stampede.model.ports import Engine
from stampede.outages.outage import Outage
from stampede.outages.postponed import Postponed
from stampede.runtime.colour import run_blocking

__all__ = ["Core"]


class Core:
    """One cache's engine and its health, its local tier, and its flights. All scopes of the cache share them."""

    def __init__(
        self,
        engine: Engine,
        local_tier: LocalTier,
        outage: Outage | None,
        note: events.Note,
        gates: Gates | None = None,
        *,
        later: bool = False,
    ) -> None:
        self.engine = engine
        self.later = later  # on_error="later": invalidations that fail are repeated
        self.postponed = Postponed(engine.called)
        self.local_tier = local_tier
        self.outage = outage
        self.note = note
        self.gates = gates
        self.closed = False
        if engine.audience is not None:
            engine.audience.add(self)
        self.flights = Flights()
        self._epochs = itertools.count(1)
        self.epoch = 0  # changes with every invalidate_all, expire_all and clear of this process
        self.ended: dict[str | None, int] = {}  # by scope (None: of all): the epoch that its last end began

    def untold(self, server: str, how: str) -> None:
        self.note(events.Untold, "", "", server, how)

    def close(self) -> Callable[[], object] | None:
        """Close this before the engine. Return what remains to be done first, or None. That is to give back the leases
        of computations under way, because other processes would wait for them. It may take a moment."""
        self.closed, outage = True, self.outage
        self.postponed.close()
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
        with suppress(EngineError):  # the rest end by themselves
            for hold in held:
                run_blocking(claims.abandon(hold.key, hold.token))

    def is_down(self) -> bool:
        return self.outage is not None and self.outage.down

    def answered(self, was_down: bool) -> None:
        """Note that the engine made a change. If it counted as down when it was asked, it is up again."""
        if was_down and self.outage is not None:
            self.outage.answered()

    def forget(self, key: str, *, hard: bool = True) -> None:
        """Stop serving what this process has stored for the key and, if `hard`, what is being computed for it."""
        if hard:
            self.flights.detach(key)
        if self.outage is not None:
            self.outage.forget(key)
        self.local_tier.drop(key)

    def drop_older(self, key: str) -> None:
        """Forget a key of an older generation, also in the tier of an engine inside this process."""
        self.forget(key)
        self.local_tier.drop_older(key)

    def forget_all(self, prefix: str = "", scope: str | None = None) -> None:
        """Forget the keys of this scope and the flights with this prefix; by default, all of both."""
        self.epoch = self.ended[scope] = next(self._epochs)
        self.local_tier.drop_all(scope)  # first: `detach_all` may wake thousands, and calls come meanwhile
        if self.outage is not None:
            self.outage.forget_all()
        self.flights.detach_all(prefix)

    def forget_tags(self, names: Sequence[bytes]) -> None:
        """Look at their tags again before anything is served that carries one of these."""
        self.local_tier.end_tags(names)
        if self.outage is not None:
            self.outage.forget_all()

    def soften_all(self, scope: str | None = None) -> None:
        """Treat everything that this process has stored for the scope (None: for all) as stale from now on."""
        self.epoch = next(self._epochs)
        self.local_tier.soften_all(scope)
        if self.outage is not None:
            self.outage.forget_all()
