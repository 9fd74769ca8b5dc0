"""Tags on a Redis server: hits and sets with tags, the invalidation of a tag, and memory, compared with the peers.

Hits and sets are measured in turns on one core, with the server on another: one thread that blocks, and 100 tasks, each
with keys of its own. Then a tag is invalidated that many entries carry. cashews stores the keys of each tag, and
deletes them a hundred at a time. dogpile.cache has no tags: its caller names all keys, one by one or all in one call.

The entries of cashews are written as it writes them, but in pipelines: one by one, a million would take long. Ours are
stored by `set_many`, with several tags each, and the median of their invalidations counts.

`--memory`: what entries with and without tags take on the server, and what is left of them in the end. Each 30 entries
have three tags of their own, and then the first half of the tags is invalidated. Tags are stored for an hour at least.
Here that is twice the entries' ttl, so that the program sees their end.

    python benchmarks/tags.py [--quick] [--rounds 15] [--most 1000000]
    python benchmarks/tags.py --memory [--quick] [--entries 1000000] [--ttl 300]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import cashews
import redis.asyncio
from _measure import interleaved, machine, pin, table
from _redis import Server, eventually, on_the_wire
from dogpile.cache import make_region
from redis_hits import CONNECTIONS, TTL, VALUE, sample

import stampede.algorithm.tags
import stampede.model.tags
from stampede import Cache

TAGS = ("all", "user:{number}", "kind")
NUMBERS = (0, 1, 3)
SIZES = (100, 10_000, 1_000_000)
ONE_BY_ONE = 10_000  # the most keys that dogpile.cache deletes one by one: a million would take minutes
TASKS = 100
BATCH = 1_000
REPEATS = 5  # tags of each of our entries that are invalidated
SHARE = 30  # entries that have the same three tags: ten times as many entries as tags

Call = Callable[..., Any]
Loop = asyncio.AbstractEventLoop


class Way(NamedTuple):
    """The calls of one library, by the number of tags: each gets the number of a key."""

    hits: Mapping[int, Call]
    sets: Mapping[int, Call]


# -- the ways -----------------------------------------------------------------------------------------------------


def named(number: int, tags: int) -> list[str]:
    return [tag.format(number=number) for tag in TAGS[:tags]]


def ours(server: Server, **options: Any) -> Way:
    cache = Cache(server.url, ttl=TTL, **options)

    def report(number: int) -> dict[str, Any]:
        return VALUE

    hits = {tags: cache.cached(version=f"{tags}-tags", tags=TAGS[:tags])(report) for tags in NUMBERS}
    sets: dict[int, Call] = {
        0: lambda number: cache.set(f"set-{number}", VALUE),
        3: lambda number: cache.set(f"set-{number}", VALUE, tags=named(number, 3)),
    }
    return Way(hits, sets)


def ours_async(server: Server, **options: Any) -> Way:
    cache = Cache(server.url, ttl=TTL, **options)

    async def report(number: int) -> dict[str, Any]:
        return VALUE

    hits = {tags: cache.cached(version=f"async-{tags}-tags", tags=TAGS[:tags])(report) for tags in NUMBERS}
    sets: dict[int, Call] = {
        0: lambda number: cache.aset(f"aset-{number}", VALUE),
        3: lambda number: cache.aset(f"aset-{number}", VALUE, tags=named(number, 3)),
    }
    return Way(hits, sets)


def keeper_of(server: Server) -> cashews.Cache:
    keeper = cashews.Cache()
    keeper.setup(server.url, max_connections=CONNECTIONS)
    return keeper


def of_cashews(server: Server) -> Way:
    """Return calls without `lock=True`, which takes two commands more per hit."""
    keeper = keeper_of(server)

    async def report(number: int) -> dict[str, Any]:
        return VALUE

    hits = {tags: keeper(ttl=TTL, key=f"hit-{tags}-{{number}}", tags=TAGS[:tags])(report) for tags in NUMBERS}
    sets: dict[int, Call] = {
        0: lambda number: keeper.set(f"set-{number}", VALUE, expire=TTL),
        3: lambda number: keeper.set(f"set-{number}", VALUE, expire=TTL, tags=named(number, 3)),
    }
    return Way(hits, sets)


def region_of(server: Server) -> Any:
    arguments = {"host": "127.0.0.1", "port": server.port, "redis_expiration_time": TTL}
    return make_region().configure("dogpile.cache.redis", expiration_time=TTL, arguments=arguments)


def of_dogpile(server: Server) -> Way:
    region = region_of(server)
    hits = {0: lambda number: region.get_or_create(f"dogpile-{number}", lambda: VALUE)}
    return Way(hits, {0: lambda number: region.set(f"dogpile-set-{number}", VALUE)})


# -- hits and sets ------------------------------------------------------------------------------------------------


def commands(server: Server, loop: Loop) -> None:
    def waiting(way: Way) -> Way:
        def wait(call: Call) -> Call:
            return lambda number: loop.run_until_complete(call(number))

        return Way(*({tags: wait(call) for tags, call in calls.items()} for calls in way))

    ways = {
        "stampede": ours(server),
        "stampede, async": waiting(ours_async(server)),
        "cashews": waiting(of_cashews(server)),
        "dogpile.cache": of_dogpile(server),
    }

    def sent(call: Call | None) -> str:
        if call is None:
            return ""
        for number in (0, 0, 1, 1):
            call(number)  # connections are made, scripts and tags known
        with server.counted() as counts:
            call(1)
        return spelled(counts)

    rows = [
        [name, *(sent(way.hits.get(tags)) for tags in NUMBERS), *(sent(way.sets.get(tags)) for tags in (0, 3))]
        for name, way in ways.items()
    ]
    print("## commands on the wire\n")
    table(COLUMNS, rows)


COLUMNS = ["", "hit, no tags", "1 tag", "3 tags", "set, no tags", "3 tags"]


def spelled(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in on_the_wire(counts).items()) or "none"


def figures(ways: Mapping[str, Way], base: str, took: Mapping[tuple[str, str, int], float]) -> None:
    """Print microseconds per call, and how many of the plain GET's that is."""

    def cell(*key: Any) -> str:
        if key not in took:
            return ""
        ratio = took[key] / took[base, "hits", 0]
        return f"{took[key]:.4g} ({ratio:.2g} x)" if ratio < 10 else f"{took[key]:.4g} ({ratio:.0f} x)"

    rows = [
        [name, *(cell(name, "hits", tags) for tags in NUMBERS), *(cell(name, "sets", tags) for tags in (0, 3))]
        for name in ways
    ]
    table(COLUMNS, rows)


