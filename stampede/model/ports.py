"""The ports: what the algorithm asks of an engine, and what an engine may answer.

Every verb is `async def`, for both colours: a blocking port is one whose coroutines never suspend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

from stampede.model.entry import Entry, Verdict

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
    """One claim's terms."""

    lease: float  # seconds the lease is to stand, if it is granted
    since: float = 0.0  # seconds the caller has waited: an entry that was fresh meanwhile is good for it
    seen: bytes | None = None  # an entry id that is not good enough (early refresh, unreadable bytes)
    awaited: bytes | None = None  # the lease it waited for: that lease's verdict is an answer
    force: bool = False  # grant whatever is there and whoever computes (refresh): a standing lease dies
    draw: float | None = None  # beta * Exp(1): an engine may grant an entry with fresh < margin + draw * cost


class Pulse:
    """Tells until when every change that has reached this process is known to be heard of. After a freeze (SIGSTOP,
    `docker pause`) a local hit may run before the thread that hears: it compares `until`, and asks `holds` if that
    has passed."""

    __slots__ = ("_heard_until", "stood", "until")

    def __init__(
        self, heard_until: Callable[[float], float], stood: Callable[[int, int], bool] = lambda slot, stamp: False
    ) -> None:
        """`heard_until` takes the time, looks whether anything has come, and returns the new `until`. `stood` says of a
        slot and its stamp whether a ticket that has ended held until the server was lost."""
        self._heard_until = heard_until
        self.stood = stood
        self.until = 0.0

    def holds(self, now: float) -> bool:
        """Return whether every change that has come is heard of; the caller compares its stamp after this."""
        if self.until <= now:
            self.until = self._heard_until(now)
        return self.until > now


ALWAYS = Pulse(lambda now: inf)
"""The pulse of an engine whose stamps are never late: no thread has to run before they change."""


class Ticket(NamedTuple):
    """What keeps a local tier in front of a shared engine true: it holds while `stamps[slot] == stamp`.

    An engine samples the stamp before it reads, and gives no ticket where a change may be under way.
    """

    stamps: Sequence[int]
    slot: int
    stamp: int
    pulse: Pulse = ALWAYS


@dataclass(slots=True)
class Found:
    """The value is there, and good for this caller."""

    entry: Entry[Any]
    ticket: Ticket | None = None  # None: the engine can't say when this entry changes
    own: bool = False  # the engine is down, and this process has kept what it computed itself


@dataclass(slots=True)
class Granted:
    """The right to compute. `entry` is what is kept meanwhile: fresh (early refresh), stale, or nothing."""

    entry: Entry[Any] | None = None
    fence: int = 0  # locks: a number that only grows


@dataclass(slots=True)
class Busy:
    """Somebody computes, or has the lock. `entry` is what may be served meanwhile."""

    token: bytes  # the standing lease's
    lease: float  # seconds it has left
    entry: Entry[Any] | None = None
    grace: bool = field(default=False, kw_only=True)  # nobody is known to have the lock (`Engine.grace`)


@dataclass(slots=True)
class Failed:
    """The awaited lease was abandoned with this verdict, or the key rests after a failure."""

    verdict: Verdict
    entry: Entry[Any] | None = None
    rest: float = 0.0  # seconds before anybody may try again


Reply: TypeAlias = Found | Granted | Busy | Failed


class Claims(Protocol):
    """The verbs of the algorithm. Each is safe to send twice with the same token.

    All but `renew` raise EngineError when the engine can't be asked; their outcome is then unknown.
    """

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        """The value, or the right to compute it, decided in one step.

        - an entry is there with `fresh > -since` and an id other than `seen`: Found
          (with `force`: never; with `draw`: an engine that can may treat an entry that is due as not there);
        - the awaited lease left a verdict, or the key rests: Failed, with the kept entry if there is one;
        - a lease of another token stands: Busy, with the kept entry if there is one;
        - else, and also when the standing lease has this very token: Granted; the lease stands from now on.
        """

    async def fill(self, key: str, token: bytes, entry: Entry[Any]) -> Ticket | bool | None:
        """Store if the lease stands; drop the lease and wake the herd. False: the lease was lost, nothing changed. A
        ticket: it is stored, and the engine tells when it changes. None: it is not known whether the lease stood."""

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        """Drop the lease if it stands, leave the verdict under its token for a while, wake the herd.

        With `rest`, nobody is granted this key for so many seconds, unless by `force`: Failed, with what is kept, to
        those who find nothing good. False: a token whose lease doesn't stand, which leaves nothing, and is no error.
        """

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        """Sleep until something may have changed: fill, abandon, invalidate, set, the holder's death, the lease's end.

        It may return early for no reason, and never misses what happened since the claim that gave `busy`.
        None: claim again. Found: the news brought the value along.
        """

    async def renew(self, key: str, token: bytes, lease: float) -> bool:
        """Let the lease stand for `lease` seconds from now. False: it is lost. Called from the keeper's thread."""


