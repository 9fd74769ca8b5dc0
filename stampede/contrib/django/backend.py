"""The backend for `CACHES`: Django's verbs, as verbs of `stampede.Cache`."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from math import inf
from pickle import PickleError
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache
from django.utils.encoding import force_bytes

from stampede.api.cache import Cache
from stampede.errors import CodecError, OptionError, TooLarge
from stampede.locks.lock import Lock

__all__ = ["StampedeCache"]

_log = logging.getLogger("stampede")

_MISSING: Any = object()


class StampedeCache(BaseCache):  # type: ignore[misc]
    """A backend for Django's `CACHES`, with one computation over the whole fleet in `get_or_set`.

    `LOCATION` is the URL of an engine, and `OPTIONS` has options of `stampede.Cache`. `MAX_ENTRIES` bounds the
    number of entries in memory or on Postgres; other engines refuse it.

        CACHES = {
            "default": {
                "BACKEND": "stampede.contrib.django.StampedeCache",
                "LOCATION": "redis://localhost:6379/0",
                "TIMEOUT": 300,
                "OPTIONS": {"stale": "1h"},
            }
        }

    Values are pickled, and signed with a key made from `SECRET_KEY`; bytes with another signature are a miss.
    """

    def __init__(self, location: str, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self._cache = _opened(location, params.get("OPTIONS") or {})

    @property
    def stampede(self) -> Cache:
        """The `stampede.Cache` of this backend, for `@cached(cache=...)`, tags, locks and limits. Its keys are those
        that `make_key` returns.

            @cached(cache=lambda: caches["default"].stampede, ttl=600)
            def report(shop_id): ...
        """
        return self._cache

    def _ttl(self, timeout: Any) -> Any:
        timeout = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        return max(timeout, 0) if isinstance(timeout, (int, float)) else timeout  # or a text, or a timedelta

    # -- one key ----------------------------------------------------------------------------------------------------

    def get(self, key: Any, default: Any = None, version: int | None = None) -> Any:
        return self._cache.get(self.make_and_validate_key(key, version=version), default)

    async def aget(self, key: Any, default: Any = None, version: int | None = None) -> Any:
        return await self._cache.aget(self.make_and_validate_key(key, version=version), default)

    def set(
        self,
        key: Any,
        value: Any,
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Iterable[str] = (),
    ) -> None:
        """Store a value. `tags` are names by which it can be invalidated together with others. A value that is too
        large is not stored, and a value that was stored before is removed."""
        name = self.make_and_validate_key(key, version=version)
        try:
            with _errors_of_pickle():
                self._cache.set(name, value, ttl=self._ttl(timeout), tags=list(tags))
        except TooLarge as error:
            _too_large(key, error)
            self._cache.invalidate(name)

    async def aset(
        self,
        key: Any,
        value: Any,
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Iterable[str] = (),
    ) -> None:
        name = self.make_and_validate_key(key, version=version)
        try:
            with _errors_of_pickle():
                await self._cache.aset(name, value, ttl=self._ttl(timeout), tags=list(tags))
        except TooLarge as error:
            _too_large(key, error)
            await self._cache.ainvalidate(name)

    def add(self, key: Any, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        with _errors_of_pickle():
            name = self.make_and_validate_key(key, version=version)
            return self._cache.add(name, value, ttl=self._ttl(timeout))

    async def aadd(self, key: Any, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        with _errors_of_pickle():
            name = self.make_and_validate_key(key, version=version)
            return await self._cache.aadd(name, value, ttl=self._ttl(timeout))

    def get_or_set(
        self,
        key: Any,
        default: Any,
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Iterable[str] = (),
    ) -> Any:
        """Return the value. If it is missing, one caller in all processes stores `default`, or what `default()`
        returns, and the others wait for it."""
        name, function = self.make_and_validate_key(key, version=version), _function(default)
        return self._cache.get_or_compute(name, function, ttl=self._ttl(timeout), tags=list(tags))

    async def aget_or_set(
        self,
        key: Any,
        default: Any,
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Iterable[str] = (),
    ) -> Any:
        name, function = self.make_and_validate_key(key, version=version), _function(default)
        return await self._cache.aget_or_compute(name, function, ttl=self._ttl(timeout), tags=list(tags))

    def touch(self, key: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        if self._cache.policy.stale and not self.has_key(key, version=version):
            return False  # a stale value has expired, as Django sees it
        return self._cache.touch(self.make_and_validate_key(key, version=version), ttl=self._ttl(timeout))

    async def atouch(self, key: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        if self._cache.policy.stale and not await self.ahas_key(key, version=version):
            return False
        return await self._cache.atouch(self.make_and_validate_key(key, version=version), ttl=self._ttl(timeout))

    def delete(self, key: Any, version: int | None = None) -> bool:
        return self._cache.invalidate(self.make_and_validate_key(key, version=version))

    async def adelete(self, key: Any, version: int | None = None) -> bool:
        return await self._cache.ainvalidate(self.make_and_validate_key(key, version=version))

    def has_key(self, key: Any, version: int | None = None) -> bool:
        return self.get(key, _MISSING, version=version) is not _MISSING

    async def ahas_key(self, key: Any, version: int | None = None) -> bool:
        return await self.aget(key, _MISSING, version=version) is not _MISSING

    def incr(self, key: Any, delta: int = 1, version: int | None = None) -> Any:
        """Add to a number, in one step. It keeps its timeout. ValueError: there is none."""
        name = self.make_and_validate_key(key, version=version)
        return self._cache.update(name, _adding(key, delta), _MISSING, in_place=True)

    async def aincr(self, key: Any, delta: int = 1, version: int | None = None) -> Any:
        name = self.make_and_validate_key(key, version=version)
        return await self._cache.aupdate(name, _adding(key, delta), _MISSING, in_place=True)

    async def adecr(self, key: Any, delta: int = 1, version: int | None = None) -> Any:
        return await self.aincr(key, -delta, version=version)

    # -- many keys --------------------------------------------------------------------------------------------------

    def _names(self, keys: Iterable[Any], version: int | None) -> dict[str, Any]:
        """Return the keys as the user gave them, by their names in the cache."""
        return {self.make_and_validate_key(key, version=version): key for key in keys}

    def get_many(self, keys: Iterable[Any], version: int | None = None) -> dict[Any, Any]:
        names = self._names(keys, version)
        return {names[name]: value for name, value in self._cache.get_many(names).items()}

    async def aget_many(self, keys: Iterable[Any], version: int | None = None) -> dict[Any, Any]:
        names = self._names(keys, version)
        return {names[name]: value for name, value in (await self._cache.aget_many(names)).items()}

    def set_many(
        self, data: Mapping[Any, Any], timeout: Any = DEFAULT_TIMEOUT, version: int | None = None
    ) -> list[Any]:
        """Store all values, and return the keys of those that were too large."""
        values = {name: data[key] for name, key in self._names(data, version).items()}
        try:
            with _errors_of_pickle():
                self._cache.set_many(values, ttl=self._ttl(timeout))
        except TooLarge:
            for key, value in data.items():
                self.set(key, value, timeout, version)
            return [key for key in data if not self.has_key(key, version)]
        return []

    async def aset_many(
        self, data: Mapping[Any, Any], timeout: Any = DEFAULT_TIMEOUT, version: int | None = None
    ) -> list[Any]:
        values = {name: data[key] for name, key in self._names(data, version).items()}
        try:
            with _errors_of_pickle():
                await self._cache.aset_many(values, ttl=self._ttl(timeout))
        except TooLarge:
            for key, value in data.items():
                await self.aset(key, value, timeout, version)
            return [key for key in data if not await self.ahas_key(key, version)]
        return []

    def delete_many(self, keys: Iterable[Any], version: int | None = None) -> None:
        self._cache.invalidate_many(self._names(keys, version))

    async def adelete_many(self, keys: Iterable[Any], version: int | None = None) -> None:
        await self._cache.ainvalidate_many(self._names(keys, version))

    def clear(self) -> None:
        """Remove all values of this cache (of its `namespace`), and nothing else that the server has."""
        self._cache.clear()

    async def aclear(self) -> None:
        await self._cache.aclear()

    # -- what users of django-redis know ----------------------------------------------------------------------------

    def ttl(self, key: Any, version: int | None = None) -> int | None:
        """Return the whole seconds until the value expires: None if it never does, 0 if there is none.

        >>> cache.set("k", 1, timeout=25)
        >>> cache.ttl("k")
        25
        """
        left = self.pttl(key, version=version)
        return None if left is None else round(left / 1000)

    def pttl(self, key: Any, version: int | None = None) -> int | None:
        """Return the milliseconds until the value expires: None if it never does, 0 if there is none."""
        entry = self._cache.peek(self.make_and_validate_key(key, version=version))
        left = 0.0 if entry is None else max(entry.fresh, 0.0)
        return None if left == inf else round(1000 * left)

    def expire(self, key: Any, timeout: Any, version: int | None = None) -> bool:
        """Let the value expire after `timeout` seconds. Return whether there was a value."""
        return self.touch(key, timeout, version=version)

    def persist(self, key: Any, version: int | None = None) -> bool:
        """Let the value never expire. Return whether there was a value."""
        return self.touch(key, None, version=version)

    def lock(self, key: Any, version: int | None = None, **options: Any) -> Lock:
        """Return a `stampede.Lock` of this name on the cache's engine: `with cache.lock("nightly", lease=60): ...`"""
        return self._cache.lock(self.make_key(key, version=version), **options)

    def iter_keys(self, search: str = "*", version: int | None = None) -> Iterator[str]:
        """Iterate over the keys that begin with a prefix: `cache.iter_keys("user:*")`. OptionError: the engine can't
        list its keys (memcached), or `search` is no prefix followed by one `*`."""
        start = self._start(version)
        return (key.removeprefix(start) for key in self._cache.keys(start + _prefix(search)))

    async def aiter_keys(self, search: str = "*", version: int | None = None) -> AsyncIterator[str]:
        start = self._start(version)
        async for key in self._cache.akeys(start + _prefix(search)):
            yield key.removeprefix(start)

    def keys(self, search: str = "*", version: int | None = None) -> list[str]:
        """Return the keys that begin with a prefix, as `iter_keys` does, in a list."""
        return list(self.iter_keys(search, version))

    def delete_pattern(self, pattern: str, version: int | None = None) -> int:
        """Delete the keys that begin with a prefix: `cache.delete_pattern("user:*")`. Return how many had a value. Tags
        do this without a search for keys."""
        start = self._start(version)
        return self._cache.invalidate_many(list(self._cache.keys(start + _prefix(pattern))))

    def _start(self, version: int | None) -> str:
        """Return the text that comes before each key of this version."""
        name = str(self.make_key("\0", version=version))
        if not name.endswith("\0") or "\0" in name[:-1]:
            raise OptionError("keys can't be listed, because KEY_FUNCTION does not put the key behind a fixed text")
        return name[:-1]

    # -- tags -------------------------------------------------------------------------------------------------------

    def invalidate_tags(self, *tags: str, **options: Any) -> None:
        """Remove all values that carry one of these tags: `stampede.Cache.invalidate_tags`."""
        self._cache.invalidate_tags(*tags, **options)

    async def ainvalidate_tags(self, *tags: str, **options: Any) -> None:
        await self._cache.ainvalidate_tags(*tags, **options)


