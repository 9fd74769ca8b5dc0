"""The algorithm in all interleavings: the real `fill` with a model of an engine, and faults at any step."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from explorer import (
    FAULTS,
    Process,
    Report,
    Scenario,
    _Flights,
    any_world,
    ask,
    asking,
    expire,
    explore,
    failing,
    hung,
    invalidate,
    invalidate_tag,
    put,
    roam,
    slow,
    then,
)  # fmt: skip
from model import Listener, Model

from stampede.algorithm import fill, finish, patience
from stampede.algorithm.call import Call
from stampede.algorithm.flight import Flight, Flights
from stampede.leases.keeper import Hold
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Found, Reply
from stampede.model.record import Record
from stampede.model.result import Result
from stampede.model.tags import Tag
from stampede.settings.options import Policy

HOLDS, HANGS = Policy(early=0.0, max_hold=1e6), Policy(early=0.0, max_hold=30.0)

# Each world checks a promise in a small scenario. `ask` is a call; a list is a process.
WORLDS = {
    "three processes": Scenario([[ask()], [ask()], [ask()]]),
    "two callers in one process": Scenario([[ask(), ask()]]),
    "three callers in one process": Scenario([[ask(), ask(), ask()]]),
    "two callers here, one there": Scenario([[ask(), ask()], [ask()]]),
    "the news brings the value": Scenario([[ask(), ask()], [ask()]], news=True),
    "invalidated from outside": Scenario([[ask()], [ask()], [invalidate()]]),
    "invalidated, then asked": Scenario([[ask()], [ask()], [then(invalidate(), ask())]]),
    "invalidated by a mate": Scenario([[ask(), then(invalidate(), ask())], [ask()]]),
    "invalidated from outside, with followers": Scenario([[ask(), ask()], [then(invalidate(), ask())]]),
    "invalidated twice": Scenario([[ask()], [then(invalidate(), ask())], [then(invalidate(), ask())]]),
    "news that are late": Scenario([[ask(), ask()], [then(ask(), invalidate())]], news=True),
    "busy and stale, invalidated from outside": Scenario([[ask(), ask()], [ask()], [invalidate()]], kept=(-1, 100)),
    "failed elsewhere, then put right": Scenario([[ask(), ask()], [then(ask(origin=failing), put())]]),
    "failing, and invalidated from outside": Scenario(
        [[ask(origin=failing), ask(origin=failing)], [invalidate()]], kept=(-1, 100)
    ),
    "unkept, and invalidated from outside": Scenario(
        [[ask(), ask()], [invalidate()]], Policy(early=0.0, cache_if=lambda value: False), alone=True
    ),
    "found as it is invalidated": Scenario([[ask(), then(invalidate(), ask())]], kept=(50, 100)),
    "one caller of a hung origin": Scenario([[ask(origin=hung)]]),
    "set from outside": Scenario([[ask()], [ask()], [then(put(), ask())]]),
    "set by a mate": Scenario([[ask(), then(put(), ask())]]),
    "softly expired": Scenario([[ask()], [then(expire(), ask())], [ask()]], kept=(50, 100), expires=True),
    "refreshed": Scenario([[ask(force=True)], [ask()], [ask()]]),
    "refreshed by a mate": Scenario([[ask(force=True), ask()], [ask()]]),
    "refreshed twice": Scenario([[ask(force=True), ask(force=True)], [ask()]]),
    "all fail": Scenario([[ask(origin=failing)], [ask(origin=failing)], [ask(origin=failing)]]),
    "all fail, two at home": Scenario([[ask(origin=failing), ask(origin=failing)], [ask(origin=failing)]]),
    "one fails": Scenario([[ask(origin=failing)], [ask()], [ask()]]),
    "a failed key rests": Scenario([[ask(origin=failing)], [ask()], [ask()]], Policy(early=0.0, retry_after=3.0)),
    "stale": Scenario([[ask(), ask()], [ask()]], kept=(-1, 100)),
    "stale and failing": Scenario([[ask(origin=failing), ask()], [ask(origin=failing)]], kept=(-1, 100)),
    "stale, invalidated by a mate": Scenario([[ask(), then(invalidate(), ask())], [ask()]], kept=(-1, 100)),
    "early": Scenario([[ask(look=True), ask(look=True)], [ask(look=True)]], kept=(10, 100), local=True),
    "early, invalidated by a mate": Scenario(
        [[ask(look=True), then(invalidate(), ask(look=True))], [ask()]], kept=(10, 100), local=True
    ),
    "stale at home, invalidated by a mate": Scenario(
        [[ask(look=True), then(invalidate(), ask(look=True))], [ask()]], kept=(-1, 100), local=True
    ),
    "in the background": Scenario(
        [[ask(), ask()], [then(invalidate(), ask())]], Policy(early=0.0, background=True), kept=(-1, 100)
    ),
    "unkept": Scenario(
        [[ask(), ask()], [ask()]], Policy(early=0.0, cache_if=lambda value: False), alone=True
    ),
    "wait runs out": Scenario([[ask(origin=slow(5)), ask()], [ask()]], Policy(early=0.0, wait=1.0)),
    "patience that is enough": Scenario(
        [[ask(), ask()], [ask(), ask()]], Policy(early=0.0, patience=9.0, deadline=9.0), kept=(-1, 100)
    ),
    "patience of many lengths": Scenario(
        [[ask(patience=9.0), ask(patience=1.0), ask()], [ask(origin=slow(5))]],
        Policy(early=0.0, patience=0.0), kept=(-1, 100),
    ),
    "patience that runs out": Scenario(
        [[ask(origin=slow(5)), ask()], [ask()]], Policy(early=0.0, patience=1.0), kept=(-1, 100)
    ),
    "patience, invalidated from outside": Scenario(
        [[ask(), ask()], [then(invalidate(), ask())]], Policy(early=0.0, patience=9.0), kept=(-1, 100), news=True
    ),
    "patience and failing": Scenario(
        [[ask(origin=failing), ask()], [ask(origin=failing)]], Policy(early=0.0, patience=9.0), kept=(-1, 100)
    ),
    "patience behind one who wants nothing stale": Scenario(
        [[ask(stale=0), ask(patience=1.0)], [ask(origin=slow(25))]], Policy(early=0.0), kept=(-1, 100)
    ),
    "a deadline that runs out": Scenario([[ask(origin=slow(5)), ask()], [ask()]], Policy(early=0.0, deadline=1.0)),
    "a deadline, invalidated by a mate": Scenario(
        [[ask(origin=slow(5)), then(invalidate(), ask())]], Policy(early=0.0, deadline=9.0)
    ),
    "a deadline, and a value that comes too late": Scenario(
        [[ask(origin=slow(99)), ask(), ask()], [ask()]], Policy(early=0.0, deadline=50.0, max_hold=30.0)
    ),
    "a long computation": Scenario([[ask(origin=slow(45)), ask(origin=slow(45))], [ask(origin=slow(45))]]),
    "a hung origin": Scenario([[ask(origin=hung)], [ask()], [ask()]], HANGS),
    "a hung origin, and followers": Scenario([[ask(origin=hung), ask(), ask()], [ask()]], HANGS),
    "a value that comes too late": Scenario([[ask(origin=slow(99)), ask()], [ask()]], HANGS),
    "a tag, invalidated from outside": Scenario(
        [[ask()], [then(invalidate_tag(), ask())]], tagged="before", expires=True, news=True
    ),
    "a tag, invalidated by a mate": Scenario([[ask(), then(invalidate_tag(), ask())]], tagged="before", expires=True),
    "a late tag, invalidated from outside": Scenario(
        [[ask()], [then(invalidate_tag(), ask())]], tagged="late", expires=True, news=True
    ),
    "a late tag, invalidated twice": Scenario(
        [[then(invalidate_tag(), ask())], [then(invalidate_tag(), ask())]], tagged="late", expires=True
    ),
    "each asks for the other's key": Scenario([[ask("a", asking("b"))], [ask("b", asking("a"))]], HOLDS, alone=True),
    "each asks for the other's key at home": Scenario(
        [[ask("a", asking("b")), ask("b", asking("a"))]], Policy(early=0.0, max_hold=250.0), alone=True
    ),
}  # fmt: skip

WORLDS |= {
    f"{world}, looking first": replace(WORLDS[world], looks=True)
    for world in (
        "two callers here, one there",
        "invalidated by a mate",
        "invalidated from outside, with followers",
        "found as it is invalidated",
        "set from outside",
        "softly expired",
        "refreshed by a mate",
        "failed elsewhere, then put right",
        "stale",
        "early",
        "wait runs out",
    )
}

CAPPED = Policy(early=0.0, origin="db")
WORLDS |= {
    "two keys of an origin with one place": Scenario([[ask(), ask("l")], [ask("l")]], CAPPED, room=1),
    "one place, and one fails": Scenario([[ask(origin=failing)], [ask("l"), ask()]], CAPPED, room=1),
    "one place, and impatience": Scenario(
        [[ask(origin=slow(5))], [ask("l"), ask("l")]], replace(CAPPED, wait=1.0), room=1
    ),
    "one place, or what is stale": Scenario(
        [[ask("l", origin=slow(5))], [ask(), ask()]], CAPPED, kept=(-1, 100), room=1, when_full="stale"
    ),
    "one place, and an error for the others": Scenario(
        [[ask("l", origin=slow(5))], [ask(), ask()]], CAPPED, room=1, when_full="raise"
    ),
    "one place, and a refresh beside": Scenario(
        [[ask("l", origin=slow(5))], [ask(), then(invalidate(), ask())]],
        replace(CAPPED, background=True), kept=(-1, 100), room=1,
    ),
}  # fmt: skip

ENOUGH = 8000 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 100
"""Schedules to try in each world with a fault at any point, the simplest first. The breakages below that need faults
are found at the 48th schedule at the latest. The others are found at the 412th, except for one: at the 2,525th."""


@pytest.fixture(scope="module")
def tally() -> Any:
    counts: list[Report] = []
    yield counts
    print(f"\n{sum(r.schedules for r in counts)} schedules, {sum(r.states for r in counts)} states explored")


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_goes_wrong(world: str, tally: list[Report]) -> None:
    """No order of the steps breaks a promise."""
    report = explore(WORLDS[world], limit=21 * ENOUGH // 5)
    tally.append(report)
    assert report.violation is None, str(report)


@pytest.mark.parametrize("world", WORLDS)
def test_one_fault_at_every_point(world: str, tally: list[Report]) -> None:
    """A crash, a cancellation, or a lost message or lease breaks no promise, at whatever step it happens."""
    report = explore(WORLDS[world], faults=FAULTS, limit=ENOUGH)
    tally.append(report)
    assert report.violation is None, str(report)


def test_two_faults_among_many(tally: list[Report]) -> None:
    """Several faults in a scenario with many callers break no promise."""
    crowd = Scenario([[ask(), ask()], [ask(), then(invalidate(), ask())], [ask()], [ask(), then(put(), ask())]])
    report = roam(crowd, faults=FAULTS, budget=3, runs=700, seed=7)
    tally.append(report)
    assert report.violation is None, str(report)


def test_options_that_nobody_has_thought_of_together(tally: list[Report]) -> None:
    """No mixture of patience, deadlines, background refreshes, invalidations and expiries breaks a promise."""
    for seed in range(25):
        world = any_world(seed)
        for faults in ((), FAULTS):
            report = roam(world, faults=faults, runs=20, seed=seed)
            tally.append(report)
            assert report.violation is None, f"{world}\n{report}"


def test_the_same_schedule_gives_the_same_story() -> None:
    """One seed always gives the same schedules. Otherwise, a violation could not be run again."""
    worlds = [roam(WORLDS["invalidated by a mate"], faults=FAULTS, runs=50, seed=3) for _ in range(2)]
    assert worlds[0] == worlds[1]


# -- the explorer itself: each of these breaks a promise, and the explorer must find it -----------------------------


class _Late(Model):
    """Stores every value, with or without a valid lease."""

    def fill(self, key: str, token: bytes, entry: Entry[Any]) -> bool:
        self.put(key, entry)
        return True


class _Undead(Model):
    """Keeps the lease valid after an invalidation."""

    def invalidate(self, key: str) -> bool:
        was = self.places[key].record
        self.places[key].record = Record(None, was.lease)
        return was.kept is not None


class _Mute(Model):
    """Never wakes a waiter."""

    poll = inf

    def listen(self, key: str, token: bytes) -> Listener:
        listener = super().listen(key, token)
        listener.deaf = True
        return listener


class _Unlocked(Model):
    """Grants every claim."""

    def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        self.places[key].record = Record(self.places[key].record.kept)
        return super().claim(key, token, ask)


class _Dreamy(Model):
    """Each look returns the first value that a look has found."""

    dream: Found | None = None

    def look(self, key: str) -> Found | None:
        self.dream = self.dream or super().look(key)
        return self.dream


class _Sticky(Model):
    """Never gives a lease back."""

    def abandon(self, *args: Any) -> None:
        pass


MODELS: dict[type[Model], tuple[str, str]] = {
    _Late: ("invalidated from outside", "lease did not stand"),
    _Undead: ("invalidated from outside", "lease did not stand"),
    _Mute: ("two callers here, one there", "never ends"),
    _Unlocked: ("three processes", "2 computations"),
    _Dreamy: ("found as it is invalidated, looking first", "invalidated before the call"),
    _Sticky: ("one fails", "lease of 'k' still stands"),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_explorer_sees_a_broken_engine(model: type[Model]) -> None:
    """The explorer finds a broken engine. Otherwise, its passing tests would mean nothing."""
    world, words = MODELS[model]
    report = explore(WORLDS[world], model=model)
    assert report.violation is not None
    assert words in report.violation
    assert 5 < len(report.trace) < 40


Breakage = Callable[[pytest.MonkeyPatch], object]


def _takes_all_tags_for_current(patch: pytest.MonkeyPatch) -> None:
    """A value is passed on without a look at its tags after the fill."""
    patch.setattr(finish, "judge", lambda entry, tags: True)


def _believes_a_late_tag(patch: pytest.MonkeyPatch) -> None:
    """A tag that only the computation knows is taken as it is at the fill."""
    of = Tag.of
    patch.setattr(Tag, "of", lambda *given: (tag := of(*given)) and replace(tag, changed=False))


def _asks_on(patch: pytest.MonkeyPatch) -> None:
    """If the reply of a claim is lost, the lease that may have been granted is not given back."""

    async def release(call: Call) -> None:
        return

    patch.setattr(fill, "release", release)


def _keeps_the_lease(patch: pytest.MonkeyPatch) -> None:
    """A failed computation does not give back its lease."""

    async def give_up(call: Call, hold: Hold, error: BaseException, *rest: Any) -> Result:
        return Result(error=error)

    patch.setattr(finish, "give_up", give_up)


def _shares(patch: pytest.MonkeyPatch) -> None:
    """A refused value or a cancellation is passed on to all callers."""
    end = Flights.end

    def generous(self: Flights, flight: Flight, result: Result | None) -> None:
        end(self, flight, result and replace(result, as_of=inf))

    patch.setattr(Flights, "end", generous)


def _shares_what_was_seen(patch: pytest.MonkeyPatch) -> None:
    """A value that only the leader's local tier held is passed on to its followers."""
    served = fill.served

    def generous(call: Call, *args: Any, as_of: float = -inf, **terms: Any) -> Result:
        return served(call, *args, as_of=call.now, **terms)

    patch.setattr(fill, "served", generous)


