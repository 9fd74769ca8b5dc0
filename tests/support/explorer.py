"""The explorer runs the real algorithm through all interleavings of a small scenario, and injects faults.

    report = explore(Scenario([[ask()], [ask()], [invalidate(), ask()]]), faults=["crash", "cancel"])
    assert report.violation is None, report

Several processes share the model of an engine (`trap_ports`). Every step of every caller is a choice, and a schedule is
a list of choices. Each schedule runs from the start. The explorer does not continue from a state that it has seen
before. It tries schedules with few faults and switches first, so that the violation that it reports is short to read.
"""

from __future__ import annotations

import heapq
import random
from asyncio import CancelledError
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from model import Model
from trap_ports import TRAPPING, Spawn, Trap, TrapHold, TrapPort, told

from stampede import events
from stampede.algorithm import fill
from stampede.algorithm.call import Call, Gate, HitLikelihood, Resources
from stampede.algorithm.flight import Flight, Flights
from stampede.algorithm.tags import TaggedClaims, TagPorts
from stampede.errors import ComputationFailed, EngineError, OriginFull, StampedeError, WaitTimeout
from stampede.model.entry import Entry
from stampede.model.ports import Engine
from stampede.model.result import Result
from stampede.model.tags import key_of_tag
from stampede.runtime.colour import Bell, Colour
from stampede.settings.options import Policy

__all__ = [
    "FAULTS", "Boom", "Process", "Report", "Scenario", "Violation", "any_world", "ask", "asking", "expire", "explore",
    "failing", "hung", "invalidate", "invalidate_tag", "put", "roam", "slow", "then",
]  # fmt: skip

FAULTS = {
    "lose": "the reply is lost",
    "refuse": "the engine can't be reached",
    "crash": "the process is killed",
    "cancel": "the caller is cancelled",
    "lapse": "the lease ends",
    "miss": "the wake-up is lost",
    "forget": "the engine starts again, empty",
    "slow": "time passes, until something ends",
}
"""The faults that may happen at any point: their names, and their words in a trace."""

PLAIN = Policy(early=0.0)  # no random refresh: a schedule must take the same course each time

STEPS = 400
"""A schedule that is longer than this counts as endless."""

MOMENT = 0.01
"""The tolerance for waits, in seconds: each reading of the clock takes a little time here."""

Choice: TypeAlias = tuple[int, str]  # the number of a fibre, and what happens to it; -1: an event outside the fibres
Script: TypeAlias = Callable[["Process"], Coroutine[Any, Any, Any]]
Origin: TypeAlias = Callable[["Process"], Awaitable[object]]


class Violation(AssertionError):
    """A broken promise."""


class Boom(Exception):
    """The error of a failing origin."""


class _Loop:
    """A fake for the event loop of one process."""

    closed = False

    def is_closed(self) -> bool:
        return self.closed


# -- actions of callers -------------------------------------------------------------------------------------------


async def quick(process: Process) -> None:
    """An origin that takes one step and no time."""
    await Trap("inside", "has its value from the origin")


async def failing(process: Process) -> None:
    """An origin that fails."""
    await Trap("inside", "sees the origin fail")
    raise Boom("boom")


async def hung(process: Process) -> None:
    """An origin that never answers."""
    await Trap("hang", "has its value from the origin", ready=lambda: False)


def asking(key: str) -> Origin:
    """An origin that calls the cached function for another key."""

    async def origin(process: Process) -> None:
        await Trap("inside", f"asks for {key!r} inside its computation")
        await process.ask(key)

    return origin


def slow(seconds: float) -> Origin:
    """An origin that takes time."""

    async def origin(process: Process) -> None:
        await Trap("sleep", "has its value from the origin", ready=lambda: False, timeout=seconds)

    return origin


def ask(key: str = "k", origin: Origin = quick, **terms: Any) -> Script:
    """Call the cached function. Terms: `force` (refresh), `look` (in a local tier first), and options of the policy."""
    return lambda process: process.ask(key, origin, **terms)


def invalidate(key: str = "k") -> Script:
    return lambda process: process.invalidate(key)


def invalidate_tag(key: str = "k") -> Script:
    """Invalidate the tag of the key's value."""
    return lambda process: process.invalidate_tag(key)


def put(key: str = "k") -> Script:
    """Set a value."""
    return lambda process: process.put(key)


def expire(key: str = "k") -> Script:
    return lambda process: process.expire(key)


def then(*scripts: Script) -> Script:
    """Run the scripts one after the other, even if one of them fails."""

    async def all_of_them(process: Process) -> None:
        for script in scripts:
            try:
                await script(process)
            except (StampedeError, Boom):
                pass

    return all_of_them


@dataclass(frozen=True)
class Scenario:
    """Processes with their callers, and the engine that they share."""

    processes: Sequence[Sequence[Script]]
    policy: Policy = PLAIN
    kept: tuple[float, float] | None = None  # seconds for which a first value of "k" is still fresh, and is kept
    local: bool = False  # the first value is also in the local tier of every process
    news: bool = False  # wake-ups carry the value
    alone: bool = False  # callers may compute without a lease: nested calls, or values that are not kept
    expires: bool = False  # values may expire during the scenario: computations are not counted
    looks: bool = False  # a call reads the engine before it claims a lease
    tagged: str = ""  # values have a tag, which is known "before" their computation, or "late": only while it runs
    room: int = 0  # most computations at once, in all processes; 0: no limit
    when_full: str = "wait"