def calls_of(ways: Mapping[str, Way]) -> Iterator[tuple[tuple[str, str, int], Call]]:
    for name, way in ways.items():
        for verb, calls in (("hits", way.hits), ("sets", way.sets)):
            for tags, call in calls.items():
                yield (name, verb, tags), call


def stored(server: Server) -> bytes:
    """Store the bytes of one of our entries under a key of their own, for a plain GET, and return that key."""
    client = server.client()
    key = next(key for key in client.scan_iter(count=10_000) if b"0-tags:" in key and not key.startswith(b"{stampede}"))
    client.set(b"same bytes", client.get(key))
    return b"same bytes"


def blocking(server: Server, rounds: int, number: int) -> None:
    near = ours(server, local=True)
    ways = {"stampede": ours(server), "stampede, local=True": near, "dogpile.cache": of_dogpile(server)}
    for _, call in calls_of(ways):
        for _ in range(3):
            call(0)
    for call in near.hits.values():  # there are no tickets before there are news
        eventually(lambda call=call: sample(lambda: call(0), 10, time.perf_counter)() < 20.0)
    client, key, base = server.client(), stored(server), "redis.Redis.get"
    ways = {base: Way({0: lambda number: client.get(key)}, {}), **ways}
    samples = {}
    for what, call in calls_of(ways):
        many = 100 * number if what[:2] == ("stampede, local=True", "hits") else number
        samples[what] = sample(lambda call=call: call(0), many, time.perf_counter)
    print("## one thread: µs per call, and how many GETs that is\n")
    figures(ways, base, interleaved(samples, rounds))


