"""The server's CPU for a hit, a miss and a waiter on Redis, compared with the peers and with a plain GET.

A fleet shares the server, so the server's CPU limits the fleet. It is the time that the kernel gave to the server's
main thread (`/proc/PID/schedstat`) per call: for calls one by one from one thread, and for as many at once as each way
can do (a pipeline of 100; 100 tasks, each with its own key). The GETs are of our own keys and bytes. A waiter is a
cache (as a process has one) that asks for a key that another one computes.

    python benchmarks/server_cost.py [--quick] [--rounds 9]
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import redis.asyncio
from _measure import interleaved, machine, pin, table
from _redis import Server
from redis_hits import CONNECTIONS, of_cashews, of_dogpile, ours, ours_async

from stampede import Cache

TASKS = 100
WAITERS = 20

Way = Callable[[int], Any]


class Meter:
    """A meter of the server's CPU, in microseconds per call."""

    def __init__(self, server: Server) -> None:
        self._file = Path(f"/proc/{server._process.pid}/schedstat")

    def spent(self) -> float:
        return int(self._file.read_text().split()[0]) / 1000

    def of(self, calls: Callable[[], object], number: int) -> Callable[[], float]:
        def measure() -> float:
            before = self.spent()
            calls()
            return (self.spent() - before) / number

        return measure


