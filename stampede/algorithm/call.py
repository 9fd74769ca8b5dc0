"""One caller's question to the algorithm, and what all calls of one function share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from stampede import events
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.flight import Flights, Leader
from stampede.model.backoff import Backoff
from stampede.model.entry import Entry
from stampede.model.policy import Policy
from stampede.model.ports import Ask, Claims, Found, Ticket
from stampede.model.result import Result
from stampede.outages.keeper import Hold
from stampede.runtime.colour import Colour, Loop

__all__ = ["STEP", "Call", "Gate", "Gates", "HitLikelihood", "Marks", "Once", "OriginPlace", "Resources"]


class OriginPlace(Protocol):
    """A computation's place at its origin."""

    @property
    def origin(self) -> str: ...

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        """It has computed this, for so long."""

    async def leave(self) -> None: ...

    def drop(self) -> None:
        """Have it given back by somebody else."""


class Gate(Protocol):
    """The caps of an origin, over the whole fleet."""

    @property
    def when_full(self) -> str: ...

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> OriginPlace:
        """A place, for so long at most, after so many seconds at most. OriginFull: there was none."""


class Gates(Protocol):
    """The caps of all origins."""

    def gate_of(self, name: str) -> Gate | None:
        """None: it has none. SettingsError: nobody wrote of it."""

    def close(self) -> None: ...


class Once(Protocol):
    """Who remembers what has been computed anew: each key is, once."""

    def takes(self, owner: object, key: str) -> bool: ...
    def has(self, owner: object, key: str) -> bool: ...
    def settle(self, owner: object, key: str, *, stored: bool) -> None: ...


STEP = 1 / 16
"""Weight of the newest call in the share of hits: about as many calls make it."""


class HitLikelihood:
    """Whether a function's next call is likely to find its value: then it looks before it claims. A look saves the
    engine most of a hit's work, and is a round trip too many where there is nothing to be seen."""

    __slots__ = ("good", "share")

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self.good = share > 0.5

    def saw(self, hit: bool) -> None:
        """What a first question has come to. (Two threads at once may count as one.)"""
        self.share += STEP * (hit - self.share)
        self.good = self.share > 0.5


class Marks:
    """Tells how the ids of entries begin that were begun after the last `expire_all`, if there was one."""

    mark = b""


@dataclass(slots=True)
class Resources:
    """What all calls of one function and one colour share."""

    scope: str
    port: Claims
    flights: Flights
    colour: Colour
    clock: Callable[[], float]
    hold: Callable[[Call, float], Hold]  # keeps the lease for at most so many seconds
    note: events.Note
    keep: Callable[[list[tuple[Call, Result]]], Awaitable[None]]  # in this process, what calls have ended with
    trial: Callable[[str, Entry[Any]], object] | None = None  # `encode`, for `strict` where values stay objects
    draws: bool = True  # no local tier has drawn the early moment: a call does
    look: Callable[[str], Awaitable[Found | None]] | None = None  # of an engine on which a hit is a look
    hit_likelihood: HitLikelihood = field(default_factory=HitLikelihood)  # of a hit
    gates: Gates | None = None  # who may compute for how many at once
    give_back: Callable[[str, bytes], object] = lambda key, token: None  # the lease of a token; from a finalizer
    marks: Marks = field(default_factory=Marks)

    def predates_mark(self, entry: Entry[Any]) -> bool:
        """Return whether the entry is older than the last `expire_all`: then it is stale, whatever the engine says."""
        return not entry.id.startswith(self.marks.mark)

    def id_of(self, id: bytes) -> bytes:
        """Return a new id as one that was begun after the last `expire_all`."""
        return self.marks.mark + id[len(self.marks.mark) :]

    def softened(self, entry: Entry[Any] | None) -> Entry[Any] | None:
        """Return the entry, made stale if it is older than the last `expire_all`."""
        if entry is not None and self.marks.mark and self.predates_mark(entry):
            entry.fresh = min(entry.fresh, 0.0)
        return entry


class Call(Leader):
    """One caller's question."""

    # Of the class until they are set, as in `Leader`.
    sample: Ticket | None = None  # of the local tier, before the engine was asked
    ask: Ask | None = None  # its next question's terms
    asked: float = -inf  # the moment before its last claim was sent
    backoff: Backoff | None = None  # of its claims, from the second one on
    place: OriginPlace | None = None  # at its origin
    nested = False  # it computes for another computation, which has a lease, too
    from_others = False  # what it got was computed by somebody else while it waited
    background: BackgroundPlace | None = None  # a place beside the caller, if it may need one

    def __init__(
        self,
        key: str,
        label: str,
        origin: Callable[[], Any],
        policy: Policy,
        resources: Resources,
        loop: Loop | None,
        began: float,
        seen: Entry[Any] | None = None,
        *,
        force: bool = False,
        once: Once | None = None,
        claims_only: bool = False,
    ) -> None:
        self.key = key  # as the engine knows it
        self.label = label  # as people know it
        self.origin = origin
        self.policy = policy
        self.resources = resources
        self.loop = loop
        self.began = began
        self.seen = seen  # what is due: the local tier's entry, or what a claim has found
        self.force = force  # compute, whatever is there
        self.once = once  # or do so if this says that nobody has
        self.claims_only = (
            claims_only  # it waits for nobody's computation, and begins none: it has other keys to ask for
        )

    @property
    def now(self) -> float:
        return self.resources.clock()

    @property
    def waited(self) -> float:
        return self.resources.clock() - self.began

    def anew(self) -> bool:
        """Return whether it computes, whatever is there; asked under the process lock."""
        if self.once is not None and self.once.takes(self.resources.flights, self.key):
            self.force = True
        return self.force

    def settle(self, *, stored: bool) -> None:
        """Tell who remembers it what came of the computation."""
        if self.once is not None and self.force:
            self.once.settle(self.resources.flights, self.key, stored=stored)

    @property
    def followed(self) -> bool:
        """Does anybody else wait for what it computes?"""
        return self.flight is not None and self.flight.callers > 1

    def tell(self, event: Callable[..., events.Event], *what: Any) -> None:
        self.resources.note(event, self.resources.scope, self.label, *what)

    def give_back(self) -> None:
        if self.may_hold_lease:
            self.resources.give_back(self.key, self.token)
            self.may_hold_lease = False  # not before: there may be no stack left for the line above
