"""A signal handler raises at a random moment. Then no value is wrong, and nothing hangs longer than its lease."""

from __future__ import annotations

import faulthandler
import logging
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from memcached_server import shared_memcached
from postgres_server import prepared_postgres
from servers import shared_redis

from stampede import Cache, EngineError, LockLost

pytestmark = [
    # An exception that is raised in a finalizer is only reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

TRIES, AT_LEAST = 300, 40
SECONDS = 5.0  # for all but the first tries with one engine, because waiting for the end of a lease takes long
LEASE = 1.0
SLACK = 4.0  # seconds: memcached's leases end at whole seconds, and callers that poll pause between their looks
KEYS = [f"k{number}" for number in range(10)]


class Limit(Exception):
    """An ordinary exception, like the time limit of some workers."""


class Exit(BaseException):
    """An exception like KeyboardInterrupt."""


URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory://?entries=6",
    "disk": lambda path: f"disk://{path}",
    "redis": lambda _: f"{shared_redis().url}?max_connections=3",
    "memcached": lambda _: shared_memcached().url,
    "postgres": lambda _: f"{prepared_postgres().postgres_url}&timeout=1",
}


@pytest.fixture(params=URLS)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    logging.getLogger("stampede").setLevel(logging.CRITICAL)
    url = URLS[request.param](tmp_path)
    with Cache(url, namespace=str(tmp_path), ttl=600, lease=LEASE, max_hold=LEASE, retry_after=0) as cache:
        yield cache
    logging.getLogger("stampede").setLevel(logging.NOTSET)


class World:
    """What a program does with a cache, and which values it may get."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.current: Counter[str] = Counter()
        self.oldest: Counter[str] = Counter()  # the oldest version that may be served: older ones are invalidated
        self.inside = 0
        self.dice = random.Random()

    def call(self, key: str) -> None:
        oldest = self.oldest[key]
        name, version = self.cache.get_or_compute(key, lambda: (key, self.current[key]))
        assert (name, version >= oldest) == (key, True), (key, name, version, oldest)

    def invalidate(self, key: str) -> None:
        self.current[key] += 1
        version = self.current[key]
        self.cache.invalidate(key)
        self.oldest[key] = version

    def lock(self, key: str) -> None:
        with self.cache.lock(key, lease=LEASE, wait=LEASE + SLACK):
            pass

    def go_on(self, seconds: float) -> None:
        """Use the cache until an exception comes. A client may swallow it, or report it as an engine's error."""
        end = monotonic() + seconds
        while monotonic() < end:
            act = self.dice.choice([self.call, self.call, self.call, self.invalidate, self.lock])
            act(self.dice.choice(KEYS))

    def works(self, act: Callable[[str], Any], key: str, within: float) -> None:
        """Check that this works at once, or when a lease that was left behind has ended."""
        end = monotonic() + within
        while True:
            began = monotonic()
            try:
                act(key)
                return
            except EngineError:
                assert monotonic() < end
                sleep(0.05)
            except LockLost:
                assert LEASE < monotonic() - began < within  # the thread did not run while its lease was valid


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals on this platform")
def test_an_exception_at_a_random_moment(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a worker's time limit comes at a bad moment, later calls get right values, and do not hang for ever."""
    # A finalizer's exception is only printed: pytest's hook runs Python code, in which the next one may be raised.
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)

    def handler(signum: int, frame: object) -> None:
        raise (Limit, Exit)[raised.total() % 2]

    def interrupted(after: float) -> None:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                world.go_on(after + 0.1)
                raised["swallowed"] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (Limit, Exit) as error:
            raised[type(error).__name__] += 1
        except EngineError:
            raised["EngineError"] += 1

    world, raised, tries, slowest = World(cache), Counter[str](), 0, 0.0
    for key in KEYS:
        for act in (world.call, world.lock):
            world.works(act, key, LEASE + SLACK)
    before, end = signal.signal(signal.SIGALRM, handler), monotonic() + SECONDS
    try:
        with ThreadPoolExecutor(1) as other:
            while tries < TRIES and (monotonic() < end or tries < AT_LEAST):
                tries += 1
                with suppress(Limit, Exit):  # raised between the last lines of `interrupted`
                    interrupted(world.dice.uniform(1e-5, 3e-3))
                if tries % 4:
                    continue  # several exceptions may come before a check
                within = LEASE + SLACK
                for act in (world.call, world.lock):
                    began = monotonic()
                    asked = [other.submit(world.works, act, key, within) for key in KEYS]
                    if wait(asked, 2 * within).not_done:
                        faulthandler.dump_traceback()  # shows where the call hangs
                    for each in asked:
                        each.result(0)
                    slowest = max(slowest, monotonic() - began)
                    assert slowest < within  # for all keys together, as all leases end at the same time
                world.works(world.call, world.dice.choice(KEYS), within)  # in this thread, too
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised["Limit"] + raised["Exit"] > tries / 4
