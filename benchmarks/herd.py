"""A herd on the disk engine: one cold key and many callers in many processes; then a holder that is killed.

Cold: all callers ask at the same moment for a key that takes 200 ms to compute. How often it is computed, and how long
after the end of the computation the last caller has its value (storing it included). For comparison, the same engine
used like most caches (get, compute, set), and diskcache's recipe against stampedes, with early refresh but no lease.

Killed: the computing process is killed with SIGKILL while the herd waits. How long after that the next computation
begins.

    python benchmarks/herd.py [--quick] [--runs 5]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

from _measure import machine, table

from stampede import Cache

COST = 0.2
TTL = 600
_numbers = count()


@dataclass
class Told:
    """The observations of one process, or of a whole herd. Times are those of the machine's monotonic clock."""

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)

    def add(self, other: Told) -> None:
        self.begun += other.begun
        self.ended += other.ended
        self.returned += other.returned


# -- the ways to ask ----------------------------------------------------------------------------------------------


def stampede(folder: str) -> Callable[[str, Callable[[], Any]], Any]:
    cache = Cache(f"disk://{folder}/stampede", ttl=TTL)
    cache.get("warm")
    return cache.get_or_compute


def plain(folder: str) -> Callable[[str, Callable[[], Any]], Any]:
    cache = Cache(f"disk://{folder}/plain", ttl=TTL)
    cache.get("warm")

    def ask(key: str, compute: Callable[[], Any]) -> Any:
        value = cache.get(key)
        if value is None:
            value = compute()
            cache.set(key, value)
        return value

    return ask


def diskcache_recipe(folder: str) -> Callable[[str, Callable[[], Any]], Any]:
    import diskcache

    cache = diskcache.Cache(f"{folder}/diskcache")
    return lambda key, compute: diskcache.memoize_stampede(cache, TTL, name=key)(compute)()


def stampede_async(folder: str) -> Callable[[str, Callable[[], Any]], Any]:
    cache = Cache(f"disk://{folder}/stampede", ttl=TTL)
    cache.get("warm")
    return cache.aget_or_compute


def plain_async(folder: str) -> Callable[[str, Callable[[], Any]], Any]:
    cache = Cache(f"disk://{folder}/plain", ttl=TTL)
    cache.get("warm")

    async def ask(key: str, compute: Callable[[], Any]) -> Any:
        value = await cache.aget(key)
        if value is None:
            value = await compute()
            await cache.aset(key, value)
        return value

    return ask


WAYS = {"stampede": stampede, "get, compute, set": plain, "diskcache.memoize_stampede": diskcache_recipe}
ASYNC_WAYS = {"stampede": stampede_async, "get, compute, set": plain_async}


# -- one process of the herd --------------------------------------------------------------------------------------


def member(pipe: Any, folder: str, callers: int, tasks: bool) -> None:
    """Ask at each ordered time, and send the observations. None ends it: the main function of a process."""
    ways = {name: make(folder) for name, make in (ASYNC_WAYS if tasks else WAYS).items()}
    with ThreadPoolExecutor(callers if not tasks else 1) as pool:
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            way, key, cost, start = order
            if tasks:
                pipe.send(asyncio.run(by_tasks(ways[way], key, cost, start, callers)))
            else:
                told = Told()
                for done in [pool.submit(by_thread, ways[way], key, cost, start, told) for _ in range(callers)]:
                    done.result()
                pipe.send(told)


def by_thread(ask: Callable[..., Any], key: str, cost: float, start: float, told: Told) -> None:
    def compute() -> dict[str, Any]:
        told.begun.append(time.monotonic())
        time.sleep(cost)
        told.ended.append(time.monotonic())
        return {"name": key, "values": [1, 2, 3]}

    time.sleep(max(0.0, start - time.monotonic()))
    ask(key, compute)
    told.returned.append(time.monotonic())


async def by_tasks(ask: Callable[..., Any], key: str, cost: float, start: float, callers: int) -> Told:
    told = Told()

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
    return told