def _offers_for_long(patch: pytest.MonkeyPatch) -> None:
    """A stale value is also offered to callers that come after an invalidation."""

    def offer(self: Flights, flight: Flight, result: Result) -> None:
        flight.offered = replace(result, as_of=inf)
        flight.bell.ring()

    patch.setattr(Flights, "offer", offer)
    patch.setattr(Flights, "detach", lambda self, key: None)


def _believes_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The engine's reply is used for all callers that join before the leader receives it."""
    claim = fill.claim

    async def claimed(call: Call) -> Any:
        answer = await claim(call)
        return replace(answer, as_of=inf) if isinstance(answer, Result) else answer

    patch.setattr(fill, "claim", claimed)


def _computes_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A value that is computed and not stored is used for all callers that join before the computation ends."""

    async def lease_known_valid_at(call: Call) -> float:
        return inf

    patch.setattr(finish, "lease_known_valid_at", lease_known_valid_at)


def _never_cuts(patch: pytest.MonkeyPatch) -> None:
    """A hung flight is never ended."""
    patch.setattr(Flights, "cut", lambda self, flight: None)
    patch.setattr(_Flights, "ends", [])


def _never_detaches(patch: pytest.MonkeyPatch) -> None:
    """Calls after an invalidation join the flight from before it."""
    patch.setattr(Flights, "detach", lambda self, key: None)


def _detaches_first(patch: pytest.MonkeyPatch) -> None:
    """An invalidation detaches the flight before it reaches the engine, instead of after it."""

    async def invalidate(self: Process, key: str) -> None:
        self.flights.detach(key)
        await self.trial.port.invalidate(key)
        self.flights.changes[key] += 1
        ledger = self.trial.ledger
        self.told[key] = ledger.returned[key] = ledger.epochs[key]

    patch.setattr(Process, "invalidate", invalidate)


def _everybody_leaves(patch: pytest.MonkeyPatch) -> None:
    """One cancelled caller ends the computation that others wait for."""

    def leave(self: Flights, flight: Flight, leader: object = None) -> bool:
        if flight.cancel is not None and not flight.ended:
            flight.cancel()
            return True
        return False

    patch.setattr(Flights, "leave", leave)


def _nobody_leaves(patch: pytest.MonkeyPatch) -> None:
    """If the last caller leaves, the computation continues and keeps its lease."""
    patch.setattr(Flights, "leave", lambda self, flight, leader=None: False)


def _rings_never(patch: pytest.MonkeyPatch) -> None:
    """A flight ends without waking its followers."""

    def end(self: Flights, flight: Flight, result: Result | None) -> None:
        self._forget(flight)

    patch.setattr(Flights, "end", end)
    patch.setattr(_Flights, "ends", [])


def _one_error_for_all(patch: pytest.MonkeyPatch) -> None:
    """Followers raise the leader's own exception object."""
    patch.setattr(Result, "for_follower", lambda self: self)