def any_world(seed: int) -> Scenario:
    """A random scenario: callers may leave early or get stale values, in any combination of options."""
    dice = random.Random(seed)
    moments = [0.0, 1.0, 9.0, 50.0]

    def some(**chances: tuple[float, list[Any]]) -> dict[str, Any]:
        return {name: dice.choice(values) for name, (chance, values) in chances.items() if dice.random() < chance}

    expires = False

    def act() -> Script:
        nonlocal expires
        if dice.random() < 0.6:
            terms = some(
                patience=(0.3, moments), deadline=(0.3, moments), force=(0.15, [True]), look=(0.15, [True]),
                stale=(0.1, [0]),
            )  # fmt: skip
            return ask(origin=dice.choice([quick, quick, quick, failing, slow(5), slow(45)]), **terms)
        verb = dice.choice([invalidate, invalidate, put, expire])
        expires = expires or verb is expire
        return verb()

    policy = some(
        patience=(0.6, moments), deadline=(0.5, moments), wait=(0.3, moments), background=(0.3, [True]),
        max_hold=(0.3, [30.0]), retry_after=(0.2, [3.0]), cache_if=(0.15, [lambda value: False]),
    )  # fmt: skip
    acts = [[[act() for _ in range(dice.choice([1, 1, 2, 3]))] for _ in range(dice.choice([1, 1, 2, 3]))]
            for _ in range(dice.choice([1, 2, 2, 3]))]  # fmt: skip
    kept = dice.choice([None, (-1, 100), (-1, 100), (50, 100), (-1, 4)])
    return Scenario(
        [[then(*each) for each in callers] for callers in acts],
        Policy(early=0.0, **policy),
        kept=kept,
        local=dice.random() < 0.3,
        news=dice.random() < 0.4,
        alone="cache_if" in policy,
        expires=expires or kept in ((50, 100), (-1, 4)),
        looks=dice.random() < 0.4,
    )


# -- the ledger: all events, in the order of the engine's effects ------------------------------------------------


@dataclass(eq=False)
class Computation:
    """One call of the origin."""

    label: str
    key: str
    caller: Caller
    epoch: int  # the number of effective invalidations of the key when its lease was granted
    granted: bool
    end: str = "running"  # done, failed, cancelled
    fate: str = "open"  # stored, refused, unkept

    def __hash__(self) -> int:
        return hash(self.label)


@dataclass(eq=False)
class Caller:
    """One call: the values that it must not get, and the outcome."""

    label: str
    process: Process
    key: str
    floor: int  # number of invalidations that had returned: older values are wrong for this call
    lag: int  # number of invalidations that this process knew of
    force: bool
    nested: bool  # a computation makes this call: it may pass the error on
    call: Call | None = None
    seen: Entry[Any] | None = None
    cancelled: bool = False
    ended: bool = False
    value: str | None = None
    error: BaseException | None = None


