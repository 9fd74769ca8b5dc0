"""The interfaces between the algorithm and an engine: questions, answers, and what an engine declares about itself.
Every verb is `async def`, in both colours. In a blocking port the coroutines never suspend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

from stampede.model.entry import Entry, Verdict
from stampede.model.tags import TagsOfCall

__all__ = [
    "ALWAYS",
    "Ask",
    "Asked",
    "Booked",
    "Busy",
    "Changes",
    "Claims",
    "Engine",
    "Failed",
    "Found",
    "Granted",
    "Handover",
    "Hears",
    "Held",
    "Holds",
    "Limits",
    "Lists",
    "Locks",
    "Looked",
    "Looks",
    "Many",
    "Near",
    "Pulse",
    "Rate",
    "Recalls",
    "Released",
    "Reply",
    "Reports",
    "Shown",
    "Shows",
    "Side",
    "Softens",
    "Store",
    "Ticket",
    "Usage",
]  # fmt: skip


# -- a claim: one question, four answers --------------------------------------------------------------------------


@dataclass(slots=True)
class Ask:
    """The terms of one claim."""

    lease: float  # seconds that the lease lasts, if it is granted
    since: float = 0.0  # seconds that the caller has waited: an entry that was fresh in that time is acceptable
    seen: bytes | None = None  # the id of an entry that is not acceptable (early refresh, unreadable bytes)
    awaited: bytes | None = None  # the lease that the caller waited for: the verdict of that lease is an answer
    force: bool = False  # grant in any case (refresh): an entry does not count, and a valid lease is cancelled
    draw: float | None = None  # beta * Exp(1): an engine may grant an entry with fresh < margin + draw * cost
    tags: TagsOfCall | None = None  # no engine looks at these: see `algorithm/tags.py`
    looked: Looked | None = None  # what `look` has found a moment ago


class Pulse:
    """The moment until which every change that has reached this process is known to be processed. After a freeze
    (SIGSTOP, `docker pause`) a local hit may run before the thread that receives changes. So a hit compares `until`
    with the time, and calls `holds` if that moment has passed."""

    __slots__ = ("_heard_until", "stood", "until")

    def __init__(
        self, heard_until: Callable[[float], float], stood: Callable[[int, int], bool] = lambda slot, stamp: False
    ) -> None:
        """Take two functions of the engine. `heard_until(now)` looks for changes that have arrived, and returns the new
        `until`. `stood(slot, stamp)` tells of a ticket that is not valid any more whether it was valid until the
        connection to the server was lost."""
        self._heard_until = heard_until
        self.stood: Callable[[int, int], bool] = stood
        self.until = 0.0

    def holds(self, now: float) -> bool:
        """Return whether every change that has arrived is processed. The caller compares its stamp afterwards."""
        if self.until <= now:
            self.until = self._heard_until(now)
        return self.until > now

    def stands(self, now: float) -> bool:
        """Return whether a ticket whose stamp is unchanged is valid, also if nothing can be heard just now."""
        return True


ALWAYS = Pulse(lambda now: inf)
"""The pulse of an engine whose stamps are never late, because no other thread has to run before they change."""


class Ticket(NamedTuple):
    """The proof that an entry in a local tier is still the one in the engine: valid while `stamps[slot] == stamp`. An
    engine samples the stamp before it reads the entry. It gives no ticket if a change may be under way."""

    stamps: Sequence[int]
    slot: int
    stamp: int
    pulse: Pulse = ALWAYS
    tags: tuple[Ticket, ...] = ()  # those of the entry's tags, which must be valid, too


@dataclass(slots=True)
class Found:
    """The answer to a claim: an entry that this caller accepts."""

    entry: Entry[Any]
    ticket: Ticket | None = None  # None: the engine does not tell when this entry changes
    own: bool = False  # the engine is down, and this process has stored what it computed itself


@dataclass(slots=True)
class Granted:
    """The right to compute, or a lock. `entry` is what is stored meanwhile: fresh (early refresh), stale, or None."""

    entry: Entry[Any] | None = None
    fence: int = 0  # of a lock: a number that grows with each holder


@dataclass(slots=True)
class Busy:
    """The answer while another caller computes, or holds the lock. `entry` is what may be served meanwhile."""

    token: bytes  # of the lease that is valid
    lease: float  # seconds that this lease has left
    entry: Entry[Any] | None = None
    grace: bool = field(default=False, kw_only=True)  # no holder of the lock is known yet (`Engine.grace`)


@dataclass(slots=True)
class Failed:
    """The answer after a failure: the awaited lease was abandoned with this verdict, or the key rests. A key rests if a
    computation failed and a pause before the next attempt was asked for (`abandon` with `rest`)."""

    verdict: Verdict
    entry: Entry[Any] | None = None  # what may be served meanwhile
    rest: float = 0.0  # seconds that the rest still lasts


Looked: TypeAlias = Mapping[str, Found | None]
"""What looks found, by key: a fresh entry, as bytes, or None if there is none. Other keys have to be read in another
way."""

Reply: TypeAlias = Found | Granted | Busy | Failed


class Claims(Protocol):
    """The verbs of a computation: claim, fill or abandon, wait, renew. Each may be sent twice with the same token. All
    but `renew` raise EngineError if the engine can't be asked. Their outcome is then unknown."""

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        """Return the value, or the right to compute it, decided in one step. The first case that applies counts:

        - an entry is stored with `fresh > -since` and an id other than `seen`: Found
          (with `force`: never; with `draw`: an engine may treat an entry that is due as missing);
        - the awaited lease left a verdict, or the key rests: Failed, with the stored entry if there is one
          (with `force`: never);
        - a lease of another token is valid: Busy, with the stored entry if there is one (with `force`: never);
        - otherwise, and also if the valid lease has this very token: Granted. The lease lasts from now."""

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        """Store the entry if the lease is valid, end the lease, and wake the herd. Return False if the lease was lost;
        then nothing changes. Return True if the entry is stored, or a ticket if the engine also tells when it changes.
        Return None if the engine does not know whether the lease was valid."""

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        """End the lease if it is valid, store the verdict under its token for a while, and wake the herd. With `rest`,
        the key is not granted for so many seconds, except with `force`: a claim that finds no acceptable entry is
        answered Failed, with what is stored. Return False, without an effect, if the lease is not valid."""

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        """Sleep until something may have changed: fill, abandon, invalidate, set, the holder's death, the lease's end.
        It may return early for no reason. It must not miss a change since the claim that answered `busy`. Return None
        if the caller has to claim again, and Found if the message that woke it contained the value."""

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now. Return False if it is lost. The keeper's thread calls this."""


