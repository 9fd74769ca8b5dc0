"""From settings to caches: `configure`, caches by name, and public names that find their engine at first use."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, cast

from stampede.api.cache import Cache, imported
from stampede.api.decorator import decorate
from stampede.api.duplicate_names import DuplicateNames
from stampede.api.overrides import unbind_all
from stampede.api.typing import (
    BulkheadOptions,
    CacheOptions,
    FunctionOptions,
    LimitOptions,
    LockOptions,
    MoreOptions,
    OnceOptions,
    Origins,
    PolicyOptions,
    Tables,
    TryLockOptions,
    WithObservers,
)
from stampede.api.typing_many import CachedIn, ManyOptions
from stampede.engines import check_url, open_engine
from stampede.engines.kit.url import safe_url, scheme_of
from stampede.errors import OptionError, SettingsError
from stampede.events import Observer
from stampede.limits import limiter as limits
from stampede.locks import bulkhead as bulkheads
from stampede.locks import lock as locks
from stampede.locks import once as onces
from stampede.metrics import OpenTelemetryObserver, PrometheusObserver
from stampede.model.ports import Engine
from stampede.runtime import forks
from stampede.runtime.signatures import showing
from stampede.settings import TABLES, Settings, cache_settings, discover, from_mapping, load
from stampede.settings.options import Seconds, TimeToLive

__all__ = [
    "Bulkhead", "Limiter", "Lock", "all_caches", "cache_without_dogpiling", "cached", "configure", "get_cache",
    "isolated", "limited", "once", "try_lock",
]  # fmt: skip

_log = logging.getLogger("stampede")

P = ParamSpec("P")
K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")
Clock: TypeAlias = Callable[[], float]
DEFAULT_NAME = "default"
"""The cache that is used if no name is given."""


def _observer(setting: str, given: str | Observer) -> Observer:
    """Return an observer of the settings: a function, a built-in one, or an imported one. A class is instantiated."""
    if not isinstance(given, str):
        return given
    ready = {"prometheus": PrometheusObserver, "opentelemetry": OpenTelemetryObserver}
    found = ready.get(given) or imported(setting, given)
    return cast("Observer", found() if isinstance(found, type) else found)


class Registry:
    """The current settings, and the caches and engines opened for them."""

    locks = "file://"
    """The engine of locks that name none: files on this machine."""

    def __init__(self, settings: Settings | None = None, *, discovers: bool = True) -> None:
        self._lock = threading.RLock()
        self._settings = settings
        self._discovers = discovers
        self._caches: dict[str, Cache] = {}
        self.duplicate_names: defaultdict[str, DuplicateNames] = defaultdict(DuplicateNames)  # by cache
        self._engines: dict[str, Engine] = {}
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._lock = threading.RLock()  # the thread that held the lock does not exist in the child

    @property
    def settings(self) -> Settings:
        with self._lock:
            if self._settings is None:
                found = discover(os.environ, Path.cwd()) if self._discovers else None
                if found is None and self._discovers:
                    _log.info("no settings: values are kept in memory (call stampede.configure or write stampede.toml)")
                self._settings = Settings() if found is None else _with_sound_urls(found, "[caches.{}] ")
            return self._settings

    @property
    def observers(self) -> list[Observer]:
        """Return the observers of all caches. OptionError: one can't be imported."""
        settings = self.settings
        return [_observer(f"{settings.source}: observers.{key}", each) for key, each in settings.observers]

    def cache(self, name: str) -> Cache:
        """Return the cache of this name. The first call opens it."""
        cache = self._caches.get(name)
        if cache is None:
            with self._lock:
                cache = self._caches.get(name)  # again: another thread may have opened it meanwhile
                if cache is None:
                    cache = self._caches[name] = self._opened(name)
        return cache

    def _opened(self, name: str) -> Cache:
        settings = self.settings
        if name == DEFAULT_NAME and (warning := settings.no_default()):
            _log.warning("%s", warning)
        return Cache.of(settings.cache(name), observers=self.observers)

    def all(self) -> list[Cache]:
        """Return all caches of the settings, and those that are open."""
        names = {*self.settings.caches, *self._caches} or {DEFAULT_NAME}
        return [self.cache(name) for name in sorted(names)]

    def engine(self, url: str) -> Engine:
        """Return the engine of this URL. The process has one for each URL, and so one pool of connections."""
        with self._lock:
            if url not in self._engines:
                self._engines[url] = open_engine(url)
            return self._engines[url]

    def close(self) -> None:
        with self._lock:
            opened: list[Any] = [*self._caches.values(), *self._engines.values()]
            self._caches, self._engines = {}, {}
        for each in opened:
            each.close()