class Ledger:
    """Follows every effect, knows which values each caller may get, and notes violations."""

    def __init__(self) -> None:
        self.epochs: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.holder: dict[str, bytes | None] = {}
        self.grants: dict[bytes, int] = {}
        self.computations: dict[str, Computation] = {}
        self.values: dict[str, int] = {"kept": 0}  # the epoch of every value that was set, not computed
        self.callers: list[Caller] = []
        self.lapsed = 0
        self.objection: str | None = None
        self.tags: dict[str, str] = {}  # by the key of a tag: the key of the value that carries it

    def lapses(self, key: str) -> None:
        """The lease of this key has expired: another caller may compute."""
        self.lapsed += 1
        self.holder[key] = None

    def objects(self, words: str) -> None:
        """Note a violation. An exception raised here would pass through the algorithm."""
        self.objection = self.objection or words

    def watch(self, verb: str, key: str, token: bytes | None, reply: Any) -> None:
        if key.startswith("#"):  # a tag
            self.epochs[self.tags[key]] += verb == "set"
            return
        match verb:
            case "claim" if told(reply).startswith("granted"):
                assert token is not None
                if any(c.force and c.label.encode() == token for c in self.callers):
                    self.lapses(key)  # a refresh may have taken the lease from another caller
                self.holder[key], self.grants[token] = token, self.epochs[key]
            case "fill":
                mine = self.computed_under(token)
                mine.fate = "stored" if reply else "refused"
                if self.holder.get(key) != token:
                    if reply:
                        self.objects(f"{mine.label} was stored, though its lease did not stand")
                    return
            case "abandon" if self.holder.get(key) != token:
                return
            case "invalidate" | "set":
                self.epochs[key] += 1
                if verb == "set":
                    self.values[reply] = self.epochs[key]
        if verb not in ("look", "claim", "expire"):
            self.holder[key] = None

    def computed_under(self, token: bytes | None) -> Computation:
        return next(c for c in self.computations.values() if token == c.caller.label.encode())

    def begins(self, caller: Caller) -> Computation:
        token = caller.label.encode()
        epoch = self.epochs[caller.key] if self.tags else self.grants.get(token, self.epochs[caller.key])
        label = f"value of {caller.label}" + ("" if token in self.grants else " alone")
        if label in self.computations:
            self.objects(f"{caller.label} computes twice")
        mine = self.computations[label] = Computation(label, caller.key, caller, epoch, token in self.grants)
        return mine

    def judge(self, caller: Caller) -> None:
        """Check the outcome of a call that has ended."""
        caller.ended = True
        if not caller.nested and caller.cancelled != isinstance(caller.error, CancelledError):
            self.objects(f"{caller.label} ended with {caller.error or caller.value!r}, cancelled: {caller.cancelled}")
        others = [c for c in self.callers if c is not caller and not (c.nested or caller.nested)]
        if caller.error is not None and any(c.error is caller.error for c in others):
            self.objects(f"{caller.label} shares its error's traceback with another caller")
        if caller.value is None:
            return
        mine = self.computations.get(caller.value)
        epoch = self.values[caller.value] if mine is None else mine.epoch
        lagging = caller.seen is not None and caller.seen.value == caller.value
        if epoch < (caller.lag if lagging else caller.floor):
            self.objects(f"{caller.label} was given {caller.value}, which was invalidated before the call")
        if mine is not None and mine.caller is not caller and mine.fate in ("refused", "open"):
            self.objects(f"{caller.label} was given {caller.value}, which the engine never took")

    def count(self, scenario: Scenario, excuses: int) -> None:
        """After the end of all calls, check that each key and generation had one computation."""
        done = [c for c in self.computations.values() if not c.caller.force]
        if not scenario.alone and any(not c.granted for c in done):
            raise Violation("a caller computed without a lease")
        if scenario.expires:
            return
        for (key, epoch), number in Counter((c.key, c.epoch) for c in done if c.granted).items():
            spent = sum(c.end != "done" or c.fate == "unkept" for c in done if (c.key, c.epoch) == (key, epoch))
            if number > 1 + spent + excuses:
                raise Violation(f"{number} computations of {key!r} in one generation")

    def summary(self) -> tuple[object, ...]:
        return (
            self.lapsed, *[frozenset(each.items()) for each in (self.epochs, self.returned, self.holder)],
            frozenset([(c.label, c.end, c.fate, c.epoch) for c in self.computations.values()]),
        )  # fmt: skip


# -- one trial: processes, fibres, the clock -------------------------------------------------------------------------


class Fibre:
    """A coroutine that continues only when the scheduler decides."""

    def __init__(self, trial: Trial, process: Process, label: str, work: Coroutine[Any, Any, Any]) -> None:
        self.trial = trial
        self.process = process
        self.label = label
        self.work = work
        self.context: Context = copy_context()
        self.trap = Trap("start", "begins")
        self.asked = False  # it has made a call: the next one needs another label
        self.caller: Caller | None = None
        self.owner: Caller | None = None  # the caller for which it works, also during nested calls
        self.root = True  # a caller's own call, not a background task of the library
        self.shields = 0
        self.cancelling = False
        self.digest = 0
        self.epoch = 0  # the epoch of its last effect
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def cancel(self) -> None:
        self.cancelling = True

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    @property
    def ready(self) -> bool:
        trap = self.trap
        return trap.ready is None or trap.ready() or trap.until <= self.trial.now

    def note(self, *what: object) -> None:
        """Add to what this fibre knows."""
        self.digest = hash((self.digest, what))

    @property
    def state(self) -> tuple[object, ...]:
        """A digest of everything that the fibre knows, and its current trap."""
        if self.done:
            return self.digest, True
        trap = self.trap
        unread = trap.listener and trap.listener.news and trap.listener.news.value
        return self.digest, (trap.words, self.ready, self.cancelling, trap.until, unread)

    def step(self, error: BaseException | None = None) -> None:
        """Continue to the next trap, or to the end."""
        value: Any = None
        before, self.trial.running = self.trial.running, self
        try:
            while True:
                if error is None:
                    trap = self.context.run(self.work.send, value)
                else:
                    trap = self.context.run(self.work.throw, error)
                value = error = None
                if type(trap) is Trap:
                    break
                if isinstance(trap, Spawn):
                    value = self.trial.spawn(self, trap.work)
                else:
                    self.shields += 1 if trap.up else -1
                    if not self.shields and self.cancelling:
                        self.cancelling, error = False, CancelledError()
            if trap.timeout is not None:
                trap.until = round(self.trial.now + max(trap.timeout, 0.0), 3)
            self.trap = trap
        except StopIteration as end:
            self.done, self.value = True, end.value
        except (Exception, CancelledError) as end_by_error:
            self.done, self.error = True, end_by_error
        finally:
            self.trial.running = before

    def close(self) -> None:
        """End the coroutine, because the trial is over."""
        if not self.done:
            self.done = True
            self.context.run(self.work.close)


