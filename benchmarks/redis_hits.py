"""Hits and misses on a Redis server: the commands and the time, compared with the peers and with a plain GET.

The server counts the commands. Times are for one small dict, as the users of each cache would ask for it, in turns on
one core, with the server on another. The GET of redis-py reads the bytes that we store for that dict. Async: many
tasks, each of which asks for its own key again and again. `redis.asyncio` gets a pool that waits (its default pool
raises when all connections are taken), of the size that was fastest here.

    python benchmarks/redis_hits.py [--quick] [--rounds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import aiocache
import cashews
import redis.asyncio
import redis_lock
from _measure import interleaved, machine, pin, table
from _redis import Server, eventually, on_the_wire
from dogpile.cache import make_region

from stampede import Cache
from stampede.engines.redis import RedisEngine
from stampede.model.ports import Ask
from stampede.runtime.colour import run_blocking

VALUE = {"id": 1, "name": "bob", "tags": ["a", "b"], "price": 1.5}
TTL = 600
CONNECTIONS = 10

Way = Callable[[int], Any]


# -- the ways to ask: f(n) is a hit if n was asked before ---------------------------------------------------------


def ours(server: Server, name: str, **options: Any) -> Way:
    cache = Cache(server.url, ttl=TTL, **options)

    def report(number: int) -> dict[str, Any]:
        return VALUE

    return cache.cached(version=name)(report)


def ours_async(server: Server, name: str, **options: Any) -> Callable[[int], Awaitable[Any]]:
    cache = Cache(server.url, ttl=TTL, **options)

    async def report(number: int) -> dict[str, Any]:
        return VALUE

    return cache.cached(version=name)(report)


def of_dogpile(server: Server) -> Way:
    region = make_region().configure(
        "dogpile.cache.redis",
        expiration_time=TTL,
        arguments={"host": "127.0.0.1", "port": server.port, "distributed_lock": True, "thread_local_lock": False},
    )
    return lambda number: region.get_or_create(f"dogpile-{number}", lambda: VALUE)


def of_redis_lock(server: Server) -> Way:
    """Return a way that guards a computation as the README of python-redis-lock does, with pickle."""
    import pickle

    client = server.client()

    def ask(number: int) -> Any:
        key = f"redis-lock-{number}"
        kept = client.get(key)
        if kept is not None:
            return pickle.loads(kept)
        with redis_lock.Lock(client, key, expire=10, auto_renewal=True):
            kept = client.get(key)
            if kept is not None:
                return pickle.loads(kept)
            client.set(key, pickle.dumps(VALUE), ex=TTL)
            return VALUE

    return ask


def of_aiocache(server: Server) -> Callable[[int], Awaitable[Any]]:
    async def report(number: int) -> dict[str, Any]:
        return VALUE

    return aiocache.cached_stampede(
        cache=aiocache.RedisCache,
        port=server.port,
        ttl=TTL,
        lease=2,
        serializer=aiocache.serializers.PickleSerializer(),
        connection_pool_class=redis.asyncio.BlockingConnectionPool,
        connection_pool_kwargs={"timeout": None},
        pool_max_size=CONNECTIONS,
    )(report)


def of_cashews(server: Server) -> Callable[[int], Awaitable[Any]]:
    keeper = cashews.Cache()
    keeper.setup(server.url, max_connections=CONNECTIONS)

    async def report(number: int) -> dict[str, Any]:
        return VALUE

    return keeper(ttl=TTL, lock=True)(report)


def get(server: Server) -> Way:
    client = server.client()
    return lambda number: client.get(b"same bytes")


def keep_same_bytes(server: Server, name: str) -> tuple[str, int]:
    """Store the bytes of `ours` of that name under the key of the plain GET. Return the engine's key, and their
    size."""
    client = server.client()
    (key,) = [key for key in client.scan_iter() if f"@{name}:".encode() in key and not key.startswith(b"{stampede}")]
    client.set(b"same bytes", client.get(key))
    return key.partition(b"}:")[2].decode(), int(client.strlen(b"same bytes"))


# -- commands -----------------------------------------------------------------------------------------------------


def commands(server: Server, loop: asyncio.AbstractEventLoop) -> None:
    def waiting(ask: Callable[[int], Awaitable[Any]]) -> Way:
        return lambda number: loop.run_until_complete(ask(number))

    ways: dict[str, Way] = {
        "stampede": ours(server, "counted"),
        "stampede, async": waiting(ours_async(server, "acounted")),
        "stampede, local=True": ours(server, "near", local=True),
        "dogpile.cache, distributed_lock": of_dogpile(server),
        "python-redis-lock, get and set": of_redis_lock(server),
        "cashews, lock=True": waiting(of_cashews(server)),
        "aiocache.cached_stampede": waiting(of_aiocache(server)),
    }
    rows = []
    for name, ask in ways.items():
        for number in (0, 0, 1, 1):
            ask(number)  # connections are made, scripts known
        with server.counted() as miss:
            ask(2)
        ask(2)
        with server.counted() as hit:
            ask(2)
        rows.append([name, on_the_wire(hit).total(), on_the_wire(miss).total(), spelled(miss)])
    print("## commands on the wire\n")
    table(["", "hit", "miss", "the miss"], rows)


def spelled(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in on_the_wire(counts).items())


# -- time ---------------------------------------------------------------------------------------------------------


def sample(call: Callable[[], object], number: int, clock: Callable[[], float]) -> Callable[[], float]:
    """Return microseconds per call."""

    def measure() -> float:
        begin = clock()
        for _ in range(number):
            call()
        return (clock() - begin) / number * 1e6

    return measure


def blocking(server: Server, rounds: int, number: int) -> None:
    fresh = count(1_000)
    hit, missing, near = ours(server, "hit"), ours(server, "miss"), ours(server, "near-hit", local=True)
    dogpile, locked, plain = of_dogpile(server), of_redis_lock(server), get(server)
    for ask in (hit, dogpile, locked, near, near):
        ask(0)
    raw_key, size = keep_same_bytes(server, "hit")
    raw = RedisEngine(server.url)  # closed when it is garbage-collected
    engine = raw.blocking.claims
    eventually(
        lambda: sample(lambda: near(0), 10, time.perf_counter)() < 5.0
    )  # there are no tickets before there are news
    base = "redis.Redis.get"
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        base: (lambda: plain(0), number),
        "stampede's engine: claim": (
            lambda: run_blocking(engine.claim(raw_key, b"a token.", Ask(10.0, draw=0.5))),
            number,
        ),
        "stampede: hit": (lambda: hit(0), number),
        "stampede: hit, local=True": (lambda: near(0), 100 * number),
        "stampede: miss": (lambda: missing(next(fresh)), number),
        "dogpile.cache: hit": (lambda: dogpile(0), number),
        "dogpile.cache, distributed_lock: miss": (lambda: dogpile(next(fresh)), number),
        "python-redis-lock: miss": (lambda: locked(next(fresh)), max(number // 10, 1)),
    }
    targets = {"stampede: hit": "1.3", "stampede: miss": "2.6"}
    took, worked = (
        interleaved({name: sample(*call, clock) for name, call in calls.items()}, rounds)
        for clock in (time.perf_counter, time.process_time)
    )
    print(f"## one thread: a dict of {size} bytes\n")
    rows = [
        [name, f"{took[name]:.4g}", f"{took[name] / took[base]:.3g}", targets.get(name, ""), f"{worked[name]:.4g}",
         f"{worked[name] / worked[base]:.3g}"]
        for name in calls
    ]  # fmt: skip
    table(["", "µs", "x GET", "target", "of it CPU, µs", "x GET"], rows)


def suspending(server: Server, rounds: int, number: int, loop: asyncio.AbstractEventLoop, tasks: int) -> None:
    """Measure answers per second, of so many tasks together."""
    pool = redis.asyncio.BlockingConnectionPool(port=server.port, max_connections=CONNECTIONS, timeout=None)
    client = redis.asyncio.Redis(connection_pool=pool)
    raw_key, _ = keep_same_bytes(server, "hit")
    hit, near = ours_async(server, "ahit"), ours_async(server, "anear", local=True)
    keeper, stored = of_cashews(server), of_aiocache(server)

    async def together(ask: Callable[[int], Awaitable[Any]], number: int) -> float:
        each = max(number // tasks, 1)

        async def task(key: int) -> None:
            for _ in range(each):
                await ask(key)

        begin = time.perf_counter()
        await asyncio.gather(*map(task, range(tasks)))
        return each * tasks / (time.perf_counter() - begin)

    def measured(ask: Callable[[int], Awaitable[Any]], number: int) -> Callable[[], float]:
        loop.run_until_complete(together(ask, 2 * tasks))
        return lambda: loop.run_until_complete(together(ask, number))

    raw = RedisEngine(server.url)
    engine, question = raw.suspending.claims, Ask(10.0, draw=0.5)
    ways = {
        "redis.asyncio GET": measured(lambda _: client.get(b"same bytes"), number),
        "stampede's engine: claim": measured(lambda _: engine.claim(raw_key, b"a token.", question), number),
        "stampede: hit": measured(hit, number),
        "stampede: hit, local=True": measured(near, 20 * number),
        "cashews, lock=True: hit": measured(keeper, number // 10),
        "aiocache.cached_stampede: hit": measured(stored, number // 10),
    }
    figures = interleaved(ways, rounds)
    print(f"## {tasks:,} tasks, each with a key of its own\n")
    base = figures["redis.asyncio GET"]
    rows = [[name, f"{rate:,.0f}", f"{rate / base:.3g}", "5" if name == "stampede: hit" else ""]
            for name, rate in figures.items()]  # fmt: skip
    table(["", "answers per second", "x GET", "target"], rows)
    loop.run_until_complete(client.aclose())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds, number = (3, 50) if options.quick else (options.rounds, 400)
    pin()
    print(f"# Hits on Redis: {machine()}, medians of {rounds} interleaved rounds\n")
    with Server(core=0) as server:
        loop = asyncio.new_event_loop()
        commands(server, loop)
        blocking(server, rounds, number)
        for tasks in (100, 1_000):
            suspending(server, rounds, 10 * number, loop, tasks)
        loop.run_until_complete(asyncio.sleep(0))


if __name__ == "__main__":
    main()
