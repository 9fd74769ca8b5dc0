"""One caller's question to the algorithm, and what all calls of one function share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from stampede import events
from stampede.algorithm.background import BackgroundPlace
from stampede.algorithm.context import Context, Reason
from stampede.algorithm.flight import Flights, Leader
from stampede.algorithm.tags import TagPorts
from stampede.leases.keeper import Hold
from stampede.model.backoff import Backoff
from stampede.model.entry import Entry
from stampede.model.ports import Ask, Claims, Found, Looked, Ticket
from stampede.model.result import Result
from stampede.runtime.colour import Colour, Loop
from stampede.settings.options import Policy

__all__ = ["STEP", "Call", "Gate", "Gates", "HitLikelihood", "Marks", "Once", "OriginPlace", "Resources"]


class OriginPlace(Protocol):
    """A computation's place at its origin."""

    @property
    def origin(self) -> str: ...

    def ended(self, name: str, seconds: float, *, failed: bool) -> None:
        """Note that the computation took `seconds`."""

    async def leave(self) -> None: ...

    def drop(self) -> None:
        """Have another thread give the place back."""


class Gate(Protocol):
    """The caps of one origin, over the whole fleet."""

    @property
    def when_full(self) -> str: ...

    async def enter(self, colour: Colour, wait: float, lease: float, longest: float) -> OriginPlace:
        """Return a place, held for at most `longest` seconds. Raise OriginFull if none is free within `wait`."""


class Gates(Protocol):
    """The caps of all origins."""

    def gate_of(self, name: str) -> Gate | None:
        """Return the caps of this origin, or None if it has none. Raise SettingsError if no setting names it."""

    def close(self) -> None: ...


class Once(Protocol):
    """A memory of the keys that were computed anew, so that each of them is computed anew once."""

    def takes(self, owner: object, key: str) -> bool: ...
    def has(self, owner: object, key: str) -> bool: ...
    def settle(self, owner: object, key: str, *, stored: bool) -> None: ...


STEP = 1 / 16
"""The weight of the newest call in the share of hits, which reflects about the last 1 / STEP calls."""


class HitLikelihood:
    """How likely a function's next call is to find its value. If it is, the call looks before it claims. A look costs
    the engine a fraction of a claim. It is a wasted round trip if there is nothing to find."""

    __slots__ = ("good", "share", "step")

    def __init__(self, step: float = STEP) -> None:
        """`step` is the weight of the newest call. With 0, a look is never likely to help: a claim costs no more."""
        self.step = step
        self.share = 0.5
        self.good = False

    def saw(self, hit: bool) -> None:
        """Note whether a call's first question found the value. Two threads at the same moment may count as one."""
        self.share += self.step * (hit - self.share)
        self.good = self.share > 0.5


class Marks:
    """The mark of the last `expire_all`: ids of entries that began after it begin with these bytes."""

    mark = b""


@dataclass(slots=True)
class Resources:
    """What all calls of one function and one colour share."""

    scope: str
    port: Claims
    flights: Flights
    colour: Colour
    clock: Callable[[], float]
    hold: Callable[[Call, float], Hold]  # renews the lease for at most that many seconds
    note: events.Note
    keep: Callable[[list[tuple[Call, Result]]], Awaitable[None]]  # puts results in the local tier
    # `encode`, for `strict` in front of engines that store objects.
    trial: Callable[[str, Entry[Any]], object] | None = None
    draws: bool = True  # calls draw the early moment, because there is no local tier to do so
    # None: the engine has no read that is cheaper than a claim.
    look: Callable[[str, Ask], Awaitable[Found | None]] | None = None
    hit_likelihood: HitLikelihood = field(default_factory=HitLikelihood)
    gates: Gates | None = None  # the caps of origins
    give_back: Callable[[str, bytes], object] = lambda key, token: None  # may be called by a finalizer
    marks: Marks = field(default_factory=Marks)
    tags: TagPorts | None = None

    def predates_mark(self, entry: Entry[Any]) -> bool:
        """Return whether the entry is older than the last `expire_all`. If so it is stale, whatever the engine says."""
        return not entry.id.startswith(self.marks.mark)

    def id_of(self, id: bytes) -> bytes:
        """Return the id with the mark of the last `expire_all`."""
        return self.marks.mark + id[len(self.marks.mark) :]

    def softened(self, entry: Entry[Any] | None) -> Entry[Any] | None:
        """Return the entry, made stale if it is older than the last `expire_all`."""
        if entry is not None and self.marks.mark and self.predates_mark(entry):
            entry.fresh = min(entry.fresh, 0.0)
        return entry


class Call(Leader):
    """One caller's question to the algorithm."""

    # Class attributes until they are set, as in `Leader`.
    sample: Ticket | None = None  # of the local tier, taken before the engine was asked
    ask: Ask | None = None  # the terms of the next question
    asked: float = -inf  # the moment before the last claim was sent
    backoff: Backoff | None = None  # between claims, from the second one on
    place: OriginPlace | None = None  # at its origin
    nested = False  # an outer computation waits for this one, and has a lease too
    from_others = False  # the value was computed by another caller while this one waited
    background: BackgroundPlace | None = None  # where the value can be computed while the caller goes on
    existing: Entry[Any] | None = None  # what is stored while it computes
    looked: Looked | None = None  # what was found while the generation was asked for
    overruled = False  # a tag of the value may have been invalidated while it was computed
    context: Context | None = None  # of its computation, if the function asked for it

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
        self.label = label  # as users know it
        self.origin = origin
        self.policy = policy
        self.tags = policy.tags
        self.resources = resources
        self.loop = loop
        self.began = began
        self.seen = seen  # an entry that is due for refresh, from the local tier or from a claim
        self.force = force  # compute, whatever is stored
        self.once = once  # or compute if this says that the key has not been computed yet
        self.claims_only = claims_only  # a call for many keys: it neither waits nor computes

    @property
    def now(self) -> float:
        return self.resources.clock()

    @property
    def waited(self) -> float:
        return self.resources.clock() - self.began

    def anew(self) -> bool:
        """Return whether to compute whatever is stored. Call this under the process lock."""
        if self.once is not None and self.once.takes(self.resources.flights, self.key):
            self.force = True
        return self.force

    @property
    def reason(self) -> Reason:
        """Why the computation began."""
        if self.force:
            return "refresh"
        return "missing" if self.existing is None else "early" if self.existing.fresh > 0 else "stale"

    def context_of_computation(self) -> Context:
        if self.context is None:
            self.context = Context(self.label, self.existing, self.reason)
        return self.context

    def settle(self, *, stored: bool) -> None:
        """Tell `once` what became of the computation."""
        if self.once is not None and self.force:
            self.once.settle(self.resources.flights, self.key, stored=stored)

    @property
    def followed(self) -> bool:
        """Whether other callers wait for this call's computation."""
        return self.flight is not None and self.flight.callers > 1

    def tell(self, event: Callable[..., events.Event], *what: Any) -> None:
        self.resources.note(event, self.resources.scope, self.label, *what)

    def give_back(self) -> None:
        if self.may_hold_lease:
            self.resources.give_back(self.key, self.token)
            self.may_hold_lease = False  # only now: the line above may raise RecursionError