class _Flights(Flights):
    """Flights that note which fibres lead and follow."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.clock = lambda: trial.now
        self._trial = trial
        self.ever: list[tuple[str, Flight]] = []
        self.changes: Counter[str] = Counter()  # number of changes of each key by this process
        self._born: dict[Flight, int] = {}  # the number of changes when the flight began

    def join(
        self, key: str, loop: Any, *, anew: Callable[[], bool] | None = None, leader: Any | None = None
    ) -> tuple[Flight, bool]:
        flight, leading = super().join(key, loop, anew=anew, leader=leader)
        self._note(key, flight, leading=leading)
        return flight, leading

    def watch(self, flight: Flight, moment: float) -> bool:
        """Do nothing: the trial itself ends hung flights, see `ends`."""
        return True

    @property
    def ends(self) -> list[tuple[float, Flight]]:
        """The flights with waiters, and the moment from which each counts as hung."""
        live = [f for _, f in self.ever if f.watched and f.span is not None and not (f.ended or f.detached)]
        return [(f.span[2], f) for f in live if f.span is not None]

    def _note(self, key: str, flight: Flight, *, leading: bool) -> None:
        fibre = self._trial.running
        assert fibre is not None
        if leading:
            self.ever.append((f"{fibre.label} {len(self.ever)}", flight))
            self._born[flight] = self.changes[key]
        elif self._born[flight] < self.changes[key]:
            self._trial.ledger.objects(f"{fibre.label} waits for what was computed before this process invalidated it")
        fibre.note(next(name for name, each in self.ever if each is flight), leading)

    def summary(self) -> tuple[object, ...]:
        """The state of all flights."""
        return tuple([
            (
                name, flight.callers, flight.cancel is None, flight.detached, flight.ended, flight.bell.rung,
                flight.result and _value(flight.result), flight.offered and _value(flight.offered),
                self._flights.get(flight.key) is flight,
            )
            for name, flight in self.ever
        ])  # fmt: skip


def _value(result: Result) -> object:
    return result.entry and result.entry.value, repr(result.error)


class _Hits(HitLikelihood):
    """A high likelihood, which stays as it is."""

    def __init__(self) -> None:
        super().__init__(step=0.0)
        self.share, self.good = 1.0, True


class _Beside:
    """Unlimited places for background work in a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def reserve(self) -> bool:
        return True

    def begin(
        self, work: Coroutine[Any, Any, Any], bell: Bell, longest: float, *, waits: bool
    ) -> Callable[[], object] | None:
        return self._process.spawn(work).cancel


async def _kept_nowhere(ends: list[tuple[Call, Result]]) -> None: ...


