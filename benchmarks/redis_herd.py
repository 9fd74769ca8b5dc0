"""A herd on a Redis server: one key, many callers in many processes, a computation of 200 ms.

Cold: all ask at the same moment. How often the key is computed; how long after the end of the computation the last
caller has its value (storing it included); and how many commands that takes, as the server counts them. For comparison,
dogpile.cache, python-redis-lock and cashews; a way that takes longer than five seconds runs once. (aiocache's lock
raises KeyError in one of three such herds.)

Then ours alone: the key expires again and again under load, with early refresh and without; the key is invalidated
during the computation; the holder is killed with SIGKILL; and how soon a write or an invalidation is seen by eight
processes that read the key through their local tiers, each a thousand times per second.

    python benchmarks/redis_herd.py [--quick] [--runs 5]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import count, pairwise
from statistics import median
from typing import Any

from _measure import machine, table
from _redis import Crew, Server, on_the_wire, percentile

COST = 0.2
TTL = 600.0
LEASE = 2.0
SLOW = 5.0
_numbers = count()

Ask = Callable[[str, Callable[[], Any]], Any]


@dataclass
class Told:
    """The observations of one process, or of a whole herd. Times are those of the machine's monotonic clock."""

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __add__(self, other: Told) -> Told:
        both = (self.begun + other.begun, self.ended + other.ended)
        return Told(*both, self.returned + other.returned, self.waits + other.waits)


# -- the ways to ask ----------------------------------------------------------------------------------------------


@lru_cache
def ours(port: int, **options: Any) -> Any:
    from stampede import Cache

    cache = Cache(f"redis://127.0.0.1:{port}/0", **{"ttl": TTL, "lease": LEASE, **options})
    cache.get("warm")
    return cache


def stampede(port: int) -> Ask:
    return ours(port).get_or_compute


def dogpile(port: int) -> Ask:
    from dogpile.cache import make_region

    region = make_region().configure(
        "dogpile.cache.redis",
        expiration_time=TTL,
        arguments={"host": "127.0.0.1", "port": port, "distributed_lock": True, "thread_local_lock": False},
    )
    return region.get_or_create


def redis_lock(port: int) -> Ask:
    """Return a way that guards a computation as the README of python-redis-lock does, with pickle."""
    import pickle

    import redis
    import redis_lock

    client = redis.Redis(port=port)

    def ask(key: str, compute: Callable[[], Any]) -> Any:
        kept = client.get(key)
        if kept is None:
            with redis_lock.Lock(client, key, expire=10, auto_renewal=True):
                kept = client.get(key)
                if kept is None:
                    value = compute()
                    client.set(key, pickle.dumps(value), ex=int(TTL))
                    return value
        return pickle.loads(kept)

    return ask


def stampede_async(port: int) -> Ask:
    return ours(port).aget_or_compute


def cashews_async(port: int) -> Ask:
    import cashews

    keeper = cashews.Cache()
    keeper.setup(f"redis://127.0.0.1:{port}/0", max_connections=50, wait_for_connection_timeout=60)

    async def ask(key: str, compute: Callable[[], Any]) -> Any:
        async def report(key: str) -> Any:
            return await compute()

        return await keeper(ttl=TTL, lock=True, key="{key}")(report)(key)

    return ask


WAYS = {"stampede": stampede, "dogpile.cache, distributed_lock": dogpile, "python-redis-lock": redis_lock}
ASYNC_WAYS = {"stampede": stampede_async, "cashews, lock=True": cashews_async}


@lru_cache
def way(name: str, port: int, tasks: bool) -> Ask:
    return (ASYNC_WAYS if tasks else WAYS)[name](port)


# -- one process of the herd --------------------------------------------------------------------------------------


