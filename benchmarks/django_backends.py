"""Django's cache framework on Redis: our backend, Django's own and django-redis, in one run.

    python benchmarks/django_backends.py

A verb per call, in one thread; and a herd of 64 threads that ask for a missing value by `get_or_set`."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from _measure import interleaved, machine, pin, table
from _redis import Server

VALUE = {"title": "x" * 100, "price": 9.5}
HERD, COST = 64, 0.2


def backends(url: str) -> Any:
    import django
    from django.conf import settings

    ours = {"BACKEND": "stampede.contrib.django.StampedeCache", "LOCATION": url}
    settings.configure(
        SECRET_KEY="of the benchmark",
        CACHES={
            "stampede": ours,
            "stampede, local=True": {**ours, "OPTIONS": {"local": True, "namespace": "local"}},
            "django-redis": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "KEY_PREFIX": "theirs"},
            "default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": url},
        },
    )
    django.setup()
    from django.core.cache import caches

    return {("Django's RedisCache" if name == "default" else name): caches[name] for name in settings.CACHES}


def each(verb: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        verb()
    return (time.perf_counter() - began) / count * 1e6


def herd(cache: Any) -> tuple[int, float]:
    """Return how often 64 threads compute a value of 0.2 s, and how much longer the last of them waited."""
    calls, begun = [], threading.Barrier(HERD + 1)

    def compute() -> dict[str, Any]:
        calls.append(1)
        time.sleep(COST)
        return VALUE

    def ask() -> None:
        begun.wait()
        cache.get_or_set("herd", compute, 60)

    cache.delete("herd")
    threads = [threading.Thread(target=ask) for _ in range(HERD)]
    for thread in threads:
        thread.start()
    begun.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return len(calls), time.perf_counter() - began - COST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    server = Server(core=0)
    pin()
    caches = backends(server.url)
    for cache in caches.values():
        cache.set("k", VALUE, 600)
    print(machine(), end="\n\n")
    verbs: dict[str, Callable[[Any], Callable[[], object]]] = {
        "get": lambda cache: partial(cache.get, "k"),
        "get_or_set, hit": lambda cache: partial(cache.get_or_set, "k", VALUE, 600),
        "set": lambda cache: partial(cache.set, "k", VALUE, 600),
        "get_many of 10": lambda cache: partial(cache.get_many, ["k", *"abcdefghi"]),
    }
    rows = []
    for name, verb in verbs.items():
        ways = {kind: partial(each, verb(cache), options.calls) for kind, cache in caches.items()}
        found = interleaved(ways, options.rounds)
        rows.append([name, *(f"{found[kind]:.1f}" for kind in caches)])
    table(["us per call", *caches], rows)
    table(["a herd of 64 threads", "computations", "s after the first could be ready"],
          [[kind, *(f"{one:.3g}" for one in herd(cache))] for kind, cache in caches.items()])  # fmt: skip


if __name__ == "__main__":
    main()