class Store(Protocol):
    """The verbs that are no part of a computation. All raise EngineError when the engine can't be asked."""

    async def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        """What is kept of each key, stale entries too, without leave to compute."""

    async def set(self, key: str, entry: Entry[Any]) -> None:
        """Store; a lease under way dies, the herd wakes."""

    async def replace(self, key: str, seen: bytes | None, entry: Entry[Any]) -> bool:
        """Store if the entry kept now has the id `seen` (None: nothing is kept), in one step; else False.

        What it says of stale entries is as in `get`: they are kept.
        """

    async def expire(self, key: str) -> bool:
        """Stale from now on, and kept as long as it would have been; a lease under way dies, as it may have begun with
        what is no longer true. True: there was something fresh."""

    async def invalidate(self, key: str) -> bool:
        """Remove value, verdict and rest; a lease under way dies, the herd wakes. True: there was a value."""

    async def generation(self, scope: str) -> str:
        """The part of a physical key that `bump` changes. Usually known to the process already, and perhaps of a moment
        ago."""

    async def generations(self, scope: str) -> Sequence[str]:
        """Today's, such that no bump that has returned anywhere is missed; behind it those that ended so shortly ago
        that other processes may still take them for today's. Whoever changes a key changes it in all of them."""

    async def bump(self, scope: str) -> None:
        """A new generation of a scope, or of all scopes with "": everything older is gone."""


@dataclass(slots=True)
class Shown:
    """One key, as an engine has it."""

    entry: Entry[Any] | None = None  # what is kept
    token: bytes | None = None  # of the lease that stands; None: it can't say; b"": there is none
    lease: float = 0.0  # seconds that it has left
    holder: str = ""  # whose it is, as `host:pid`, if that is known


class Softens(Protocol):
    """Of an engine in which a scope can be made stale as a whole."""

    async def soften(self, scope: str) -> None:
        """From now on the scope's `generation` has another part behind a `~` (or has one at all), or that of all scopes
        with "": what is kept is kept, under the names that it has. Told as a bump is; a bump need not keep the part."""


class Shows(Protocol):
    """Of an engine that can be asked who computes."""

    async def show(self, key: str) -> Shown:
        """What is kept of a key, and which lease stands; nothing is changed, claimed, or made to be evicted later."""


class Lists(Protocol):
    """Of an engine that can say which keys it has."""

    async def page(self, prefix: str, cursor: Any = None) -> tuple[list[str], Any]:
        """Some of the keys that are kept and begin with this, and by what the next ones are asked for; None: there are
        no more. What is there from the first page to the last is in one of them; what comes or goes meanwhile may be.
        """


class Changes(Store, Protocol):
    """Of an engine to which the way is long: it says in the reply to a change which generations are today's. Said by
    its `Store`."""

    async def change(self, asked: Sequence[Asked], scopes: Sequence[str]) -> tuple[list[Any], list[Sequence[str]]]:
        """What each of these verbs of `Store` would have returned; and, asked behind them, what `generations` would
        have of each scope."""


class Recalls(Protocol):
    """Of an engine that remembers generations in this process."""

    def generation_at_hand(self, scope: str) -> str | None:
        """What the store's `generation` would say, if that is known at once."""


class Looks(Protocol):
    """Of an engine with a read that costs it less than a claim: a hit needs no decision. Said by its `Claims`."""

    async def look(self, key: str) -> Found | None:
        """Return what is fresh. None, also in any doubt: claim. EngineError as in `claim`."""


