"""diskcache's recipes, on stampede's locks and limits. Waiters do not poll in a busy loop, and the
lock of a process that dies is released."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar, cast

from stampede.contrib.diskcache.cache import Cache, memoized
from stampede.contrib.diskcache.keys import text_of
from stampede.errors import LockLost
from stampede.limits.limiter import Limiter, limiting
from stampede.locks.bulkhead import Bulkhead
from stampede.locks.holding import Holding
from stampede.locks.lock import Lock as StampedeLock
from stampede.model.ports import Engine

__all__ = ["Averager", "BoundedSemaphore", "Lock", "RLock", "barrier", "memoize_stampede", "throttle"]

F = TypeVar("F", bound=Callable[..., Any])

LEASE = 30.0


class Averager:
    """The average of numbers that any process adds.

    >>> from stampede.contrib.diskcache import Averager, Cache
    >>> with Cache() as cache:
    ...     latency = Averager(cache, "latency")
    ...     latency.add(1), latency.add(4)
    ...     latency.get(), latency.pop(), latency.get()
    (None, None)
    (2.5, 2.5, None)
    """

    def __init__(self, cache: Cache, key: Any, expire: float | None = None, tag: Any = None) -> None:
        self._cache = cache
        self._key = key
        self._expire = expire
        self._tag = tag

    def add(self, value: float) -> None:
        """Add a number."""

        def more(sum_and_count: Any) -> Any:
            return sum_and_count[0] + value, sum_and_count[1] + 1

        self._cache.update(self._key, more, (0.0, 0), self._expire, self._tag)

    def get(self) -> float | None:
        """Return the average, or None if there is no number."""
        return _average(self._cache.get(self._key, (0.0, 0)))

    def pop(self) -> float | None:
        """Return the average and remove all numbers."""
        return _average(self._cache.pop(self._key, (0.0, 0)))


def _average(sum_and_count: tuple[float, int]) -> float | None:
    total, count = sum_and_count
    return total / count if count else None


class Lock(StampedeLock):
    """A `stampede.Lock` in the cache's directory: its lease is renewed while it is held, and ends if its holder dies.

    `expire` is how many seconds it may be held (None: for ever). `tag` has no effect. A release by an object that does
    not hold it raises LockLost.

    >>> from stampede.contrib.diskcache import Cache, Lock
    >>> with Cache() as cache, Lock(cache, "report-123"):
    ...     Lock(cache, "report-123").locked()
    True
    """

    def __init__(self, cache: Cache, key: Any, expire: float | None = None, tag: Any = None) -> None:
        super().__init__(text_of(key), _engine(cache), **_terms(expire))


class RLock:
    """A lock that the thread that holds it can take again. It is released as often as it was taken.

    `expire` is how many seconds it may be held (None: for ever). `tag` has no effect.

    >>> from stampede.contrib.diskcache import Cache, RLock
    >>> with Cache() as cache, RLock(cache, "user-123") as lock, RLock(cache, "user-123"):
    ...     print("twice inside")
    twice inside
    """

    def __init__(self, cache: Cache, key: Any, expire: float | None = None, tag: Any = None) -> None:
        self._lock = Lock(cache, key, expire)
        self._place = os.path.realpath(cache.directory), self._lock.name

    def acquire(self) -> None:
        """Take the lock, or take it once more."""
        holdings = _held_here().setdefault(self._place, [])
        holdings.append(holdings[0] if holdings else self._lock.acquire())

    def release(self) -> None:
        """Release the lock once. LockLost: this thread does not hold it."""
        holdings = _held_here().get(self._place)
        if not holdings:
            raise LockLost(f"the lock {self._lock.name!r} is not held by this thread")
        holding = holdings.pop()
        if not holdings:
            holding.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Held(threading.local):
    """What one thread holds: by directory and name, a holding as often as it was taken."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.holdings: dict[tuple[str, str], list[Holding]] = {}


_held = _Held()


def _held_here() -> dict[tuple[str, str], list[Holding]]:
    if _held.pid != os.getpid():  # a forked child holds nothing
        _held.__init__()  # type: ignore[misc]
    return _held.holdings


class BoundedSemaphore(Bulkhead):
    """A `stampede.Bulkhead` in the cache's directory: at most `value` holders at once, in all processes.

    `expire` is how many seconds each may hold it (None: for ever). `tag` has no effect.

    >>> from stampede.contrib.diskcache import BoundedSemaphore, Cache
    >>> with Cache() as cache:
    ...     places = BoundedSemaphore(cache, "connections", value=2)
    ...     with places, places:
    ...         bool(places.acquire(wait=0))
    False
    """

    def __init__(self, cache: Cache, key: Any, value: int = 1, expire: float | None = None, tag: Any = None) -> None:
        super().__init__(text_of(key), _engine(cache), concurrency=value, **_terms(expire))


def throttle(
    cache: Cache, count: int, seconds: float, name: str | None = None, expire: float | None = None, tag: Any = None
) -> Callable[[F], F]:
    """Decorate a function, so that in all processes at most `count` calls begin in any `seconds`; others wait.

    `expire` and `tag` have no effect.

    >>> from stampede.contrib.diskcache import Cache, throttle
    >>> with Cache() as cache:
    ...     @throttle(cache, 2, 1)
    ...     def ask():
    ...         return "answer"
    ...     ask()
    'answer'
    """

    def decorate(function: F) -> F:
        limiter = Limiter(_name(function, name), _engine(cache), max=count, per=seconds)
        return cast(F, limiting(limiter, function, 1))

    return decorate


def barrier(
    cache: Cache,
    lock_factory: Callable[..., Any],
    name: str | None = None,
    expire: float | None = None,
    tag: Any = None,
) -> Callable[[F], F]:
    """Decorate a function, so that its calls take the lock that `lock_factory` (Lock, RLock ...) makes.

    >>> from stampede.contrib.diskcache import Cache, Lock, barrier
    >>> with Cache() as cache:
    ...     @barrier(cache, Lock)
    ...     def work():
    ...         return "done"
    ...     work()
    'done'
    """

    def decorate(function: F) -> F:
        lock = lock_factory(cache, _name(function, name), expire=expire, tag=tag)

        @wraps(function)
        def alone(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return function(*args, **kwargs)

        return cast(F, alone)

    return decorate


def memoize_stampede(
    cache: Cache,
    expire: float,
    name: str | None = None,
    typed: bool = False,
    tag: Any = None,
    beta: float = 1,
    ignore: Collection[int | str] = (),
) -> Callable[[F], F]:
    """Decorate a function as `cache.memoize` does, and compute in the background before a result expires.

    `beta` is how early: 0 is never.

    >>> from stampede.contrib.diskcache import Cache, memoize_stampede
    >>> with Cache() as cache:
    ...     @memoize_stampede(cache, expire=60)
    ...     def price(item):
    ...         return len(item)
    ...     price("tea")
    3
    """
    # The keys end in a mark: a directory of diskcache has pairs of result and duration under the keys without it.
    return memoized(cache, name, expire, tag, ignore, ("stampede",), early=beta, background=True)


def _engine(cache: Cache) -> Callable[[], Engine]:
    """Return a function that returns the engine, which is another one after `close`."""
    return lambda: cache.stampede.engine


def _terms(expire: float | None) -> dict[str, Any]:
    return {} if expire is None else {"lease": min(expire, LEASE), "max_hold": expire}


def _name(function: Any, name: str | None) -> str:
    return f"{function.__module__}.{function.__qualname__}" if name is None else name