def one_by_one(ask: Way, keys: Callable[[], int], number: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(number):
            ask(keys())

    return calls


def at_once(
    loop: asyncio.AbstractEventLoop, ask: Callable[[int], Awaitable[Any]], keys: Callable[[int], int], number: int
) -> Callable[[], None]:
    """Call with `TASKS` tasks. `keys` gives the next key of each."""

    async def task(mine: int) -> None:
        for _ in range(number // TASKS):
            await ask(keys(mine))

    async def all_of_them() -> None:
        await asyncio.gather(*map(task, range(TASKS)))

    return lambda: loop.run_until_complete(all_of_them())


def pipelined(server: Server, number: int, keys: list[bytes], *names: str) -> Callable[[], None]:
    """Send these commands for each key in one pipeline."""
    client = server.client()

    def calls() -> None:
        for _ in range(number // len(keys)):
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                for name in names:
                    pipeline.execute_command(name, key)
            pipeline.execute()

    return calls


def entries(client: Any, name: str) -> list[bytes]:
    """Return the keys of the entries that `ours` of that name stores."""
    keys = client.scan_iter(count=10_000)
    return [key for key in keys if f"@{name}:".encode() in key and not key.startswith(b"{stampede}")]


def waiting(server: Server) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: many waiters for one computation, and the computation alone."""
    caches = [Cache(server.url, ttl=600) for _ in range(WAITERS + 1)]
    fresh = count()
    for cache in caches:
        for warm in ("warm", "warm"):
            cache.get_or_compute(warm, lambda: 1)

    def herd(waiters: list[Cache]) -> None:
        key, begun = f"waited-for-{next(fresh)}", threading.Event()

        def compute() -> int:
            begun.set()
            time.sleep(0.3)
            return 1

        holder = threading.Thread(target=lambda: caches[0].get_or_compute(key, compute))
        holder.start()
        begun.wait()
        others = [threading.Thread(target=lambda each=each: each.get_or_compute(key, compute)) for each in waiters]
        for each in others:
            each.start()
        for each in (*others, holder):
            each.join()

    return lambda: herd(caches[1:]), lambda: herd([])


def measure(server: Server, loop: asyncio.AbstractEventLoop, rounds: int, number: int) -> None:
    meter, fresh = Meter(server), count(1_000_000)
    zero, new = (lambda: 0), lambda *_: next(fresh)
    hit, missing, dogpile = ours(server, "hit"), ours(server, "miss"), of_dogpile(server)
    ahit, amissing, keeper = ours_async(server, "ahit"), ours_async(server, "amiss"), of_cashews(server)
    pool = redis.asyncio.BlockingConnectionPool(port=server.port, max_connections=CONNECTIONS, timeout=None)
    aplain = redis.asyncio.Redis(connection_pool=pool)
    for _ in range(20):  # connections are made, scripts known, and what mostly hits does so
        hit(0)
        dogpile(0)
        for ask in (ahit, keeper):
            at_once(loop, ask, lambda mine: mine, TASKS)()
    client = server.client()
    (key,) = entries(client, "hit")
    keys = entries(client, "ahit")  # what is asked for by its name costs what that name costs, too
    size = client.strlen(key)

    def plain(_: int) -> Any:
        return client.get(key)

    def look(_: int) -> Any:
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("PTTL", key)
        pipeline.execute_command("GETEX", key)
        return pipeline.execute()

    def own(mine: int) -> int:
        return mine

    many = 10 * number  # of what is over in no time
    singly: dict[str, tuple[Callable[[], None], int]] = {
        "GET": (one_by_one(plain, zero, number), number),
        "PTTL and GETEX": (one_by_one(look, zero, number), number),
        "stampede: hit": (one_by_one(hit, zero, number), number),
        "dogpile.cache: hit": (one_by_one(dogpile, zero, number), number),
        "stampede: miss": (one_by_one(missing, new, number), number),
        "dogpile.cache, distributed_lock: miss": (one_by_one(dogpile, new, number), number),
    }
    together: dict[str, tuple[Callable[[], None], int]] = {
        "GET": (pipelined(server, many, keys, "GET"), many),
        "PTTL and GETEX": (pipelined(server, many, keys, "PTTL", "GETEX"), many),
        "redis.asyncio GET": (at_once(loop, lambda mine: aplain.get(keys[mine]), own, number), number),
        "stampede: hit": (at_once(loop, ahit, own, many), many),
        "cashews, lock=True: hit": (at_once(loop, keeper, own, number), number),
        "stampede: miss": (at_once(loop, amissing, new, number), number),
        "cashews, lock=True: miss": (at_once(loop, keeper, new, number), number),
    }
    # One after the other: what is sent one by one is not to be slowed by what is sent at once.
    one, all_ = (
        interleaved({name: meter.of(*way) for name, way in ways.items()}, rounds) for ways in (singly, together)
    )
    print(f"## an entry of {size} bytes\n")
    rows = [
        [name, *figures(one.get(name), one["GET"]), *figures(all_.get(name), all_["GET"]),
         f"{1e6 / all_[name]:,.0f}" if name in all_ else ""]
        for name in dict.fromkeys([*one, *all_])
    ]  # fmt: skip
    table(["server CPU, µs per call", "one by one", "x GET", "at once", "x GET", "one server's most, per second"], rows)


def figures(value: float | None, base: float) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value:.3g}", f"{value / base:.2f}")


def waiters(server: Server, rounds: int) -> None:
    meter = Meter(server)
    herd, alone = waiting(server)
    herd()
    found = interleaved({"herd": meter.of(herd, 1), "alone": meter.of(alone, 1)}, rounds)
    with server.counted() as commands:
        herd()
    wire = sum(n for name, n in commands.items() if not name.startswith("lua ") and name != "PING")
    print(f"## {WAITERS} caches wait for what one computes in 0.3 s\n")
    row = ["stampede", f"{(found['herd'] - found['alone']) / WAITERS:.3g}", f"{wire / (WAITERS + 1):.2f}"]
    table(["", "server CPU, µs per waiter", "commands per caller"], [row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rounds, number = (3, 200) if options.quick else (options.rounds, 1_000)
    pin()
    print(f"# What Redis works for: {machine()}, medians of {rounds} interleaved rounds\n")
    with Server(core=0) as server:
        loop = asyncio.new_event_loop()
        measure(server, loop, rounds, number)
        waiters(server, rounds)
        loop.run_until_complete(asyncio.sleep(0))


if __name__ == "__main__":
    main()