class Store(Protocol):
    """The verbs that are not part of a computation. All raise EngineError if the engine can't be asked."""

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """Return the stored entry of each key, also if it is stale, or None. No right to compute is granted."""

    async def set(self, key: str, entry: Entry[Any]) -> None:
        """Store the entry, cancel a lease that is valid, and wake the herd."""

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        """Store the entry if the one stored now has the id `seen`, in one step. Otherwise return False. None as `seen`
        means that nothing is stored. A stale entry counts as stored, as it does in `get`."""

    async def expire(self, key: str) -> bool:
        """Make the entry stale, but store it as long as before. Return whether it was fresh. A lease that is valid is
        cancelled, because its computation may have read what is no longer true."""

    async def invalidate(self, key: str) -> bool:
        """Remove value, verdict and rest, cancel a valid lease, wake the herd. Return whether there was a value."""

    async def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        """Return the entry of each key if it is fresh, or None, and the current generation of each scope: the part of a
        physical key that `bump` changes. All is read in one round trip where that is possible. Keys are left out that
        have to be read in another way."""

    async def generations(self, scope: str) -> Sequence[str]:
        """Return the current generation, and after it those that ended a moment ago. The first one includes every bump
        that has returned in any process. Other processes may still use the older ones, so a change of a key is made in
        all of them."""

    async def bump(self, scope: str) -> None:
        """Begin a new generation of a scope, or of all scopes with "". All older values are gone."""