class _Cap:
    """A limit on the concurrent computations of an origin, in all processes."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.when_full = trial.scenario.when_full
        self.inside: list[_Seat] = []

    def gate_of(self, name: str) -> Gate:
        return self

    def close(self) -> None:
        return

    def full(self) -> bool:
        return sum(not each.process.dead for each in self.inside) >= self._trial.scenario.room

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> _Seat:
        end = self._trial.now + wait
        while self.full():
            if self._trial.now >= end:
                full = OriginFull("the origin is full")
                full.may_be_covered = self.when_full != "raise"
                raise full
            left = end - self._trial.now
            await Trap("park", "asks for a place at its origin", ready=lambda: not self.full(), timeout=left)
        assert self._trial.running is not None
        seat = _Seat(self, self._trial.running.process)
        self.inside.append(seat)
        return seat


class _Seat:
    origin = "db"

    def __init__(self, cap: _Cap, process: Process) -> None:
        self._cap, self.process = cap, process

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        return

    def drop(self) -> None:
        self._cap.inside.remove(self)

    async def leave(self) -> None:
        self.drop()


class Process:
    """One process of the fleet: its flights, its local tier, its callers."""

    def __init__(self, trial: Trial, name: str, size: int) -> None:
        self.trial = trial
        self.name = name
        self.solo = size == 1
        self.flights = _Flights(trial)
        self.loop: Any = _Loop()
        self.tier: dict[str, Entry[Any]] = {}
        self.told: Counter[str] = Counter()  # number of invalidations that this process knows of
        self.dead = False

    async def ask(
        self, key: str, origin: Origin = quick, *, force: bool = False, look: bool = False, **options: Any
    ) -> str | None:
        """Call the cached function."""
        trial, ledger = self.trial, self.trial.ledger
        fibre = trial.running
        assert fibre is not None
        label = f"{fibre.label}.{len(ledger.callers)}" if fibre.asked else fibre.label
        fibre.asked = True
        caller = Caller(label, self, key, ledger.returned[key], self.told[key], force, fibre.caller is not None)
        outer, fibre.caller = fibre.caller, caller
        ledger.callers.append(caller)
        fibre.note("asks", caller.floor, caller.lag)
        try:
            if look:
                caller.seen = self.tier.get(key)
                fibre.note(caller.seen is None)
                await Trap("inside", f"has looked at its local tier: {caller.seen and caller.seen.value}")
            result = await trial.algorithm(self.call(caller, origin, options))
            if result.error is not None:
                raise result.error
            assert result.entry is not None
            caller.value = result.entry.value
        except BaseException as error:
            caller.error = error
            if isinstance(error, GeneratorExit):
                raise
            trial.admits(error)
            raise
        finally:
            fibre.caller = outer
            if not trial.over:
                trial.say(f"{label} ends with {caller.value or repr(caller.error)}")
                ledger.judge(caller)
                trial.time(caller)
        return caller.value

    def call(self, caller: Caller, origin: Origin, options: dict[str, Any]) -> Call:
        trial, token = self.trial, caller.label.encode()
        policy = trial.scenario.policy.with_options(**options)
        if trial.scenario.tagged == "before":
            policy = policy.with_options(tags=[tag_of(caller.key)])

        async def compute() -> str:
            mine = trial.ledger.begins(caller)
            if trial.scenario.room:
                at_it = [
                    c for c in trial.ledger.computations.values() if c.end == "running" and not c.caller.process.dead
                ]
                if len(at_it) > trial.scenario.room:
                    trial.ledger.objects(f"{len(at_it)} compute at once")
            trial.say(f"{caller.label} computes")
            if trial.scenario.tagged == "late" and caller.call is not None:
                caller.call.context_of_computation().tag(tag_of(caller.key))
            try:
                await origin(self)
                mine.end = "done"
            except CancelledError:
                mine.end = "cancelled"
                raise
            except Exception:
                mine.end = "failed"
                raise
            return mine.label

        def note(kind: type[events.Event], *what: object) -> None:
            if kind is events.Unkept:
                trial.ledger.computed_under(token).fate = "unkept"

        def hold(call: Call, seconds: float) -> TrapHold:
            return TrapHold(trial.model, call.key, call.token, call.policy.lease, seconds)

        port: Any = trial.tagged_claims if trial.scenario.tagged else trial.port
        resources = Resources(
            scope="", port=port, flights=self.flights, colour=TRAPPING, clock=trial.clock, hold=hold,
            give_back=lambda key, token: trial.model.abandon(key, token, None, 0.0), note=note, keep=_kept_nowhere,
            draws=False,
            look=trial.port.look if trial.scenario.looks else None, hit_likelihood=_Hits(),
            gates=trial.cap if trial.scenario.room else None, tags=trial.tags,
        )  # fmt: skip
        caller.call = Call(
            key=caller.key, label=caller.key, origin=compute, policy=policy, resources=resources, loop=self.loop,
            began=trial.clock(), seen=caller.seen, force=caller.force,
        )  # fmt: skip
        caller.call.token, caller.call.background = token, _Beside(self) if policy.beside else None
        return caller.call

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Fibre:
        """Start a fibre beside the running one."""
        parent = self.trial.running
        assert parent is not None
        return self.trial.start(parent, Fibre(self.trial, self, f"{parent.label}'s refresh", work))

    async def invalidate(self, key: str) -> None:
        """Invalidate in the order of a real cache: first in the engine, then in this process's own flights."""
        await self.trial.port.invalidate(key)
        self.learn(key)

    async def invalidate_tag(self, key: str) -> None:
        await self.trial.tags.end(self.trial.tags.names([tag_of(key)]))
        assert self.trial.running is not None
        epoch, ledger = self.trial.running.epoch, self.trial.ledger
        self.told[key] = max(self.told[key], epoch)
        ledger.returned[key] = max(ledger.returned[key], epoch)

    async def put(self, key: str) -> None:
        label = f"set {next(self.trial.counter)}"
        await self.trial.port.set(key, Entry(label, label.encode()))
        self.learn(key)

    async def expire(self, key: str) -> None:
        await self.trial.port.expire(key)
        self.tier.pop(key, None)
        self.flights.detach(key)

    def learn(self, key: str) -> None:
        """Finish an invalidation: from now on, no call may get an older value."""
        assert self.trial.running is not None
        epoch = self.trial.running.epoch
        self.tier.pop(key, None)
        self.flights.detach(key)
        self.flights.changes[key] += 1
        self.told[key] = max(self.told[key], epoch)
        ledger = self.trial.ledger
        ledger.returned[key] = max(ledger.returned[key], epoch)

    def summary(self) -> tuple[object, ...]:
        return self.dead, self.flights.summary(), tuple(self.tier), tuple(self.told.items()), self._order()

    def _order(self) -> tuple[int, ...]:
        """The order of the moments that still matter: starts of calls, requests, and results that they may get."""
        if self.solo:
            return ()
        calls = [c.call for c in self.trial.ledger.callers if c.call is not None and c.process is self and not c.ended]
        moments = [moment for call in calls for moment in (call.began, call.asked)]
        moments += [each.as_of for _, flight in self.flights.ever for each in (flight.result, flight.offered) if each]
        ranks = {moment: rank for rank, moment in enumerate(sorted(set(moments)))}
        return tuple(ranks[moment] for moment in moments)


def tag_of(key: str) -> str:
    return f"tag of {key}"


class _EngineOfTags:
    """The part of an engine that tags need."""

    many = near = None
    looks = changes = shared = timeless = False
    tick = 0.0

    def __init__(self, port: TrapPort) -> None:
        self._side = SimpleNamespace(store=port, claims=port)

    def side(self, colour: Colour) -> Any:
        return self._side


