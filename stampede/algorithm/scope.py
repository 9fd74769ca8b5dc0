"""One function's part of a cache: the way of a call, from what is at hand to what becomes of it here."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast
from weakref import ref

from stampede import events
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.call import Call, HitLikelihood, Once, Resources
from stampede.algorithm.core import Core
from stampede.algorithm.encoded import Coder, EncodedClaims, EncodedStore, SideKeys
from stampede.algorithm.fill import fill, look
from stampede.algorithm.finish import quietly
from stampede.algorithm.gather import Gathering, run_together
from stampede.algorithm.generations import Generations
from stampede.algorithm.stored import Stored
from stampede.errors import OptionError
from stampede.local_tier.residents import Resident
from stampede.model import early
from stampede.model.entry import Entry
from stampede.model.policy import Policy
from stampede.model.ports import Asked, Claims, Found, Looks, Store
from stampede.model.result import Result
from stampede.outages.keeper import Hold, keeper
from stampede.outages.outage import GuardedClaims
from stampede.runtime import greenlets
from stampede.runtime.colour import BLOCKING, PROMPT, SUSPENDING, Colour, Loop, run_blocking, running_loop, settled

__all__ = ["Scope", "ScopeSide", "later"]

T = TypeVar("T")
Home: TypeAlias = Callable[[Resident], object]
"""Lets a resident live where the next call finds it by itself, besides its tier."""

Look: TypeAlias = Callable[[str], Awaitable[Found | None]]

_clock = time.monotonic

MOST_REPORTED = 1000


class Scope:
    """One function's part of a cache (or the cache's own keys), for callers of both colours."""

    def __init__(
        self, core: Core, namespace: str, name: str, policy: Policy, codec: Coder | None, called: str | None = None
    ) -> None:
        """`called`: by whom its events are told, where that is not its name."""
        engine = core.engine
        if engine.blocking.claims is None or engine.suspending.claims is None:
            if engine.blocking.store is not None:
                raise OptionError(f"{engine.scheme}:// has no locks: name an engine that has, with locks=")
            raise OptionError(f"{engine.scheme}:// keeps no values: it can only be a lock (locks=)")
        if policy.origin is not None and core.gates is not None:
            core.gates.gate_of(policy.origin)  # a name that nobody wrote is an error at once
        self.core = core
        self.policy = policy
        self.called = name if called is None else called
        self.generations = Generations(core, namespace, name)
        # Where values are kept as they are, they are only tried.
        self.codec = codec if engine.shared else None
        self.trial = codec.encode if codec is not None and not engine.shared else None
        self.hit_likelihood = HitLikelihood()
        self._side_keys: SideKeys = {}
        self._reported_bad: dict[str, bytes] = {}  # by key: of which bytes people were told
        self._blocking = ScopeSide(self, BLOCKING)
        self._suspending = ScopeSide(self, PROMPT if engine.prompt else SUSPENDING)

    def side(self, colour: Colour) -> ScopeSide:
        """Return what it does for callers of one colour."""
        return self._suspending if colour.suspending else self._blocking

    def ports(self, claims: Claims, store: Store, colour: Colour) -> tuple[Claims, Store, Look | None]:
        """Return an engine's ports of bytes as those of entries, which never fail while there is a refuge."""
        core, codec = self.core, self.codec
        looks = cast("Looks", claims) if core.engine.looks else None
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None] = _undecoded
        if codec is not None:
            claims = EncodedClaims(claims, codec, self._bad, store, self._side_keys)
            store = EncodedStore(store, codec, self._bad)
            decoded = claims.decoded
        refuge = core.outage.refuge.side(colour).claims if core.outage is not None else None
        if core.outage is None or refuge is None:
            return claims, store, None if looks is None else looks.look
        guarded = GuardedClaims(claims, refuge, core.outage, core.local_tier.kept, looks, decoded)
        return guarded, store, None if looks is None else guarded.look

    def _bad(self, key: str, id: bytes, error: Exception) -> None:
        """One miss looks at the same bytes up to three times: it is told of once."""
        if self._reported_bad.get(key) != id:
            if len(self._reported_bad) >= MOST_REPORTED:
                self._reported_bad.clear()
            self._reported_bad[key] = id
            self.core.note(events.BadBytes, self.called, key.removeprefix(self.generations.prefix), str(error))


