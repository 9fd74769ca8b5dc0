"""The local tier compared with cachetools: hit ratio, memory per entry, cost of a put that evicts.

taskset -c 0 python benchmarks/local_tier.py [--quick]
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from bisect import bisect
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from math import inf
from random import Random
from statistics import median
from threading import Lock
from time import monotonic, perf_counter
from typing import Any

from cachetools import LRUCache, TTLCache

from stampede.local_tier.residents import Resident, Residents
from stampede.model.entry import Entry, new_id

KEYS = 100_000


def zipf(length: int, seed: int) -> Iterator[int]:
    """Return keys with a frequency of 1 / rank, the classic exponent of 1.0."""
    dice = Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, KEYS + 1)))
    for _ in range(length):
        yield bisect(weights, dice.random() * weights[-1])


def scan_mixed(length: int, seed: int) -> Iterator[int]:
    """Return such keys, mixed every 20,000 calls with a scan over 5,000 keys that are used only once."""
    cold = count(KEYS)
    for number, key in enumerate(zipf(length, seed)):
        yield key
        if number % 20_000 == 19_999:
            for _ in range(5_000):
                yield next(cold)


def ratio_of_tier(trace: list[str], size: int) -> float:
    tier, entry = Residents(size), Entry(None, b"")
    for key in trace:
        resident = tier.get(key)
        if resident is not None:
            resident.hits += 1
        else:
            tier.put(Resident(key, "", entry, inf, inf, inf))
    return tier.hits / len(trace)


def ratio_of_lru(trace: list[str], size: int) -> float:
    cache: Any = LRUCache(size)
    hits = 0
    for key in trace:
        try:
            cache[key]
            hits += 1
        except KeyError:
            cache[key] = None
    return hits / len(trace)


def fill_tier(keys: list[str], homes: bool = False) -> object:
    """Fill a tier with entries as a shared engine returns them: each with an id, a cost, and its own times."""
    tier, table = Residents(len(keys)), dict[Any, Resident]()
    for number, key in enumerate(keys):
        now = monotonic()
        entry = Entry(None, new_id(), 0.1 + now, 0.2 + now, 300.0, 300.0 - now, 300.0 - now)
        resident = Resident(key, "scope", entry, now + 290, now + 300, now + 300)
        tier.put(resident)
        if homes:
            tier.adopt(resident, table, key if number % 2 else number)
    return tier, table


def fill_cachetools(kind: Callable[[int], Any], keys: list[str]) -> object:
    cache = kind(len(keys))
    for key in keys:
        cache[key] = None
    return cache


def bytes_per_entry(fill: Callable[[list[str]], object], keys: list[str]) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        kept = fill(keys)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return size / len(keys)


def put_tier(keys: list[str]) -> None:
    tier, entry = Residents(1_000), Entry(None, b"")
    for key in keys:
        tier.put(Resident(key, "", entry, inf, inf, inf))


def put_locked(kind: Callable[[int], Any], keys: list[str]) -> None:
    cache, lock = kind(1_000), Lock()
    for key in keys:
        with lock:
            cache[key] = None


def ttl_cache(size: int) -> Any:
    return TTLCache(size, 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    length = 40_000 if parser.parse_args().quick else 400_000

    print(f"Hit ratio, {KEYS:,} keys, {length:,} calls\n")
    print("| trace | entries | LRU % | local tier % |\n|---|--:|--:|--:|")
    for make in (zipf, scan_mixed):
        trace = [f"key:{key}" for key in make(length, seed=1)]
        for size in (100, 1_000, 10_000, 50_000):
            lru, ours = ratio_of_lru(trace, size), ratio_of_tier(trace, size)
            print(f"| {make.__name__} | {size:,} | {100 * lru:.2f} | {100 * ours:.2f} |", flush=True)

    keys = [f"key:{number}" for number in range(length // 8)]
    print("\nMemory, without key and value\n\n| cache | bytes per entry |\n|---|--:|")
    for name, fill in (
        ("cachetools LRUCache", lambda keys: fill_cachetools(LRUCache, keys)),
        ("cachetools TTLCache", lambda keys: fill_cachetools(ttl_cache, keys)),
        ("local tier, with entry", fill_tier),
        ("local tier, with entry and a home", lambda keys: fill_tier(keys, homes=True)),
    ):
        print(f"| {name} | {bytes_per_entry(fill, keys):.0f} |")

    print("\nA put that evicts\n\n| cache | µs |\n|---|--:|")
    ways: dict[str, Callable[[], None]] = {
        "cachetools LRUCache, locked": lambda: put_locked(LRUCache, keys),
        "cachetools TTLCache, locked": lambda: put_locked(ttl_cache, keys),
        "local tier": lambda: put_tier(keys),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            began = perf_counter()
            way()
            times[name].append(perf_counter() - began)
    for name, seconds in times.items():
        print(f"| {name} | {1e6 * median(seconds) / len(keys):.2f} |")


if __name__ == "__main__":
    main()