class Trial:
    """One run of a scenario, under one schedule."""

    def __init__(
        self,
        scenario: Scenario,
        faults: Collection[str] = (),
        budget: int = 0,
        algorithm: Callable[[Call], Coroutine[Any, Any, Result]] = fill.fill,
        model: type[Model] = Model,
    ) -> None:
        self.scenario = scenario
        self.faults = faults
        self.budget = budget
        self.algorithm = algorithm
        self.now = 0.0
        self.reading = count(1)
        self.counter = count(1)
        self.words: list[str] = []
        self.spent: Counter[str] = Counter()
        self.running: Fibre | None = None
        self.last = -1
        self.steps = 0
        self.over = False
        self.ledger = Ledger()
        self.model = model(lambda: self.now, news=scenario.news)
        self.port = TrapPort(self.model, self._watch)
        engine = cast("Engine", _EngineOfTags(self.port))
        self.tags = TagPorts("", engine, None, TRAPPING, {}, of_many=False, clock=self.clock)
        self.tagged_claims = TaggedClaims(self.port, self.port, None, lambda key, entry: entry, self.tags)
        if scenario.tagged:
            (name,) = self.tags.names([tag_of("k")])
            self.ledger.tags[key_of_tag(name)] = "k"
        self.cap = _Cap(self)
        self.processes: list[Process] = []
        self.fibres: list[Fibre] = []
        for name, scripts in zip("ABCDEFGH", scenario.processes, strict=False):
            process = Process(self, name, len(scripts))
            self.processes.append(process)
            for n, script in enumerate(scripts, 1):
                label = name if len(scripts) == 1 else f"{name}{n}"
                self.fibres.append(Fibre(self, process, label, script(process)))
        if scenario.kept is not None:
            fresh, keep = scenario.kept
            first = Entry("kept", b"kept", fresh=fresh, keep=keep)
            self.model.put("k", first)
            for process in self.processes:
                process.tier["k"] = first if scenario.local else process.tier.get("k", first)

    def clock(self) -> float:
        """The clock of callers. Each reading is slightly later than the last, but too little for anything to expire."""
        return self.now + next(self.reading) * 1e-7

    def _watch(self, verb: str, key: str, token: bytes | None, reply: Any) -> None:
        self.ledger.watch(verb, key, token, reply)
        if self.running is not None:
            self.running.note(verb, told(reply))
            self.running.epoch = self.ledger.epochs[self.ledger.tags.get(key, key)]
        if verb in ("invalidate", "set") and not key.startswith("#"):
            for process in self.processes:
                if not process.solo and (self.running is None or process is not self.running.process):
                    self._push(process, key, self.ledger.epochs[key])

    def _push(self, process: Process, key: str, epoch: int) -> None:
        """Let the engine push the news of an invalidation. A fibre delivers it later."""

        async def courier() -> None:
            process.tier.pop(key, None)
            process.told[key] = max(process.told[key], epoch)

        fibre = Fibre(self, process, f"the news for {process.name}", courier())
        fibre.root = False
        self.fibres.append(fibre)

    def spawn(self, parent: Fibre, work: Coroutine[Any, Any, Any]) -> Fibre:
        """Start a fibre beside its parent, in a copy of its context. It runs to its first trap at once."""
        return self.start(
            parent, parent.context.run(Fibre, self, parent.process, f"{parent.label}'s computation", work)
        )

    def start(self, parent: Fibre, fibre: Fibre) -> Fibre:
        fibre.root, fibre.caller, fibre.owner, fibre.asked = False, parent.caller, parent.caller, True
        self.fibres.append(fibre)
        fibre.step()
        return fibre

    def say(self, words: str) -> None:
        self.words.append(words)

    def admits(self, error: BaseException) -> None:
        """Note a violation if no caller may get this error."""
        match error:
            case CancelledError() | Boom() | ComputationFailed() | WaitTimeout():
                return
            case OriginFull() if self.scenario.room and (self.cap.when_full == "raise" or self.scenario.policy.limit):
                return
            case EngineError() if self.spent["lose"] or self.spent["refuse"]:
                return
        self.ledger.objects(f"a caller was given {error!r}")

    def time(self, caller: Caller) -> None:
        """Check that the call used up its patience, and waited no longer than allowed if no fault delayed it."""
        call = caller.call
        if call is None or call.force or caller.cancelled or self.ledger.objection:
            return
        policy, waited = call.policy, call.waited
        fresh, keep = self.scenario.kept or (0.0, 0.0)
        stale = fresh <= 0 and self.now < keep and not (self.ledger.epochs[caller.key] or policy.refuses_stale)
        failed = any(each.end in ("failed", "cancelled") for each in self.ledger.computations.values())
        failed = failed or policy.cache_if is not None
        least = min(policy.patience or 0.0, inf if policy.limit is None else policy.limit)
        if stale and not failed and caller.value == "kept" and waited < least - MOMENT:
            self.ledger.objects(f"{caller.label} was served what is stale, and had patience left")
        longest = policy.patience if stale and policy.patience is not None else policy.deadline
        refreshed = any(each.force and each.process is caller.process for each in self.ledger.callers)
        if longest is not None and waited > longest + MOMENT and not (self.spent or (stale and refreshed)):
            self.ledger.objects(f"{caller.label} has waited for {waited:.3g} s")

    # -- choices

    def choices(self) -> list[Choice]:
        """The choices for the next step, the simplest first. An empty list means that the trial has ended."""
        live = [(n, f) for n, f in enumerate(self.fibres) if not f.done and not f.process.dead]
        for n, fibre in live:
            if fibre.process.solo and fibre.ready and fibre.trap.kind in ("reply", "inside", "join"):
                # No other process can see this step or its faults, so the order with their steps does not matter.
                mates = [(m, f) for m, f in live if f.process is fibre.process]
                return [(n, "go"), *(c for m, f in mates for c in self._mishaps(m, f))]
        steps = [(n, "go") for n, f in live if f.ready]
        steps.sort(key=lambda choice: choice[0] != self.last)
        if not steps and any(f.trap.kind != "hang" for _, f in live) and self._next_moment() < inf:
            steps = [(-1, "tick")]
        mishaps = [choice for n, f in live for choice in self._mishaps(n, f)]
        if not steps and not mishaps:
            return []
        return steps + mishaps + self._acts_of_god()

    def _mishaps(self, n: int, fibre: Fibre) -> list[Choice]:
        found: list[Choice] = []
        if fibre.cancelling and not fibre.shields:
            found.append((n, "throw"))
        if self.budget:
            kind, faults = fibre.trap.kind, self.faults
            begun = kind != "start"
            if "lose" in faults and kind in ("reply", "return", "wait"):
                found.append((n, "lose"))
            if "refuse" in faults and kind == "effect":
                found.append((n, "refuse"))
            listener = fibre.trap.listener
            if "miss" in faults and listener is not None and listener.heard and not listener.deaf:
                found.append((n, "miss"))
            caller = fibre.caller
            if "cancel" in faults and fibre.root and begun and caller is not None and not caller.cancelled:
                found.append((n, "cancel"))
            if "crash" in faults and fibre.root and begun:
                found.append((n, "crash"))
        return found

    def _acts_of_god(self) -> list[Choice]:
        if not self.budget:
            return []
        found: list[Choice] = []
        if "lapse" in self.faults and any(self.model.stands(key) for key in self.model.places):
            found.append((-1, "lapse"))
        if "forget" in self.faults and any(place.record.end > self.now for place in self.model.places.values()):
            found.append((-1, "forget"))
        if "slow" in self.faults and self._next_moment() < inf:
            found.append((-1, "slow"))
        return found

    def _next_moment(self) -> float:
        """The next moment at which anything expires."""
        ends = [f.trap.until for f in self.fibres if not f.done and not f.process.dead and f.trap.until > self.now]
        ends += [self.model.end(key) for key in self.model.places if self.model.stands(key)]
        ends += [end for process in self.processes if not process.dead for end, _ in process.flights.ends]
        return min(ends, default=inf)

    def take(self, choice: Choice) -> None:
        """Carry out a choice."""
        self.steps += 1
        if self.steps > STEPS:
            raise Violation("it never ends")
        n, action = choice
        if action in FAULTS:
            self.budget -= 1
            self.spent[action] += 1
        if n < 0:
            self._act(action)
            return
        fibre = self.fibres[n]
        self.last = n
        fibre.note(action, self.now)
        match action:
            case "go":
                self.say(f"{fibre.label} {fibre.trap.words}")
                fibre.step()
            case "throw":
                self.say(f"{fibre.label} is cancelled: nobody waits for it")
                fibre.cancelling = False
                fibre.step(CancelledError())
            case "cancel":
                self.say(f"! {fibre.label} is cancelled")
                assert fibre.caller is not None
                fibre.caller.cancelled = True
                if fibre.shields:
                    fibre.cancelling = True
                else:
                    fibre.step(CancelledError())
            case "lose" | "refuse":
                self.say(f"! {fibre.label} {fibre.trap.words}, but {FAULTS[action]}")
                fibre.step(EngineError(FAULTS[action]))
            case "miss":
                self.say(f"! {fibre.label}: {FAULTS[action]}")
                assert fibre.trap.listener is not None
                fibre.trap.listener.deaf = True
            case "crash":
                self.say(f"! process {fibre.process.name} is killed")
                self._crash(fibre.process)
        if self.ledger.objection:
            raise Violation(self.ledger.objection)

    def _act(self, action: str) -> None:
        self.say(("" if action == "tick" else "! ") + FAULTS.get(action, "time passes"))
        if action in ("tick", "slow"):
            self._look_for_leaks()
            standing = {key for key in self.model.places if self.model.stands(key)}
            self.now = self._next_moment()
            for key in standing:
                if not self.model.stands(key):
                    self.ledger.lapses(key)
            for process in self.processes:
                for end, flight in process.flights.ends:
                    if end <= self.now:
                        process.flights.cut(flight)
        elif action == "forget":
            self.model.forget()
            self.ledger.holder.clear()
        else:
            for key in list(self.model.places):
                if self.model.stands(key):
                    self.model.lapse(key)
                    self.ledger.lapses(key)

    def _crash(self, process: Process) -> None:
        process.dead = True
        tokens = {c.label.encode() for c in self.ledger.callers if c.process is process}
        for key, place in self.model.places.items():
            token = self.model.stands(key)
            if token in tokens and token is not None:
                self.model.renew(key, token, place.lease)  # its last renewal

    # -- states and ends

    def state(self) -> tuple[object, ...]:
        """The state of the trial. Trials in the same state continue in the same way."""
        return (
            self.now, self.budget, self.model.summary(), self.ledger.summary(),
            tuple([p.summary() for p in self.processes]), tuple([f.state for f in self.fibres]),
            frozenset(self.spent.items()), tuple([seat.process.name for seat in self.cap.inside]),
        )  # fmt: skip

    def verdict(self) -> None:
        """At the end of a trial, check that all calls have ended and everything was given back."""
        for fibre in self.fibres:
            if not fibre.done and not fibre.process.dead and fibre.trap.kind != "hang" and not self._hangs(fibre):
                raise Violation(f"{fibre.label} never ends: nothing is left that could let it go on")
            if fibre.done and fibre.error is not None and not fibre.root and fibre.caller is None:
                raise fibre.error
            if fibre.done or fibre.root or fibre.process.dead:
                continue
            if not any(f.root and not f.done for f in self._mates(fibre)):
                raise Violation(f"{fibre.label} goes on, and nobody waits for it")
        self._look_for_leaks()
        if any(not seat.process.dead and not self._hung_in(seat.process) for seat in self.cap.inside):
            raise Violation("a place at the origin was not given back")
        engine_faults = self.spent["lose"] + self.spent["refuse"]
        for process in self.processes:
            if not process.dead and process.flights._flights and not self._hung_in(process):
                raise Violation(f"process {process.name} still has a flight, and nobody is in it")
        excuses = self.ledger.lapsed + engine_faults + self.spent["forget"]
        self.ledger.count(self.scenario, excuses)

    def _look_for_leaks(self) -> None:
        """Raise a violation if a lease is still valid and no caller will give it back."""
        if self.spent["refuse"]:
            return  # the lease could not be given back
        at_work = {caller for f in self.fibres if not f.done for caller in (f.caller, f.owner)}
        idle = {c.label.encode(): c for c in self.ledger.callers if c.ended and not c.process.dead and c not in at_work}
        for key in self.model.places:
            holder = self.model.stands(key)
            if holder in idle:
                raise Violation(f"{idle[holder].label} has ended, and its lease of {key!r} still stands")

    def _mates(self, fibre: Fibre) -> list[Fibre]:
        return [f for f in self.fibres if f.process is fibre.process]

    def _hung_in(self, process: Process) -> bool:
        return any(f.trap.kind == "hang" and not f.done for f in self.fibres if f.process is process)

    def _hangs(self, fibre: Fibre) -> bool:
        """Whether the fibre waits for a hung computation of its own process, which the library does not prevent."""
        return fibre.trap.kind == "join" and self._hung_in(fibre.process)

    def close(self) -> None:
        self.over = True
        for fibre in self.fibres:
            fibre.close()