class Near(Protocol):
    """The same of an engine that answers in a few microseconds: such a look needs no flight, either."""

    def look(self, key: str) -> Found | None:
        """At once, and for callers of both colours. None, also of trouble.

        Of the entry it may leave out what is in the header of its bytes too: cost, margin, ttl, raised.
        """


class Asked(NamedTuple):
    """A verb of `Claims`, or `Looks`, or one that changes a key, of `Store`, to be asked together with others."""

    verb: str
    args: tuple[Any, ...]


class Many(Protocol):
    """Of an engine to which the way is long: many verbs in one round trip."""

    def ask_many(self, asked: Sequence[Asked]) -> list[Any]:
        """What each would have returned, or the EngineError that it would have raised; blocking."""


class Hears(Protocol):
    """Who is told of what an engine does without."""

    def untold(self, server: str, how: str) -> None:
        """It doesn't tell of changes as it should: what it says, and how they are told instead."""


class Locks(Protocol):
    """The verbs of a lock that is no cache. Trouble of the engine raises EngineError: a lock is never open."""

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        """Take the lock, or say who has it. The holder's own token is granted again.

        `room`: how many may be inside together as far as this one is concerned, itself included. It may enter if there
        are no more with it than the least of these numbers, its own and those of all inside, and nobody waits who came
        before. An engine without `rooms` is asked with 1 only, as an exclusive lock is.
        With `waits`, one that is refused is going to ask again with this token, until it is granted or calls `release`.
        An engine that can keeps the order of arrival among those.
        """

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        """Let the lock stand for `lease` seconds from now. False: it is lost. Called from the keeper's thread."""

    async def release(self, name: str, token: bytes) -> bool:
        """Give it back, or the place among those who wait, and wake a waiter. False: it was somebody else's by then."""

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        """Sleep until the lock may be free: its release, its holder's death, its lease's end.

        It may return early for no reason, and never misses what happened since the acquire that gave `busy`.
        """


class Holds(Protocol):
    """Of an engine that can say who has its locks. Nothing is changed by these."""

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        """The tokens of those who are inside, and the seconds that they have left, unless they are renewed.

        An empty token stands for those of whom its server doesn't know yet (`Engine.grace`).
        """

    async def held(self, prefix: str = "") -> list[Held] | None:
        """The locks that stand and whose names begin with this, the longest held first. None: it can't list them."""


class Handover(Protocol):
    """Of an engine whose locks can go from one process to another."""

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        """Let the lock stand for `lease` seconds from now without its holder, whose end ends it no more. It is taken on
        by `acquire` with this very token, from wherever. False: it is lost."""


class Rate(NamedTuple):
    """At most so much in any window of so many seconds."""

    most: int
    per: float


class Booked(NamedTuple):
    """When a start may be made."""

    delay: float  # seconds until then
    booked: bool  # it is ours
    at: int = 0  # when that is, in microseconds of the engine's own clock, by which it can be given back


class Usage(NamedTuple):
    """What is used of a limit."""

    rate: Rate | None  # as it was last asked for; None: nobody has, as far as is remembered
    used: int = 0  # in the window that ends now
    ahead: int = 0  # booked for later
    penalized: float = 0.0  # seconds before which nothing starts


class Limits(Protocol):
    """The verbs of a limit: one round trip each. Trouble of the engine raises EngineError. `window` is what they do."""

    async def take(self, name: str, rate: Rate, cost: int, ahead: float, was: int = 0) -> Booked:
        """Say when a start of this cost may be made, and book it if that is at most `ahead` seconds from now.

        If the delay is 0 the start is made. Otherwise its caller sleeps until then, and asks again with the booked
        moment as `was`, for which the new answer is an exchange: a late start may have shifted it. A refusal gives
        `was` back. `ahead` of 0 means at once, and below 0 that nothing is booked.

        It may say that it can't be booked yet, although it is near enough: ask again when half of that has passed.
        """

    async def give_back(self, name: str, rate: Rate, cost: int, at: int) -> None:
        """A start that was booked isn't made."""

    async def penalize(self, name: str, rate: Rate, seconds: float) -> None:
        """No start for so long, from now on; a shorter penalty than the one that stands changes nothing."""

    async def used(self, name: str) -> Usage:
        """What is used; nothing is changed."""

    async def listed(self) -> list[tuple[str, Usage]] | None:
        """The same of each that it knows. None: it can't list them."""