@dataclass(slots=True)
class Shown:
    """What an engine has of one key."""

    entry: Entry[Any] | None = None  # what is stored
    token: bytes | None = None  # of the valid lease; None: the engine can't tell; b"": there is no lease
    lease: float = 0.0  # seconds that the lease has left
    holder: str = ""  # the process that has the lease, as `host:pid`, if that is known


class Softens(Protocol):
    """An engine in which all entries of a scope can be made stale at once."""

    async def soften(self, scope: str) -> None:
        """Change the part behind a `~` in the `generation` of a scope, or of all scopes with "". Add it if missing.
        Entries remain stored, under the names that they have. Processes learn of the change as they learn of a bump. A
        bump may remove the part."""


class Shows(Protocol):
    """An engine that can tell which process computes a key."""

    async def show(self, key: str) -> Shown:
        """Return what is stored of a key, and its lease. Change nothing, not even the order of eviction."""


class Lists(Protocol):
    """An engine that can list its keys."""

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        """Return some of the stored keys that begin with `prefix`, and the cursor of the next page, or None at the end.
        A key that exists from the first page to the last is in one of the pages. One that comes or goes may be."""


class Changes(Store, Protocol):
    """A store that is far away, and returns the current generations in the reply to changes. An engine whose stores
    have this says so with `Engine.changes`."""

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        """Make these changes, then read generations, in one round trip. Return what each verb of `Store` would have
        returned, and what `generations` would have returned of each scope."""


class Recalls(Protocol):
    """An engine that remembers generations in this process."""

    def generation_at_hand(self, scope: str) -> str | None:
        """Return the current generation if it is known without asking; otherwise None. It may be a moment old."""

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        """Return the proof that the generation is still the one that this process knows, where the engine reports the
        next one; otherwise None."""


class Looks(Protocol):
    """Claims with a read that costs the engine less than a claim, because a hit needs no decision. An engine whose
    claims have this says so with `Engine.looks`."""

    async def look(self, key: str) -> Found | None:
        """Return the entry if it is fresh. None, also in any doubt, means claim. Raise EngineError as `claim` does."""


class Near(Protocol):
    """An engine whose plain read takes a few microseconds, so that it does not even need a flight."""

    def look(self, key: str) -> Found | None:
        """Return the entry if it is fresh; otherwise None, also if the engine fails. Callers of both colours use this.
        The entry may lack what is also in the header of its bytes: cost, margin, ttl, raised."""


class Asked(NamedTuple):
    """One question of a batch: a verb of `Claims` or `Looks`, or one of `Store` that changes a key."""

    verb: str
    args: tuple[Any, ...]


class Many(Protocol):
    """An engine that is far away, and takes many questions in one round trip."""

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        """Return what each verb would have returned, or the EngineError that it would have raised. This blocks."""


class Hears(Protocol):
    """A member of an engine's `audience`, notified when a server can't do what a local tier needs."""

    def untold(self, server: str, how: str) -> None:
        """Take note that `server` does not announce changes as it should. `how` says why, and what is done instead."""


class Locks(Protocol):
    """The verbs of locks. They raise EngineError if the engine fails: a lock never fails open."""

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        """Take the lock, or say which holder keeps the caller out. The holder's own token is granted again.

        `room` is the number of holders that this caller allows, itself included. It may enter if no holder's number,
        its own included, is exceeded then, and if no waiter came before it. An engine without `rooms` is asked only
        with 1, which is an exclusive lock.

        With `waits`, a caller that is refused asks again with this token, until it is granted or calls `release`. An
        engine that is `fair` serves these waiters in the order of arrival."""

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        """Extend the lock to `lease` seconds from now. Return False if it is lost. The keeper's thread calls this."""

    async def release(self, name: str, token: bytes) -> bool:
        """Release the lock, or leave the queue, and wake a waiter. Return False if this token did not hold the lock."""

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        """Sleep until the lock may be free: its release, its holder's death, its lease's end. It may return early for
        no reason. It must not miss a change since the `acquire` that answered `busy`."""


