"""The path of a call: how many of our own functions it calls, in how many files, once everything is warm.

    python benchmarks/calls.py            # starts its own servers, if they are installed

tests/project/test_calls.py keeps these numbers from growing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import stampede
from stampede import Cache, Lock

PACKAGE = str(Path(stampede.__file__).parent)
TRIES = 15


def counted(act: Callable[[], object]) -> tuple[int, int]:
    """Return the lowest number of calls of our own functions that `act` needs, and the files of these functions.

    It is the lowest of several tries, because a call sometimes does work for others, too.
    """
    ways = [_once(act) for _ in range(TRIES)]
    return min(ways, key=lambda way: way[0])


def _once(act: Callable[[], object]) -> tuple[int, int]:
    calls: list[str] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return len(calls), len(set(calls))


def ways_of(cache: Cache) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return what is counted: a hit, a miss, and a lock."""
    numbers = itertools.count()

    @cache.cached(ttl=600)
    def f(n: int) -> int:
        return n

    f(-1)
    yield "hit", lambda: f(-1)
    yield "miss", lambda: f(next(numbers))
    lock = Lock("calls", on=cache)

    def block() -> None:
        with lock:
            pass

    yield "lock", block


def measured(name: str, url: str) -> Iterator[tuple[str, int, int]]:
    with closing(Cache(url)) as cache:
        for way, act in ways_of(cache):
            for _ in range(TRIES):
                act()  # warm
            yield f"{name}, {way}", *counted(act)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from _measure import table

    rows: list[tuple[Any, ...]] = [*measured("memory", "memory://")]
    try:
        from servers import shared_redis

        rows += measured("redis", shared_redis().url)
    except Exception as trouble:  # not installed
        print(f"no Redis: {trouble}", file=sys.stderr)
    try:
        from postgres_server import prepared_postgres

        rows += measured("postgres", prepared_postgres().postgres_url)
    except Exception as trouble:
        print(f"no Postgres: {trouble}", file=sys.stderr)
    table(["way", "calls", "files"], rows)


if __name__ == "__main__":
    main()