@lru_cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@lru_cache
def pool(callers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(callers)


def herd(name: str, port: int, key: str, cost: float, start: float, callers: int, tasks: bool) -> Told:
    """Let all callers of this process ask at the given time."""
    ask, told = way(name, port, tasks), Told()
    if tasks:
        loop().run_until_complete(_by_tasks(ask, key, cost, start, callers, told))
    else:
        for done in [pool(callers).submit(_by_thread, ask, key, cost, start, told) for _ in range(callers)]:
            done.result()
    return told


def _by_thread(ask: Ask, key: str, cost: float, start: float, told: Told) -> None:
    time.sleep(max(0.0, start - time.monotonic()))
    ask(key, _computation(key, cost, told))
    told.returned.append(time.monotonic())


async def _by_tasks(ask: Ask, key: str, cost: float, start: float, callers: int, told: Told) -> None:
    async def compute() -> dict[str, Any]:
        told.begun.append(time.monotonic())
        await asyncio.sleep(cost)
        told.ended.append(time.monotonic())
        return {"name": key, "values": [1, 2, 3]}

    async def call() -> None:
        await ask(key, compute)
        told.returned.append(time.monotonic())

    await asyncio.sleep(max(0.0, start - time.monotonic()))
    await asyncio.gather(*(call() for _ in range(callers)))


def _computation(key: str, cost: float, told: Told) -> Callable[[], Any]:
    def compute() -> dict[str, Any]:
        told.begun.append(time.monotonic())
        time.sleep(cost)
        told.ended.append(time.monotonic())
        return {"name": key, "values": [1, 2, 3]}

    return compute


def under_load(port: int, key: str, early: float, ttl: float, start: float, end: float, callers: int) -> Told:
    """Let all callers of this process ask again and again, each about a hundred times per second."""
    told, cache = Told(), ours(port, early=early, ttl=ttl)

    def caller() -> None:
        time.sleep(max(0.0, start - time.monotonic()))
        while (asked := time.monotonic()) < end:
            cache.get_or_compute(key, _computation(key, COST, told))
            told.waits.append(time.monotonic() - asked)
            time.sleep(0.01)

    for done in [pool(callers).submit(caller) for _ in range(callers)]:
        done.result()
    return told


def hold(port: int, key: str) -> None:
    """Compute for ever, or until the process is killed."""
    ours(port).get_or_compute(key, lambda: time.sleep(60))


def follow(port: int, key: str, end: float) -> list[tuple[float, float]]:
    """Read through the local tier, and return when each value was first seen: (time of its birth, time seen)."""
    cache, seen = ours(port, local=True), []
    last = None
    while time.monotonic() < end:
        value = cache.get_or_compute(key, time.monotonic)
        if value != last:
            last = value
            seen.append((value, time.monotonic()))
        time.sleep(0.001)
    return seen


# -- the herd -----------------------------------------------------------------------------------------------------


def ask_all(
    crew: Crew, port: int, name: str, callers: int, tasks: bool, key: str, cost: float = COST, delay: float = 0.1
) -> float:
    """Order all callers to ask a moment from now, and return that time."""
    start = time.monotonic() + delay
    crew.order(herd, name, port, key, cost, start, callers, tasks)
    return start


def whole(crew: Crew) -> Told:
    return reduce(Told.__add__, crew.told())


def milliseconds(samples: list[float]) -> list[str]:
    return [f"{median(samples) * 1e3:.1f}", f"{max(samples) * 1e3:.1f}"]


def show_cold(crew: Crew, server: Server, callers: int, tasks: bool, runs: int) -> None:
    rows: list[list[object]] = []
    for name in ASYNC_WAYS if tasks else WAYS:
        ask_all(crew, server.port, name, 8, tasks, f"warm-{next(_numbers)}", 0.0, 0.5)  # connections, scripts
        whole(crew)
        with server.counted() as counts:
            start = ask_all(crew, server.port, name, callers, tasks, f"cold-{next(_numbers)}")
            herds = [whole(crew)]
        if time.monotonic() - start < SLOW:
            herds.clear()  # it was slowed down by being counted
        while len(herds) < runs and time.monotonic() - start < SLOW * runs:
            ask_all(crew, server.port, name, callers, tasks, f"cold-{next(_numbers)}")
            herds.append(whole(crew))
        computations = [len(told.begun) for told in herds]
        lateness = [max(told.returned) - min(told.ended) for told in herds]
        each = f"{on_the_wire(counts).total() / len(crew.members):,.1f}"
        rows.append([name, f"{median(computations):.0f}", max(computations), *milliseconds(lateness), each])
    print(f"## cold: {title(crew, callers, tasks)}\n")
    last = "last caller after the computation, ms"
    table(["", "computations", "worst", last, "worst", "commands per process"], rows)


def title(crew: Crew, callers: int, tasks: bool) -> str:
    return f"{len(crew.members)} processes x {callers:,} {'tasks' if tasks else 'threads'}"


def show_expiry(crew: Crew, server: Server, callers: int, seconds: float) -> None:
    rows = []
    for early, ttl in [(0.0, 1.0), (1.0, 1.0)]:
        key = f"expiring-{next(_numbers)}"
        start = time.monotonic() + 0.3
        crew.order(under_load, server.port, key, early, ttl, start, start + seconds, callers)
        told = whole(crew)
        spans = sorted(zip(sorted(told.begun), sorted(told.ended), strict=True))
        beside = sum(after[0] < before[1] for before, after in pairwise(spans))
        waited = sum(wait > COST / 2 for wait in told.waits)
        worst = max(told.waits) - COST
        rows.append([f"early={early:g}", len(told.waits), len(told.begun), beside, waited, f"{worst * 1e3:.1f}"])
    print(f"## expiry under load: {title(crew, callers, False)}, ttl 1 s, {seconds:g} s\n")
    head = ["", "calls", "computations", "of them beside another", "calls that waited", "longest wait less 200 ms, ms"]
    table(head, rows)


def show_invalidated(crew: Crew, server: Server, callers: int, tasks: bool, runs: int) -> None:
    computations, lateness = [], []
    for _ in range(runs):
        key = f"invalidated-{next(_numbers)}"
        start = ask_all(crew, server.port, "stampede", callers, tasks, key)
        time.sleep(start + COST / 2 - time.monotonic())
        ours(server.port).invalidate(key)
        told = whole(crew)
        computations.append(len(told.begun))
        lateness.append(max(told.returned) - max(told.ended))
    print(f"## invalidated in the middle: {title(crew, callers, tasks)}\n")
    head = ["", "computations", "worst", "last caller after the last computation, ms", "worst"]
    table(head, [["stampede", f"{median(computations):.0f}", max(computations), *milliseconds(lateness)]])


def show_killed(crew: Crew, server: Server, callers: int, tasks: bool, runs: int) -> None:
    begun, last, computations = [], [], []
    for _ in range(runs):
        key = f"killed-{next(_numbers)}"
        holder = Crew(1)
        holder.order(hold, server.port, key)
        time.sleep(0.5)
        start = ask_all(crew, server.port, "stampede", callers, tasks, key)
        time.sleep(start + 0.3 - time.monotonic())
        death = time.monotonic()
        holder.kill()
        told = whole(crew)
        begun.append(min(told.begun) - death)
        last.append(max(told.returned) - min(told.ended))
        computations.append(len(told.begun))
    print(f"## the holder is killed: {title(crew, callers, tasks)}, lease {LEASE:g} s\n")
    head = ["", "computations after it, worst", "next computation after the death, ms", "worst"]
    row = ["stampede", max(computations), *milliseconds(begun), *milliseconds(last)]
    table([*head, "last caller after it, ms", "worst"], [row])


def show_followed(crew: Crew, server: Server, writes: int) -> None:
    rows = []
    for verb in ("set", "invalidate"):
        key, cache = f"followed-{verb}", ours(server.port)
        start = time.monotonic() + 1.5
        crew.order(follow, server.port, key, start + 0.1 * writes + 0.2)
        time.sleep(start - time.monotonic())
        written = []
        for _ in range(writes):
            written.append(time.monotonic())
            if verb == "set":
                cache.set(key, written[-1])
            else:
                cache.invalidate(key)
            time.sleep(0.1)
        late = []
        for seen in crew.told():
            for moment in written:
                late.append(min((at for birth, at in seen if birth >= moment), default=float("inf")) - moment)
        rows.append([verb, len(late), *(f"{x * 1e3:.1f}" for x in (median(late), percentile(late, 0.99), max(late)))])
    print(f"## seen by the local tiers of {len(crew.members)} processes\n")
    table(["", "times", "after, ms: median", "p99", "worst"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    runs = 1 if options.quick else options.runs
    print(f"# Herds at Redis: {machine()}, {runs} runs each\n")
    with Server() as server:
        with Crew(2) as crew:
            show_cold(crew, server, 1_000, True, runs)
            show_invalidated(crew, server, 1_000, True, runs)
            show_killed(crew, server, 1_000, True, runs)
        with Crew(8) as crew:
            show_cold(crew, server, 8, False, runs)
            show_expiry(crew, server, 8, 2.0 * runs)
            show_invalidated(crew, server, 8, False, runs)
            show_killed(crew, server, 8, False, runs)
            show_followed(crew, server, 10 * runs)


if __name__ == "__main__":
    main()
