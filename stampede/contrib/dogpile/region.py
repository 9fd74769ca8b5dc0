"""dogpile's region, on our engines and without its convoys: `from stampede.contrib.dogpile import make_region`.

All that is not defined here is dogpile's own: key generators and manglers, decorators, proxies, invalidation, metadata.
Some of it are private names of dogpile.cache 1.5: a region's mutexes, the conversion of values for the backend and
back, what counts as a miss, and what is logged."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

from dogpile.cache.api import NO_VALUE, CachedValue, CacheMutex
from dogpile.cache.exception import DogpileCacheException
from dogpile.cache.proxy import ProxyBackend
from dogpile.cache.region import CacheRegion as _CacheRegion
from dogpile.cache.region import RegionInvalidationStrategy

from stampede.contrib.dogpile.translate import translated
from stampede.errors import RecursiveComputation
from stampede.runtime import forks

__all__ = ["CacheRegion", "make_region"]

SELF = TypeVar("SELF", bound="CacheRegion")

Creator = Callable[..., Any]
CreatorArgs = tuple[Any, Mapping[str, Any]]


LONGEST = 600.0
"""The most seconds for which other threads of a process wait for a creator, if the backend does not say."""


class _State(enum.Enum):
    MISSING = "there is no value that may be served"
    STALE = "the value may be served while another caller computes"
    FRESH = "the value is good"


class CacheRegion(_CacheRegion):
    """A region like dogpile's own, with these differences:

    The names of dogpile's backends (`dogpile.cache.redis`, `.memcached`, `.memory` ...) mean our engines on the same
    servers, with the same arguments. Mutexes are leases in all processes, whatever `distributed_lock` says.
    One thread of a process asks for a missing key, and the others get its value as soon as it is there, all at once.
    `get_or_create_multi` never waits while it holds a mutex: it fetches what others compute when its own is done.

    >>> from stampede.contrib.dogpile import make_region
    >>> region = make_region().configure("dogpile.cache.memory")
    >>> @region.cache_on_arguments()
    ... def price(item):
    ...     return len(item)
    >>> price("tea")
    3
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._flights = _Flights()

    def configure(
        self: SELF,
        backend: str,
        expiration_time: float | timedelta | None = None,
        arguments: Mapping[str, Any] | None = None,
        _config_argument_dict: Mapping[str, Any] | None = None,
        _config_prefix: str | None = None,
        wrap: Sequence[ProxyBackend | type[ProxyBackend]] = (),
        replace_existing_backend: bool = False,
        region_invalidator: RegionInvalidationStrategy | None = None,
    ) -> SELF:
        """Choose the backend: "stampede", one of dogpile's, which means our engine on the same store, or any other."""
        config, prefix = _config_argument_dict or {}, _config_prefix or ""
        given = {key.removeprefix(prefix): config[key] for key in config if key.startswith(prefix)}
        ours, given = translated(backend, given or arguments or {})
        if ours != backend:
            backend, arguments, _config_argument_dict = ours, given, None
        return super().configure(
            backend,
            expiration_time,
            arguments,
            _config_argument_dict,
            _config_prefix,
            wrap=wrap,
            replace_existing_backend=replace_existing_backend,
            region_invalidator=region_invalidator,
        )

    # -- one key ------------------------------------------------------------------------------------------------------

    def get_or_create(
        self,
        key: str,
        creator: Creator,
        expiration_time: float | None = None,
        should_cache_fn: Callable[[Any], bool] | None = None,
        creator_args: CreatorArgs | None = None,
    ) -> Any:
        """Return the key's value. If it is missing or has expired, `creator` computes it, for one of all callers. If a
        value has expired, or was invalidated softly, one caller computes a new one while all others are served the old
        one."""
        wanted = _Wanted(self, key, self._lifetime(expiration_time))
        while True:
            value, state = wanted.look()
            if state is _State.FRESH:
                return value.payload
            if state is _State.STALE:
                if not wanted.mutex.acquire(False):
                    return value.payload  # another caller computes
                return self._renewed(wanted, value, _bound(creator, creator_args), should_cache_fn)
            flight = self._flights.lead(wanted.mangled)
            if flight is None:
                self._flights.follow(wanted.mangled, getattr(self.actual_backend, "max_hold", LONGEST))
                continue
            try:
                wanted.mutex.acquire()
                return self._created(wanted, _bound(creator, creator_args), should_cache_fn)
            finally:
                flight.end()

    def _renewed(
        self, wanted: _Wanted, value: CachedValue, create: Creator, should_cache_fn: Callable[[Any], bool] | None
    ) -> Any:
        """Compute a new value under the mutex, while the old one may be served."""
        if self.async_creation_runner is None:
            return self._created(wanted, create, should_cache_fn)
        try:
            self.async_creation_runner(self, wanted.key, create, wanted.mutex)
        except BaseException:
            wanted.mutex.release()
            raise
        return value.payload

    def _created(self, wanted: _Wanted, create: Creator, should_cache_fn: Callable[[Any], bool] | None) -> Any:
        try:
            value, state = wanted.look()  # again: another caller may have created it meanwhile
            if state is _State.FRESH:
                return value.payload
            with self._log_time([wanted.key]):
                created = create()
            if should_cache_fn is None or should_cache_fn(created):
                self._set_cached_value_to_backend(wanted.mangled, self._value(created))
            return created
        finally:
            wanted.mutex.release()

    # -- many keys ----------------------------------------------------------------------------------------------------

    def get_or_create_multi(
        self,
        keys: Iterable[str],
        creator: Creator,
        expiration_time: float | None = None,
        should_cache_fn: Callable[[Any], bool] | None = None,
    ) -> Sequence[Any]:
        """Return the values in the order of the keys. `creator` is called with the keys that are to be computed, in
        sorted order, and returns as many values. It is called again for each key that another caller was computing, and
        did not store."""
        keys, lifetime = list(keys), self._lifetime(expiration_time)

        def is_kept(value: Any) -> bool:
            return value is not NO_VALUE and (should_cache_fn is None or should_cache_fn(value))

        wanted = {key: _Wanted(self, key, lifetime) for key in sorted(set(keys))}
        payloads: dict[str, Any] = {}
        mine: list[_Wanted] = []
        try:
            states = self._looked(list(wanted.values()), payloads)
            for each, state in states.items():
                if state is not _State.FRESH and each.take(self._flights):
                    mine.append(each)
            # Again: another caller may have created them between the look and the mutex.
            for each, state in self._looked(mine, payloads).items():
                if state is _State.FRESH:
                    mine.remove(each)
                    each.release()
            if mine:
                payloads |= self._created_multi(mine, creator, is_kept)
        finally:
            for each in mine:
                each.release()
        for key in wanted.keys() - payloads.keys():  # others compute them
            payloads[key] = self.get_or_create(
                key, lambda key=key: next(iter(creator(key)), NO_VALUE), expiration_time, is_kept
            )
        return [payloads[key] for key in keys]

    def _looked(self, wanted: Sequence[_Wanted], payloads: dict[str, Any]) -> dict[_Wanted, _State]:
        """Return the states of all keys, with one request. Put the values that may be served into `payloads`."""
        states: dict[_Wanted, _State] = {}
        if wanted:
            found = self._get_multi_from_backend([each.mangled for each in wanted])
            for each, value in zip(wanted, found, strict=True):
                states[each] = each.state_of(value)
                if states[each] is not _State.MISSING:
                    payloads[each.key] = value.payload
        return states

    def _created_multi(
        self, mine: Sequence[_Wanted], creator: Creator, is_kept: Callable[[Any], bool]
    ) -> dict[str, Any]:
        keys = [each.key for each in mine]
        with self._log_time(keys):
            created = dict(zip(keys, creator(*keys), strict=False))
        self._set_multi_cached_value_to_backend({
            each.mangled: self._value(created[each.key])
            for each in mine
            if each.key in created and is_kept(created[each.key])
        })  # fmt: skip
        return dict.fromkeys(keys, NO_VALUE) | created

    def _lifetime(self, expiration_time: float | None) -> float | None:
        """Return how many seconds a value is fresh; None means for ever, as does -1, whatever the region's setting."""
        if expiration_time is None:
            expiration_time = self.expiration_time
        lifetime = None if expiration_time == -1 else expiration_time
        if lifetime is None and self.region_invalidator.was_soft_invalidated():
            raise DogpileCacheException("Non-None expiration time required for soft invalidation")
        return lifetime


