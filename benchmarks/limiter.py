"""Limits: the cost of a start, and how exact limits are, compared with the packages `limits` and `pyrate-limiter`.

Cost: one process and thread, a limit that is never reached, microseconds per start. Exactness: for `--seconds`, several
processes ask for more than is allowed, and each records the times of its starts, by a clock that all of them share.
Then every window of `per` is checked: the most starts in one, and the share of the allowed starts that was used.

    python benchmarks/limiter.py [--quick] [--rounds 9] [--seconds 60]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from _measure import interleaved, machine, pin, table
from _redis import Server

from stampede import Limiter

MOST, PER, PROCESSES = 50, 0.8, 8

Start = Callable[[], object]
Make = Callable[[str, str, int, float], Start]


def ours(url: str, name: str, most: int, per: float) -> Start:
    return Limiter(name, max=most, per=per, on=url).acquire


def limits_moving(url: str, name: str, most: int, per: float) -> Start:
    """The moving window of `limits`. It counts whole seconds only and can't wait: refused callers poll."""
    from limits import RateLimitItemPerSecond, storage, strategies

    limiter = strategies.MovingWindowRateLimiter(storage.storage_from_string(url))
    return partial(_until, partial(limiter.hit, RateLimitItemPerSecond(most, max(round(per), 1)), name), per)


def limits_counter(url: str, name: str, most: int, per: float) -> Start:
    """The sliding counter of `limits`, an approximation."""
    from limits import RateLimitItemPerSecond, storage, strategies

    limiter = strategies.SlidingWindowCounterRateLimiter(storage.storage_from_string(url))
    return partial(_until, partial(limiter.hit, RateLimitItemPerSecond(most, max(round(per), 1)), name), per)


def pyrate(url: str, name: str, most: int, per: float) -> Start:
    from pyrate_limiter import InMemoryBucket, Limiter, Rate, RedisBucket

    rates = [Rate(most, round(per * 1000))]
    if url == "memory://":
        return partial(Limiter(InMemoryBucket(rates)).try_acquire, name)
    import redis

    return partial(Limiter(RedisBucket.init(rates, redis.Redis.from_url(url), name)).try_acquire, name)


def _until(hit: Callable[[], bool], per: float) -> None:
    while not hit():
        time.sleep(per / 100)


PEERS: dict[str, Make] = {
    "stampede": ours,
    "limits, moving window": limits_moving,
    "limits, sliding counter": limits_counter,
    "pyrate-limiter": pyrate,
}


# -- cost ---------------------------------------------------------------------------------------------------------


def cost(urls: dict[str, str], rounds: int, number: int) -> None:
    ways = {}
    for place, url in urls.items():
        for name, make in PEERS.items():
            if place in ("redis", "memory") or make is ours:
                ways[name, place] = partial(_each, make(url, f"cost {name}", 100_000_000, 1.0), number)
    plain = {f"{name}|{place}": way for (name, place), way in ways.items()}
    found = interleaved(plain, rounds)
    print("## A start, one after the other: µs\n")
    table(["", *urls], [[name, *(_micros(found.get(f"{name}|{place}")) for place in urls)] for name in PEERS])


def _each(start: Start, number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        start()
    return (time.perf_counter() - began) / number * 1e6


def _micros(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


# -- exactness ----------------------------------------------------------------------------------------------------


def starts_of(make: Make, url: str, name: str, per: float, seconds: float, all_there: Any, told: Any) -> None:
    """Start as fast as allowed, and return the times: the work of one process."""
    start, made = make(url, name, MOST, per), []
    all_there.wait(60)
    until = time.monotonic() + seconds + 2 * per
    while time.monotonic() < until:
        start()
        made.append(time.monotonic())
    told.put(made)


def exactness(urls: dict[str, str], seconds: float) -> None:
    rows = []
    for place, url in urls.items():
        for name, make in PEERS.items():
            if make is not ours and place != "redis":
                continue
            per = 1.0 if "limits" in name else PER
            made = _together(make, url, f"exact {name} {os.getpid()}", per, seconds)
            worst, low = 0, 0
            for high, at in enumerate(made):
                while made[low] <= at - per:
                    low += 1
                worst = max(worst, high - low + 1)
            windows = int(seconds / per)  # whole ones, from the second on
            counted = sum(per <= at - made[0] < (windows + 1) * per for at in made)
            rows.append([f"{name}, {place}", f"{per:g} s", worst, f"{100 * counted / (MOST * windows):.1f} %"])
    print(f"## {PROCESSES} processes, {seconds:g} s, at most {MOST} in any window\n")
    table(["", "window", "most in any window", "used of what is allowed"], rows)


def _together(make: Make, url: str, name: str, per: float, seconds: float) -> list[float]:
    """Return all starts of all processes, in order."""
    spawn = multiprocessing.get_context("spawn")
    told, all_there = spawn.Queue(), spawn.Barrier(PROCESSES)
    args = make, url, name, per, seconds, all_there, told
    workers = [spawn.Process(target=starts_of, args=args) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    made = sorted(each for _ in workers for each in told.get())
    for worker in workers:
        worker.join()
    return made


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Give the available engines, by name."""
    with Server() as redis, tempfile.TemporaryDirectory() as home:
        yield {"memory": "memory://", "file": f"file://{Path(home)}/f", "disk": f"disk://{home}/d", "redis": redis.url}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    rounds, seconds = (2, 5.0) if options.quick else (options.rounds, options.seconds)
    print(f"{machine()}\n")
    with servers() as urls:
        exactness({name: url for name, url in urls.items() if name != "memory"}, seconds)
        pin()
        cost(urls, rounds, 100 if options.quick else 500)
