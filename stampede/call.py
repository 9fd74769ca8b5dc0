"""One caller's question to the algorithm, and the means to answer it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from os import getpid
from typing import Any, Protocol

from stampede import events
from stampede.colour import Colour, Loop
from stampede.entry import Entry, new_id
from stampede.flight import Flight, Flights
from stampede.leader import Leader
from stampede.odds import Odds
from stampede.outcome import Landing
from stampede.pace import Pace
from stampede.policy import Policy
from stampede.ports import Ask, Claims, Looks

__all__ = ["Call", "Era", "Gate", "Gates", "Held", "Means", "Once", "Place", "Spawn"]


class Held(Protocol):
    """A lease that is being renewed."""

    foreign: bool  # the lease is none of ours any more, as in a forked child: nothing is to be stored

    @property
    def overruled(self) -> bool:
        """Whether a lease that is gone was taken away by an invalidation, and did not run out."""
        ...

    def bound(self, seconds: float) -> None:
        """It is renewed for so long from now on."""
        ...


class Place(Protocol):
    """A computation's place at its origin."""

    @property
    def origin(self) -> str: ...

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        """It has computed this, for so long."""
        ...

    async def leave(self) -> None: ...

    def drop(self) -> None:
        """Have it given back by somebody else."""
        ...


class Gate(Protocol):
    """The caps of an origin, over the whole fleet."""

    @property
    def when_full(self) -> str: ...

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> Place:
        """A place, for so long at most, after so many seconds at most. OriginFull: there was none."""
        ...


class Gates(Protocol):
    """The caps of all origins."""

    def gate_of(self, name: str) -> Gate | None:
        """None: it has none. SettingsError: nobody wrote of it."""
        ...

    def close(self) -> None: ...


class Trial(Protocol):
    """Whether a value could be stored where others can have it, too."""

    def __call__(self, key: str, entry: Entry[Any], *, strict: bool) -> None: ...


class Once(Protocol):
    """Who remembers what has been computed anew: each key is, once."""

    def takes(self, owner: object, key: str) -> bool: ...
    def has(self, owner: object, key: str) -> bool: ...
    def settle(self, owner: object, key: str, *, stored: bool) -> None: ...


class Spawn(Protocol):
    """A place beside a caller, for what goes on without him."""

    def reserve(self) -> bool:
        """Is there one? Then it is his."""
        ...

    def __call__(
        self, call: Call, work: Coroutine[Any, Any, Landing], unborn: Callable[[], object], *, waits: bool
    ) -> Callable[[], object] | None:
        """Have the work done there; if it is cancelled before its first step, `unborn` is called. How to cancel it, if
        that can be done. `waits`: for a while, so that it is still a part of what he computes himself."""
        ...


class Era:
    """What tells entries that were begun after the last `expire_all` from all that are older: how their ids begin."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark = b""  # of nothing, as long as there was none

    def is_over(self, entry: Entry[Any]) -> bool:
        """Is it older? Then it is stale, however fresh the engine says it is."""
        return not entry.id.startswith(self.mark)

    def id_of(self, id: bytes) -> bytes:
        """An id of today, out of a new one."""
        return self.mark + id[len(self.mark) :]

    def told(self, entry: Entry[Any] | None) -> Entry[Any] | None:
        """The same entry, with what is left of it."""
        if entry is not None and self.mark and self.is_over(entry):
            entry.fresh = min(entry.fresh, 0.0)
        return entry


@dataclass(frozen=True, slots=True)
class Means:
    """With what all calls of one function and colour are answered."""

    scope: str
    port: Claims
    flights: Flights
    colour: Colour
    clock: Callable[[], float]
    hold: Callable[[Call, float], AbstractContextManager[Held]]  # keeps the lease for at most so many seconds
    drop: Callable[[Call], object]  # gives the lease back where nothing can be awaited any more
    note: events.Note
    trial: Trial | None = None  # of values that are kept as they are, on an engine that no other process shares
    era: Era = field(default_factory=Era)
    draws: bool = True  # no local tier has drawn the early moment: a call does
    looks: Looks | None = None  # the port, of an engine of which a hit is a look
    odds: Odds = field(default_factory=Odds)  # of a hit
    gates: Gates | None = None  # who may compute for how many at once


class Call:
    """One caller's question."""

    # Of the class until they are set: every miss makes one of these.
    flight: Flight | None = None  # that it leads
    ask: Ask | None = None  # its next claim's terms
    asked: float = -inf  # the moment before its last claim was sent
    pace: Pace | None = None  # of its claims, from the second one on
    place: Place | None = None  # at its origin
    nested = False  # it computes for another computation, which has a lease, too
    others = False  # what it got was computed by somebody else while it waited

    def __init__(
        self,
        key: str,
        label: str,
        origin: Callable[[], Any],
        policy: Policy,
        means: Means,
        loop: Loop | None,
        began: float,
        seen: Entry[Any] | None = None,
        *,
        force: bool = False,
        once: Once | None = None,
        leader: Leader | None = None,
        spawn: Spawn | None = None,
        asks_on: bool = False,
        token: bytes = b"",
    ) -> None:
        self.key = key  # as the engine knows it
        self.label = label  # as people know it
        self.origin = origin
        self.policy = policy
        self.means = means
        self.loop = loop
        self.began = began
        self.seen = seen  # what is due: the local tier's entry, or what a claim has found
        self.force = force  # compute, whatever is there
        self.once = once  # or do so if this says that nobody has
        self.leader = leader  # of its flight, if it comes to lead one
        self.spawn = spawn  # a place beside the caller, if it may need one
        self.asks_on = asks_on  # it waits for nobody's computation, and begins none: it has other keys to ask for
        self.token = token or new_id()
        self.pid = getpid()

    @property
    def now(self) -> float:
        return self.means.clock()

    @property
    def waited(self) -> float:
        return self.means.clock() - self.began

    def anew(self) -> bool:
        """Whether it computes, whatever is there; asked under the lock of decisions."""
        if self.once is not None and self.once.takes(self.means.flights, self.key):
            self.force = True
        return self.force

    def settle(self, *, stored: bool) -> None:
        """What has come of it, for who remembers that."""
        if self.once is not None and self.force:
            self.once.settle(self.means.flights, self.key, stored=stored)

    @property
    def followed(self) -> bool:
        """Does anybody else wait for what it computes?"""
        return self.flight is not None and self.flight.callers > 1

    def owes(self, lease: bool) -> None:
        """Whether it may have a lease that is to be given back."""
        if self.leader is not None:
            self.leader.owes = lease

    def tell(self, event: Callable[..., events.Event], *what: Any) -> None:
        self.means.note(event, self.means.scope, self.label, *what)