class _Wanted:
    """One key that a caller asks for."""

    def __init__(self, region: CacheRegion, key: str, lifetime: float | None) -> None:
        self.key = key
        self.mangled = region.key_mangler(key) if region.key_mangler else key
        self._region = region
        self._lifetime = lifetime
        self._mutex: CacheMutex | None = None
        self._flight: _Flight | None = None

    @property
    def mutex(self) -> Any:
        if self._mutex is None:
            region: Any = self._region  # this method of dogpile's has no types
            self._mutex = region._mutex(self.mangled)
        return self._mutex

    def look(self) -> tuple[Any, _State]:
        value = self._region._get_from_backend(self.mangled)
        return value, self.state_of(value)

    def state_of(self, value: Any) -> _State:
        region: Any = self._region  # likewise
        if region._is_cache_miss(value, self.key):
            return _State.MISSING
        created = value.metadata["ct"]
        if self._region.region_invalidator.is_soft_invalidated(created):
            return _State.STALE
        if self._lifetime is not None and time.time() - created > self._lifetime:
            return _State.STALE
        return _State.FRESH

    def take(self, flights: _Flights) -> bool:
        """Take the key, to compute it. Return False if another caller computes it. Never wait."""
        flight = flights.lead(self.mangled)
        if flight is None:
            return False
        try:
            if self.mutex.acquire(False):
                self._flight = flight
        finally:
            if self._flight is None:
                flight.end()
        return self._flight is not None

    def release(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                self.mutex.release()
            finally:
                flight.end()


class _Flight:
    """One caller of this process that asks for a missing key; the others wait until it has ended."""

    def __init__(self, key: str, flights: dict[str, _Flight]) -> None:
        self.leader = threading.get_ident()
        self.ended = threading.Event()
        self._key = key
        self._flights = flights

    def end(self) -> None:
        if self._flights.get(self._key) is self:
            del self._flights[self._key]
        self.ended.set()


class _Flights:
    def __init__(self) -> None:
        self._flights: dict[str, _Flight] = {}
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._flights = {}  # their leaders are the parent's threads

    def lead(self, key: str) -> _Flight | None:
        """Return the flight that this thread leads from now on; None if another thread leads it."""
        mine = _Flight(key, self._flights)
        return mine if self._flights.setdefault(key, mine) is mine else None

    def follow(self, key: str, longest: float) -> None:
        """Wait until the flight's leader has ended. If it hangs, wait no longer than `longest` seconds."""
        flight = self._flights.get(key)
        if flight is None:
            return
        if flight.leader == threading.get_ident():
            raise RecursiveComputation(f"the creator of {key!r} asked for its own key")
        if not flight.ended.wait(longest):
            flight.end()


def _bound(creator: Creator, creator_args: CreatorArgs | None) -> Creator:
    if not creator_args:
        return creator
    args, options = creator_args

    @wraps(creator)
    def create() -> Any:
        return creator(*args, **options)

    return create


def make_region(*args: Any, **options: Any) -> CacheRegion:
    """Return a region on our engines, with the arguments of dogpile's own `make_region`.

    >>> from stampede.contrib.dogpile import make_region
    >>> region = make_region().configure("stampede", expiration_time=60, arguments={"url": "memory://"})
    >>> region.get_or_create("answer", lambda: 42)
    42
    """
    return CacheRegion(*args, **options)
