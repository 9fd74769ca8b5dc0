"""What stands behind every face of a cache: the engine, the local tier, and one `Scope` for each function."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from stampede import early, events
from stampede.coded import CodedClaims, CodedStore, Coder
from stampede.colour import BLOCKING, SUSPENDING, Colour, hold_task, kept_whole, run_blocking, running_loop
from stampede.entry import Entry, new_id
from stampede.errors import EngineError, OptionError
from stampede.fill import Call, fill, quietly
from stampede.flight import Flights, Landing, outside
from stampede.keeper import Hold, keeper
from stampede.local import Resident, Tier
from stampede.outage import GuardedClaims, Outage
from stampede.policy import Policy
from stampede.ports import Claims, Engine, Looks, Store, Ticket
from stampede.workers import Workers

__all__ = ["Core", "Scope", "landed"]

_clock = time.monotonic
_refreshers = Workers(4, "stampede-refresh")
_SLOTS = 1024


class Core:
    """One cache's engine, tier, flights and health; its scopes share them."""

    def __init__(
        self,
        engine: Engine,
        tier: Tier | None,
        tier_ttl: float | None,
        outage: Outage | None,
        tell: Callable[[events.Event], object],
    ) -> None:
        self.engine = engine
        self.tier = tier
        self.own_tier = tier is not None and engine.shared  # in front of the engine, not the engine's own
        self.tier_ttl = tier_ttl  # seconds that an entry is believed where no news come
        self.outage = outage
        self.tell = tell
        self.flights = Flights()
        # What this process changes is voided in its own tier at once, also where the engine sends no news.
        self.epoch = 0  # grows with every invalidate_all and clear of this process
        self._stamps = array("Q", bytes(8 * _SLOTS))
        self._stamping = threading.Lock()

    def sample(self, key: str) -> Ticket:
        slot = hash(key) % _SLOTS
        return Ticket(self._stamps, slot, self._stamps[slot])

    def forget(self, key: str, *, hard: bool = True) -> None:
        """From now on nobody in this process gets what is kept here, nor (if hard) what is being computed."""
        with self._stamping:
            self._stamps[hash(key) % _SLOTS] += 1
        if hard:
            self.flights.detach(key)
        if self.outage is not None:
            self.outage.forget(key)
        if self.own_tier and self.tier is not None:
            self.tier.drop(key)

    def forget_all(self, prefix: str) -> None:
        with self._stamping:
            self.epoch += 1
            for slot in range(_SLOTS):
                self._stamps[slot] += 1
        self.flights.detach_all(prefix)
        if self.outage is not None:
            self.outage.forget_all()


