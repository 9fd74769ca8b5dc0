"""`stampede check`: the settings as they are read, whether the engines answer, and what they can't promise."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from stampede.api.cache import Cache
from stampede.api.registry import Registry
from stampede.cli.address import settings_of
from stampede.cli.show import say
from stampede.engines import safe_url
from stampede.errors import OptionError, StampedeError
from stampede.settings import CacheSettings, Settings

__all__ = ["check", "check_caches"]

PINGS = 7


class Health(NamedTuple):
    """The state of one cache."""

    well: bool
    ping: float | None  # the median of a few, in seconds
    notes: list[str]


def check(options: Namespace) -> int:
    """Check every cache of the settings, or the named one. Return 1 if an engine can't be used."""
    settings, name = settings_of(options.settings), options.cache
    names = [name] if name else sorted(settings.caches) or ["default"]
    caches = {name: settings.cache(name) for name in names}
    missed, wrong = settings.no_default() if name is None else None, _wrong(settings)
    notes = [each for each in (missed, wrong) if each]
    if options.json:
        seen = {each: _examine(cache) for each, cache in caches.items()}
        rows = [{"cache": each, **_described(caches[each]), **health._asdict()} for each, health in seen.items()]
        report = {"settings": settings.source, "notes": notes, "caches": rows}
        say(json.dumps(report, indent=2))
        return 1 if wrong or not all(health.well for health in seen.values()) else 0
    say(f"settings: {settings.source}")
    well = check_caches(caches, notes)
    return 0 if well and not wrong else 1


def check_caches(caches: Mapping[str, CacheSettings], notes: Iterable[str] = ()) -> bool:
    """Print a line for each cache, and then notes on what it can't promise. Return whether all engines can be used."""
    examined = {name: _examine(cache) for name, cache in caches.items()}
    for name, health in examined.items():
        cache = caches[name]
        ping, local = _latency(health.ping), f"{cache.local.entries} entries" if cache.local else "none"
        say(f"{name}: engine {_engine(cache)}, median ping {ping}, local tier {local}, codec {cache.codec}")
    for note in [*notes, *[f"{name}: {note}" for name, health in examined.items() for note in health.notes]]:
        say(note)
    return all(health.well for health in examined.values())


def _wrong(settings: Settings) -> str | None:
    """Return why the observers can't be used, which the program's first call would raise; None if they can."""
    try:
        Registry(settings, discovers=False).observers  # noqa: B018
    except OptionError as error:
        return f"[observers] can't be used: {error}"
    return None


def _described(settings: CacheSettings) -> dict[str, object]:
    local = settings.local.entries if settings.local else None
    return {"engine": _engine(settings), "local": local, "codec": str(settings.codec)}


def _engine(settings: CacheSettings) -> str:
    return " + locks ".join(map(safe_url, filter(None, (settings.url, settings.locks))))


def _examine(settings: CacheSettings) -> Health:
    try:
        with Cache.of(settings) as cache:
            return Health(True, median(cache.engine.ping() for _ in range(PINGS)), list(_notes(cache)))
    except StampedeError as error:
        return Health(False, None, [f"can't be used: {error}"])


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.001 else f"{seconds * 1e3:.1f} ms"


def _notes(cache: Cache) -> Iterator[str]:
    """Yield what the library can't promise with this engine, or this combination of engine and local tier."""
    engine = cache.engine
    if engine.scheme in ("memory", "null"):
        yield _WITHIN[engine.scheme]
        return
    if "disk" in engine.scheme.split("+"):
        yield "shared by the processes of this machine; other machines do not see this directory"
    if engine.timeless:
        yield "it has no clock: values age by the clocks of the machines that store them, which must be right"
    if not engine.pushes:
        yield "waiters are not woken, but poll: they get a value later than with an engine that pushes"
    if cache.settings.local and not engine.coherent:
        believed = cache.settings.local.ttl or 1.0
        yield f"the local tier is not told of changes: for {believed:g} s it may serve what another process has changed"
    if cache.settings.local and (refusal := engine.refusal()):
        yield refusal
    yield from engine.advice()


_WITHIN = {
    "memory": "this process only: every other process computes for itself, and nothing outlives the process",
    "null": "stores nothing and locks nothing: for tests",
}
