"""What settings are, once they are read and checked: frozen dataclasses, whose reprs hold no secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

from stampede.errors import OptionError, SettingsError
from stampede.model.policy import DEFAULT, Policy, nearest

__all__ = ["CacheSettings", "LocalSettings", "OriginSettings", "RateSetting", "Settings", "safe_url"]


NOTHING = "nothing"
"""Where settings that nobody wrote were read."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """A local tier: how many entries, and for how many seconds one is believed without news (None: the engine's)."""

    entries: int = 10_000
    ttl: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class CacheSettings:
    """One cache, as its table describes it. None is always "as the engine or codec would have it"."""

    url: str = "memory://"
    locks: str | None = None
    local: LocalSettings | Literal[False] | None = None
    namespace: str = ""
    codec: Any = "sealed"  # or a codec of the user's, from code
    trust: tuple[str | type | ModuleType, ...] = ()  # dotted names from a file, classes and modules also from code
    signing_key: tuple[bytes, ...] = ()  # the first signs, each is believed
    compress: int | None = None  # bytes above which a body is compressed
    max_bytes: int | None = None
    on_engine_error: Literal["local", "raise"] = "local"
    policy: Policy = DEFAULT
    origins: Mapping[str, OriginSettings] = field(default_factory=dict)  # all that the settings have
    name: str = field(default="", compare=False)  # its name there

    def __repr__(self) -> str:
        locks = self.locks and safe_url(self.locks)
        return (
            f"CacheSettings(url={safe_url(self.url)!r}, locks={locks!r}, local={self.local!r}, "
            f"namespace={self.namespace!r}, codec={self.codec!r}, trust={self.trust!r}, "
            f"signing_key=<{len(self.signing_key)} of them>, compress={self.compress!r}, "
            f"max_bytes={self.max_bytes!r}, on_engine_error={self.on_engine_error!r}, policy={self.policy!r})"
        )


@dataclass(frozen=True, slots=True)
class RateSetting:
    """So many computations within so many seconds."""

    count: int
    per: float


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """The caps of one origin over the whole fleet: computations at once, and in so many seconds. None: there is none.

    `adaptive`: the first follows how well the origin bears it, between `at_least` and `concurrency`.
    """

    concurrency: int | None = None
    rate: RateSetting | None = None
    when_full: Literal["wait", "stale", "raise"] = "wait"
    adaptive: bool = False
    at_least: int = 1

    def __post_init__(self) -> None:
        if self.adaptive and self.concurrency is None:
            raise OptionError("adaptive is true: give concurrency, the most that it may adapt to")
        if self.at_least > (self.concurrency or self.at_least):
            raise OptionError(f"at_least is {self.at_least}: it must not be more than concurrency, {self.concurrency}")


@dataclass(frozen=True, slots=True)
class Settings:
    """All caches and origins by name, the observers, and where they were read."""

    caches: Mapping[str, CacheSettings] = field(default_factory=dict)
    origins: Mapping[str, OriginSettings] = field(default_factory=dict)
    source: str = NOTHING
    observers: tuple[tuple[Any, Any], ...] = ()  # of every cache, by key: functions, or "prometheus", "module:name"

    def cache(self, name: str) -> CacheSettings:
        """The settings of one cache; `default` is there even if nobody wrote it."""
        if name in self.caches:
            return replace(self.caches[name], origins=self.origins, name=name)
        if name == "default":
            return CacheSettings(origins=self.origins, name=name)
        if self.source == NOTHING:
            raise SettingsError(f"there are no settings, and so no [caches.{name}]: call configure(caches=...)")
        raise SettingsError(f"{self.source}: there is no [caches.{name}]: {nearest(name, ['default', *self.caches])}")

    def no_default(self) -> str | None:
        """What is to be told to who asks for the default cache, where others are written and it isn't; else None."""
        if not self.caches or "default" in self.caches:
            return None
        hint, names = nearest("default", self.caches), ", ".join(map(repr, sorted(self.caches)))
        meant = f"{hint.removesuffix('?').replace('did you mean', 'is')} meant? " if hint.startswith("did") else ""
        return (
            f"{self.source}: there is no [caches.default], only {names}: {meant}What asks for no cache by its name, as "
            "@cached without cache= does, is kept in the memory of each process. Name one of them default, say "
            "@cached(cache=...), or write [caches.default] with url = 'memory://' if that is meant"
        )


_ASKS = r"(?!\d{1,5}(?:/[^?#@]*)?\?[^@]*=)"  # a port, and a query in which the @ is
# Also where a slash, or the scheme, is missing, or a password has in it what ends one elsewhere.
_PASSWORD = re.compile(rf"(:/{{1,2}}[^/?#:]*:|^[^/?#:]*:(?!/))(?:[^?#]*|{_ASKS}.*)@", re.DOTALL)
_SECRET = re.compile(  # `listen` is an address, of whatever form
    r"([?&;][^=&;#]*(?:pass|secret|token|signing|listen|credential|_key)[^=&#]*=)[^&;]*", re.IGNORECASE
)


def safe_url(url: str) -> str:
    """The URL as it may be shown: without its password."""
    return _SECRET.sub(r"\1***", _PASSWORD.sub(r"\1***@", url))
