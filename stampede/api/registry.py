"""From settings to caches: `configure`, caches by name, and the public faces that find theirs at first use."""

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
    LimitOptions,
    LockOptions,
    MoreOptions,
    Options,
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
from stampede.metrics import OpenTelemetryObserver, PrometheusObserver
from stampede.model.policy import Seconds, TimeToLive
from stampede.model.ports import Engine
from stampede.runtime import forks
from stampede.runtime.signatures import showing
from stampede.settings import TABLES, Settings, cache_settings, discover, from_mapping, load

__all__ = [
    "Bulkhead", "Limiter", "Lock", "cache_without_dogpiling", "cached", "configure", "get_cache", "isolated", "limited",
    "try_lock",
]  # fmt: skip

_log = logging.getLogger("stampede")

P = ParamSpec("P")
K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")
Clock: TypeAlias = Callable[[], float]
DEFAULT_NAME = "default"
"""The cache of all who name none."""


def _observer(setting: str, given: str | Observer) -> Observer:
    """One of the settings' observers: itself, ready-made, or by its module and name. A class is called to make one."""
    if not isinstance(given, str):
        return given
    ready = {"prometheus": PrometheusObserver, "opentelemetry": OpenTelemetryObserver}
    found = ready.get(given) or imported(setting, given)
    return cast("Observer", found() if isinstance(found, type) else found)


class Registry:
    """The settings in force, and the caches and engines opened for them."""

    locks = "file://"
    """Where locks are whose engine nobody names."""

    def __init__(self, settings: Settings | None = None, *, discovers: bool = True) -> None:
        self._lock = threading.RLock()
        self._settings = settings
        self._discovers = discovers
        self._caches: dict[str, Cache] = {}
        self.duplicate_names: defaultdict[str, DuplicateNames] = defaultdict(
            DuplicateNames
        )  # of the functions decorated for a cache
        self._engines: dict[str, Engine] = {}
        forks.in_child(self._start_again)

    def _start_again(self) -> None:
        self._lock = threading.RLock()  # a thread that was opening a cache is not here to open this

    @property
    def settings(self) -> Settings:
        with self._lock:
            if self._settings is None:
                found = discover(os.environ, Path.cwd()) if self._discovers else None
                if found is None and self._discovers:
                    _log.info("no settings: values are kept in memory (stampede.configure, or a stampede.toml)")
                self._settings = Settings() if found is None else _with_sound_urls(found, "[caches.{}] ")
            return self._settings

    @property
    def observers(self) -> list[Observer]:
        """The observers of all caches; OptionError if one can't be imported."""
        settings = self.settings
        return [_observer(f"{settings.source}: observers.{key}", each) for key, each in settings.observers]

    def cache(self, name: str) -> Cache:
        """The cache of this name, opened at the first time."""
        cache = self._caches.get(name)
        if cache is None:
            with self._lock:
                cache = self._caches.get(name)
                if cache is None:
                    cache = self._caches[name] = self._opened(name)
        return cache

    def _opened(self, name: str) -> Cache:
        settings = self.settings
        if name == DEFAULT_NAME and (missed := settings.no_default()):
            _log.warning("%s", missed)
        return Cache.of(settings.cache(name), observers=self.observers)

    def engine(self, url: str) -> Engine:
        """The engine of this URL: one for the process, and so one pool of connections."""
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
    """A test's: it reads nothing of the machine's, and its locks exclude nobody outside."""

    locks = "memory://"

    def __init__(self, settings: Settings, *, named: bool, clock: Clock | None) -> None:
        super().__init__(settings, discovers=False)
        self._named = named  # its caches are told by name, and there are no others
        self._clock = clock

    def _opened(self, name: str) -> Cache:
        settings = self.settings.cache(name if self._named else "default")
        if self._clock is None:
            return Cache.of(settings, observers=self.observers)
        if settings.url != "memory://":
            raise SettingsError(f"isolated(clock=...) can't set the clock of {settings.url}: leave its url out")
        # Sealed: of values that are kept as they are, the time left is also looked at by the process's own clock.
        engine = open_engine("memory://?codec=sealed", clock=self._clock)
        return Cache.of(replace(settings, local=False), engine, self.observers)


_registry = Registry()


class _Configured(CacheOptions, total=False):
    """All that `configure` takes by name."""

    url: str
    locks: str | None
    caches: Tables
    origins: Origins
    observers: WithObservers