class ScopeSide(Stored):
    """One function's part of a cache, for callers of one colour: how its values are had, kept and forgotten."""

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
        claims, self.store, look = scope.ports(engine.claims, engine.store, colour)
        self._keeper_claims = (
            scope.side(BLOCKING).claims if colour.suspending else claims
        )  # what the keeper's thread asks
        self._coded = self.store if isinstance(self.store, EncodedStore) else None
        self.resources = self._resources(scope, claims, look)
        self._gathered = self.resources  # of calls for many keys, which block together
        if not colour.suspending and core.engine.many is not None:
            claims, _, look = scope.ports(Gathering(), engine.store, colour)
            self._gathered = self._resources(scope, claims, look)
        self.near = core.local_tier.residents is not None or core.engine.near is not None  # something may be at hand

    @property
    def claims(self) -> Claims:
        return self.resources.port

    def _resources(self, scope: Scope, claims: Claims, look: Look | None) -> Resources:
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
        )

    # -- the way of a call ----------------------------------------------------------------------------------------

    def hit(self, key: str) -> Resident | None:
        """The local tier's answer, if it needs no thought."""
        epoch, prefix, _, _ = self.generations.known
        return self.core.local_tier.hit(prefix + key) if epoch == self.core.epoch else None

    def at_hand(self, key: str) -> Resident | Entry[Any] | None:
        """What can be had without a claim, a flight, or a moment's waiting: something with a `value`."""
        if not self.near:
            return None
        epoch, prefix, _, _ = self.generations.known  # as `hit`, and a call less
        found = self.core.local_tier.hit(prefix + key) if epoch == self.core.epoch else None
        return self.look(key) if found is None and self.core.engine.near is not None else found

    def at_hand_of(self, once: Once, key: str) -> Resident | Entry[Any] | None:
        """The same, if it was computed where everything is computed anew."""
        return self.at_hand(key) if once.has(self.core.flights, self.generations.at_hand() + key) else None

    def look(self, key: str) -> Entry[Any] | None:
        """A shared engine's answer, where it can be had in microseconds: no claim, no flight, no doubt."""
        core = self.core
        near = core.engine.near
        if near is None or (core.outage is not None and core.outage.down):
            return None
        prefix = self.generations.recall()
        if prefix is None:
            return None
        physical, at, local_tier = prefix + key, _clock(), core.local_tier
        if local_tier.is_due(physical):
            return None  # the engine's is the same one: somebody has to claim, or nobody refreshes it
        found = near.look(physical)
        entry = self._coded.decoded(physical, found.entry) if found is not None and self._coded is not None else None
        if (
            found is None
            or entry is None
            or entry.raised
            or (self.generations.mark and self.resources.predates_mark(entry))
        ):
            return None
        if local_tier.residents is not None:
            result = Result(entry, ticket=found.ticket, at=at)
            resident = local_tier.place(physical, self.called, result, None)
            if self.generations.recall() != prefix:
                local_tier.residents.drop(physical)
                return None
            if resident is not None:
                local_tier.open(resident, result, self.policy)
                if local_tier.is_due(physical):
                    return None  # it came in its early moment
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
    ) -> Coroutine[Any, Any, Result]:
        """What the local tier could not answer. `home` is told of the resident, if there is one now. `seen` is an entry
        that is to be refreshed early."""
        resources, loop = self.resources, _loop() if self.colour.suspending else None
        # What it waits for is one wait, also for the first question, that of its generation.
        call = Call("", key, origin, policy or self.policy, resources, loop, _clock(), seen, force=force, once=once)
        work = self._fetch(call, home)
        call.work = ref(work, call.is_gone)  # as `answered_by` does it, and a call less
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
        if prefix is None:
            prefix = await self.learn()
        call.key = physical = prefix + key
        if call.once is not None and call.once.has(core.flights, physical):
            call.once = None
        usual = not force and call.once is None
        if local_tier.residents is not None:
            if seen is None and usual:
                call.seen = seen = local_tier.take_due(physical)
            call.sample = local_tier.sample(physical) if local_tier.shared else None
        if call.once is not None:
            result = await _once(call)
        else:
            result = await (self._with_background(call) if policy.beside and usual else fill(call))
        if call.from_others and result.entry is not None:
            known = await self.today()
            if known != prefix:
                # All was cleared, perhaps before it came, and it had not been told. Who has waited for what was
                # computed before that would have it long after.
                rest = policy.after(call.waited, call.waited)
                return await self.fetch(key, call.origin, rest, force=force, home=home, once=call.once)
        if local_tier.residents is None:
            return result
        resident = local_tier.place(physical, self.called, result, call.sample)
        if resident is None:
            if seen is None and usual and not call.from_others and _is_due(result, policy):
                return await self.fetch(key, call.origin, policy, seen=result.entry)
            return result
        if resident.end == 0.0 or result.until is not None:  # or somebody else of its flight has opened it
            today = self.generations.recall()
            if today is None:
                today = await self.learn() if result.ticket is not None else prefix
            # Asked now, when the resident is placed and nobody hits it yet: who has changed the key in a newer
            # generation has killed the resident by then, or we see that generation here. Neither the resident's home
            # nor a ticket that was taken after the change knows of generations.
            if (
                epoch != core.epoch
                or today != prefix
                or (self.generations.mark and self.resources.predates_mark(resident.entry))
            ):
                local_tier.residents.drop(physical)
                return result
            local_tier.open(resident, result, policy)
        if home is not None:
            home(resident)
        if seen is None and not force and not result.stored and local_tier.is_due(physical):
            return await self.fetch(key, call.origin, policy, home=home)  # in its early moment: now it's seen
        return result

    async def _with_background(self, call: Call) -> Result:
        """The same for a caller that may go before its computation has ended, which has a place beside it."""
        call.background = place = BackgroundPlace(self.colour, call.policy)
        # Before the claim, where nobody is to wait at all.
        if (call.policy.background or call.seen is not None) and not place.reserve() and call.seen is not None:
            return later(call.seen)
        try:
            return await fill(call)
        finally:
            place.free()

    async def keep(self, ends: Iterable[tuple[Call, Result]]) -> None:
        """Keep in this process what calls of one colour ended with, as far as it is known to be true."""
        local_tier, today = self.core.local_tier, None
        placed = [
            (resident, call, result)
            for call, result in ends
            if (resident := local_tier.place(call.key, self.called, result, call.sample)) is not None
        ]
        if placed:  # asked now, and not before: as in `_fetch`
            today = self.generations.recall()
        if today is None and any(result.ticket is not None for _, _, result in placed):
            today = await self.learn()
        for resident, call, result in placed:
            if (today is None or today + call.label == call.key) and not self.resources.predates_mark(resident.entry):
                local_tier.open(resident, result, call.policy)
            elif local_tier.residents is not None:
                local_tier.residents.drop(call.key)

    async def at_once(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """What each piece of work, over calls `of_many`, returned or raised; in as few round trips as can be."""
        if self.colour.suspending:
            return await settled(work)
        many = self.core.engine.many
        return run_together(work, many.ask_many if many is not None else _nothing_to_ask)

    async def seen(self, keys: Sequence[str], policy_of: Callable[[str], Policy]) -> dict[str, Result]:
        """What is there of these keys, and need not be refreshed yet, in as few round trips as can be: for blocking
        callers of an engine to which the way is long. An event loop sends all that is asked in one of its turns."""
        if self.colour.suspending or self.core.engine.many is None or not keys:
            return {}
        began, prefix = _clock(), await self.today()
        calls = [self.of_many(prefix, key, _never, policy_of(key), began) for key in keys]
        if self._gathered.look is not None:
            for call in calls:
                call.sample = self.core.local_tier.sample(call.key)
            found = await self.at_once([look(call) for call in calls])
            ends = [
                (call, result)
                for call, result in zip(calls, found, strict=True)
                if isinstance(result, Result)  # what can't be read is asked for once more, alone
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
        prefix: str,
        key: str,
        origin: Callable[[], Any],
        policy: Policy,
        began: float,
        once: Once | None = None,
    ) -> Call:
        """One of a caller's questions for many keys of `today`, to be asked `at_once` with the others."""
        resources, loop = self._gathered, _loop() if self.colour.suspending else None
        if once is not None and once.has(resources.flights, prefix + key):
            once = None
        return Call(prefix + key, key, origin, policy, resources, loop, began, once=once, claims_only=True)

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
        """By the keeper, and soon: the caller is in a finalizer, perhaps on the thread of a loop."""
        keeper.give_back(self._keeper_claims, key, token, self._keeper_claims.abandon)


def _undecoded(key: str, entry: Entry[Any]) -> Entry[Any]:
    return entry


async def _once(call: Call) -> Result:
    """`fill`, and what became of it is remembered by who remembers that."""
    stored = False
    try:
        result = await fill(call)
        stored = result.stored
        return result
    finally:
        call.settle(stored=stored)
        result = None  # type: ignore[assignment]  # its error, if it has one, refers to this frame


def _is_due(result: Result, policy: Policy) -> bool:
    """Return whether what was read without a ticket, as nobody tells of changes yet, has come to its early moment."""
    entry = result.entry
    if entry is None or entry.raised or result.ticket is not None or result.stored or result.until is not None:
        return False
    return policy.early > 0 and entry.fresh > 0 and early.due(entry, early.draw(policy.early))


def later(seen: Entry[Any]) -> Result:
    """What is due, since there is no place beside the caller to refresh it in: to be looked at again a little later."""
    return Result(seen, until=seen.fresh / 4)


def _loop() -> Loop:
    if threading.Lock is not greenlets.known:
        greenlets.adapt()
    loop = running_loop()
    if loop is None:
        raise RuntimeError(
            "no asyncio loop runs here, and async calls need one: elsewhere (trio, curio) use plain verbs in a thread"
        )
    return loop


def _never() -> None:
    raise AssertionError("a call that only looks computes")


def _nothing_to_ask(asked: Sequence[Asked]) -> list[Any]:
    raise AssertionError(f"{asked} suspended on an engine that answers at once")