class Scope:
    """One function's part of a cache (or the cache's own keys): how its values are asked for, kept and forgotten."""

    def __init__(self, core: Core, namespace: str, name: str, policy: Policy, codec: Coder | None) -> None:
        if core.engine.claims is None or core.engine.aclaims is None:
            raise OptionError(f"{core.engine.scheme}:// keeps no values: it can only be a lock (locks=)")
        assert core.engine.store is not None
        assert core.engine.astore is not None
        self.core = core
        self.name = name
        self.policy = policy
        self.namespace = namespace
        refuge = core.outage.refuge if core.outage is not None else None
        self.claims, self.store = self._ports(
            core.engine.claims, core.engine.store, codec, refuge.claims if refuge else None
        )
        self.aclaims, self.astore = self._ports(
            core.engine.aclaims, core.engine.astore, codec, refuge.aclaims if refuge else None
        )
        self._coded = CodedStore(core.engine.store, codec, self._bad) if codec is not None else None
        self._known = -1, ""  # the generation, as this process knows it, and the epoch in which it was asked for
        run_blocking(self.learn(BLOCKING))

    def _ports(self, claims: Claims, store: Store, codec: Coder | None, refuge: Claims | None) -> tuple[Claims, Store]:
        if codec is not None:
            claims, store = CodedClaims(claims, codec, self._bad), CodedStore(store, codec, self._bad)
        if self.core.outage is not None and refuge is not None:
            claims = GuardedClaims(claims, refuge, self.core.outage)
        return claims, store

    def _bad(self, key: str, error: Exception) -> None:
        self.core.tell(events.BadBytes(self.name, self.label(key), str(error)))

    # -- keys -----------------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        return self._known[1]

    def label(self, physical: str) -> str:
        return physical.removeprefix(self.prefix)

    async def learn(self, colour: Colour) -> str:
        """The prefix of every key in today's generation."""
        store = self.astore if colour.suspending else self.store
        outage, epoch = self.core.outage, self.core.epoch
        if outage is not None and outage.down:
            return self.prefix
        try:
            generation = await store.generation(self.name)
            if self.namespace and self.namespace != self.name:
                generation = f"{await store.generation(self.namespace)},{generation}"
        except EngineError as error:
            if outage is not None:
                outage.failed(error)
            return self.prefix
        prefix = f"{generation}|"
        self._known = epoch, prefix
        return prefix

    def _prefix(self, looks: Looks) -> str:
        """The same, without the price of a coroutine where the engine knows it at once."""
        epoch, own = self.core.epoch, looks.generation_at_hand(self.name)
        whole = looks.generation_at_hand(self.namespace) if self.namespace and self.namespace != self.name else ""
        if own is None or whole is None:
            return run_blocking(self.learn(BLOCKING))
        prefix = f"{whole},{own}|" if whole else f"{own}|"
        self._known = epoch, prefix
        return prefix

    # -- the way of a call ----------------------------------------------------------------------------------------

    def hit(self, key: str) -> Resident | None:
        """The local tier's answer, if it needs no thought."""
        tier = self.core.tier
        epoch, prefix = self._known
        if tier is None or epoch != self.core.epoch:
            return None
        resident = tier.get(prefix + key)
        if resident is None or resident.end <= _clock() or not _holds(resident):
            return None
        resident.hits += 1
        return resident

    def at_hand(self, key: str) -> Resident | Entry[Any] | None:
        """What can be had without a claim, a flight, or a moment's waiting: something with a `value`."""
        return self.hit(key) or self.look(key)

    def look(self, key: str) -> Entry[Any] | None:
        """A shared engine's answer, where it can be had in microseconds: no claim, no flight, no doubt."""
        core = self.core
        looks = core.engine.looks
        if looks is None or (core.outage is not None and core.outage.down):
            return None
        physical = self._prefix(looks) + key
        at = _clock()
        resident = core.tier.get(physical) if core.tier is not None else None
        if resident is not None and _is_due(resident, at):
            return None  # the engine's is the same one: somebody has to claim, or nobody refreshes it
        found = looks.look(physical)
        entry = self._coded.open(physical, found.entry) if found is not None and self._coded is not None else None
        if found is None or entry is None or entry.raised:
            return None
        if core.tier is not None:
            if self._prefix(looks) + key != physical:
                return None  # bumped before the ticket was taken: it would hold for ever
            self.keep(physical, Landing(entry, ticket=found.ticket, at=at), None, self.policy)
        elif self.policy.early and early.due(entry, early.draw(self.policy.early)):
            return None
        core.tell(events.Found(self.name, key))
        return entry

    async def fetch(
        self,
        colour: Colour,
        key: str,
        origin: Callable[[], Any],
        policy: Policy | None = None,
        *,
        force: bool = False,
        home: Callable[[Resident], object] | None = None,
    ) -> Landing:
        """What the local tier could not answer. `home` is told of the resident, if there is one now."""
        policy, epoch = policy or self.policy, self.core.epoch
        call = await self.call(colour, key, origin, policy, force=force)
        physical = call.key
        sample = self.core.sample(physical)
        place = None
        if policy.background and not force:
            place = _Place(self, colour, physical, sample)
            if place.reserved:
                call.spawn = place.spawn
            elif call.seen is not None:
                return self._postponed(physical, call)
        try:
            landing = await fill(call)
        finally:
            if place is not None:
                place.free()
        if landing.ticket is not None and self.core.own_tier and await self.learn(colour) + key != physical:
            return landing  # bumped before the ticket was taken: kept, it would hold for ever
        resident = self.keep(physical, landing, sample, policy)
        if resident is not None and home is not None:
            home(resident)
            if epoch != self.core.epoch and self.core.tier is not None:
                self.core.tier.drop(physical)  # of an older generation by now: its home doesn't know generations
        return landing

    async def call(
        self, colour: Colour, key: str, origin: Callable[[], Any], policy: Policy, *, force: bool = False
    ) -> Call:
        """One caller's question to the algorithm."""
        physical = await self.learn(colour) + key
        return Call(
            key=physical,
            label=key,
            scope=self.name,
            origin=origin,
            policy=policy,
            port=self.aclaims if colour.suspending else self.claims,
            flights=self.core.flights,
            colour=colour,
            loop=running_loop() if colour.suspending else None,
            clock=_clock,
            hold=self._hold,
            drop=self._drop,
            tell=self.core.tell,
            seen=None if force else self._due(physical),
            force=force,
            draws=self.core.tier is None,
        )

    def _due(self, key: str) -> Entry[Any] | None:
        """The tier's entry, still fresh, whose early moment has come. Other callers go on hitting it meanwhile."""
        resident = self.core.tier.get(key) if self.core.tier is not None else None
        now = _clock()
        if resident is None or not _is_due(resident, now):
            return None
        resident.end = resident.fresh
        return replace(resident.entry, fresh=resident.fresh - now, keep=resident.keep - now)

    def _postponed(self, key: str, call: Call) -> Landing:
        """No place beside the caller, and nobody is to wait: look again a little later."""
        assert call.seen is not None
        landing = Landing(call.seen, until=call.seen.fresh / 4)
        self.keep(key, landing, None, call.policy)
        return landing

    def _hold(self, call: Call, max_hold: float) -> Hold:
        loop = call.loop
        return Hold(
            keeper,
            self.claims,
            call.key,
            call.token,
            call.policy.lease,
            max_hold,
            drop=lambda: self._drop(call),
            alive=None if loop is None else lambda: not loop.is_closed(),
        )

    def _drop(self, call: Call) -> None:
        if call.pid == os.getpid():  # in a forked child it is the parent's
            run_blocking(quietly(self.claims.abandon(call.key, call.token)))

    # -- the local tier -------------------------------------------------------------------------------------------

    def keep(self, key: str, landing: Landing, sample: Ticket | None, policy: Policy) -> Resident | None:
        """Keep what a call ended with as a resident, as long as it is known to be true, and draw its early moment."""
        tier, entry = self.core.tier, landing.entry
        if tier is None or entry is None or entry.raised:
            return None
        resident = tier.get(key)
        if resident is None or resident.entry.id != entry.id or not _holds(resident):
            resident = self._resident(key, landing, sample)
            if resident is None:
                return None
            tier.put(resident)
        resident.scope = self.name
        if landing.until is not None:
            resident.end = min(resident.fresh, _clock() + landing.until)
        elif resident.end == 0.0:
            ahead = early.lead(entry, early.draw(policy.early)) if policy.early else 0.0
            resident.end = resident.fresh - ahead
        return resident

    def _resident(self, key: str, landing: Landing, sample: Ticket | None) -> Resident | None:
        entry, core = landing.entry, self.core
        assert entry is not None
        if not core.own_tier or landing.at == 0.0 or entry.fresh <= 0:
            return None
        ticket = landing.ticket
        if ticket is None:
            if core.tier_ttl is None or sample is None:
                return None  # a change may be under way: the next call reads it under a ticket
            ticket = sample
        fresh = landing.at + (entry.fresh if core.tier_ttl is None else min(entry.fresh, core.tier_ttl))
        return Resident(key, self.name, entry, 0.0, fresh, landing.at + entry.keep, ticket)

    # -- the store's verbs ----------------------------------------------------------------------------------------

    async def get(self, colour: Colour, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """What is fresh of each key."""
        prefix = await self.learn(colour)
        found = await self._store(colour).get([prefix + key for key in keys])
        return [entry if entry is not None and entry.fresh > 0 else None for entry in found]

    async def peek(self, colour: Colour, key: str) -> Entry[Any] | None:
        """What is kept, stale or fresh."""
        return (await self._store(colour).get([await self.learn(colour) + key]))[0]

    async def put(self, colour: Colour, key: str, value: Any, policy: Policy | None = None) -> None:
        policy = policy or self.policy
        ttl = policy.ttl_of(kept_whole(value))
        entry = Entry(value, new_id(), 0.0, 0.0, ttl, ttl, ttl + policy.stale)
        await self._change(colour, key, "set", lambda store, physical: store.set(physical, entry))

    async def expire(self, colour: Colour, key: str) -> bool:
        return bool(await self._change(colour, key, "expire", lambda store, physical: store.expire(physical)))

    async def invalidate(self, colour: Colour, key: str) -> bool:
        return bool(await self._change(colour, key, "invalidate", lambda store, physical: store.invalidate(physical)))

    async def _change(
        self, colour: Colour, key: str, verb: str, act: Callable[[Store, str], Coroutine[Any, Any, Any]]
    ) -> Any:
        physical = await self.learn(colour) + key
        core, hard = self.core, verb != "expire"
        core.forget(physical, hard=hard)  # before, so that it is gone here even if the engine can't be asked
        try:
            return await act(self._store(colour), physical)
        finally:
            core.forget(physical, hard=hard)  # after, for those who read the old one while it was being changed
            core.tell(events.Invalidated(self.name, key, verb))

    async def bump(self, colour: Colour) -> None:
        """A new generation of this scope: everything older is gone."""
        core, before = self.core, await self.learn(colour)
        try:
            await self._store(colour).bump(self.name)
        finally:
            core.forget_all(before + self.name)
            if core.tier is not None:
                core.tier.drop_scope(self.name)
            core.tell(events.Invalidated(self.name, "", "invalidate_all"))
        await self.learn(colour)

    async def clear(self, colour: Colour) -> None:
        """A new generation of the whole namespace."""
        core = self.core
        try:
            await self._store(colour).bump(self.namespace)
        finally:
            core.forget_all("")
            if core.tier is not None:
                core.tier.clear()
            core.tell(events.Invalidated(self.namespace, "", "clear"))
        await self.learn(colour)

    def _store(self, colour: Colour) -> Store:
        return self.astore if colour.suspending else self.store


class _Place:
    """A place beside the caller, reserved before the claim, for the computation that the claim may be granted."""

    def __init__(self, scope: Scope, colour: Colour, key: str, sample: Ticket) -> None:
        self._scope, self._colour, self._key, self._sample = scope, colour, key, sample
        self.reserved = colour is SUSPENDING or _refreshers.reserve()
        self._unused = self.reserved

    def free(self) -> None:
        if self._unused and self._colour is not SUSPENDING:
            _refreshers.free()

    def spawn(self, work: Coroutine[Any, Any, Landing]) -> None:
        self._unused = False
        context = copy_context()
        context.run(outside)
        kept = self._kept(work)
        loop = running_loop()
        if self._colour is SUSPENDING and loop is not None:
            hold_task(loop.create_task(kept, context=context))
        else:
            _refreshers.run(lambda: context.run(run_blocking, kept))

    async def _kept(self, work: Coroutine[Any, Any, Landing]) -> None:
        landing = await work
        self._scope.keep(self._key, landing, self._sample, self._scope.policy)


def _holds(resident: Resident) -> bool:
    return resident.stamp is None or (resident.stamps is not None and resident.stamps[resident.slot] == resident.stamp)


def _is_due(resident: Resident, now: float) -> bool:
    """Fresh and true, and its early moment has come."""
    return 0.0 < resident.end <= now < resident.fresh and _holds(resident)


def landed(landing: Landing, policy: Policy) -> Any:
    """The value of a landing, or its error raised."""
    entry = landing.entry
    if landing.error is not None:
        try:
            raise landing.error
        finally:
            del landing  # or the error would refer to itself through this frame
    assert entry is not None
    if entry.raised:
        raise _revived(entry, policy.raises)
    return entry.value


def _revived(entry: Entry[Any], raises: tuple[type[BaseException], ...]) -> BaseException:
    """The exception that an entry of `raises` stands for: of a declared class, or one below it."""
    name, arguments = entry.value
    known = list(raises)
    for kind in known:
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            return kind(*arguments)
        known.extend(kind.__subclasses__())
    return (raises[0] if raises else RuntimeError)(*arguments)