# -- the search ---------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The result of a search. As text: the steps of the first schedule that broke a promise, if there is one."""

    schedules: int = 0
    states: int = 0
    complete: bool = True  # all schedules were tried
    violation: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        tried = f"{self.schedules} schedules, {self.states} states{'' if self.complete else ', not all there are'}"
        if self.violation is None:
            return f"all well in {tried}"
        steps = "\n".join(f"{n:4}. {words}" for n, words in enumerate(self.trace, 1))
        return f"{self.violation} (after {tried}):\n{steps}"


def explore(
    scenario: Scenario, *, faults: Collection[str] = (), budget: int = 1, limit: int | None = None, **parts: Any
) -> Report:
    """Try all schedules with at most `budget` faults, or only the `limit` simplest. `parts`: algorithm, model.

    >>> import explorer
    >>> world = explorer.Scenario([[explorer.ask()], [explorer.ask()]])  # two processes with one caller each
    >>> print(explorer.explore(world))
    all well in ... schedules, ... states
    """
    report, seen = Report(), set()
    number = count()
    waiting: list[tuple[int, int, tuple[Choice, ...], tuple[Choice, ...]]] = [(0, 0, (), ())]
    while waiting:
        if report.schedules == limit:
            report.complete = False
            break
        cost, _, path, more = heapq.heappop(waiting)
        schedule = path + more
        report.schedules += 1
        trial = Trial(scenario, faults, budget if faults else 0, **parts)
        try:
            for choice in schedule:
                trial.take(choice)
            while (state := hash(trial.state())) not in seen:
                seen.add(state)
                choices = trial.choices()
                if not choices:
                    trial.verdict()
                    break
                for other in choices[1:]:
                    price = cost + (2 if other[1] in FAULTS else 1)
                    heapq.heappush(waiting, (price, next(number), schedule, (other,)))
                schedule = (*schedule, choices[0])
                trial.take(choices[0])
        except Violation as violation:
            report.violation, report.trace = str(violation), trial.words
            break
        finally:
            trial.close()
            report.states = len(seen)
    return report


def roam(
    scenario: Scenario, *, faults: Collection[str] = (), budget: int = 2, runs: int = 1000, seed: int = 0, **parts: Any
) -> Report:
    """Try random schedules, for scenarios with too many schedules to try all.

    >>> import explorer
    >>> world = explorer.Scenario([[explorer.ask()] * 2] * 2)
    >>> print(explorer.roam(world, faults=["crash"], runs=20))
    all well in 20 schedules, ... states, not all there are
    """
    report, dice = Report(complete=False), random.Random(seed)
    for _ in range(runs):
        report.schedules += 1
        trial = Trial(scenario, faults, budget, **parts)
        try:
            while choices := trial.choices():
                boring = [choice for choice in choices if choice[1] not in FAULTS]
                trial.take(dice.choice(boring if boring and dice.random() < 0.9 else choices))
                report.states += 1
            trial.verdict()
        except Violation as violation:
            report.violation, report.trace = str(violation), trial.words
            break
        finally:
            trial.close()
    return report