_caches: dict[str, Cache] = {}
_lock = threading.Lock()


def _opened(location: str, options: Mapping[str, Any]) -> Cache:
    """Return the cache of these settings. Django makes a backend for each thread; they share one."""
    given = {name: value for name, value in options.items() if name not in ("MAX_ENTRIES", "CULL_FREQUENCY")}
    if not isinstance(location, str):
        raise OptionError(f"LOCATION is {location!r}: give one URL, such as memcached://a:11211,b:11211")
    url = location or "memory://"
    codec = given.setdefault("codec", "pickle")
    if codec == "pickle":
        given.setdefault("signing_key", [_key(each) for each in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)])
    in_url = {}
    if "MAX_ENTRIES" in options:
        in_url["entries"] = options["MAX_ENTRIES"]
    if url.startswith("memory://") and "codec=" not in url:
        in_url["codec"] = codec if isinstance(codec, str) else "pickle"  # bytes, so that each caller has its own copy
    if in_url:
        url += ("&" if "?" in url else "?") + urlencode(in_url)
    given.setdefault("namespace", "django")
    name = repr((url, sorted(given.items(), key=lambda item: item[0])))
    with _lock:
        if name not in _caches:
            _caches[name] = Cache(url, **given)
        return _caches[name]


def _key(secret: Any) -> bytes:
    return blake2b(force_bytes(secret), person=b"stampede.django").digest()


def _function(default: Any) -> Callable[[], Any]:
    return default if callable(default) else lambda: default


def _adding(key: Any, delta: int) -> Callable[[Any], Any]:
    def add(value: Any) -> Any:
        if value is _MISSING:
            raise ValueError(f"Key {key!r} not found")
        return value + delta

    return add


def _prefix(search: str) -> str:
    prefix, star, rest = search.partition("*")
    if not star or rest or set("?[]\\") & set(prefix):
        raise OptionError(
            f"the pattern is {search!r}: only a prefix and one '*' at the end are supported. Give the values a tag "
            "(tags= of set and get_or_set), and call invalidate_tags"
        )
    return prefix


@contextmanager
def _errors_of_pickle() -> Iterator[None]:
    """Raise what pickle has raised, as Django's backends do."""
    try:
        yield
    except CodecError as error:
        if isinstance(error.__cause__, PickleError):
            raise error.__cause__ from None
        raise


def _too_large(key: Any, error: TooLarge) -> None:
    _log.warning("the value of %r was not stored: %s", key, error)