@showing(_Configured)
def configure(
    settings: str | os.PathLike[str] | Mapping[str, Any] | Settings | None = None, /, **tables: Unpack[_Configured]
) -> None:
    """Use these settings from now on: a TOML file's path, a mapping of its shape, or the default cache's own.

    `configure("shop.toml")`, `configure(caches={"default": {"url": ...}})`, `configure(url="disk:///var/cache/shop")`.
    What was configured before is forgotten, with all its tables: keywords alone leave the default cache only.
    Functions that are decorated already bind again at their next call.

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
            "configure() inside of stampede.testing.isolated(): from here on the test uses %s. If that is not meant, "
            "enter isolated() when the application has been configured",
            ", ".join(shared),
        )
    made.observers  # noqa: B018  # what can't be imported is an error now
    _replace(made)


_OWN = ("memory", "null")  # schemes of what a process has for itself


def _settings_of(settings: Any, tables: Mapping[str, Any]) -> Settings:
    """What was given, with URLs by which an engine can be opened."""
    alone = not tables.keys() <= set(TABLES)  # the default cache's own settings
    return _with_sound_urls(_read(settings, tables), "" if alone else "[caches.{}] ")


def _with_sound_urls(given: Settings, table: str) -> Settings:
    """The settings; SettingsError names the file, table and key of a URL by which no engine can be opened."""
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
        raise SettingsError("configure() takes a file, a mapping or keywords: one of them")
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
    unbind_all()
    if close:
        before.close()
    return before


@showing(_Configured)
@contextmanager
def isolated(*, clock: Clock | None = None, **settings: Unpack[_Configured]) -> Iterator[None]:
    """Caches of its own for a block: empty, in memory unless `settings` (as of `configure`) say otherwise; and a value
    that couldn't be stored is an error there (`strict`), unless they say that it is not.

    Each name of a cache stands for one, unless `caches=` names them. With `clock=stampede.testing.FakeClock()` time
    passes when its `advance` says so. Locks whose engine isn't named are the block's own.

    >>> from stampede.testing import isolated
    >>> with isolated(ttl=60):  # empty, whatever was kept before
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
    """The cache of this name in the settings.

    >>> get_cache().set("k", 1)
    >>> get_cache().get("k")
    1
    """
    return _registry.cache(name)


def _finder(cache: Any) -> Callable[[], Cache]:
    """How a function finds its cache: by name, given, or from a callable."""
    if isinstance(cache, Cache):
        return lambda: cache
    if isinstance(cache, str):
        return lambda: _registry.cache(cache)
    if callable(cache):
        return lambda: _found(cache())
    raise OptionError(f"cache is {cache!r}: give a name of the settings, a Cache, or a function that returns one")


def _namesakes(cache: Any) -> DuplicateNames:
    return cache.duplicate_names if isinstance(cache, Cache) else _registry.duplicate_names[str(cache)]


def _found(cache: Any) -> Cache:
    if not isinstance(cache, Cache):
        raise OptionError(f"the function given as cache= returned {cache!r}: it must return a Cache")
    return cache


Where: TypeAlias = str | Cache | Callable[[], Cache]
"""A name of the settings, a cache, or what gives one."""


@showing(ManyOptions)
def _many(function: Any = None, /, *, cache: Where = "default", **options: Any) -> Any:
    """Called once for the ids that are missing; each is a key of its own, which all batches share.

    >>> @cached.many(ttl=600)
    ... def lengths(words: list[str]) -> dict[str, int]:
    ...     return {word: len(word) for word in words}
    >>> lengths(["tea", "coffee"])
    {'tea': 3, 'coffee': 6}
    >>> lengths.one("tea")
    3
    """
    return decorate(function, _finder(cache), options, _namesakes(cache), many=True)


def _with_many(function: Any) -> CachedIn[Where]:
    function.many = _many
    _many.__name__, _many.__qualname__ = "many", "cached.many"
    return cast(CachedIn[Where], function)


@_with_many
@showing(Options)
def cached(function: Any = None, /, *, cache: Where = "default", **options: Any) -> Any:
    """Compute once, however many ask: `@cached`, or `@cached(ttl=600, ...)`, on a def, an async def or a method.

    `@cached.many` on a function of many ids, `def users(ids: list[int]) -> dict[int, User]`.

    >>> @cached(ttl="10m", stale="1h")
    ... def price(item: str) -> int:
    ...     return len(item)
    >>> price("tea")
    3
    >>> price.invalidate("tea")
    True
    """
    return decorate(function, _finder(cache), options, _namesakes(cache))


@showing(MoreOptions)
def cache_without_dogpiling(
    key: str, function: Callable[[], T], ttl: TimeToLive = None, **options: Unpack[MoreOptions]
) -> T:
    """The key's value, computed by `function` if it is missing. An async function gives an awaitable.

    >>> cache_without_dogpiling("answer", lambda: 42, ttl=600)
    42
    """
    cache = get_cache()
    policy: PolicyOptions = {**options}  # type: ignore[typeddict-item]  # a ttl may be left out
    if ttl is not None:
        policy["ttl"] = ttl
    if inspect.iscoroutinefunction(function):
        return cache.aget_or_compute(key, function, **policy)  # type: ignore[return-value]
    return cache.get_or_compute(key, function, **policy)


# -- locks --------------------------------------------------------------------------------------------------------


def _engine_of(on: Any) -> Engine:
    """What `on=` means: a URL, a cache's name, a Cache, an engine; nothing is files on this machine."""
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
    """The engine, or how it is found each time that it is used: `configure` may give its name, or nothing, another."""
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
    """Each call of the function is a start of this limit: `@limited("github", max=5, per=0.8)`, on a def or an
    async def. It waits for its turn; where that is longer than `wait`, it raises LimitTimeout at once.

    All functions of one name share the limit, with all processes.

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
