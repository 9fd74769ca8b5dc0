"""What a person types, translated to what an engine holds: a cache, a key's scope, an entry."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from stampede import events
from stampede.algorithm.scope import ScopeSide
from stampede.api.cache import Cache
from stampede.api.cached import Cached
from stampede.api.method import Method
from stampede.api.registry import Registry, configure
from stampede.api.status import Holder, status
from stampede.engines import open_engine, safe_url
from stampede.errors import CodecError, OptionError, StampedeError
from stampede.keys import function_in, in_namespace, quoted
from stampede.model.entry import Entry
from stampede.model.ports import Engine
from stampede.model.tags import names_in
from stampede.runtime.colour import BLOCKING, run_blocking
from stampede.settings import CacheSettings, Settings, discover, load
from stampede.settings.options import checked_tags

__all__ = [
    "NOTHING",
    "Answers",
    "Chosen",
    "EngineAnswer",
    "UnreadableEntry",
    "addresses",
    "ask",
    "cache_of",
    "chosen",
    "engine_at",
    "find",
    "holder",
    "invalidate",
    "invalidate_tags",
    "listed",
    "settings_of",
    "url_of_locks",
    "urls_of_limits",
    "urls_of_locks",
]

T = TypeVar("T")

NOTHING = "no settings: neither $STAMPEDE_SETTINGS nor ./stampede.toml"


class UnreadableEntry(NamedTuple):
    """A placeholder for a value that can't be read here."""

    why: str


class Chosen(NamedTuple):
    """The configured cache that a command is about."""

    name: str
    settings: CacheSettings

    def __str__(self) -> str:
        return f"cache {self.name!r} ({safe_url(self.settings.url)})"


def addresses(options: Namespace, urls: Callable[[Settings, str | None], list[str]]) -> list[str]:
    """Return the address that was given on the command line, or else those in the settings."""
    if options.where is not None and "://" in options.where:
        return [options.where]
    return list(dict.fromkeys(urls(settings_of(options.settings), options.where)))


def chosen(options: Namespace) -> Chosen:
    """Return the configured cache that the options name."""
    return select_cache(settings_of(options.settings), options.cache)


def settings_of(file: Path | None) -> Settings:
    """Return the settings of a file, or else those that a program started here would find, and put them in force. Their
    observers are left out: they belong to the program, and may not be importable here."""
    settings = (load(file) if file else discover(os.environ, Path.cwd())) or Settings(source=NOTHING)
    configure(replace(settings, observers=()))
    return settings


def select_cache(settings: Settings, name: str | None) -> Chosen:
    """Return the named cache; without a name, the only one, or `default`."""
    if name is None and settings.caches and "default" not in settings.caches:
        if len(settings.caches) > 1:
            raise OptionError(f"which cache? --cache takes {', '.join(sorted(settings.caches))}")
        (name,) = settings.caches
    name = name or "default"
    return Chosen(name, settings.cache(name))


def cache_of(settings: CacheSettings, *observers: events.Observer) -> Cache:
    """Return a cache. OptionError: its values can't be read outside the process that stored them."""
    # A person at the command line wants to see an engine's errors.
    cache = Cache.of(replace(settings, on_engine_error="raise"), observers=observers)
    if cache.engine.scheme in ("memory", "null") or not cache.engine.shared:
        raise OptionError(f"{cache.name} lives inside each process: no other process can look into it")
    return cache


def url_of_locks(settings: Settings, where: str | None) -> list[str]:
    """Return the address of a cache's locks, as a list."""
    cache = select_cache(settings, where).settings
    return [cache.locks or cache.url]


def urls_of_locks(settings: Settings, where: str | None) -> list[str]:
    """Return where the named cache has its locks; without a name, where all caches and locks without `on=` do."""
    if where is not None:
        return url_of_locks(settings, where)
    return [Registry.locks, *(each.locks or each.url for each in settings.caches.values())]


def urls_of_limits(settings: Settings, where: str | None) -> list[str]:
    """Return where limits may be: on the engine of a cache's values if it has limits, or else on that of its locks."""
    caches = settings.caches.values() if where is None else [select_cache(settings, where).settings]
    urls = [url for each in caches for url in (each.url, each.locks) if url is not None]
    return [Registry.locks, *urls] if where is None else urls


@contextmanager
def engine_at(url: str) -> Iterator[Engine]:
    """Open the engine behind an address, and close it at the end of the block."""
    engine = open_engine(url)
    try:
        yield engine
    finally:
        engine.close()


# -- one question to every engine on which locks and limits may be -------------------------------------------------


class EngineAnswer(NamedTuple, Generic[T]):
    url: str
    on: str  # the engine's name for people
    answer: T


class Answers(NamedTuple, Generic[T]):
    """The answers of the engines that have one, and the errors of the others."""

    given: list[EngineAnswer[T]]
    errors: list[StampedeError]

    def end(self, *, refusals: bool = True) -> int:
        """Print the errors, and return the exit code: 1 if an engine is out of reach, which may know more. Without
        `refusals`, do not print the errors of engines that can't answer such a question at all."""
        unreached = [each for each in self.errors if not isinstance(each, OptionError)]
        for error in self.errors if refusals else unreached:
            print(f"stampede: {' '.join(str(error).split())}", file=sys.stderr)
        return int(bool(unreached))

    @property
    def on(self) -> str:
        return " and ".join(each.on for each in self.given)