class Problem(NamedTuple):
    """How what was done under a lock has failed."""

    exception: str  # its type
    message: str
    traceback: str


class Records(Protocol):
    """Of an engine that keeps a record of how its locks were held."""

    def failed(self, token: bytes, problem: Problem) -> None:
        """What was done under this lock has failed, as is to be in the record when it is released, next."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lock, and who has it."""

    name: str
    host: str | None
    pid: int | None
    program: str | None
    fence: int | None
    since: float | None  # the server's clock, in seconds since 1970; None, as of all that follows: it isn't known
    seconds: float | None  # for which it has been held
    lease: float  # seconds for which it stands, unless it is renewed
    bound: bool  # it ends with its holder's connection, too
    waiting: int | None  # how many have a place in its queue


@dataclass(frozen=True, slots=True)
class Released:
    """How a lock was held."""

    number: int | None  # None: a dead holder's, whose lock nobody has wanted yet
    name: str
    host: str | None
    pid: int | None
    program: str | None
    fence: int | None
    taken: float | None  # as `since` is above
    released: float
    problem: str  # "": there was none; "failed", "expired" or "disconnected"
    exception: str | None
    message: str | None
    traceback: str | None


class Reports(Protocol):
    """Of an engine that can be asked who had its locks. Blocking; names that are no text are escaped."""

    async def released(self, *, failed: bool, since: float, most: int) -> list[Released]:
        """The record of the last `since` seconds, newest first, at most so many; `failed`: of what had a problem."""


class HasColour(Protocol):
    """A `colour.Colour`, as far as an engine has to know it."""

    suspending: bool


@dataclass(frozen=True, slots=True)
class Side:
    """What an engine does for callers of one colour. None: the engine can't do this."""

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
    """One engine of one URL: a store, a lock, or both; blocking and suspending. Declared by inheriting from this.

    What it can do is said here, and never found out by asking for attributes; what it can't is None, or False.
    """

    scheme: str
    url: str = ""  # without secrets: for people
    shared: bool = True  # other processes see it: values are bytes, and a local tier is a choice
    pushes: bool = False  # waiters are woken, not polling
    fair: bool = False  # who has waited longest for a lock is next
    rooms: bool = False  # its locks have room for as many as say so; else for one
    breaks: bool = True  # a lock can be released by anybody who says its token
    prompt: bool = False  # its suspending verbs never do but `wait`: no caller is cancelled in the middle of one
    timeless: bool = False  # it knows no time: what it keeps gets older by the wall clock of who has stored it
    coherent: bool = False  # what it finds comes with a ticket: a local tier in front of it stays true

    blocking: Side = Side()  # what it does for callers that block
    suspending: Side = Side()  # the same verbs for callers in an event loop
    recalls: Recalls | None = None
    near: Near | None = None
    looks: bool = False  # its claims, of both colours, are `Looks`
    changes: bool = False  # its stores, of both colours, are `Changes`
    records: Records | None = None
    reports: Reports | None = None
    many: Many | None = None
    audience: WeakSet[Hears] | None = None
    tier: Any = None  # the `local.Tier` that is its store, of an engine inside this process

    @property
    def called(self) -> str:
        """What people call it: by its address, if that is known."""
        return self.url or f"{self.scheme}://"

    @property
    def lock_engine(self) -> Engine:
        """The one that has its locks."""
        return self

    def side(self, colour: HasColour) -> Side:
        """Return what this engine does for callers of one colour."""
        return self.suspending if colour.suspending else self.blocking

    @abstractmethod
    def ping(self) -> float:
        """Seconds of one round trip; EngineError if there is none."""

    def grace(self) -> Mapping[str, float]:
        """Those of its servers that have just been started, know nothing of the locks of before, and grant none for so
        many seconds, but what its holders renew."""
        return {}

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """What each server says of itself, by its name: numbers and texts; None: no limit. Empty: not asked."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, for good: who waits is woken, and every verb raises EngineClosed from then on."""

    def refusal(self) -> str | None:
        """What a server refuses that a local tier would need, and what is done instead; asked now."""
        return None

    def advice(self) -> Sequence[str]:
        """What a person could change so that it does all that it can; asked now."""
        return ()

    def follow(self) -> None:
        """A local tier stands in front from now on: let tickets be true. For engines to which news have a price."""
        return
