"""A cache as its users see it, called from blocking or async code while its engine is in trouble; and its origins."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from herd import Herd

from stampede import Cache, Lock, StampedeError, events
from stampede.model.breaker import Breaker

__all__ = ["BRIEF", "LONG", "Face", "Number", "Suspending", "blocking", "never"]

BRIEF = 0.1
"""Seconds that a reply may take, and between questions to a dead server, in tests that are not about these."""

LONG = 60.0


class Face:
    """One cache, used in one colour: by threads, or by tasks of one event loop."""

    def __init__(
        self,
        url: str,
        colour: str = "sync",
        *,
        pause: float = BRIEF,
        breakers: Sequence[str] = ("stampede.outages.outage",),
        **options: Any,
    ) -> None:
        self.told: list[events.Event] = []
        options = {"early": 0, "lease": LONG, **options}
        with pytest.MonkeyPatch.context() as patch:
            for module in breakers:
                patch.setattr(f"{module}.Breaker", lambda: Breaker(pause))
            self.cache = Cache(url, observers=[self.told.append], **options)
        self._runner = asyncio.Runner() if colour == "async" else None
        self._locks: list[Lock] = []

    def __call__(self, key: str, origin: Callable[[], Any], **terms: Any) -> Any:
        return self.run("get_or_compute", key, origin, **terms)

    def run(self, verb: str, *args: Any, **terms: Any) -> Any:
        """Call one of the cache's plain verbs, or its async twin."""
        if self._runner is None:
            return getattr(self.cache, verb)(*args, **terms)
        return self._runner.run(getattr(self.cache, "a" + verb)(*args, **terms))

    def herd(self, count: int, key: str, origin: Callable[[], Any], **terms: Any) -> list[Any]:
        """Return what this number of callers get if they call at the same time."""
        if self._runner is None:
            return Herd(*[lambda: self.cache.get_or_compute(key, origin, **terms)] * count).join()

        async def suspending() -> Any:
            return await asyncio.to_thread(origin)

        async def all_of_them() -> list[Any]:
            calls = [self.cache.aget_or_compute(key, suspending, **terms) for _ in range(count)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

        return self._runner.run(all_of_them())

    def many(self, keys: list[str], loader: Callable[[list[str]], Any], **terms: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.run("get_or_compute_many", keys, loader, **terms)
        return found

    def invalidate(self, key: str) -> None:
        self.run("invalidate", key)

    def lock(self, name: str) -> bool:
        lock = self.cache.lock(name)
        self._locks.append(lock)  # a lock without a reference would be released
        return lock.acquire(0) if self._runner is None else self._runner.run(lock.aacquire(0))

    def release(self) -> None:
        """Release all locks that this object holds."""
        while self._locks:
            lock = self._locks.pop()
            lock.release() if self._runner is None else self._runner.run(lock.arelease())

    def count(self, kind: type[events.Event]) -> int:
        return sum(isinstance(event, kind) for event in self.told)

    @property
    def down(self) -> bool:
        return self.count(events.EngineDown) > self.count(events.EngineUp)

    def close(self) -> None:
        for lock in self._locks:
            with suppress(StampedeError):
                lock.release()
        self.cache.close()
        if self._runner is not None:
            self._runner.close()


class Suspending:
    """A cache whose plain verbs call their async twins, each in its own event loop."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        plain, twin = getattr(self._cache, name), getattr(self._cache, f"a{name}", None)
        if twin is None or asyncio._get_running_loop() is not None:
            return plain
        return lambda *args, **options: asyncio.run(twin(*args, **options))


def blocking(cache: Cache) -> Cache:
    """Return the cache itself, without a wrapper."""
    return cache._cache if isinstance(cache, Suspending) else cache


class Number:
    """An origin that takes a moment, and returns the number of its call."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls = 0
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.calls += 1
            number = self.calls
        time.sleep(self._seconds)
        return number


def never() -> Any:
    raise AssertionError("a second computation")