def suspending(server: Server, rounds: int, number: int, loop: Loop) -> None:
    pool = redis.asyncio.BlockingConnectionPool(port=server.port, max_connections=CONNECTIONS, timeout=None)
    client, key, base = redis.asyncio.Redis(connection_pool=pool), stored(server), "redis.asyncio GET"
    ways = {
        base: Way({0: lambda number: client.get(key)}, {}),
        "stampede": ours_async(server),
        "stampede, local=True": ours_async(server, local=True),
        "cashews": of_cashews(server),
    }

    async def together(call: Callable[[int], Awaitable[Any]], each: int) -> float:
        async def task(mine: int) -> None:
            for _ in range(each):
                await call(mine)

        begin = time.perf_counter()
        await asyncio.gather(*map(task, range(TASKS)))
        return (time.perf_counter() - begin) / (each * TASKS) * 1e6

    def measured(call: Call, each: int) -> Callable[[], float]:
        return lambda: loop.run_until_complete(together(call, each))

    samples = {}
    for what, call in calls_of(ways):
        near = what[:2] == ("stampede, local=True", "hits")
        loop.run_until_complete(together(call, 3))
        if near:
            eventually(lambda call=call: loop.run_until_complete(together(call, 10)) < 10.0)
        samples[what] = measured(call, max((10 * number if near else number) // TASKS, 1))
    print(f"## {TASKS} tasks, each with keys of its own: µs per call, and how many GETs that is\n")
    figures(ways, base, interleaved(samples, rounds))
    loop.run_until_complete(client.aclose())


# -- the invalidation of a tag ------------------------------------------------------------------------------------


def batches(size: int) -> Iterator[range]:
    return (range(first, min(first + BATCH, size)) for first in range(0, size, BATCH))


def gone(found: object) -> None:
    if found:
        raise SystemExit(f"an invalidated entry is still there: {found!r}")


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


async def timed_async(work: Awaitable[object]) -> float:
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


Ends = Callable[[int], dict[str, float]]
"""Stores so many entries, and returns the seconds that it takes to invalidate all of them, by names of ways."""


def ends_of_ours(server: Server, loop: Loop) -> Ends:
    cache = Cache(server.url, ttl=TTL)
    cache.invalidate_tags("warm")
    loop.run_until_complete(cache.ainvalidate_tags("warm"))

    def measure(size: int) -> dict[str, float]:
        tags = [f"tag-{number}" for number in range(2 * REPEATS)]
        for some in batches(size):
            cache.set_many({f"key-{number}": VALUE for number in some}, tags=tags)
        ends = [f"key-{size - 1}", "key-0"]
        assert len(cache.get_many(ends)) == 2
        took = [timed(lambda tag=tag: cache.invalidate_tags(tag)) for tag in tags[:REPEATS]]
        gone(cache.get_many(ends))
        atook = [loop.run_until_complete(timed_async(cache.ainvalidate_tags(tag))) for tag in tags[REPEATS:]]
        return {"stampede": median(took), "stampede, async": median(atook)}

    return measure


def as_cashews(server: Server, loop: Loop, keeper: cashews.Cache, tag: str, ttl: float) -> Call:
    """Return a function of a number and of tags, which returns the commands by which cashews stores such an entry.
    `tag` is the tags' template."""

    async def report(number: int) -> dict[str, Any]:
        return VALUE

    ask, client = keeper(ttl=ttl, key="key-{number}", tags=[tag])(report), server.client()
    loop.run_until_complete(ask(0))
    blob, carriers = client.get("key-0"), f"_tag:{tag.format(number=0)}"
    assert blob is not None and client.smembers(carriers) == {b"key-0"}, client.keys()
    client.delete("key-0", carriers)
    ms = int(ttl * 1000)

    def sent(number: int, tags: Sequence[str]) -> list[Sequence[Any]]:
        commands: list[Sequence[Any]] = [("SET", f"key-{number}", blob, "PX", ms)]
        for each in tags:
            commands += [("SADD", f"_tag:{each}", f"key-{number}"), ("PEXPIRE", f"_tag:{each}", ms)]
        return commands

    return sent


def ends_of_cashews(server: Server, loop: Loop) -> Ends:
    keeper, client = keeper_of(server), server.client()
    entry = as_cashews(server, loop, keeper, "tag", TTL)

    def measure(size: int) -> dict[str, float]:
        for some in batches(size):
            send(client, [command for number in some for command in entry(number, ["tag"])])
        assert client.scard("_tag:tag") == size
        took = loop.run_until_complete(timed_async(keeper.delete_tags("tag")))
        gone(client.exists("key-0", f"key-{size - 1}", "_tag:tag"))
        return {"cashews": took}

    return measure


def send(client: Any, some: Sequence[Sequence[Any]]) -> None:
    pipeline = client.pipeline(transaction=False)
    for command in some:
        pipeline.execute_command(*command)
    pipeline.execute()


def ends_of_dogpile(server: Server, loop: Loop) -> Ends:
    region = region_of(server)

    def fill(size: int) -> list[str]:
        for some in batches(size):
            region.set_multi({f"dogpile-{number}": VALUE for number in some})
        return [f"dogpile-{number}" for number in range(size)]

    def one_by_one(keys: list[str]) -> None:
        for key in keys:
            region.delete(key)

    def measure(size: int) -> dict[str, float]:
        keys = fill(size)
        took = {"dogpile.cache, delete_multi of all keys": timed(lambda: region.delete_multi(keys))}
        if size <= ONE_BY_ONE:
            keys = fill(size)
            took["dogpile.cache, delete of each key"] = timed(lambda: one_by_one(keys))
        gone(server.client().exists(keys[0], keys[-1]))
        return took

    return measure


def ends(loop: Loop, rounds: int, most: int) -> None:
    sizes = [size for size in SIZES if size <= most]
    took: dict[str, dict[int, list[float]]] = {}
    for size in sizes:
        for _ in range(max(rounds if size <= 100 else rounds // 3 if size <= 10_000 else 1, 1)):
            for ends_of in (ends_of_ours, ends_of_cashews, ends_of_dogpile):
                with Server(core=0) as server:  # the entries of the others would slow down this one's
                    measure = ends_of(server, loop)
                    gc.collect()
                    for name, seconds in measure(size).items():
                        took.setdefault(name, {}).setdefault(size, []).append(seconds)
    print("## a tag is invalidated: ms, by the number of entries that carry it\n")
    rows = [
        [name, *(f"{median(by_size[size]) * 1000:,.3g}" if size in by_size else "" for size in sizes)]
        for name, by_size in took.items()
    ]
    table(["", *(f"{size:,}" for size in sizes)], rows)


# -- memory -------------------------------------------------------------------------------------------------------


class Scale:
    """What a server holds, beyond what it held at first."""

    def __init__(self, server: Server, name: str, entries: int, ttl: float) -> None:
        self._name, self._entries, self._end = name, entries, time.monotonic() + ttl
        self._client = server.client()
        self._keys, self._bytes = self.keys, self._used()
        self.rows: list[list[str]] = []

    @property
    def keys(self) -> int:
        return int(self._client.dbsize())

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def note(self, what: str, *, live: bool = False) -> None:
        """Note what the server holds now. With `live`, none of the entries may have reached its ttl."""
        if live and time.monotonic() >= self._end:
            raise SystemExit("the first entries have ended before all was measured: give a longer --ttl")
        keys, used = self.keys - self._keys, self._used() - self._bytes
        self.rows.append([f"{self._name}, {what}", f"{keys:,}", f"{used:,}", f"{used / self._entries:,.1f}"])

    def falls(self, most: int, seconds: float) -> None:
        """Wait until so many keys are left, beyond those of the beginning."""
        end = time.monotonic() + seconds
        while self.keys - self._keys > most:
            if time.monotonic() > end:
                raise SystemExit(f"{self.keys - self._keys:,} keys are left after {seconds:.0f} s, and not {most:,}")
            time.sleep(0.2)


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """Have tags stored for so long at least, and not for an hour."""
    modules: tuple[Any, ...] = stampede.algorithm.tags, stampede.model.tags
    usual = stampede.model.tags.LASTING
    for module in modules:
        module.LASTING = seconds
    try:
        yield
    finally:
        for module in modules:
            module.LASTING = usual


def groups(entries: int) -> Iterator[tuple[range, list[str]]]:
    """Return the entries that have the same tags, with these tags."""
    tag = count()
    for first in range(0, entries, SHARE):
        yield range(first, min(first + SHARE, entries)), [f"tag-{next(tag)}" for _ in range(3)]


def memory_of_ours(entries: int, ttl: float) -> list[list[str]]:
    rows = []
    for tagged in (False, True):
        with Server(core=0) as server, Cache(server.url, ttl=ttl) as cache, lasting(2 * ttl):
            cache.get_or_compute("first", lambda: 1, ttl=0.1)
            time.sleep(0.2)
            client = server.client()
            eventually(lambda client=client: not any(b"first" in key for key in client.scan_iter()))
            scale, names = Scale(server, "stampede", entries, ttl), list[str]()
            for some, tags in groups(entries):
                cache.set_many({f"user:{number}": VALUE for number in some}, tags=tags if tagged else [])
                names += tags if tagged else []
            scale.note("3 tags" if tagged else "no tags", live=True)
            if tagged:
                half = names[: len(names) // 2]
                for first in range(0, len(half), 100):
                    cache.invalidate_tags(*half[first : first + 100])
                scale.note("half of the tags invalidated", live=True)
                scale.falls(len(names), 1.8 * ttl)  # the server removes them by and by
                scale.note("after the ttl of the entries")
                scale.falls(0, 2 * ttl + 60)
                scale.note("after the end of the tags")
            rows += scale.rows
    return rows


def memory_of_cashews(entries: int, ttl: float, loop: Loop) -> list[list[str]]:
    with Server(core=0) as server:
        keeper, client = keeper_of(server), server.client()
        entry = as_cashews(server, loop, keeper, "tag-{number}", ttl)
        scale, names = Scale(server, "cashews", entries, ttl), list[str]()
        for some, tags in groups(entries):
            send(client, [command for number in some for command in entry(number, tags)])
            names += tags
        scale.note("3 tags", live=True)
        loop.run_until_complete(keeper.delete_tags(*names[: len(names) // 2]))
        scale.note("half of the tags invalidated", live=True)
        scale.falls(0, ttl + 60)
        scale.note("after the ttl of the entries")
        return scale.rows


def memory(entries: int, ttl: float, loop: Loop) -> None:
    print(f"## {entries:,} entries, {3 * -(-entries // SHARE):,} tags\n")
    rows = [*memory_of_ours(entries, ttl), *memory_of_cashews(entries, ttl, loop)]
    table(["on the server", "keys", "bytes", "bytes per entry"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most entries that carry an invalidated tag")
    parser.add_argument("--memory", action="store_true", help="measure memory, and nothing else")
    parser.add_argument("--entries", type=int, default=1_000_000, help="with --memory")
    parser.add_argument("--ttl", type=float, default=300.0, help="of these entries: they take a minute or two")
    options = parser.parse_args()
    rounds, number = (3, 50) if options.quick else (options.rounds, 400)
    loop = asyncio.new_event_loop()
    pin()
    if options.memory:
        entries, ttl = (3_000, 5.0) if options.quick else (options.entries, options.ttl)
        print(f"# Memory of tags on Redis: {machine()}\n")
        memory(entries, ttl, loop)
        return
    print(f"# Tags on Redis: {machine()}, medians of {rounds} interleaved rounds\n")
    with Server(core=0) as server:
        commands(server, loop)
        blocking(server, rounds, number)
        suspending(server, rounds, 10 * number, loop)
    ends(loop, rounds, min(options.most, 1_000) if options.quick else options.most)
    loop.run_until_complete(asyncio.sleep(0))


if __name__ == "__main__":
    main()