class Holds(Protocol):
    """An engine that can tell who holds its locks. These verbs change nothing."""

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        """Return the token of each holder, and the seconds until its lease ends unless it is renewed. An empty token
        stands for holders that the server does not know yet (`Engine.grace`)."""

    async def held(self, prefix: str = "") -> list[Held] | None:
        """Return the held locks whose names begin with `prefix`, the longest held first. None: the engine can't."""


class Handover(Protocol):
    """An engine whose locks can go from one process to another."""

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        """Extend the lock to `lease` seconds from now, independently of its holder, whose death no longer ends it. Any
        process can continue it by `acquire` with this token. Return False if the lock is lost."""


class Rate(NamedTuple):
    """A limit: at most `most` in any window of `per` seconds."""

    most: int
    per: float


class Booked(NamedTuple):
    """The moment at which a start may be made."""

    delay: float  # seconds until that moment
    booked: bool  # it is reserved for the caller
    at: int = 0  # that moment in microseconds of the engine's own clock; `give_back` takes it


class Usage(NamedTuple):
    """How much of a limit is used."""

    rate: Rate | None  # as it was last asked for; None: it was not, as far as the engine remembers
    used: int = 0  # in the window that ends now
    ahead: int = 0  # booked for later
    penalized: float = 0.0  # seconds before which nothing starts


class Limits(Protocol):
    """The verbs of a rate limit, one round trip each. They raise EngineError if the engine fails.
    `model/limit_window.py` has the rules."""

    async def take(self, name: str, rate: Rate, cost: int, ahead: float, was: int = 0) -> Booked:
        """Return when a start of this cost may be made, and book it if that is at most `ahead` seconds from now.

        If the delay is 0, the start is made. Otherwise the caller sleeps until then, and asks again with the booked
        moment as `was`. The new answer replaces that booking, because a late start may have shifted it; a refusal
        gives it back. `ahead` of 0 means at once. Below 0, nothing is booked.

        The answer may be that nothing is booked, although the moment is near enough. Then the caller asks again when
        half of the delay has passed."""

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        """Cancel a booking. `at` is the moment of the start that is not made."""

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        """Allow no start for so many seconds from now. A penalty that ends before the current one has no effect."""

    async def used(self, name: str) -> Usage:
        """Return how much is used. Change nothing."""

    async def listed(self) -> list[tuple[str, Usage]] | None:
        """Return the name and usage of each known limit. None: the engine can't list them."""


class Problem(NamedTuple):
    """The error with which the work under a lock failed."""

    exception: str  # its type
    message: str
    traceback: str


class Records(Protocol):
    """An engine that records how its locks were held."""

    def failed(self, token: bytes, problem: Problem) -> None:
        """Take note of why the work under this lock failed. The release, which comes next, writes it to the record."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lock, and its holder. A field is None if the engine does not know it."""

    name: str
    host: str | None
    pid: int | None
    program: str | None
    fence: int | None
    since: float | None  # by the server's clock, in seconds since 1970
    seconds: float | None  # for which it has been held
    lease: float  # seconds until it ends, unless it is renewed
    bound: bool  # it also ends with its holder's connection
    waiting: int | None  # the length of its queue


@dataclass(frozen=True, slots=True)
class Released:
    """The record of one past holding of a lock. A field is None if the engine does not know it."""

    number: int | None  # None: the holder died, and the lock has not been asked for since
    name: str
    host: str | None
    pid: int | None
    program: str | None
    fence: int | None
    taken: float | None  # by the server's clock, in seconds since 1970
    released: float
    problem: str  # "failed", "expired", "disconnected", or "" if there was none
    exception: str | None
    message: str | None
    traceback: str | None


