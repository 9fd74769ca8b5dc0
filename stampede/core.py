"""What stands behind every face of a cache: the engine, the local tier, and one `Scope` for each function."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias, TypeVar, cast
from weakref import ref

from stampede import early, events
from stampede.call import Call, Era, Means, Once
from stampede.coded import CodedClaims, CodedStore, Coder, Trial
from stampede.colour import BLOCKING, PROMPT, SUSPENDING, Colour, Loop, lasting, run_blocking, running_loop, settled
from stampede.entry import Entry, new_id
from stampede.errors import EngineClosed, EngineError, OptionError
from stampede.fill import Glance, fill, glance
from stampede.flight import Flight, Flights
from stampede.front import Front
from stampede.gather import Gathering, run_together
from stampede.guarded import Guarded
from stampede.guarded_many import GuardedMany
from stampede.keeper import Hold, keeper
from stampede.keys import generation, quoted
from stampede.land import quietly
from stampede.leader import Leader
from stampede.local import Resident
from stampede.looks import Looking
from stampede.odds import Odds
from stampede.outage import GuardedClaims, Outage
from stampede.outcome import Landing
from stampede.places import Place
from stampede.policy import Policy
from stampede.ports import Asked, Changes, Claims, Engine, Lists, Looks, Shown, Store, Ticket
from stampede.workers import Late

__all__ = ["Core", "Page", "Scope", "later"]

T = TypeVar("T")

_clock = time.monotonic

HEARD = 2.0
"""Seconds after which every process has heard of a new generation."""


Page: TypeAlias = tuple[str, Any]
"""The generation of a page of keys, and by what the engine is asked for the next one."""


class TakesHome(Protocol):
    """Where a resident may live besides its tier."""

    def take_home(self, resident: Resident) -> object: ...


class Core:
    """One cache's engine and its health, what it keeps in this process, and its flights; its scopes share them."""

    def __init__(
        self,
        engine: Engine,
        front: Front,
        outage: Outage | None,
        note: events.Note,
    ) -> None:
        self.engine = engine
        self.front = front
        self.outage = outage
        self.note = note
        self.closed = False
        if engine.audience is not None:
            engine.audience.add(self)
        self.flights = Flights()
        self._epochs = itertools.count(1)
        self.epoch = 0  # another one after every invalidate_all and clear of this process
        self.ended: dict[str | None, int] = {}  # the epoch that the last of these began: of a scope, of all by None

    def damaged(self, key: str, why: str) -> None:
        self.note(events.BadBytes, "", key, why)

    def untold(self, server: str, how: str) -> None:
        self.note(events.Untold, "", "", server, how)

    def close(self) -> Callable[[], object] | None:
        """Before its engine is: whoever hears of that finds it so. What is left to do by then, if there is anything:
        its computations' leases are given back, or others would wait for them to end. It may take a moment."""
        self.closed, outage = True, self.outage
        held = [(hold.key, hold.token) for hold in keeper.disowned(self)]
        if outage is None:
            return None
        outage.closed = True
        held = [(key, token) for key, token in held if token not in outage.refugees]
        return partial(outage.unknown.give_back, held, CLOSING) if held or outage.unknown else None

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
        self.front.drop(key)

    def bury(self, key: str) -> None:
        """The same for a key of an older generation: nobody asks for it, but its resident may still be at home."""
        self.forget(key)
        self.front.bury(key)

    def forget_all(self, prefix: str = "", scope: str | None = None) -> None:
        """The same for the keys with this prefix, of this scope; or for all."""
        self.epoch = self.ended[scope] = next(self._epochs)
        self.front.drop_all(scope)  # before thousands are woken: meanwhile others call
        if self.outage is not None:
            self.outage.forget_all()
        self.flights.detach_all(prefix)

    def soften_all(self, scope: str | None = None) -> None:
        """From now on nobody in this process takes what is kept for fresh."""
        self.epoch = next(self._epochs)
        self.front.soften_all(scope)
        if self.outage is not None:
            self.outage.forget_all()


CLOSING = 1.0
"""Seconds for leases to be given back while a cache is closed: an engine that hangs keeps nobody."""

MOST_TOLD = 1000