class Isolated(Registry):
    """The registry of a test. It reads no settings of the machine, and its locks exclude no other process."""

    locks = "memory://"

    def __init__(self, settings: Settings, *, named: bool, clock: Clock | None) -> None:
        super().__init__(settings, discovers=False)
        self._named = named  # only caches named in the settings exist
        self._clock = clock

    def _opened(self, name: str) -> Cache:
        settings = self.settings.cache(name if self._named else "default")
        if self._clock is None:
            return Cache.of(settings, observers=self.observers)
        if settings.url != "memory://":
            raise SettingsError(f"isolated(clock=...) can't set the clock of {settings.url}: leave the url out")
        # Encoded, because a hit on a value that is kept as an object reads the process's own clock.
        engine = open_engine("memory://?codec=sealed", clock=self._clock)
        return Cache.of(replace(settings, local=False), engine, self.observers)


_registry = Registry()


class _Configured(CacheOptions, total=False):
    """The keywords of `configure`."""

    url: str
    locks: str | None
    caches: Tables
    origins: Origins
    observers: WithObservers


@showing(_Configured)
def configure(
    settings: str | os.PathLike[str] | Mapping[str, Any] | Settings | None = None, /, **tables: Unpack[_Configured]
) -> None:
    """Use these settings from now on: the path of a TOML file, a mapping of its shape, or the default cache's own.

    `configure("shop.toml")`, `configure(caches={"default": {"url": ...}})`, `configure(url="disk:///var/cache/shop")`.
    Earlier settings are replaced, with all their tables: after `configure(url=...)`, only the default cache exists.
    Functions that are already decorated use the new settings at their next call.

    >>> configure(url="memory://", ttl="10m")
    >>> configure(caches={"default": {"url": "memory://"}, "reports": {"ttl": "1d"}})
    >>> configure(urll="memory://")
    Traceback (most recent call last):
    stampede.errors.SettingsError: configure(): urll: there is no such setting: did you mean 'url'?
    """
    made = Registry(_settings_of(settings, tables))
    shared = sorted({safe_url(each.url) for each in made.settings.caches.values() if scheme_of(each.url) not in _OWN})
    if shared and isinstance(_registry, Isolated):
        _log.warning(
            "configure() inside of stampede.testing.isolated(): from now on the test uses %s. If that is not "
            "intended, enter isolated() after the application has called configure()",
            ", ".join(shared),
        )
    made.observers  # noqa: B018  # raise now if one can't be imported
    _replace(made)


_OWN = ("memory", "null")  # schemes of engines that a process does not share


def _settings_of(settings: Any, tables: Mapping[str, Any]) -> Settings:
    """Return the given settings. SettingsError: one of their URLs can't be opened."""
    alone = not tables.keys() <= set(TABLES)  # they are the default cache's own settings
    return _with_sound_urls(_read(settings, tables), "" if alone else "[caches.{}] ")


def _with_sound_urls(given: Settings, table: str) -> Settings:
    """Return the settings. SettingsError: no engine can open one of their URLs; it names the file, table and key."""
    for name, cache in given.caches.items():
        for key, url in (("url", cache.url), ("locks", cache.locks)):
            try:
                if url is not None:
                    check_url(url)
            except OptionError as error:
                raise SettingsError(f"{given.source}: {table.format(name)}{key}: {error}") from error
    return given


def _read(settings: Any, tables: Mapping[str, Any]) -> Settings:
    if settings is not None and tables:
        raise SettingsError("configure() takes a file, a mapping or keywords: give only one of them")
    if isinstance(settings, (str, os.PathLike)):
        return load(settings)
    if isinstance(settings, Settings):
        return settings
    if isinstance(settings, Mapping):
        return from_mapping(settings)
    if settings is not None:
        raise SettingsError(f"configure() was given {settings!r}: give a file's path, a mapping or keywords")
    if tables.keys() <= set(TABLES):
        return from_mapping(tables)
    own = {name: value for name, value in tables.items() if name != "observers"}
    observers = from_mapping({"observers": tables.get("observers", ())}).observers
    return Settings({"default": cache_settings(own, "configure():")}, observers=observers, source="configure()")