class Reports(Protocol):
    """An engine that can list the past holdings of its locks. This blocks. Names that are not text are escaped."""

    async def released(self, *, failed: bool, since: float, most: int) -> list[Released]:
        """Return the records of the last `since` seconds, newest first, at most `most`. With `failed`, return only
        those with a problem."""


class HasColour(Protocol):
    """The part of `colour.Colour` that an engine has to know."""

    suspending: bool


@dataclass(frozen=True, slots=True)
class Side:
    """What an engine does for callers of one colour. A port is None if the engine can't do it."""

    claims: Claims | None = None
    store: Store | None = None
    locks: Locks | None = None
    limits: Limits | None = None
    lists: Lists | None = None
    softens: Softens | None = None
    shows: Shows | None = None
    holds: Holds | None = None
    handover: Handover | None = None


class Engine(ABC):
    """The engine of one URL: a store, locks, limits, or several of these. An engine inherits from this class. Its
    attributes declare what the engine can do. What it can't do is None or False. The library relies on these
    attributes, and does not search an engine for methods."""

    scheme: str
    url: str = ""  # without secrets, for messages
    shared: bool = True  # other processes use it, too: values are bytes, and a local tier is an option
    pushes: bool = False  # waiters are woken, and do not poll
    fair: bool = False  # waiters for a lock are served in the order of arrival
    rooms: bool = False  # a lock may have several holders; otherwise it has one
    breaks: bool = True  # any process that presents the token of a lock can release it
    prompt: bool = False  # no suspending verb but `wait` ever suspends: no caller is cancelled in the middle of one
    timeless: bool = False  # it has no clock: an entry ages by the wall clock of the process that stored it
    tick: float = 0.05  # seconds by which the age of what it stores may be wrong, unless it is timeless
    coherent: bool = False  # what it finds comes with a ticket, so that a local tier in front of it is never outdated

    blocking: Side = Side()  # the verbs for callers that block
    suspending: Side = Side()  # the verbs for callers in an event loop
    recalls: Recalls | None = None
    near: Near | None = None
    looks: bool = False  # the claims of both colours are `Looks`
    changes: bool = False  # the stores of both colours are `Changes`
    records: Records | None = None
    reports: Reports | None = None
    many: Many | None = None
    audience: WeakSet[Hears] | None = None  # notified of servers that do not announce changes
    tier: Any = None  # the store of an engine inside this process, a `local_tier.residents.Residents`

    @property
    def called(self) -> str:
        """The engine's name for people: its address, if that is known."""
        return self.url or f"{self.scheme}://"

    @property
    def lock_engine(self) -> Engine:
        """The engine that has the locks of this one."""
        return self

    def side(self, colour: HasColour) -> Side:
        """Return what this engine does for callers of one colour."""
        return self.suspending if colour.suspending else self.blocking

    @abstractmethod
    def ping(self) -> float:
        """Return the seconds of one round trip. Raise EngineError if there is no answer."""

    def grace(self) -> Mapping[str, float]:
        """Return the servers that were just started, and the seconds for which each grants no new locks. Such a server
        does not know the locks from before its start. Meanwhile it accepts what their holders renew."""
        return {}

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what each server reports about itself, by its name: numbers and texts. None means "no limit". The
        mapping is empty if the engine asks no server."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release everything, for good. Waiters are woken, and every verb raises EngineClosed from then on."""

    def refusal(self) -> str | None:
        """Ask the servers. Return what one refuses that a local tier needs, and what is done instead, or None."""
        return None

    def advice(self) -> Sequence[str]:
        """Ask the servers. Return what a person could change so that the engine can do more."""
        return ()

    def follow(self) -> None:
        """Keep tickets valid from now on, because a local tier uses them. Receiving changes may cost the engine."""
        return
