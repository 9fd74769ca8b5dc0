"""Settings that were read and checked, as frozen dataclasses. Their reprs contain no secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

from stampede.errors import OptionError, SettingsError
from stampede.settings.options import DEFAULT, Policy, nearest

__all__ = ["CacheSettings", "LocalSettings", "OriginSettings", "RateSetting", "Settings", "safe_url"]


NOTHING = "nothing"
"""The source of settings that were not given at all."""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """A local tier: how many entries it keeps, and for how many seconds without news (None: the engine's default)."""

    entries: int = 10_000
    ttl: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class CacheSettings:
    """One cache, as its table describes it. None always means the default of the engine or codec."""

    url: str = "memory://"
    locks: str | None = None
    local: LocalSettings | Literal[False] | None = None
    namespace: str = ""
    codec: Any = "sealed"  # from code, also an object: a codec of the user's own
    trust: tuple[str | type | ModuleType, ...] = ()  # dotted names; from code, also classes and modules
    signing_key: tuple[bytes, ...] = ()  # the first one signs, each one verifies
    compress: int | None = None  # larger bodies, in bytes, are compressed
    max_bytes: int | None = None
    on_engine_error: Literal["local", "raise"] = "local"
    on_error: Literal["raise", "later"] = "raise"  # of an invalidation that the engine could not make
    policy: Policy = DEFAULT
    origins: Mapping[str, OriginSettings] = field(default_factory=dict)  # all origins of the settings
    name: str = field(default="", compare=False)  # the cache's name in the settings

    def __repr__(self) -> str:
        locks = self.locks and safe_url(self.locks)
        return (
            f"CacheSettings(url={safe_url(self.url)!r}, locks={locks!r}, local={self.local!r}, "
            f"namespace={self.namespace!r}, codec={self.codec!r}, trust={self.trust!r}, "
            f"signing_key=<{len(self.signing_key)} of them>, compress={self.compress!r}, "
            f"max_bytes={self.max_bytes!r}, on_engine_error={self.on_engine_error!r}, on_error={self.on_error!r}, "
            f"policy={self.policy!r})"
        )


@dataclass(frozen=True, slots=True)
class RateSetting:
    """A rate: at most `count` computations within `per` seconds."""

    count: int
    per: float


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """The caps of one origin over the whole fleet: on concurrent computations, and on their rate. None means no cap.
    With `adaptive`, the concurrency follows how the origin copes with it, between `at_least` and `concurrency`."""

    concurrency: int | None = None
    rate: RateSetting | None = None
    when_full: Literal["wait", "stale", "raise"] = "wait"
    adaptive: bool = False
    at_least: int = 1

    def __post_init__(self) -> None:
        if self.adaptive and self.concurrency is None:
            raise OptionError("adaptive is true: also give concurrency, the upper bound")
        if self.at_least > (self.concurrency or self.at_least):
            raise OptionError(f"at_least is {self.at_least}: it must not be more than concurrency, {self.concurrency}")


@dataclass(frozen=True, slots=True)
class Settings:
    """All caches and origins by name, the observers, and the source of these settings."""

    caches: Mapping[str, CacheSettings] = field(default_factory=dict)
    origins: Mapping[str, OriginSettings] = field(default_factory=dict)
    source: str = NOTHING
    observers: tuple[tuple[Any, Any], ...] = ()  # by key: a function, "prometheus", or "module:name"

    def cache(self, name: str) -> CacheSettings:
        """Return the settings of one cache. SettingsError: there is none of this name (`default` always exists)."""
        if name in self.caches:
            return replace(self.caches[name], origins=self.origins, name=name)
        if name == "default":
            return CacheSettings(origins=self.origins, name=name)
        if self.source == NOTHING:
            raise SettingsError(f"there are no settings, and so no [caches.{name}]: call configure(caches=...)")
        raise SettingsError(f"{self.source}: there is no [caches.{name}]: {nearest(name, ['default', *self.caches])}")

    def no_default(self) -> str | None:
        """Return a warning for users of the default cache if only other caches are configured; else None."""
        if not self.caches or "default" in self.caches:
            return None
        hint, names = nearest("default", self.caches), ", ".join(map(repr, sorted(self.caches)))
        meant = f"{hint.removesuffix('?').replace('did you mean', 'is')} meant? " if hint.startswith("did") else ""
        return (
            f"{self.source}: there is no [caches.default], only {names}: {meant}Functions and calls that name no "
            "cache, such as @cached without cache=, keep their values in the memory of each process. Name one of the "
            "caches default, give @cached(cache=...), or, to use memory, write [caches.default] with url = 'memory://'"
        )


_ASKS = r"(?!\d{1,5}(?:/[^?#@]*)?\?[^@]*=)"  # a port, then a query that contains the @
# Find it also if a slash or the scheme is missing, or if the password contains a delimiter such as / or @.
_PASSWORD = re.compile(rf"(:/{{1,2}}[^/?#:]*:|^[^/?#:]*:(?!/))(?:[^?#]*|{_ASKS}.*)@", re.DOTALL)
_SECRET = re.compile(  # `listen` holds an address with its own password, in any form
    r"([?&;][^=&;#]*(?:pass|secret|token|signing|listen|credential|_key)[^=&#]*=)[^&;]*", re.IGNORECASE
)


def safe_url(url: str) -> str:
    """Return the URL without its password, so that it can be shown."""
    return _SECRET.sub(r"\1***", _PASSWORD.sub(r"\1***@", url))
