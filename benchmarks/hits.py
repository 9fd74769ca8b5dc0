"""Hits inside the process: what each cache adds to a call of a function whose value is stored.

Measured with one argument, with three arguments of which two are keywords, and on a method; sync and async; through the
disk engine; and the costs before the first hit. Every way is called as its users would, in turns on one core. Medians
are printed as nanoseconds per call, including the loop (about 10), and as multiples of two peers: `lru_cache`, which
never expires and never coordinates, and cachebox, the fastest one with a ttl.

    python benchmarks/hits.py [--quick] [--rounds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import tempfile
import threading
import time
import timeit
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import aiocache
import cachebox
import cachetools
import cachetools.keys
import cashews
import diskcache
from _measure import interleaved, machine, pin, table
from dogpile.cache import make_region
from dogpile.cache.util import kwarg_function_key_generator
from theine import Memoize

from stampede import Cache

Decorator = Callable[[Any], Any]

SHAPES = {"f(1)": "way(one)", "f(1, b=2, c=3)": "way(one, b=two, c=three)", "obj.m(1)": "way.m(one)"}
ARGUMENTS = "one, two, three = 1, 2, 3"
SIZE, TTL = 1_000, 600


def report(a: int, b: int = 0, c: int = 0) -> tuple[int, int, int]:
    return a, b, c


async def areport(a: int, b: int = 0, c: int = 0) -> tuple[int, int, int]:
    return a, b, c


class Shop:
    """A class with a cached method. Our key is its name; peers use the object itself, by its identity."""

    def __init__(self) -> None:
        self.name = "corner"
        self.cache: Any = cachetools.TTLCache(SIZE, TTL)

    def __stampede_key__(self) -> str:
        return self.name


def on_function(decorate: Decorator, function: Any = report) -> Any:
    """Return a decorated copy of the function, so that no two ways share a wrapper or a cache."""
    twin = type(function)(function.__code__, globals(), function.__name__, function.__defaults__, function.__closure__)
    twin.__annotations__ = dict(function.__annotations__)
    return decorate(twin)


def on_method(decorate: Decorator, function: Any = report) -> Any:
    """Return an object whose class has the decorated method `m`."""

    def m(self: Shop, a: int) -> tuple[int, int, int]:
        return a, 0, 0

    async def am(self: Shop, a: int) -> tuple[int, int, int]:
        return a, 0, 0

    method = m if function is report else am
    method.__name__, method.__qualname__ = "m", "Shop.m"
    decorated = decorate(method)
    kind = type("Shop", (Shop,), {"m": decorated})
    if hasattr(decorated, "__set_name__"):
        decorated.__set_name__(kind, "m")
    return kind()


# -- the ways -----------------------------------------------------------------------------------------------------


def sync_ways(folder: str) -> dict[str, dict[str, Any]]:
    """Return each cache on a function and on a method, except for what a cache can't do."""
    ours = Cache("memory://", ttl=TTL)
    region = make_region(function_key_generator=kwarg_function_key_generator).configure(
        "dogpile.cache.memory", expiration_time=TTL
    )
    disk = diskcache.Cache(folder)

    def locked(function: Any) -> Any:
        return cachetools.cached(cachetools.TTLCache(SIZE, TTL), cachetools.keys.typedkey, threading.Lock())(function)

    decorators: dict[str, tuple[Decorator | None, Decorator | None]] = {
        "stampede memory://": (ours.cached, ours.cached),
        "functools.lru_cache(typed)": (functools.lru_cache(SIZE, typed=True),) * 2,
        "cachebox.cached(TTLCache)": (lambda f: cachebox.cached(cachebox.TTLCache(SIZE, TTL))(f),) * 2,
        "cachetools TTLCache": (
            lambda f: cachetools.cached(cachetools.TTLCache(SIZE, TTL), cachetools.keys.typedkey)(f),
            cachetools.cachedmethod(lambda self: self.cache),
        ),
        "cachetools TTLCache, locked": (locked, None),
        "theine.Memoize": (lambda f: Memoize(SIZE, timedelta(seconds=TTL))(f),) * 2,
        "dogpile.cache memory": (region.cache_on_arguments(),) * 2,
        "diskcache.memoize_stampede": (diskcache.memoize_stampede(disk, TTL), None),
    }
    return {
        name: {"function": function and on_function(function), "method": method and on_method(method)}
        for name, (function, method) in decorators.items()
    }


def async_ways() -> dict[str, dict[str, Any]]:
    ours = Cache("memory://", ttl=TTL)
    keeper = cashews.Cache()
    keeper.setup(f"mem://?size={SIZE}")
    decorators: dict[str, Decorator] = {
        "stampede memory://": ours.cached,
        "cachebox.cached(TTLCache)": lambda f: cachebox.cached(cachebox.TTLCache(SIZE, TTL))(f),
        "theine.Memoize": lambda f: Memoize(SIZE, timedelta(seconds=TTL))(f),
        "aiocache.cached": lambda f: aiocache.cached(ttl=TTL)(f),
        "cashews": lambda f: keeper(ttl=TTL)(f),
        "cashews, lock=True": lambda f: keeper(ttl=TTL, lock=True, prefix="locked")(f),
    }
    return {
        name: {"function": on_function(decorate, areport), "method": on_method(decorate, areport)}
        for name, decorate in decorators.items()
    }


# -- the clock ----------------------------------------------------------------------------------------------------


def sync_sample(way: Any, call: str, number: int) -> Callable[[], float]:
    """Return a function that measures nanoseconds per call."""
    timer = timeit.Timer(call, f"way = given; {ARGUMENTS}", globals={"given": way})
    return lambda: timer.inner(iter(range(number)), time.perf_counter) / number * 1e9  # type: ignore[attr-defined]


