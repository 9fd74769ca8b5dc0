"""A flush of ten thousand keys on eight processes, in front of an origin that can take eight computations at once.

    python benchmarks/origins.py [--quick]

Counted at the origin, for all processes: how many computations ran at once, and how many there were in total. For
comparison, the same without the option `origin`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from servers import RedisServer  # the tests' servers

from stampede import Cache

CAP, PROCESSES, THREADS, SECONDS = 8, 8, 16, 0.002


class Origin:
    """An origin shared by all processes: a database that takes 2 ms for a row."""

    def __init__(self) -> None:
        self.lock = multiprocessing.Lock()
        self.now, self.most, self.calls = (multiprocessing.Value("i", 0, lock=False) for _ in range(3))

    def row(self, key: int) -> int:
        with self.lock:
            self.now.value += 1
            self.calls.value += 1
            self.most.value = max(self.most.value, self.now.value)
        time.sleep(SECONDS)
        with self.lock:
            self.now.value -= 1
        return key


def asked(url: str, origin: Origin, options: dict[str, Any], keys: int, number: int, begin: Any, told: Any) -> None:
    caps = {"db": {"concurrency": CAP}}
    with Cache(url, origins=caps, early=0) as cache, ThreadPoolExecutor(THREADS) as pool:
        cache.get("warm")
        begin.wait()

        def one(key: int) -> float:
            started = time.perf_counter()
            cache.get_or_compute(str(key), lambda: origin.row(key), **options)
            return time.perf_counter() - started

        # Each begins elsewhere: a herd in front of one key after the other would be no flush.
        told.put(list(pool.map(one, [(key + number * keys // PROCESSES) % keys for key in range(keys)])))


def flushed(url: str, keys: int, options: dict[str, Any]) -> str:
    origin, begin, told = Origin(), multiprocessing.Barrier(PROCESSES + 1), multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=asked, args=(url, origin, options, keys, number, begin, told))
        for number in range(PROCESSES)
    ]
    for each in processes:
        each.start()
    begin.wait()
    started = time.perf_counter()
    waits = [seconds for _ in processes for seconds in told.get()]
    took = time.perf_counter() - started
    for each in processes:
        each.join()
    least = keys * SECONDS / CAP
    return (
        f"{keys:,} keys x {PROCESSES} processes: {origin.calls.value:,} computations, {origin.most.value} at once; "
        f"{took:.1f} s in all (the cap alone: {least:.1f}), a call's median {1000 * statistics.median(waits):.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    keys = 500 if parser.parse_args().quick else 10_000
    with ExitStack() as stack:
        server = RedisServer()
        stack.callback(server.close)
        print("with an origin:   ", flushed(server.url, keys, {"origin": "db"}))
        server.cli("FLUSHALL")
        print("without:          ", flushed(server.url, keys, {}))


if __name__ == "__main__":
    main()
