"""The plan of a round: its keys with their behaviour, and the steps of each caller, all drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "FACES", "KINDS", "LEASE", "LOCK_LEASE", "Kind", "Part", "Step", "Whim", "all_keys", "kind_of", "steps", "tags_of",
]  # fmt: skip

LEASE = 3.0  # longer than any stall of this machine
LOCK_LEASE = 2.0


@dataclass(frozen=True)
class Kind:
    """How keys of one kind are computed and stored."""

    options: dict[str, Any]
    weight: int
    nap: float = 0.03  # the longest computation, in seconds
    fails: float = 0.0  # share of computations that fail
    hangs: float = 0.0  # share of computations that hang
    hang: float = 0.0  # seconds for which a computation hangs
    size: int = 0  # bytes added to the value
    waits: float | None = None  # the `wait` that half of its callers pass

    @property
    def lease(self) -> float:
        return float(self.options["lease"])

    @property
    def hold(self) -> float:
        return float(self.options.get("max_hold", 60.0))

    @property
    def age(self) -> float:
        """Seconds for which callers may get a value."""
        return float(self.options["ttl"] + self.options.get("stale", 0.0))

    @property
    def longest(self) -> float:
        """Seconds that a caller may wait for another's computation, and then for its own."""
        others = self.lease + 2 + (self.hold if self.hangs else self.nap)  # memcached's leases end up to 2 s later
        return others + max(self.nap, self.hang)


KINDS = {
    "firm": Kind({"ttl": 600, "early": 0, "lease": LEASE}, weight=8),
    "brief": Kind({"ttl": 2, "early": 1.0, "lease": LEASE}, weight=4, nap=0.05),
    "stale": Kind({"ttl": 2, "stale": 30, "background": True, "lease": LEASE}, weight=3, nap=0.1),
    "frail": Kind({"ttl": 2, "stale": 4, "retry_after": 0.3, "lease": LEASE}, weight=2, nap=0.05, fails=0.4),
    "failing": Kind({"ttl": 2, "early": 0, "lease": LEASE}, weight=2, fails=0.5),
    "slow": Kind({"ttl": 600, "early": 0, "lease": LEASE}, weight=2, nap=0.8, waits=0.3),
    "hung": Kind({"ttl": 600, "early": 0, "lease": 1, "max_hold": 1.5}, weight=1, nap=0.05, hangs=0.1, hang=3.0),
    "big": Kind({"ttl": 600, "early": 0, "lease": LEASE}, weight=1, nap=0.05, size=60_000),
}
FACES = {"cache": list(KINDS), "sync": ["firm", "stale", "frail"], "async": ["firm", "stale", "frail"]}
"""The three interfaces: the methods of the cache (sync and async), a cached function, a cached async function."""

_EACH = 2  # keys of each kind

_CACHE = {
    "compute": 60, "get": 12, "peek": 4, "set": 3, "expire": 3, "invalidate": 7, "many": 6, "get_many": 4,
    "set_many": 1, "clear": 0.3, "cancel": 4, "fork": 0.3, "lock": 5, "try_lock": 4, "end_tag": 2, "expire_tag": 1,
}  # fmt: skip
_FUNCTION = {"call": 60, "peek": 3, "set": 2, "expire": 3, "invalidate": 6, "refresh": 4, "many": 5, "end_all": 0.5}


class Whim(NamedTuple):
    """The behaviour of an origin in one call, if it computes."""

    nap: float
    fails: bool
    hangs: float


class Step(NamedTuple):
    """One call."""

    verb: str
    face: str
    keys: list[str]
    whim: Whim
    wait: float | None
    chance: float  # 0 to 1, for any other choice that the verb needs
    pause: float  # seconds before it


@dataclass(frozen=True)
class Part:
    """The part of one process in a round."""

    url: str
    name: str
    seed: str
    namespace: str
    local: bool
    threads: int
    tasks: int
    pause: float  # seconds between two calls of a caller, on average
    uvloop: bool = False
    interrupts: float = 0.0  # average seconds between exceptions raised in threads at any bytecode; 0: none
    options: dict[str, Any] = field(default_factory=dict)  # options of its cache


def kind_of(key: str) -> Kind:
    return KINDS[key.split("/")[1]]


def all_keys(*faces: str) -> list[str]:
    return [f"{face}/{kind}/{n}" for face in faces or FACES for kind in FACES[face] for n in range(_EACH)]


def tags_of(key: str) -> tuple[str, str]:
    """The tags of a key's value: one that its caller names, and one that its computation adds. The first one is that
    of all keys of the kind, the second one of those of the same interface."""
    face, kind, *_ = key.split("/")
    return kind, f"made of {face}/{kind}"


def steps(part: Part, caller: int, *, suspending: bool) -> Iterator[Step]:
    """The endless steps of one caller. Each step draws the same number of random numbers."""
    dice = random.Random(f"{part.seed} {part.name} {caller}")
    own = "async" if suspending else "sync"
    while True:
        face = dice.choices(["cache", own], [3, 1])[0]
        verbs = _CACHE if face == "cache" else _FUNCTION
        verb = dice.choices(list(verbs), list(verbs.values()))[0]
        kinds = FACES[face]
        kind = dice.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        keys = [f"{face}/{kind}/{dice.randrange(_EACH)}"]
        more = dice.sample([f"{face}/{kind}/{n}" for kind in kinds for n in range(_EACH)], 3)
        whim = Whim(
            dice.random() * KINDS[kind].nap,
            dice.random() < KINDS[kind].fails,
            KINDS[kind].hang if dice.random() < KINDS[kind].hangs else 0.0,
        )
        wait = KINDS[kind].waits if dice.random() < 0.5 else None
        chance, pause = dice.random(), dice.expovariate(1 / part.pause)
        if verb in ("many", "get_many", "set_many"):
            # A batch uses the options of its first key.
            keys = [key for key in more if kind_of(key) is KINDS[kind]] if verb != "get_many" else more
            keys = keys or [f"{face}/{kind}/{n}" for n in range(_EACH)]
        elif verb.endswith("_tag"):
            tag = tags_of(keys[0])[chance < 0.5]
            keys = [key for key in all_keys() if tag in tags_of(key)]
        yield Step(verb, face, keys, whim, wait, chance, pause)