def async_sample(way: Any, call: str, number: int, loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    source = f"""
async def sample(way, number, clock):
    {ARGUMENTS}
    begin = clock()
    for _ in range(number):
        await {call}
    return clock() - begin
"""
    made: dict[str, Callable[..., Awaitable[float]]] = {}
    exec(source, made)
    return lambda: loop.run_until_complete(made["sample"](way, number, time.perf_counter)) / number * 1e9


def number_of(sample: Callable[[int], float], seconds: float) -> int:
    """Return how many calls take about so long. The first of them fill the cache."""
    sample(2)
    return max(20, int(seconds * 1e9 / max(sample(50), 1.0)))


def measured(
    ways: dict[str, dict[str, Any]], sample: Callable[[Any, str, int], Callable[[], float]], rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Return nanoseconds by shape and way."""
    figures = {}
    for shape, call in SHAPES.items():
        kind = "method" if shape.startswith("obj") else "function"
        samples = {}
        for name, objects in ways.items():
            way = objects[kind]
            if way is not None:
                number = number_of(lambda n, way=way, call=call: sample(way, call, n)(), seconds)  # type: ignore[misc]
                samples[name] = sample(way, call, number)
        figures[shape] = interleaved(samples, rounds)
    return figures


def show(title: str, figures: dict[str, dict[str, float]], peers: dict[str, str]) -> None:
    print(f"## {title}\n")
    names = list(dict.fromkeys(name for ways in figures.values() for name in ways))
    rows = [[name, *(f"{ways[name]:,.0f}" if name in ways else "" for ways in figures.values())] for name in names]
    for peer, target in peers.items():
        ours = "stampede memory://"
        ratios = [f"{ways[ours] / ways[peer]:.2f}" for ways in figures.values()]
        rows.append([f"ours / {peer.split('(')[0]} (target {target})", *ratios])
    table(["ns per call", *figures], rows)


def on_disk(folder: str, rounds: int, seconds: float) -> None:
    """Measure hits of a small dict that another process could have stored."""
    value = {"id": 1, "name": "bob", "tags": ["a", "b"], "price": 1.5}
    near = Cache(f"disk://{folder}/ours", ttl=TTL, local=True)
    far = Cache(f"disk://{folder}/ours", ttl=TTL)
    disk = diskcache.Cache(f"{folder}/diskcache")
    disk.set(1, value)

    def decorated(decorate: Decorator) -> Any:
        def report(a: int) -> dict[str, Any]:
            return value

        return decorate(report)

    ways: dict[str, Any] = {
        "stampede disk://, local=True": decorated(functools.partial(near.cached, version="near")),
        "stampede disk://": decorated(functools.partial(far.cached, version="far")),
        "diskcache get": disk.get,
        "diskcache.memoize_stampede": decorated(diskcache.memoize_stampede(disk, TTL)),
    }
    samples = {}
    for name, way in ways.items():
        number = number_of(lambda n, way=way: sync_sample(way, "way(one)", n)(), seconds)  # type: ignore[misc]
        samples[name] = sync_sample(way, "way(one)", number)
    figures = interleaved(samples, rounds)
    assert far.stats().found, "the engine was not asked"
    print("## through the disk engine: a small dict, decoded except in the local tier\n")
    table(["µs per call", "f(1)"], [[name, f"{figure / 1e3:.2f}"] for name, figure in figures.items()])
    near.close()
    far.close()


def first_costs(rounds: int) -> None:
    """Measure the costs before the first hit: decoration, and a miss."""
    ours = Cache("memory://?entries=100000", ttl=TTL)
    decorators: dict[str, Decorator] = {
        "stampede memory://": ours.cached,
        "functools.lru_cache(typed)": functools.lru_cache(100_000, typed=True),
        "cachebox.cached(TTLCache)": lambda f: cachebox.cached(cachebox.TTLCache(100_000, TTL))(f),
        "cachetools TTLCache": lambda f: cachetools.cached(cachetools.TTLCache(100_000, TTL))(f),
    }

    def decoration(decorate: Decorator) -> Callable[[], float]:
        return lambda: timeit.timeit(lambda: on_function(decorate), number=20) / 20 * 1e6

    def miss(decorate: Decorator) -> Callable[[], float]:
        way, numbers = on_function(decorate), iter(range(10**9))
        way(-1)
        return lambda: timeit.timeit(lambda: way(next(numbers)), number=500) / 500 * 1e6

    decorated = interleaved({name: decoration(decorate) for name, decorate in decorators.items()}, rounds)
    missed = interleaved({name: miss(decorate) for name, decorate in decorators.items()}, rounds)
    print("## before the first hit\n")
    table(
        ["µs", "decoration", "miss"], [[name, f"{decorated[name]:.1f}", f"{missed[name]:.1f}"] for name in decorators]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a look, not a measure")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds, seconds = (3, 0.003) if options.quick else (options.rounds, 0.02)
    pin()
    print(f"# Hits inside the process: {machine()}\n")
    with tempfile.TemporaryDirectory() as folder:
        sync = measured(sync_ways(folder), sync_sample, rounds, seconds)
        show("sync", sync, {"functools.lru_cache(typed)": "3", "cachebox.cached(TTLCache)": "0.6"})
        on_disk(folder, rounds, seconds)
    loop = asyncio.new_event_loop()
    asynchronous = measured(
        async_ways(), lambda way, call, number: async_sample(way, call, number, loop), rounds, seconds
    )
    loop.close()
    show("async", asynchronous, {"cachebox.cached(TTLCache)": "0.7"})
    first_costs(rounds)


if __name__ == "__main__":
    main()