def ask(urls: Sequence[str], question: Callable[[Engine], T]) -> Answers[T]:
    """Ask each engine. An error of one does not hide the others' answers; if there is only one, its error is raised."""
    answers = Answers[T]([], [])
    for url in urls:
        try:
            with engine_at(url) as engine:
                if not engine.shared:
                    called = engine.called
                    raise OptionError(f"{called} lives inside each process: no other process can look into it")
                answers.given.append(EngineAnswer(url, engine.called, question(engine)))
        except StampedeError as error:
            answers.errors.append(error)
    if not answers.given and len(answers.errors) == 1:
        raise answers.errors[0]
    return answers


# -- keys -----------------------------------------------------------------------------------------------------------


def find(settings: CacheSettings, key: str, function: str | None) -> Entry[Any] | None:
    """Return what is stored under a key: one of the cache's own, or a function's as its `key(...)` returns it."""
    reasons: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.BadBytes):
            reasons.append(event.why)

    with cache_of(settings, listen) as cache:
        for scope, full in _places(cache, key, function):
            entry = run_blocking(scope.peek(full))
            if entry is None:
                entry = _unread(scope, full, reasons.pop() if reasons else "it is a value of another type")
            if entry is not None:
                return entry
    return None


def _unread(scope: ScopeSide, key: str, why: str) -> Entry[Any] | None:
    """Return the entry, with all that is known about it except its value."""
    store = scope.core.engine.blocking.store
    assert store is not None
    (sealed,) = run_blocking(store.get([scope.prefix + key]))
    return sealed and sealed.holding(UnreadableEntry(f"{why}; --function MODULE:NAME gives its type"))


def holder(settings: CacheSettings, key: str, function: str | None) -> Holder | None:
    """Return the process that computes the key now; None if no process does."""
    with cache_of(settings) as cache:
        for scope, full in _places(cache, key, function):
            known = run_blocking(status(scope, full)).holder
            if known is not None:
                return known
    return None


def listed(settings: CacheSettings, prefix: str, tag: str | None = None) -> Iterator[str]:
    """Yield the cache's own keys with this prefix; then those of the function that the prefix names: `shop:report`.
    With `tag`, yield only those whose value carries it, and is not gone."""
    if tag is not None:
        checked_tags("--tag", [tag])
    with cache_of(settings) as cache:
        own = in_namespace(cache.namespace, "")
        for key in _keys(cache, quoted(cache.namespace), own + prefix, tag):
            yield key.removeprefix(own)
        name = function_in(f"{prefix}:") or ""
        name = name if "/" in name else in_namespace(cache.namespace, name)
        if function_in(f"{name}:"):
            yield from _keys(cache, name, f"{name}:", tag)


def _keys(cache: Cache, name: str, prefix: str, tag: str | None) -> Iterator[str]:
    scope, after = cache.scope(name, cache.policy).side(BLOCKING), None
    while True:
        found, after = run_blocking(scope.page(prefix, after))
        yield from found if tag is None else _carrying(scope, found, tag)
        if after is None:
            return


def _carrying(scope: ScopeSide, keys: Sequence[str], tag: str) -> list[str]:
    """Return the keys whose value carries the tag, and is not gone. The values' types need not be known here."""
    store, codec = scope.core.engine.blocking.store, scope.scope.codec
    assert store is not None and codec is not None
    (name,), physical = scope.tags.names([tag]), [scope.prefix + key for key in keys]
    found = run_blocking(store.get(physical))
    carrying: list[Entry[Any] | None] = []
    for full, sealed in zip(physical, found, strict=True):
        if sealed is not None:
            with suppress(CodecError):  # no reader finds anything there
                sealed.tags = codec.tags(full, sealed.value)
        carrying.append(sealed if sealed is not None and name in names_in(sealed.tags) else None)
    good = run_blocking(scope.tags.judged(carrying))
    return [key for key, entry in zip(keys, good, strict=True) if entry is not None]


def invalidate(settings: CacheSettings, key: str, function: str | None) -> bool:
    """Invalidate every key of this name, and return whether there was a value."""
    with cache_of(settings) as cache:
        places = list(_places(cache, key, function))
        return sum(run_blocking(scope.invalidate(full)) for scope, full in places) > 0  # in every place: not `any`


def invalidate_tags(settings: CacheSettings, tags: Sequence[str]) -> None:
    """Invalidate all that carries one of the tags, and what is being computed for them."""
    checked_tags("--tag", tags)
    with cache_of(settings) as cache:
        cache.invalidate_tags(*tags, on_error="raise")


def _places(cache: Cache, key: str, function: str | None) -> Iterator[tuple[ScopeSide, str]]:
    """Yield where a key may be, with its full name there: among the cache's own, or among a function's."""
    if function is not None:
        yield _cached(function).scope.scope.side(BLOCKING), key
        return
    yield cache.scope(quoted(cache.namespace), cache.policy).side(BLOCKING), in_namespace(cache.namespace, key)
    name = function_in(key)
    if name is not None:
        yield cache.scope(name, cache.policy).side(BLOCKING), key


def _cached(name: str) -> Cached:
    """Return the decorated function of a dotted name. Its module is imported, as its program would do."""
    module, _, path = name.rpartition(":") if ":" in name else name.rpartition(".")
    sys.path.insert(0, "")  # as for a program that is started in this directory
    try:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = vars(function)[part] if isinstance(function, type) else getattr(function, part)
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise OptionError(f"--function {name}: it can't be imported: {error}: write shop.reports:report") from error
    finally:
        sys.path.remove("")
    cached = function.cached if isinstance(function, Method) else getattr(getattr(function, "key", None), "__self__", 0)
    if not isinstance(cached, Cached):
        raise OptionError(f"--function {name}: it is not a function under @cached")
    return cached