class Scope:
    """One function's part of a cache (or the cache's own keys): how its values are asked for, kept and forgotten."""

    def __init__(
        self, core: Core, namespace: str, name: str, policy: Policy, codec: Coder | None, called: str | None = None
    ) -> None:
        """`called`: by whom its events are told, where that is not its name."""
        if core.engine.claims is None or core.engine.aclaims is None:
            if core.engine.store is not None:
                raise OptionError(f"{core.engine.scheme}:// has no locks: name an engine that has, with locks=")
            raise OptionError(f"{core.engine.scheme}:// keeps no values: it can only be a lock (locks=)")
        assert core.engine.store is not None
        assert core.engine.astore is not None
        # Where values are kept as they are, they are only tried.
        trial, codec = (None, codec) if core.engine.shared or codec is None else (Trial(name, codec), None)
        self._disbelieved: dict[str, bytes] = {}  # by key: of which bytes people were told
        self.core = core
        self.name = name  # of its generation
        self.called = name if called is None else called
        self.policy = policy
        self.namespace = quoted(namespace)
        refuge = core.outage.refuge if core.outage is not None else None
        self.claims, self.store, looks = self._ports(
            core.engine.claims, core.engine.store, codec, refuge.claims if refuge else None, BLOCKING
        )
        # For the keeper, who has all the time.
        self._patient, *_ = self._ports(core.engine.claims, core.engine.store, codec, refuge.claims if refuge else None)
        many = Gathering() if core.engine.many is not None else core.engine.claims
        together, _, looks_together = self._ports(many, core.engine.store, codec, refuge.claims if refuge else None)
        self.aclaims, self.astore, alooks = self._ports(
            core.engine.aclaims, core.engine.astore, codec, refuge.aclaims if refuge else None, SUSPENDING
        )
        self._trial = trial
        self.era = Era()
        self._odds = Odds()
        self._blocking = self._means(self.claims, looks, BLOCKING)
        self._together = self._means(together, looks_together, BLOCKING)
        self._suspending = self._means(self.aclaims, alooks, PROMPT if core.engine.prompt else SUSPENDING)
        self._coded = CodedStore(core.engine.store, codec, self._bad) if codec is not None else None
        self.near = core.front.tier is not None or core.engine.near is not None  # something may be at hand
        # Who knows the generation. (Of two, one may be asked, and the other one hang.)
        self._home = None if core.engine.server_of(name) is None else f"generation of {name}"
        self._nested = bool(namespace) and self.namespace != name  # `clear` of the namespace ends its generations, too
        self._scopes = [name, self.namespace] if self._nested else [name]
        # The generation, as this process knows it, and the epoch in which it was asked for. At first, and until it can
        # be asked for, one of this scope's own: no other's values are to be found in it.
        self._own = new_id().hex()
        self._known = -1, generation(name, self._own, ""), "", ""
        self._older: list[str] = []  # prefixes known before, whose residents may still be at home
        # The engine's of these, as their two generations, and when this process heard of a newer one.
        self._left: list[tuple[str, str, float]] = []
        self._recall()  # and no question: a loop may wait for this, or for who makes it under a lock

    def _ports(
        self, claims: Claims, store: Store, codec: Coder | None, refuge: Claims | None, colour: Colour | None = None
    ) -> tuple[Claims, Store, Looks | None]:
        looks = cast("Looks", claims) if self.core.engine.looks else None
        decoded: Callable[[str, Entry[Any]], Entry[Any] | None] = _as_it_is
        if codec is not None:
            claims, store = CodedClaims(claims, codec, self._bad), CodedStore(store, codec, self._bad)
            decoded = claims.decoded
        if self.core.outage is not None and refuge is not None:
            guarded = Guarded(colour, self.core.outage) if colour is not None else None
            claims = GuardedClaims(claims, refuge, self.core.outage, guarded, self.core.front.kept)
            looks = Looking(looks, decoded, self.core.outage, guarded) if looks is not None else None
        return claims, store, looks

    def _bad(self, key: str, id: bytes, error: Exception) -> None:
        """One miss looks at the same bytes up to three times: it is told of once."""
        if self._disbelieved.get(key) != id:
            if len(self._disbelieved) >= MOST_TOLD:
                self._disbelieved.clear()
            self._disbelieved[key] = id
            self.core.note(events.BadBytes, self.called, self.label(key), str(error))

    # -- keys -----------------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        return self._known[1]

    def label(self, physical: str) -> str:
        return physical.removeprefix(self.prefix)

    def learn_first(self) -> None:
        """Ask for the generation before a herd of threads does, each over a connection of its own; not in a loop."""
        if running_loop() is None and not self.core.is_down():
            run_blocking(self.learn(BLOCKING, self.policy.limit))

    async def learn(self, colour: Colour, patience: float | None = None) -> str:
        """The prefix of every key in today's generation, as far as the engine can be asked (for so many seconds)."""
        outage, epoch = self.core.outage, self.core.epoch
        probed = outage if self.core.is_down() else None
        if probed is not None and not probed.may_ask():
            return self._unsure()
        # Who probes asks this first, and the engine itself: what is known may have ended during the outage.
        ask = partial(self._generations if probed is None else self._todays, self._store(colour))

        def late(_: object, error: BaseException | None) -> None:
            if probed is not None and error is None:
                probed.answered()

        try:
            if outage is None or patience is None:
                told: tuple[str, str] | Late = await ask()
            else:
                told = await Guarded(colour, outage).ask(ask, patience, late, server=self._home)
        except EngineClosed:
            raise
        except EngineError as error:
            if outage is not None:
                outage.failed(error, probing=probed is not None)
            return self._unsure()
        if isinstance(told, Late):
            return self._unsure()
        if probed is not None:
            probed.answered()
        return self._keep_prefix(epoch, *told)

    async def _todays(self, store: Store) -> tuple[str, str]:
        """Those of today, as the engine itself says."""
        own = (await store.generations(self.name))[0]
        return own, (await store.generations(self.namespace))[0] if self._nested else ""

    async def _generations(self, store: Store) -> tuple[str, str]:
        return await store.generation(self.name), await store.generation(self.namespace) if self._nested else ""

    def _unsure(self) -> str:
        """The prefix that is known, while the engine can't say it: unless this process has ended that generation. The
        engine may be back before we know, and would be asked for what was cleared."""
        ended = max(self.core.ended.get(self.name, 0), self.core.ended.get(None, 0))
        known = self._known[0]
        return self._keep_prefix(ended, f"{self._own}.{ended}", "") if known < ended else self.prefix

    async def learn_surely(self, colour: Colour) -> tuple[str, list[str]]:
        """The same without a doubt; and the prefixes under which other processes may be looking for a moment yet."""
        epoch, store = self.core.epoch, self._store(colour)
        return self._told(epoch, [await store.generations(scope) for scope in self._scopes])

    def _told(self, epoch: int, generations: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
        """What the generations of its scopes, as they were said to be since that epoch, make of a prefix."""
        owns, wholes = (*generations, [""])[:2]
        today = self._keep_prefix(epoch, owns[0], wholes[0])
        # What this process knew a moment ago, too: of what an emptied server can't tell any more. Each process asks for
        # both generations at moments of its own, so it may know of a newer one, and believe in the older other.
        left = [known for known in self._left.copy() if _clock() - known[2] < HEARD]
        if not left and len(owns) == len(wholes) == 1:
            return today, []
        owns = [*owns, *[own for own, _, _ in left]]
        wholes = [*wholes, *[whole for _, whole, _ in left]]
        prefixes = {self._prefix_of(own, whole) for whole in wholes for own in owns}
        return today, list(prefixes - {today})

    def _recall(self) -> str | None:
        """The same, where the engine knows it at once: without the price of coroutines. Not of one that is down, which
        is asked for this first."""
        recalls = self.core.engine.recalls
        if recalls is None or self.core.is_down():
            return None
        known, epoch, own = self._known, self.core.epoch, recalls.generation_at_hand(self.name)
        whole = recalls.generation_at_hand(self.namespace) if self._nested else ""
        if known[2] == own and known[3] == whole and known[0] == epoch:
            return known[1]
        return None if own is None or whole is None else self._keep_prefix(epoch, own, whole)

    def _at_hand(self) -> str:
        """The prefix as it is known here. A change asks the engine itself, and would pay twice for one that hangs."""
        return self._recall() or self.prefix

    def _keep_prefix(self, epoch: int, own: str, whole: str) -> str:
        known = self._known
        if known[0] == epoch and known[2] == own and known[3] == whole:
            return known[1]
        prefix = self._prefix_of(own, whole)
        self.era.mark = _mark_of(own, whole)
        if prefix != known[1] and known[0] >= 0:  # or nobody has asked for anything yet
            self._older.append(known[1])  # before anybody can see the new one
            del self._older[:-8]
            if self._of_engine(known):
                self._left.append((known[2], known[3], _clock()))
                del self._left[:-8]
        self._known = epoch, prefix, own, whole
        return prefix

    def _prefix_of(self, own: str, whole: str) -> str:
        """By the parts of the generations that are of keys: what stands behind is of their entries."""
        return generation(self.name, own.partition("~")[0], whole.partition("~")[0])

    def _of_engine(self, known: tuple[int, str, str, str]) -> bool:
        return bool(known[2]) and not known[2].startswith(self._own)

    # -- the way of a call ----------------------------------------------------------------------------------------

    def hit(self, key: str) -> Resident | None:
        """The local tier's answer, if it needs no thought."""
        epoch, prefix, _, _ = self._known
        return self.core.front.hit(prefix + key) if epoch == self.core.epoch else None

    def at_hand(self, key: str) -> Resident | Entry[Any] | None:
        """What can be had without a claim, a flight, or a moment's waiting: something with a `value`."""
        return self.hit(key) or self.look(key) if self.near else None

    def at_hand_of(self, once: Once, key: str) -> Resident | Entry[Any] | None:
        """The same, if it was computed where everything is computed anew."""
        return self.at_hand(key) if once.has(self.core.flights, self._at_hand() + key) else None

    def look(self, key: str) -> Entry[Any] | None:
        """A shared engine's answer, where it can be had in microseconds: no claim, no flight, no doubt."""
        core = self.core
        near = core.engine.near
        if near is None or (core.outage is not None and core.outage.down):
            return None
        prefix = self._recall()
        if prefix is None:
            return None
        physical, at, front = prefix + key, _clock(), core.front
        if front.is_due(physical):
            return None  # the engine's is the same one: somebody has to claim, or nobody refreshes it
        found = near.look(physical)
        entry = self._coded.decoded(physical, found.entry) if found is not None and self._coded is not None else None
        if found is None or entry is None or entry.raised or (self.era.mark and self.era.is_over(entry)):
            return None
        if front.tier is not None:
            landing = Landing(entry, ticket=found.ticket, at=at)
            resident = front.place(physical, self.called, landing, None)
            if self._recall() != prefix:
                front.tier.drop(physical)
                return None
            if resident is not None:
                front.open(resident, landing, self.policy)
                if front.is_due(physical):
                    return None  # it came in its early moment
        elif self.policy.early and early.due(entry, early.draw(self.policy.early)):
            return None
        core.note(events.Found, self.called, key)
        return entry

    def fetch(
        self,
        colour: Colour,
        key: str,
        origin: Callable[[], Any],
        policy: Policy | None = None,
        *,
        force: bool = False,
        home: TakesHome | None = None,
        once: Once | None = None,
    ) -> Coroutine[Any, Any, Landing]:
        """What the local tier could not answer. `home` is told of the resident, if there is one now."""
        leader = Leader(self._give_back)
        work = self._fetch(colour, key, origin, policy or self.policy, force, home, leader, once)
        leader.work = ref(work, leader)  # as `follow` does it, and a call less in every miss
        return work

    async def _fetch(
        self,
        colour: Colour,
        key: str,
        origin: Callable[[], Any],
        policy: Policy,
        force: bool,
        home: TakesHome | None,
        leader: Leader,
        once: Once | None,
    ) -> Landing:
        core, epoch = self.core, self.core.epoch
        means, loop = (self._suspending, running_loop() or _loop()) if colour.suspending else (self._blocking, None)
        prefix, front = self._recall(), core.front
        began = _clock()  # what it waits for is one wait, also for its first question
        if prefix is None:
            prefix = await self.learn(colour, policy.limit)
        physical = prefix + key
        if once is not None and once.has(core.flights, physical):
            once = None
        usual = not force and once is None
        seen = sample = None
        if front.tier is not None:
            seen, sample = front.take_due(physical) if usual else None, front.sample(physical)
        glanced: Landing | Glance | None = None
        if means.looks is not None and seen is None and usual and not policy.background:
            glanced = await glance(means, physical, key, policy, loop, leader, began)
        if isinstance(glanced, Landing):
            landing = glanced
        else:
            leader.token = self.era.id_of(new_id())
            call = Call(
                physical, key, origin, policy, means, loop, began, seen,
                force=force, once=once, leader=leader, token=leader.token,
            )  # fmt: skip
            if glanced is not None:
                call.flight, call.ask = glanced
            if once is not None:
                landing = await _once(call)
            else:
                landing = await (self._aside(call, sample) if policy.beside and usual else fill(call))
        if front.tier is None:
            return landing
        resident = front.place(physical, self.called, landing, sample)
        if resident is None:
            return landing
        if resident.end == 0.0 or landing.until is not None:  # or somebody else of its flight has opened it
            today = self._recall()
            if today is None:
                left = _left(policy, began)
                today = await self.learn(colour, left) if landing.ticket is not None else prefix
            # Asked now, when the resident is placed and nobody hits it yet: who has changed the key in a newer
            # generation has killed the resident by then, or we see that generation here. Neither the resident's home
            # nor a ticket that was taken after the change knows of generations.
            if epoch != core.epoch or today != prefix or (self.era.mark and self.era.is_over(resident.entry)):
                front.tier.drop(physical)
                return landing
            front.open(resident, landing, policy)
        if home is not None:
            home.take_home(resident)
        if seen is None and not force and not landing.stored and front.is_due(physical):
            return await self.fetch(
                colour, key, origin, policy, home=home
            )  # it came in its early moment: now it's seen
        return landing

    async def _aside(self, call: Call, sample: Ticket | None) -> Landing:
        """The same for a caller that may go before its computation has ended, which has a place beside it."""
        place = Place(call.means.colour, call.policy)
        # Before the claim, where nobody is to wait at all.
        if (call.policy.background or call.seen is not None) and not place.reserve() and call.seen is not None:
            return later(call.seen)
        call.spawn = _Beside(self, place, sample)
        try:
            return await fill(call)
        finally:
            place.free()

    async def keep_of(self, call: Call, work: Coroutine[Any, Any, Landing], sample: Ticket | None) -> None:
        """What is computed beside its caller."""
        if getattr(work, "cr_frame", work) is None:
            return  # he was interrupted just as he had it done, and has closed it
        await self.keep([(call, await work, sample)])

    async def keep(self, ends: Iterable[tuple[Call, Landing, Ticket | None]], patience: float | None = None) -> None:
        """Keep in this process what calls of one colour ended with, as far as it is known to be true."""
        front, today = self.core.front, None
        placed = [
            (resident, call, landing)
            for call, landing, sample in ends
            if (resident := front.place(call.key, self.called, landing, sample)) is not None
        ]
        if placed:  # asked now, and not before: as in `_fetch`
            today = self._recall()
        if today is None and any(landing.ticket is not None for _, _, landing in placed):
            today = await self.learn(placed[0][1].means.colour, patience)
        for resident, call, landing in placed:
            if (today is None or today + call.label == call.key) and not self.era.is_over(resident.entry):
                front.open(resident, landing, call.policy)
            elif front.tier is not None:
                front.tier.drop(call.key)

    async def at_once(
        self, colour: Colour, work: Sequence[Coroutine[Any, Any, T]], patience: float | None = None
    ) -> list[T | BaseException]:
        """What each piece of work, over calls `of_many`, returned or raised; in as few round trips as can be."""
        if colour.suspending:
            return await settled(work)
        many = self.core.engine.many
        if many is not None and patience is not None and self.core.outage is not None:
            many = GuardedMany(many, self.core.outage, patience)
        return run_together(work, many.ask_many if many is not None else _nothing_to_ask)

    async def today(self, colour: Colour, patience: float | None = None) -> str:
        """The prefix of every key, as `learn` tells it."""
        return self._recall() or await self.learn(colour, patience)

    def of_many(
        self,
        colour: Colour,
        prefix: str,
        key: str,
        origin: Callable[[], Any],
        policy: Policy,
        began: float,
        once: Once | None = None,
    ) -> Call:
        """One of a caller's questions for many keys of `today`, to be asked `at_once` with the others."""
        means, loop = (self._suspending, _loop()) if colour.suspending else (self._together, None)
        leader = Leader(self._give_back)
        leader.token = self.era.id_of(new_id())
        if once is not None and once.has(means.flights, prefix + key):
            once = None
        return Call(
            prefix + key, key, origin, policy, means, loop, began,
            once=once, leader=leader, asks_on=True, token=leader.token,
        )  # fmt: skip

    def _means(self, port: Claims, looks: Looks | None, colour: Colour) -> Means:
        core = self.core
        return Means(
            scope=self.called,
            trial=self._trial,
            port=port,
            flights=core.flights,
            colour=colour,
            clock=_clock,
            hold=self._hold,
            drop=self._drop,
            note=core.note,
            era=self.era,
            draws=core.front.tier is None,
            looks=looks,
            odds=self._odds,
        )

    def _hold(self, call: Call, max_hold: float) -> Hold:
        return Hold(
            keeper,
            self._patient,
            call.key,
            call.token,
            call.policy.lease,
            max_hold,
            drop=lambda: self._lost(call),
            owe=lambda: self._owe(call.key, call.token),
            alive=None if call.flight is None else call.flight.is_under_way,
            of=self.core,
        )

    def _lost(self, call: Call) -> None:
        """By the keeper: the holder can never end. The flight refers to its loop."""
        self.core.flights.cut_orphans()
        self._drop(call)

    def _give_back(self, key: str, token: bytes) -> None:
        """By the keeper, and soon: who asks is in a finalizer, perhaps on the thread of a loop."""
        drop = partial(self._abandon, key, token)
        keeper.let_go(Hold(keeper, self.claims, key, token, 1.0, 0.0, drop, owe=lambda: self._owe(key, token)))

    def _owe(self, key: str, token: bytes) -> None:
        """By the keeper, as the interpreter ends."""
        outage = self.core.outage
        if outage is None or not outage.owe(key, token):
            self._abandon(key, token)

    def _abandon(self, key: str, token: bytes) -> None:
        run_blocking(quietly(self.claims.abandon, key, token))

    def _drop(self, call: Call) -> None:
        if call.pid != os.getpid():
            return  # in a forked child it is the parent's
        if running_loop() is None:
            self._abandon(call.key, call.token)
        else:
            self._give_back(call.key, call.token)

    # -- the store's verbs ----------------------------------------------------------------------------------------

    async def get(self, colour: Colour, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """What is fresh of each key."""
        found = await self._read(colour, keys)
        return [entry if entry is not None and entry.fresh > 0 else None for entry in found]

    async def peek(self, colour: Colour, key: str) -> Entry[Any] | None:
        """What is kept, stale or fresh."""
        return (await self._read(colour, [key]))[0]

    async def _read(self, colour: Colour, keys: Sequence[str]) -> list[Entry[Any] | None]:
        return [self.era.told(entry) for entry in await self._found(colour, keys)]

    async def _found(self, colour: Colour, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """What is kept of each key: reads go on without their engine, with what this process has computed meanwhile."""
        outage, prefix = self.core.outage, await self.learn(colour)
        physical = [prefix + key for key in keys]
        if outage is None:
            return await self._store(colour).get(physical)
        if not outage.down:  # or to ask for its generation has just been the try
            try:
                return await self._store(colour).get(physical)
            except EngineClosed:
                raise
            except EngineError as error:
                outage.failed(error)
        if outage.strict:
            raise outage.trouble() from outage.last
        store = outage.refuge.astore if colour.suspending else outage.refuge.store
        assert store is not None
        return await store.get(physical) if outage.used else [None] * len(physical)

    async def show(self, colour: Colour, key: str) -> tuple[Shown, Flight | None]:
        """What is kept of the key, and which lease stands; and the flight of this process. Nothing is touched."""
        engine, outage, physical = self.core.engine, self.core.outage, await self.learn(colour) + key
        port = engine.ashows if colour.suspending else engine.shows
        if port is None or self.core.is_down():
            (entry,) = await self._read(colour, [key])
            return Shown(entry), self.core.flights.get(physical)
        try:
            shown = await port.show(physical)
        except EngineClosed:
            raise
        except EngineError as error:
            if outage is None:
                raise
            outage.failed(error)
            return await self.show(colour, key) if self.core.is_down() else (Shown(), self.core.flights.get(physical))
        if self._coded is not None:
            shown.entry = self._coded.decoded(physical, shown.entry)
        self.era.told(shown.entry)
        return shown, self.core.flights.get(physical)

    def lists(self, colour: Colour) -> Lists:
        """OptionError, if the engine can't say which keys it has."""
        engine = self.core.engine
        port = engine.alists if colour.suspending else engine.lists
        if port is None:
            raise OptionError(f"{engine.scheme}:// can't say which keys it has")
        return port

    async def page(self, colour: Colour, prefix: str, cursor: Page | None = None) -> tuple[list[str], Page | None]:
        """Some of the keys that are kept and begin with this, and by what the next ones are asked for. In the middle of
        it a new generation may begin, of which all are told then, from its first page on."""
        today, _ = await self.learn_surely(colour)
        at = None if cursor is None or cursor[0] != today else cursor[1]
        found, after = await self.lists(colour).page(today + prefix, at)
        return [key.removeprefix(today) for key in found], None if after is None else (today, after)

    async def put(self, colour: Colour, key: str, value: Any, policy: Policy | None = None) -> None:
        entry = self.entry_for(key, value, policy or self.policy)
        await self._change(colour, key, "set", entry)

    async def put_many(
        self, colour: Colour, values: Mapping[str, Any], policy: Policy | Callable[[str], Policy]
    ) -> None:
        """All of them in one round trip, where the engine can."""
        entries = {
            key: self.entry_for(key, value, policy(key) if callable(policy) else policy)
            for key, value in values.items()
        }
        await self._change_many(colour, "set", {key: (entry,) for key, entry in entries.items()})

    def entry_for(self, key: str, value: Any, policy: Policy) -> Entry[Any]:
        ttl = policy.ttl_of(lasting(value))
        known = self.core.front.known(self._at_hand() + key)
        cost, margin = (known.cost, known.margin) if known is not None else (0.0, 0.0)  # or its end comes as a surprise
        entry = Entry(value, new_id(), cost, margin, ttl, ttl, ttl + policy.stale)
        if self._trial is not None:
            self._trial(key, entry, strict=policy.strict)
        return entry

    async def exchange(self, colour: Colour, key: str, seen: Entry[Any] | None, entry: Entry[Any]) -> bool:
        """Store it if what is kept is still what was seen."""
        return bool(await self._change(colour, key, "replace", seen.id if seen is not None else None, entry))

    async def kept(self, colour: Colour, key: str) -> Entry[Any] | None:
        """What the engine itself keeps, in the generation of today."""
        today, _ = await self.learn_surely(colour)
        return self.era.told((await self._store(colour).get([today + key]))[0])

    async def expire(self, colour: Colour, key: str) -> bool:
        return bool(await self._change(colour, key, "expire"))

    async def invalidate(self, colour: Colour, key: str) -> bool:
        return bool(await self._change(colour, key, "invalidate"))

    async def invalidate_many(self, colour: Colour, keys: Iterable[str]) -> int:
        """How many there were; all in one round trip, where the engine can."""
        return sum(map(bool, await self._change_many(colour, "invalidate", dict.fromkeys(keys, ()))))

    async def expire_many(self, colour: Colour, keys: Iterable[str]) -> int:
        """How many were fresh; all in one round trip, where the engine can."""
        return sum(map(bool, await self._change_many(colour, "expire", dict.fromkeys(keys, ()))))

    async def _change(self, colour: Colour, key: str, verb: str, *args: Any) -> Any:
        (done,) = await self._change_many(colour, verb, {key: args})
        return done

    async def _change_many(self, colour: Colour, verb: str, changes: Mapping[str, tuple[Any, ...]]) -> list[Any]:
        """What the engine said of each in today's generation, or the first error."""
        core, hard, was_down = self.core, verb != "expire", self.core.is_down()
        known = physical = self.prefix
        for key in changes:
            core.forget(known + key, hard=hard)  # before, so that it is gone here even if the engine can't be asked
        try:
            physical, done = await self._change_today(colour, verb, changes)
            core.answered(was_down)
            return done
        finally:
            # Whoever begins a new generation, another thread perhaps, may not have got to these keys' residents yet.
            before = {known, *self._older.copy()} - {physical}
            for key in changes:
                core.forget(physical + key, hard=hard)  # after, for those who read the old one while it was changed
                for prefix in before:
                    core.bury(prefix + key)
                core.note(events.Invalidated, self.called, key, "set" if verb == "replace" else verb)

    async def _change_today(
        self, colour: Colour, verb: str, changes: Mapping[str, tuple[Any, ...]]
    ) -> tuple[str, list[Any]]:
        """Today's prefix, and what was said there.

        Another process may have begun a new generation a moment ago, and its keys are the ones to change. A third may
        not have heard of it, and would go on to find in the older one what is older than this change.
        """
        done, guess, epoch = None, self._at_hand(), self.core.epoch
        believed = self._known
        if self.core.engine.changes and self._of_engine(believed) and guess == believed[1]:
            done, generations = await self._changed(colour, verb, guess, changes, self._scopes)
            today, ended = self._told(epoch, generations)
            ended = [each for each in ended if each != guess]
            if self._known[2:] != believed[2:]:  # also if but the mark is another one, of what isn't stale as a whole
                done = None
        else:
            today, ended = await self.learn_surely(colour)
        if done is None:
            done, _ = await self._changed(colour, verb, today, changes)
        for older in {*ended} - {today}:
            await self._changed(colour, verb, older, changes)
        return today, done

    async def _changed(
        self, colour: Colour, verb: str, prefix: str, changes: Mapping[str, tuple[Any, ...]], scopes: Sequence[str] = ()
    ) -> tuple[list[Any], Sequence[Sequence[str]]]:
        """What was said of each under this prefix; and behind it, where an engine `changes`, today's generations."""
        store, many = self._store(colour), self.core.engine.many
        for args in changes.values():
            for each in args:
                if isinstance(each, Entry):
                    each.id = self.era.id_of(each.id)
        asked = [Asked(verb, (prefix + key, *args)) for key, args in changes.items()]
        if self.core.engine.changes:
            return await cast("Changes", store).change(asked, scopes)
        if colour.suspending and len(asked) > 1:
            done = await settled([getattr(store, verb)(*each.args) for each in asked])
        elif many is None or len(asked) == 1:
            return [await getattr(store, verb)(*each.args) for each in asked], ()
        else:
            coded = self._coded  # all before the first is sent: a value that is refused leaves the others as they were
            done = many.ask_many(coded.sealed(asked) if coded is not None else asked)
        try:
            for each in done:
                if isinstance(each, BaseException):
                    raise each
            return done, ()
        finally:
            del done  # an error in it refers to this frame

    async def bump(self, colour: Colour) -> None:
        """A new generation of this scope: everything older is gone."""
        core, was_down, before = self.core, self.core.is_down(), self._at_hand()
        try:
            await self._store(colour).bump(self.name)
            core.answered(was_down)
        finally:
            core.forget_all(f"{before}{self.name}:", self.name)
            core.note(events.Invalidated, self.called, "", "invalidate_all")
        await self.learn(colour)

    async def expire_all(self, colour: Colour, scope: str | None = None) -> None:
        """All that was kept of this scope, or of another (the namespace), is stale from now on."""
        core, was_down = self.core, self.core.is_down()
        port = core.engine.asoftens if colour.suspending else core.engine.softens
        if port is None:
            raise OptionError(f"{core.engine.scheme}:// can't make all stale at once: expire the keys one by one")
        try:
            await port.soften(self.name if scope is None else scope)
            core.answered(was_down)
        finally:
            core.soften_all(self.called if scope is None else None)
            core.note(events.Invalidated, self.called if scope is None else scope, "", "expire_all")
        await self.learn(colour)

    async def clear(self, colour: Colour) -> None:
        """A new generation of the whole namespace."""
        core, was_down = self.core, self.core.is_down()
        try:
            await self._store(colour).bump(self.namespace)
            core.answered(was_down)
        finally:
            core.forget_all()
            core.note(events.Invalidated, self.namespace, "", "clear")
        await self.learn(colour)

    def _store(self, colour: Colour) -> Store:
        outage = self.core.outage
        if outage is not None and outage.closed:  # and its engine will be, as soon as the leases have gone back
            raise EngineClosed(outage.engine)
        return self.astore if colour.suspending else self.store


def _as_it_is(key: str, entry: Entry[Any]) -> Entry[Any]:
    return entry


def _mark_of(own: str, whole: str) -> bytes:
    """How the ids begin of what is begun in this generation: as any, as long as nothing was made stale as a whole."""
    softer = own.partition("~")[2], whole.partition("~")[2]
    return blake2b("|".join(softer).encode(), digest_size=3).digest() if any(softer) else b""


async def _once(call: Call) -> Landing:
    """`fill`, and what became of it is remembered by who remembers that."""
    stored = False
    try:
        landing = await fill(call)
        stored = landing.stored
        return landing
    finally:
        call.settle(stored=stored)
        landing = None  # type: ignore[assignment]  # its error, if it has one, refers to this frame


class _Beside:
    """The place of one caller: what is computed there is kept in this process, too."""

    __slots__ = ("_place", "_sample", "_scope", "reserve")

    def __init__(self, scope: Scope, place: Place, sample: Ticket | None) -> None:
        self._scope = scope
        self._place = place
        self._sample = sample
        self.reserve = place.reserve

    def __call__(
        self, call: Call, work: Coroutine[Any, Any, Landing], unborn: Callable[[], object], *, waits: bool
    ) -> Callable[[], object] | None:
        longest = call.policy.hold_of(call.seen.cost if call.seen is not None else 0.0)
        keeping = self._scope.keep_of(call, work, self._sample)
        return self._place.spawn(keeping, lambda: _close(work, unborn), longest, waits=waits)


def _left(policy: Policy, began: float) -> float | None:
    """Seconds for which a caller waits yet, who has done nothing else since; None: without end."""
    return None if policy.limit is None else max(policy.limit - (_clock() - began), 0.0)


def _close(work: Coroutine[Any, Any, Any], unborn: Callable[[], object]) -> None:
    """The task around it was cancelled, perhaps before either took a step."""
    work.close()
    unborn()


def later(seen: Entry[Any]) -> Landing:
    """What is due, since there is no place beside the caller to refresh it in: to be looked at again a little later."""
    return Landing(seen, until=seen.fresh / 4)


def _loop() -> Loop:
    loop = running_loop()
    if loop is None:
        raise RuntimeError(
            "no asyncio loop runs here, and async calls need one: elsewhere (trio, curio) use plain verbs in a thread"
        )
    return loop


def _nothing_to_ask(asked: Sequence[Asked]) -> list[Any]:
    raise AssertionError(f"{asked} suspended on an engine that answers at once")
