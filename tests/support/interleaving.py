"""Random interleavings over several processes, and a checker that knows which values were allowed.

Each process has callers (threads, or tasks of an event loop) that compute, read, set, refresh, expire and invalidate a
few keys at random. It records when each call began and ended, with a clock that all processes share. A value contains
the process that computed it, and the time. Afterwards the checker reads all records:

- If a call began after an invalidation (or a set) had ended, its value was not computed before the invalidation. This
  holds at once in the process that invalidated, and after `lag` seconds in others (their local tiers know it then).
- No two computations of one key ran at the same time, unless a call in between allowed that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

from disk_world import Other, others

from stampede import Cache

__all__ = ["Done", "Plan", "Verdicts", "check", "live", "played"]

KEYS = 4

VERBS = {
    "compute": 300,
    "read": 125,
    "invalidate": 40,
    "set": 15,
    "refresh": 10,
    "expire": 5,
    "clear": 2,
}
_ENDS = {"invalidate", "set", "clear"}  # after these, no caller may see an older value
_ALLOWS = _ENDS | {"refresh", "expire"}  # after these, a second computation may start while one runs


@dataclass(frozen=True)
class Plan:
    """The plan of one process."""

    url: str
    number: int
    seed: int
    local: bool
    callers: int
    calls: int  # number of calls of each caller
    slow: float  # the longest computation, in seconds
    clears: bool = True  # False: no `clear`, as other processes may use the old generation for a second


Value: TypeAlias = tuple[int, int, float]
"""The process that made the value, a serial number, and the start of its computation."""


class Done(NamedTuple):
    """One call, or one computation inside a call."""

    process: int
    verb: str
    key: str
    began: float
    ended: float
    value: tuple[Any, ...] | None


def live(pipe: Connection, plan: Plan) -> None:
    """The main function of one process. Half of the processes use threads, the other half an event loop."""
    logging.getLogger("stampede").setLevel(logging.ERROR)  # no logs about invalidations during a computation
    done: list[Done] = []
    cache = Cache(plan.url, local=plan.local, ttl=600, early=0, lease=20)
    serials = itertools.count()
    pipe.send("ready")
    pipe.recv()
    if plan.number % 2:
        asyncio.run(_tasks(plan, cache, done, serials))
    else:
        threads = [threading.Thread(target=_calls, args=(plan, cache, done, serials, n)) for n in range(plan.callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pipe.send([tuple(each) for each in done])
    while True:  # no call runs any more: report the values that this process sees now
        pipe.recv()
        pipe.send({str(key): cache.get(str(key)) for key in range(KEYS)})


def _choice(dice: random.Random, plan: Plan) -> tuple[str, str]:
    (verb,) = dice.choices(list(VERBS), list(VERBS.values()))
    if verb == "clear" and not plan.clears:
        verb = "invalidate"
    return verb, str(dice.randrange(KEYS))


def _calls(plan: Plan, cache: Cache, done: list[Done], serials: Any, caller: int) -> None:
    dice = random.Random(f"{plan.seed} {plan.number} {caller}")
    for _ in range(plan.calls):
        verb, key = _choice(dice, plan)
        began, nap = time.monotonic(), dice.random() * plan.slow

        def compute(began: float = began, key: str = key, nap: float = nap) -> Value:
            value = plan.number, next(serials), time.monotonic()
            time.sleep(nap)
            # The record of a computation has the start of its call, because the claim came after that.
            done.append(Done(plan.number, "computation", key, began, time.monotonic(), value))
            return value

        given: Any = None
        match verb:
            case "compute":
                given = cache.get_or_compute(key, compute)
            case "read":
                given = cache.get(key)
            case "set":
                given = plan.number, next(serials), began
                cache.set(key, given)
            case "refresh":
                cache.expire(key)
                given = cache.get_or_compute(key, compute)
            case "expire":
                cache.expire(key)
            case "clear":
                cache.clear()
            case "invalidate":
                cache.invalidate(key)
        done.append(Done(plan.number, verb, key, began, time.monotonic(), given))


async def _tasks(plan: Plan, cache: Cache, done: list[Done], serials: Any) -> None:
    async def calls(caller: int) -> None:
        dice = random.Random(f"{plan.seed} {plan.number} {caller}")
        for _ in range(plan.calls):
            verb, key = _choice(dice, plan)
            began, nap = time.monotonic(), dice.random() * plan.slow

            async def compute(began: float = began, key: str = key, nap: float = nap) -> Value:
                value = plan.number, next(serials), time.monotonic()
                await asyncio.sleep(nap)
                done.append(Done(plan.number, "computation", key, began, time.monotonic(), value))
                return value

            given: Any = None
            match verb:
                case "compute":
                    given = await cache.aget_or_compute(key, compute)
                case "read":
                    given = await cache.aget(key)
                case "set":
                    given = plan.number, next(serials), began
                    await cache.aset(key, given)
                case "refresh":
                    await cache.aexpire(key)
                    given = await cache.aget_or_compute(key, compute)
                case "expire":
                    await cache.aexpire(key)
                case "clear":
                    await cache.aclear()
                case "invalidate":
                    await cache.ainvalidate(key)
            done.append(Done(plan.number, verb, key, began, time.monotonic(), given))
            await asyncio.sleep(0)  # a hit alone would not suspend the task

    await asyncio.gather(*[calls(caller) for caller in range(plan.callers)])


def played(plans: list[Plan]) -> tuple[list[Done], list[dict[str, Any]]]:
    """All records, and the values that each process saw at the end, after all calls."""
    processes = [others(1, live, plan) for plan in plans]
    opened = []
    try:
        for each in processes:
            opened.append(each.__enter__()[0])
        for each in opened:
            assert each.hear() == "ready"
        for each in opened:
            each.tell()
        done = [Done(*line) for each in opened for line in each.hear()]
        end, kept = time.monotonic() + 5, _seen(opened)
        while any(each != kept[0] for each in kept) and time.monotonic() < end:
            time.sleep(0.02)  # messages may be under way, and no event tells when all have arrived
            kept = _seen(opened)
        return done, kept
    finally:
        for context, _ in zip(processes, opened, strict=False):
            context.__exit__(None, None, None)


def _seen(opened: list[Other]) -> list[dict[str, Any]]:
    """Return the values that each process sees now."""
    for each in opened:
        each.tell()
    return [each.hear() for each in opened]


# -- the checker ----------------------------------------------------------------------------------------------------


@dataclass
class Verdicts:
    """The faults that the checker found, and the number of calls that it checked."""

    calls: int = 0
    computations: int = 0
    old: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # seconds for which other processes returned an old value


class _Line:
    """The changes of one key, in order of their ends, with the latest start so far."""

    def __init__(self, changes: list[Done]) -> None:
        changes.sort(key=lambda change: change.ended)
        self._ends = [change.ended for change in changes]
        self._latest = list(itertools.accumulate((change.began for change in changes), max))
        self._changes = changes

    def oldest(self, moment: float) -> float:
        """A call that begins at this moment must get a value whose computation began later than this."""
        at = bisect_left(self._ends, moment)
        return self._latest[at - 1] if at else float("-inf")

    def culprit(self, born: float) -> Done:
        """The first change that made a value of this age old."""
        return next(change for change in self._changes if change.began > born)

    def since(self, born: float, moment: float) -> float:
        """Seconds for which a value had been old at this moment: since the first end of a later change."""
        for end, latest in zip(self._ends, self._latest, strict=True):
            if latest > born:
                return moment - end
        return 0.0


def check(done: list[Done], kept: list[dict[str, Any]], lag: float) -> Verdicts:
    """Check that each value that a call returned was allowed."""
    verdicts = Verdicts()
    changes, own = defaultdict(list), defaultdict(list)
    born: dict[tuple[Any, ...], float] = {}
    for each in done:
        keys = [str(key) for key in range(KEYS)] if each.verb == "clear" else [each.key]
        for key in keys if each.verb in _ENDS else ():
            changes[key].append(each)
            own[each.process, key].append(each)
        if each.verb == "set":
            assert each.value is not None
            born[tuple(each.value)] = each.ended  # it may have been stored as late as this
    everywhere = {key: _Line(lines) for key, lines in changes.items()}
    here = {place: _Line(lines) for place, lines in own.items()}
    end = max(each.ended for each in done) + 1.0
    last = [
        Done(process, "last", key, end, end, value) for process, all in enumerate(kept) for key, value in all.items()
    ]
    for each in [*done, *last]:
        if each.verb == "computation" or each.verb == "set":
            continue
        verdicts.calls += 1
        if each.value is None:
            continue
        made = born.get(tuple(each.value), each.value[2])
        allowed, mine = everywhere.get(each.key), here.get((each.process, each.key))
        if mine is not None and made < mine.oldest(each.began):
            verdicts.old.append(f"{each}: this process had ended it by {mine.culprit(made)}")
        if allowed is not None and made < allowed.oldest(each.began):
            late = allowed.since(made, each.began)
            verdicts.lags.append(late)
            if late > lag:
                verdicts.old.append(f"{each}: old for {late:.3f} s, by {allowed.culprit(made)}")
    _check_computations(done, verdicts, lag)
    for key in range(KEYS):
        found = {tuple(all[str(key)]) for all in kept if all[str(key)] is not None}
        if len(found) > 1:
            verdicts.apart.append(f"{key}: {found}")
    return verdicts


def _check_computations(done: list[Done], verdicts: Verdicts, lag: float) -> None:
    allows = defaultdict(list)
    for each in done:
        if each.verb in _ALLOWS:
            for key in map(str, range(KEYS)) if each.verb == "clear" else [each.key]:
                # Other processes hear of a new generation later.
                allows[key].append((each.began, each.ended + lag if each.verb == "clear" else each.ended))
    for key in map(str, range(KEYS)):
        ours = sorted((each for each in done if each.verb == "computation" and each.key == key), key=_birth)
        verdicts.computations += len(ours)
        for first, second in itertools.pairwise(ours):
            if _birth(second) < first.ended:
                start = min(first.began, second.began)
                if not any(began < _birth(second) and ended > start for began, ended in allows[key]):
                    verdicts.twice.append(f"{first} and {second}")


def _birth(computation: Done) -> float:
    assert computation.value is not None
    birth: float = computation.value[2]
    return birth