def _replace(registry: Registry, *, close: bool = True) -> Registry:
    global _registry
    before, _registry = _registry, registry
    unbind_all()  # before the old caches are closed: later calls find the new ones
    if close:
        before.close()
    return before


@showing(_Configured)
@contextmanager
def isolated(*, clock: Clock | None = None, **settings: Unpack[_Configured]) -> Iterator[None]:
    """Give the code in a block caches of its own. They are empty, and in memory unless `settings` say otherwise.

    `settings` are those of `configure`, but `strict` is true by default: a value that can't be stored is an error.
    Every cache name works, unless `caches=` names the caches. With `clock=stampede.testing.FakeClock()`, time passes
    only by its `advance`. Locks that name no engine are the block's own.

    >>> from stampede.testing import isolated
    >>> with isolated(ttl=60):  # empty, whatever was stored before
    ...     get_cache().get("k")
    """
    given: dict[str, Any] = {**settings}
    if given.keys() <= set(TABLES):
        tables = {"default": {}, **given.get("caches", {})}
        given["caches"] = {name: {"strict": True, **table} for name, table in tables.items()}
    else:
        given = {"strict": True, **given}
    inner = Isolated(_settings_of(None, given), named="caches" in settings, clock=clock)
    before = _replace(inner, close=False)
    try:
        yield
    finally:
        _replace(before)


def get_cache(name: str = "default") -> Cache:
    """Return the cache of this name in the settings. It is opened at the first call.

    >>> get_cache().set("k", 1)
    >>> get_cache().get("k")
    1
    """
    return _registry.cache(name)


def all_caches() -> list[Cache]:
    """Return all caches of the settings, and those that are open besides."""
    return _registry.all()


def _finder(cache: Any) -> Callable[[], Cache]:
    """Return how a function finds its cache: from a name, a cache, or a callable that returns one."""
    if isinstance(cache, Cache):
        return lambda: cache
    if isinstance(cache, str):
        return lambda: _registry.cache(cache)
    if callable(cache):
        return lambda: _checked(cache())
    raise OptionError(f"cache is {cache!r}: give a name of the settings, a Cache, or a function that returns one")


def _duplicate_names(cache: Any) -> DuplicateNames:
    return cache.duplicate_names if isinstance(cache, Cache) else _registry.duplicate_names[str(cache)]


def _checked(cache: Any) -> Cache:
    if not isinstance(cache, Cache):
        raise OptionError(f"the function given as cache= returned {cache!r}: it must return a Cache")
    return cache


Where: TypeAlias = str | Cache | Callable[[], Cache]
"""A name in the settings, a cache, or a function that returns one."""


@showing(ManyOptions)
def _many(function: Any = None, /, *, cache: Where = "default", **options: Any) -> Any:
    """Cache a function of many ids: it is called once for all missing ids. Each id is a key, shared by all batches.

    >>> @cached.many(ttl=600)
    ... def lengths(words: list[str]) -> dict[str, int]:
    ...     return {word: len(word) for word in words}
    >>> lengths(["tea", "coffee"])
    {'tea': 3, 'coffee': 6}
    >>> lengths.one("tea")
    3
    """
    return decorate(function, _finder(cache), options, _duplicate_names(cache), many=True)


def _with_many(function: Any) -> CachedIn[Where]:
    function.many = _many
    _many.__name__, _many.__qualname__ = "many", "cached.many"
    return cast(CachedIn[Where], function)


@_with_many
@showing(FunctionOptions)
def cached(function: Any = None, /, *, cache: Where = "default", **options: Any) -> Any:
    """Cache the values of a function by its arguments. Concurrent callers with equal arguments share one computation.

    Write `@cached` or `@cached(ttl=600, ...)` above a def, an async def or a method, and `@cached.many` above a
    function of many ids, such as `def users(ids: list[int]) -> dict[int, User]`.

    >>> @cached(ttl="10m", stale="1h")
    ... def price(item: str) -> int:
    ...     return len(item)
    >>> price("tea")
    3
    >>> price.invalidate("tea")
    True
    """
    return decorate(function, _finder(cache), options, _duplicate_names(cache))