def _waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A caller that holds a lease waits for another caller that waits for that lease."""

    def wait_left(call: Call) -> tuple[float, Callable[[Call], Coroutine[Any, Any, Result]]]:
        return inf, patience.timed_out

    patch.setattr(fill, "wait_left", wait_left)


def _has_no_patience(patch: pytest.MonkeyPatch) -> None:
    """A stale value is served at once, whatever patience the caller has."""
    patch.setattr(fill, "patience_left", lambda call, kept: 0.0)


def _waits_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """A leader waits for its own computation until it ends."""
    patch.setattr(fill, "own_wait_left", lambda call, kept: inf)


ALGORITHMS: dict[Breakage, tuple[str, tuple[str, ...], str]] = {
    _believes_for_ever: ("news that are late", (), "invalidated before"),
    _computes_for_ever: ("unkept, and invalidated from outside", (), "invalidated before"),
    _asks_on: ("two callers here, one there", ("lose",), "still stands"),
    _keeps_the_lease: ("one fails", (), "still stands"),
    _shares: ("two callers here, one there", ("lapse",), "never took"),
    _shares_what_was_seen: ("stale at home, invalidated by a mate", (), "invalidated before"),
    _offers_for_long: ("stale, invalidated by a mate", (), "before this process invalidated it"),
    _never_cuts: ("a hung origin, and followers", (), "never ends"),
    _never_detaches: ("invalidated by a mate", (), "before this process invalidated it"),
    _detaches_first: ("found as it is invalidated", (), "before this process invalidated it"),
    _everybody_leaves: ("two callers in one process", ("cancel",), "CancelledError"),
    _nobody_leaves: ("one caller of a hung origin", ("cancel",), "nobody waits"),
    _rings_never: ("two callers in one process", (), "never ends"),
    _one_error_for_all: ("all fail, two at home", (), "traceback"),
    _has_no_patience: ("patience that is enough", (), "had patience left"),
    _waits_for_its_own: ("patience that runs out", (), "has waited for 5 s"),
    _waits_for_ever: ("each asks for the other's key", (), "never ends"),
    _takes_all_tags_for_current: ("a tag, invalidated by a mate", (), "invalidated before"),
    _believes_a_late_tag: ("a late tag, invalidated twice", (), "invalidated before"),
}


@pytest.mark.parametrize("breakage", ALGORITHMS, ids=lambda breakage: breakage.__name__)
def test_the_explorer_sees_a_broken_algorithm(breakage: Breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The explorer finds a broken algorithm. Otherwise, its passing tests would mean nothing."""
    world, faults, words = ALGORITHMS[breakage]
    breakage(monkeypatch)
    report = explore(WORLDS[world], faults=faults)
    assert report.violation is not None
    assert words in report.violation, str(report)
    assert len(report.trace) > 5
