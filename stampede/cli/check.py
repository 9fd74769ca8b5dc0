"""`stampede check`: the settings as they are read, whether the engines answer, and what this mix can't promise."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from stampede.cache import Cache
from stampede.cli.screen import Screen
from stampede.engines import safe_url
from stampede.errors import StampedeError
from stampede.settings import CacheSettings, Settings

__all__ = ["check"]

PINGS = 7
COLUMNS = ["cache", "engine", "median ping", "local tier", "codec"]


def check(screen: Screen, settings: Settings, name: str | None) -> int:
    """Every cache of the settings, or the named one; 1 if an engine can't be reached."""
    screen.say(f"settings: {settings.source}")
    names = [name] if name else sorted(settings.caches) or ["default"]
    caches = {name: settings.cache(name) for name in names}
    notes: list[str] = []
    failed = 0
    with screen.board(COLUMNS) as board:
        for each, cache in caches.items():
            engine = " + locks ".join(map(safe_url, filter(None, (cache.url, cache.locks))))
            board.show(each, engine, "?", "", "")
            ping, said, well = _examine(cache)
            notes += [f"{each}: {note}" for note in said]
            failed += not well
            board.show(each, engine, ping, _local(cache), cache.codec)
    if name is None and (missed := settings.no_default()):
        screen.say(missed)
    for note in notes:
        screen.say(note)
    return 1 if failed else 0


def _examine(settings: CacheSettings) -> tuple[str, list[str], bool]:
    """The latency as text, what is to be said about the cache, and whether its engine answers."""
    try:
        with Cache.of(settings) as cache:
            seconds = median(cache.engine.ping() for _ in range(PINGS))
            return _latency(seconds), list(_notes(cache)), True
    except StampedeError as error:
        return "none", [f"can't be used: {error}"], False


def _latency(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.001 else f"{seconds * 1e3:.1f} ms"


def _local(settings: CacheSettings) -> str:
    return f"{settings.local.entries} entries" if settings.local else "none"


def _notes(cache: Cache) -> Iterator[str]:
    """Where the promises end with this engine, or this mix."""
    engine = cache.engine
    if engine.scheme in ("memory", "null"):
        yield _WITHIN[engine.scheme]
        return
    if "disk" in engine.scheme.split("+"):
        yield "shared by the processes of this machine; other machines do not see this directory"
    if not engine.fenced:
        yield "promises 4 and 5 do not hold in this mix: the store can't refuse what is filled in late"
    if engine.timeless:
        yield "it tells no time: values get older by the clocks of the machines that store them, which must be right"
    if not engine.pushes:
        yield "waiters are not woken but poll: the last one comes later than with an engine that pushes"
    if cache.settings.local and not engine.coherent:
        believed = cache.settings.local.ttl or 1.0
        yield f"the local tier gets no news: it may serve for {believed:g} s what another process has changed"
    if cache.settings.local and (refusal := engine.refusal()):
        yield refusal
    yield from engine.advice()


_WITHIN = {
    "memory": "this process only: every other process computes for itself, and nothing outlives the process",
    "null": "keeps nothing and locks nothing: for tests",
}