def holder(pipe: Any, folder: str, key: str) -> None:
    """Compute for ever, or until the process is killed."""

    def compute() -> None:
        pipe.send("computing")
        time.sleep(60)

    stampede(folder)(key, compute)


# -- the herd -----------------------------------------------------------------------------------------------------

_spawn = multiprocessing.get_context("spawn")


class Herd:
    """Processes that wait for orders."""

    def __init__(self, folder: str, processes: int, callers: int, *, tasks: bool) -> None:
        self.members = []
        for _ in range(processes):
            here, there = _spawn.Pipe()
            process = _spawn.Process(target=member, args=(there, folder, callers, tasks), daemon=True)
            process.start()
            self.members.append((process, here))
        for _, pipe in self.members:
            pipe.recv()

    def order(self, way: str, key: str, cost: float) -> float:
        """Order all callers to ask a moment from now, and return that time."""
        start = time.monotonic() + 0.1
        for _, pipe in self.members:
            pipe.send((way, key, cost, start))
        return start

    def told(self) -> Told:
        whole = Told()
        for _, pipe in self.members:
            if not pipe.poll(120):
                raise TimeoutError("a process of the herd doesn't answer")
            whole.add(pipe.recv())
        return whole

    def end(self) -> None:
        for process, pipe in self.members:
            pipe.send(None)
            process.join(10)


def cold(herd: Herd, way: str) -> Told:
    herd.order(way, f"cold-{next(_numbers)}", COST)
    return herd.told()


def killed(herd: Herd, folder: str) -> tuple[float, Told]:
    """Kill the holder; return the time of its death, and what the herd did then."""
    key = f"killed-{next(_numbers)}"
    here, there = _spawn.Pipe()
    process = _spawn.Process(target=holder, args=(there, folder, key), daemon=True)
    process.start()
    here.recv()
    start = herd.order("stampede", key, 0.0)
    time.sleep(max(0.0, start - time.monotonic()) + 0.5)
    death = time.monotonic()
    process.kill()
    told = herd.told()
    process.join()
    return death, told


def milliseconds(samples: list[float]) -> list[str]:
    return [f"{median(samples) * 1e3:.1f}", f"{max(samples) * 1e3:.1f}"]


def show_cold(herd: Herd, title: str, ways: dict[str, Any], runs: int) -> None:
    rows: list[list[object]] = []
    for way in ways:
        herds = [cold(herd, way) for _ in range(runs)]
        computations = [len(told.begun) for told in herds]
        lateness = [max(told.returned) - min(told.ended) for told in herds]
        rows.append([way, f"{median(computations):.0f}", max(computations), *milliseconds(lateness)])
    print(f"## cold: {title}\n")
    table(["", "computations", "worst", "last caller after the computation, ms", "worst"], rows)


def show_killed(herd: Herd, folder: str, title: str, runs: int) -> None:
    herds = [killed(herd, folder) for _ in range(runs)]
    begun = [min(told.begun) - death for death, told in herds]
    last = [max(told.returned) - death for death, told in herds]
    print(f"## the holder is killed: {title}\n")
    head = ["", "computations after it, worst", "next computation after the death, ms", "worst", "last caller", "worst"]
    worst = max(len(told.begun) for _, told in herds)
    table(head, [["stampede", worst, *milliseconds(begun), *milliseconds(last)]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    runs = 1 if options.quick else options.runs
    print(f"# Herds at the disk engine: {machine()}, {runs} runs each\n")
    with tempfile.TemporaryDirectory() as folder:
        for processes, callers, tasks in [(8, 8, False), (2, 1000, True)]:
            title = f"{processes} processes x {callers:,} {'tasks' if tasks else 'threads'}"
            herd = Herd(folder, processes, callers, tasks=tasks)
            try:
                show_cold(herd, title, ASYNC_WAYS if tasks else WAYS, runs)
                show_killed(herd, folder, title, runs)
            finally:
                herd.end()


if __name__ == "__main__":
    main()