@showing(MoreOptions)
def cache_without_dogpiling(
    key: str, function: Callable[[], T], ttl: TimeToLive = None, **options: Unpack[MoreOptions]
) -> T:
    """Return the key's value, computed by `function` if it is missing. With an async function, return an awaitable.

    >>> cache_without_dogpiling("answer", lambda: 42, ttl=600)
    42
    """
    cache = get_cache()
    policy: PolicyOptions = {**options}  # type: ignore[typeddict-item]  # ttl is optional
    if ttl is not None:
        policy["ttl"] = ttl
    if inspect.iscoroutinefunction(function):
        return cache.aget_or_compute(key, function, **policy)  # type: ignore[return-value]
    return cache.get_or_compute(key, function, **policy)


# -- locks --------------------------------------------------------------------------------------------------------


def _engine_of(on: Any) -> Engine:
    """Return the engine that `on=` means: a URL, a cache's name, a Cache or an engine; None: files on this machine."""
    if on is None:
        return _registry.engine(_registry.locks)
    if isinstance(on, Cache):
        return on.engine
    if isinstance(on, str):
        return _registry.engine(on) if "://" in on else _registry.cache(on).engine
    if isinstance(on, Engine):
        return on
    raise OptionError(f"on is {on!r}: give a URL, the name of a cache, or a Cache")


def _engine_or_finder(on: Any) -> Engine | Callable[[], Engine]:
    """Return the engine; or, for a name or None, a function that finds it at each use, as `configure` may change it."""
    return partial(_engine_of, on) if on is None or isinstance(on, str) else _engine_of(on)


class Lock(locks.Lock):
    __doc__ = locks.Lock.__doc__

    @showing(LockOptions)
    def __init__(self, name: str, *, on: str | Cache | Engine | None = None, **options: Unpack[LockOptions]) -> None:
        super().__init__(name, _engine_or_finder(on), **options)


class try_lock(Lock, locks.TryLock):
    __doc__ = locks.TryLock.__doc__

    @showing(TryLockOptions)
    def __init__(self, name: str, *, on: str | Cache | Engine | None = None, **options: Unpack[TryLockOptions]) -> None:
        if options.pop("wait", 0) != 0:  # type: ignore[typeddict-item]
            raise OptionError("try_lock never waits: leave wait= out, or use Lock")
        super().__init__(name, on=on, **options)


class once(onces.Once):
    __doc__ = onces.Once.__doc__

    @showing(OnceOptions)
    def __init__(
        self, name: str, *, every: Seconds, on: str | Cache | Engine = DEFAULT_NAME, **options: Unpack[OnceOptions]
    ) -> None:
        super().__init__(name, _engine_or_finder(on), every=every, **options)


# -- limits -------------------------------------------------------------------------------------------------------


class Limiter(limits.Limiter):
    __doc__ = limits.Limiter.__doc__

    @showing(LimitOptions)
    def __init__(
        self,
        name: str,
        *,
        max: int,
        per: Seconds,
        on: str | Cache | Engine | None = None,
        **options: Unpack[LimitOptions],
    ) -> None:
        super().__init__(name, _engine_or_finder(on), max=max, per=per, **options)


@showing(LimitOptions)
def limited(
    name: str,
    *,
    max: int,
    per: Seconds,
    cost: int = 1,
    on: str | Cache | Engine | None = None,
    **options: Unpack[LimitOptions],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Limit how often a function may be called: `@limited("github", max=5, per=0.8)`, on a def or an async def.

    A call waits for its turn. If that would take longer than `wait`, it raises LimitTimeout at once. All functions
    and processes that use this name share the limit. `cost` is how many starts one call counts for.

    >>> @limited("github", max=5, per="800ms")
    ... def repository(name: str) -> str:
    ...     return name
    >>> repository("stampede")
    'stampede'
    """
    limiter = Limiter(name, max=max, per=per, on=on, **options)
    limits.checked(cost, limiter)
    return lambda function: limits.limiting(limiter, function, cost)


class Bulkhead(bulkheads.Bulkhead):
    __doc__ = bulkheads.Bulkhead.__doc__

    @showing(BulkheadOptions)
    def __init__(
        self, name: str, *, on: str | Cache | Engine | None = None, **options: Unpack[BulkheadOptions]
    ) -> None:
        super().__init__(name, _engine_or_finder(on), **options)
