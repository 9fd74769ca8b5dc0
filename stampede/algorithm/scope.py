"""One function's part of a cache: what happens to a call, from the local tier to the engine and back."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast
from weakref import ref

from stampede import events
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.call import STEP, Call, HitLikelihood, Once, Resources
from stampede.algorithm.core import Core
from stampede.algorithm.encoded import Coder, EncodedClaims, EncodedStore, SideKeys
from stampede.algorithm.fill import fill, look
from stampede.algorithm.finish import quietly
from stampede.algorithm.gather import Gathering, run_together
from stampede.algorithm.generations import Generations
from stampede.algorithm.stored import Ahead, Stored
from stampede.algorithm.tags import TaggedClaims, TagPorts
from stampede.errors import OptionError
from stampede.leases.keeper import Hold, keeper
from stampede.local_tier.residents import Resident
from stampede.model import early
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Asked, Claims, Found, Looks, Store, Ticket
from stampede.model.result import Result
from stampede.outages.outage import GuardedClaims
from stampede.runtime import greenlets
from stampede.runtime.colour import BLOCKING, PROMPT, SUSPENDING, Colour, Loop, run_blocking, running_loop, settled
from stampede.settings.options import Policy

__all__ = ["Scope", "ScopeSide", "later"]

T = TypeVar("T")
Home: TypeAlias = Callable[[Resident], object]
"""Stores a resident where the next call finds it directly, besides the local tier."""

Look: TypeAlias = Callable[[str, Ask], Awaitable[Found | None]]

_clock = time.monotonic

MOST_REPORTED = 1000


class Scope:
    """One function's part of a cache (or the cache's own keys), for callers of both colours."""

    def __init__(
        self, core: Core, namespace: str, name: str, policy: Policy, codec: Coder | None, called: str | None = None
    ) -> None:
        """Create the scope. `called` is the name that its events show, if that is not `name`."""
        engine = core.engine
        if engine.blocking.claims is None or engine.suspending.claims is None:
            if engine.blocking.store is not None:
                raise OptionError(f"{engine.scheme}:// has no locks: name an engine that has them with locks=")
            raise OptionError(f"{engine.scheme}:// stores no values: use it for locks only (locks=)")
        if policy.origin is not None and core.gates is not None:
            core.gates.gate_of(policy.origin)  # fails at once for an origin that no setting names
        self.core = core
        self.policy = policy
        self.called = name if called is None else called
        self.generations = Generations(core, namespace, name)
        # An engine in this process stores objects: the codec only tests whether a value could be encoded.
        self.codec = codec if engine.shared else None
        self.trial = codec.encode if codec is not None and not engine.shared else None
        self.hit_likelihood = HitLikelihood(STEP if core.engine.looks else 0.0)
        self._side_keys: SideKeys = {}
        self._namespace = namespace
        self._hints: dict[str, tuple[bytes, ...]] = {}
        self._reported_bad: dict[str, bytes] = {}  # by key: the id of the bytes that were reported
        self._blocking = ScopeSide(self, BLOCKING)
        self._suspending = ScopeSide(self, PROMPT if engine.prompt else SUSPENDING)

    def side(self, colour: Colour) -> ScopeSide:
        """Return what the scope does for callers of one colour."""
        return self._suspending if colour.suspending else self._blocking

    def ports(
        self, claims: Claims, store: Store, colour: Colour, *, of_many: bool = False
    ) -> tuple[Claims, Store, Look | None, TagPorts]:
        """Turn an engine's ports of bytes into ports of entries, which know tags, and use the refuge while the engine
        is down. `of_many`: the claims are put aside, and many of them are run at once."""
        core, codec, engine = self.core, self.codec, self.core.engine
        ended = core.local_tier.tag_stamps.ended_since
        tags = TagPorts(self._namespace, engine, core.outage, colour, self._hints, of_many=of_many, ended_here=ended)
        aside: Any = Gathering() if tags.aside else claims
        looks, looks_aside = (claims, aside) if engine.looks else (None, None)
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None] = _undecoded
        if codec is not None:
            claims = EncodedClaims(claims, codec, self._bad, store, self._side_keys)
            aside = EncodedClaims(aside, codec, self._bad, store, self._side_keys) if tags.aside else claims
            store = EncodedStore(store, codec, self._bad)
            decoded = claims.decoded
        tagged = TaggedClaims(claims, aside, looks_aside, decoded, tags)
        refuge = core.outage.refuge.side(colour).claims if core.outage is not None else None
        if core.outage is None or refuge is None:
            return tagged, store, None, tags
        guarded = GuardedClaims(
            tagged, refuge, core.outage, core.local_tier.kept, cast("Looks | None", looks), decoded, tagged
        )
        return guarded, store, guarded.look if engine.near is None else None, tags

    def _bad(self, key: str, id: bytes, error: Exception) -> None:
        """Report unreadable bytes once, although one miss decodes them up to three times."""
        if self._reported_bad.get(key) != id:
            if len(self._reported_bad) >= MOST_REPORTED:
                self._reported_bad.clear()
            self._reported_bad[key] = id
            self.core.note(events.BadBytes, self.called, key.removeprefix(self.generations.prefix), str(error))


class ScopeSide(Stored):
    """One function's part of a cache, for callers of one colour: how its values are found, stored and forgotten."""

    def __init__(self, scope: Scope, colour: Colour) -> None:
        self.scope = scope
        self.core = core = scope.core
        self.colour = colour
        self.generations = scope.generations
        self.policy = scope.policy
        self.called = scope.called
        engine = core.engine.side(colour)
        assert engine.claims is not None
        assert engine.store is not None
        claims, self.store, look, self.tags = scope.ports(engine.claims, engine.store, colour)
        # For renewals, in the keeper's thread.
        self._keeper_claims = scope.side(BLOCKING).claims if colour.suspending else claims
        self._coded = self.store if isinstance(self.store, EncodedStore) else None
        self.resources = self._resources(scope, claims, look, self.tags)
        self._gathered = self.resources  # of calls for many keys, which share round trips
        if not colour.suspending and core.engine.many is not None:
            claims, _, look, tags = scope.ports(Gathering(), engine.store, colour, of_many=True)
            self._gathered = self._resources(scope, claims, look, tags)
        # Whether `at_hand` may find something.
        self.near = core.local_tier.residents is not None or core.engine.near is not None

    @property
    def claims(self) -> Claims:
        return self.resources.port

    @property
    def blocking(self) -> ScopeSide:
        return self.scope.side(BLOCKING)

    def _resources(self, scope: Scope, claims: Claims, look: Look | None, tags: TagPorts) -> Resources:
        core = self.core
        return Resources(
            scope=self.called,
            trial=scope.trial,
            port=claims,
            flights=core.flights,
            colour=self.colour,
            clock=_clock,
            hold=self._hold,
            note=core.note,
            draws=core.local_tier.residents is None,
            look=look,
            hit_likelihood=scope.hit_likelihood,
            gates=core.gates,
            give_back=self._give_back,
            keep=self.keep,
            marks=self.generations,
            tags=tags,
        )

    # -- a call --------------------------------------------------------------------------------------------------------

    def hit(self, key: str) -> Resident | None:
        """Return the resident if it can be served without any further question."""
        epoch, known, _, _ = self.generations.known
        prefix = known if epoch == self.core.epoch else self.generations.recall()
        return self.core.local_tier.hit(prefix + key) if prefix is not None else None

    def at_hand(self, key: str) -> Resident | Entry[Any] | None:
        """Return something with a `value` that needs no claim, flight or wait; None if there is nothing."""
        if not self.near:
            return None
        epoch, known, _, _ = self.generations.known  # as `hit`, without the call
        prefix = known if epoch == self.core.epoch else self.generations.recall()
        found = self.core.local_tier.hit(prefix + key) if prefix is not None else None
        return self.look(key) if found is None and self.core.engine.near is not None else found

    def at_hand_of(self, once: Once, key: str) -> Resident | Entry[Any] | None:
        """Return what `at_hand` does, if the key has already been computed anew for this `once`."""
        return self.at_hand(key) if once.has(self.core.flights, self.generations.at_hand() + key) else None

    def look(self, key: str) -> Entry[Any] | None:
        """Return the entry of an engine that answers in microseconds, without claim and flight. None in any doubt."""
        core = self.core
        near = core.engine.near
        if near is None or (core.outage is not None and core.outage.down):
            return None
        prefix = self.generations.recall()
        if prefix is None:
            return None
        physical, at, local_tier = prefix + key, _clock(), core.local_tier
        if local_tier.is_due(physical):
            return None  # the engine has the same entry: a claim is needed, so that it is refreshed
        found = near.look(physical)
        entry = self._coded.decoded(physical, found.entry) if found is not None and self._coded is not None else None
        if (
            found is None
            or entry is None
            or entry.raised
            or (self.generations.mark and self.resources.predates_mark(entry))
        ):
            return None
        if entry.tags and not self.tags.are_current(found, entry):
            return None
        if local_tier.residents is not None:
            result = Result(entry, ticket=found.ticket, at=at)
            resident = local_tier.place(physical, self.called, result, None, self.generations.guard)
            if self.generations.recall() != prefix:
                local_tier.residents.drop(physical)
                return None
            if resident is not None:
                local_tier.open(resident, result, self.policy)
                if local_tier.is_due(physical):
                    return None  # its early moment has come
        elif self.policy.early and early.due(entry, early.draw(self.policy.early)):
            return None
        core.note(events.Found, self.called, key, entry.cost)
        return entry

    def fetch(
        self,
        key: str,
        origin: Callable[[], Any],
        policy: Policy | None = None,
        *,
        force: bool = False,
        home: Home | None = None,
        once: Once | None = None,
        seen: Entry[Any] | None = None,
        tags: tuple[str, ...] | None = None,
    ) -> Coroutine[Any, Any, Result]:
        """Return the coroutine of a call that the local tier could not answer. `home` is called with the resident, if
        there is one afterwards. `seen` is an entry that is due for refresh. `tags` replace those of the policy."""
        resources, loop = self.resources, _loop() if self.colour.suspending else None
        # The time starts here, so that asking for the generation counts as waiting, too.
        call = Call("", key, origin, policy or self.policy, resources, loop, _clock(), seen, force=force, once=once)
        if tags is not None:
            call.tags = tags
        work = self._fetch(call, home)
        call.work = ref(work, call.is_gone)  # as `answered_by`, without the call
        return work

    async def _fetch(self, call: Call, home: Home | None) -> Result:
        core, local_tier, key, policy, seen, force = (
            self.core,
            self.core.local_tier,
            call.label,
            call.policy,
            call.seen,
            call.force,
        )
        epoch, prefix = core.epoch, self.generations.recall()
        samples: Mapping[str, Ticket] = {}
        if prefix is None:
            looks = not force and seen is None and call.once is None
            prefix, call.looked, samples = await self.learn_and_look({key: call.tags} if looks else {})
        call.key = physical = prefix + key
        if call.once is not None and call.once.has(core.flights, physical):
            call.once = None
        usual = not force and call.once is None
        if local_tier.residents is not None:
            if seen is None and usual:
                call.seen = seen = local_tier.take_due(physical)
            call.sample = samples.get(physical) or local_tier.sample(physical) if local_tier.shared else None
        if call.once is not None:
            result = await _once(call)
        else:
            result = await (self._with_background(call) if policy.beside and usual else fill(call))
        if call.from_others and result.entry is not None:
            known = await self.current_prefix()
            if known != prefix:
                # All was cleared meanwhile. If that was before this call began, the value may be older than the call.
                remaining = policy.after(call.waited, call.waited)
                return await self.fetch(
                    key, call.origin, remaining, force=force, home=home, once=call.once, tags=call.tags
                )
        if local_tier.residents is None:
            return result
        resident = local_tier.place(physical, self.called, result, call.sample, self.generations.guard)
        if resident is None:
            if seen is None and usual and not call.from_others and _is_due(result, policy):
                return await self.fetch(key, call.origin, policy, seen=result.entry, tags=call.tags)
            return result
        if resident.end == 0.0 or result.until is not None:  # False if another caller of the flight has opened it
            current_prefix = self.generations.recall()
            if current_prefix is None:
                current_prefix = await self.learn() if result.ticket is not None else prefix
            # Asked now: the resident is in its place, and not served yet. If another caller changed the key in a newer
            # generation, either it has killed the resident, or we see that generation here. Neither the resident's home
            # nor a ticket taken after the change knows of generations.
            if epoch != core.epoch or current_prefix != prefix:
                local_tier.residents.drop(physical)
                return result
            if self.generations.mark and self.resources.predates_mark(resident.entry):
                local_tier.drop(physical)  # the memory engine keeps it, to be served stale
                return result
            local_tier.open(resident, result, policy)
        if home is not None:
            home(resident)
        if seen is None and not force and not result.stored and local_tier.is_due(physical):
            return await self.fetch(
                key, call.origin, policy, home=home, tags=call.tags
            )  # its early moment has come: refresh it
        return result

    async def _with_background(self, call: Call) -> Result:
        """Call `fill` with a background place, for a caller that may return before its computation ends."""
        call.background = place = BackgroundPlace(self.colour, call.policy)
        # Reserve the place before the claim if the caller must not wait at all.
        if (call.policy.background or call.seen is not None) and not place.reserve() and call.seen is not None:
            return later(call.seen)
        try:
            return await fill(call)
        finally:
            place.free()

    async def keep(self, ends: Iterable[tuple[Call, Result]]) -> None:
        """Put results in the local tier, as far as they are known to be valid."""
        local_tier, guard, prefix = self.core.local_tier, self.generations.guard, None
        placed = [
            (resident, call, result)
            for call, result in ends
            if (resident := local_tier.place(call.key, self.called, result, call.sample, guard)) is not None
        ]
        if placed:  # asked now and not before, for the same reason as in `_fetch`
            prefix = self.generations.recall()
        if prefix is None and any(result.ticket is not None for _, _, result in placed):
            prefix = await self.learn()
        for resident, call, result in placed:
            if prefix is not None and prefix + call.label != call.key:
                local_tier.drop_older(call.key)
            elif self.resources.predates_mark(resident.entry):
                local_tier.drop(call.key)  # the memory engine keeps it, to be served stale
            else:
                local_tier.open(resident, result, call.policy)

    async def at_once(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Run work over calls `of_many` in as few round trips as possible. Return what each piece gave or raised."""
        if self.colour.suspending:
            return await settled(work)
        many = self.core.engine.many
        return run_together(work, many.ask_many if many is not None else _nothing_to_ask)

    async def seen(self, keys: Sequence[str], policy_of: Callable[[str], Policy]) -> dict[str, Result]:
        """Return the entries that are stored and need no refresh yet, with as few round trips as possible. This is for
        blocking callers of an engine with long round trips. An event loop sends together what is asked in one of its
        turns."""
        if self.colour.suspending or self.core.engine.many is None or not keys:
            return {}
        began, policies = _clock(), {key: policy_of(key) for key in keys}
        ahead = await self.look_ahead({key: policy.tags for key, policy in policies.items()})
        calls = [self.of_many(ahead, key, _never, policy, began) for key, policy in policies.items()]
        if self.core.engine.looks or ahead.looked is not None:
            found = await self.at_once([look(call) for call in calls])
            ends = [
                (call, result)
                for call, result in zip(calls, found, strict=True)
                if isinstance(result, Result)  # a key that cannot be read is asked for again, alone
            ]
            await self.keep(ends)
            return {call.label: result for call, result in ends}
        results: dict[str, Result] = {}
        for call, entry in zip(calls, await self.get(keys), strict=True):
            beta = call.policy.early
            if entry is not None and not (beta and early.due(entry, early.draw(beta))):
                call.tell(events.Found, entry.cost)
                results[call.label] = Result(entry, at=began, as_of=began)
        return results

    def of_many(
        self,
        ahead: Ahead,
        key: str,
        origin: Callable[[], Any],
        policy: Policy,
        began: float,
        once: Once | None = None,
    ) -> Call:
        """Return the call for one of a caller's many keys, to be asked `at_once` with the others."""
        resources, loop, physical = self._gathered, _loop() if self.colour.suspending else None, ahead.prefix + key
        if once is not None and once.has(resources.flights, physical):
            once = None
        call = Call(physical, key, origin, policy, resources, loop, began, once=once, claims_only=True)
        call.looked = ahead.looked
        call.sample = ahead.samples.get(physical) or self.core.local_tier.sample(physical)
        return call

    def _hold(self, call: Call, max_hold: float) -> Hold:
        key, token = call.key, call.token
        return Hold(
            keeper,
            self._keeper_claims,
            key,
            token,
            call.policy.lease,
            max_hold,
            drop=lambda: run_blocking(quietly(self._keeper_claims.abandon, key, token)),
            alive=None if call.flight is None else call.flight.is_under_way,
            of=self.core,
        )

    def _give_back(self, key: str, token: bytes) -> None:
        """Have the keeper give a lease back. The caller is in a finalizer, perhaps on the thread of an event loop."""
        keeper.give_back(self._keeper_claims, key, token, self._keeper_claims.abandon)


def _undecoded(key: str, entry: Entry[Any]) -> Entry[Any]:
    return entry


async def _once(call: Call) -> Result:
    """Run `fill`, and tell the call's `once` whether the value was stored."""
    stored = False
    try:
        result = await fill(call)
        stored = result.stored
        return result
    finally:
        call.settle(stored=stored)
        result = None  # type: ignore[assignment]  # its error, if it has one, refers to this frame


def _is_due(result: Result, policy: Policy) -> bool:
    """Return whether a result without a ticket is due for early refresh."""
    entry = result.entry
    if entry is None or entry.raised or result.ticket is not None or result.stored or result.until is not None:
        return False
    return policy.early > 0 and entry.fresh > 0 and early.due(entry, early.draw(policy.early))


def later(seen: Entry[Any]) -> Result:
    """Return an entry that is due but cannot be refreshed, for lack of a background place. Try again a little later."""
    return Result(seen, until=seen.fresh / 4)


def _loop() -> Loop:
    if threading.Lock is not greenlets.known:
        greenlets.adapt()
    loop = running_loop()
    if loop is None:
        raise RuntimeError(
            "async calls need a running asyncio loop: under trio or curio, use the blocking verbs in a thread"
        )
    return loop


def _never() -> None:
    raise AssertionError("a call that only looks has started a computation")


def _nothing_to_ask(asked: Sequence[Asked]) -> list[Any]:
    raise AssertionError(f"{asked} suspended on an engine that answers at once")
