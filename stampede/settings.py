"""Settings: a TOML file, or a mapping of the same shape, as frozen dataclasses. Reading the file is all that is done.

    [caches.default]
    url = "redis://:${REDIS_PASSWORD}@localhost/0"
    ttl = "10m"
    local = { entries = 10_000 }

`[origins.NAME]` is reserved: it is read and checked, and nothing obeys it yet.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stampede.errors import OptionError, SettingsError
from stampede.policy import DEFAULT, Policy, nearest, seconds

__all__ = [
    "CacheSettings", "LocalSettings", "OriginSettings", "Rate", "Settings",
    "discover", "duration", "from_mapping", "load", "without_secrets",
]  # fmt: skip

VARIABLE = "STAMPEDE_SETTINGS"
FILE = "stampede.toml"
COMPRESS_ABOVE = 4096
"""Bytes above which `compress = true` compresses."""


# -- what comes out ---------------------------------------------------------------------------------------------


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
    codec: str = "sealed"
    trust: tuple[str | type, ...] = ()  # dotted names from a file, classes also from code
    signing_key: tuple[bytes, ...] = ()  # the first signs, each is believed
    compress: int | None = None  # bytes above which a body is compressed
    max_bytes: int | None = None
    on_engine_error: Literal["local", "raise"] = "local"
    policy: Policy = DEFAULT

    def __repr__(self) -> str:
        locks = self.locks and without_secrets(self.locks)
        return (
            f"CacheSettings(url={without_secrets(self.url)!r}, locks={locks!r}, local={self.local!r}, "
            f"namespace={self.namespace!r}, codec={self.codec!r}, trust={self.trust!r}, "
            f"signing_key=<{len(self.signing_key)} of them>, compress={self.compress!r}, "
            f"max_bytes={self.max_bytes!r}, on_engine_error={self.on_engine_error!r}, policy={self.policy!r})"
        )


@dataclass(frozen=True, slots=True)
class Rate:
    """So many computations within so many seconds."""

    count: int
    per: float


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """Reserved: the caps of one origin over the whole fleet."""

    concurrency: int | None = None
    rate: Rate | None = None
    when_full: Literal["wait", "stale", "raise"] = "wait"


@dataclass(frozen=True, slots=True)
class Settings:
    """All caches and origins by name, and where they were read."""

    caches: Mapping[str, CacheSettings] = field(default_factory=dict)
    origins: Mapping[str, OriginSettings] = field(default_factory=dict)
    source: str = "nothing"

    def cache(self, name: str) -> CacheSettings:
        """The settings of one cache; `default` is there even if nobody wrote it."""
        if name in self.caches:
            return self.caches[name]
        if name == "default":
            return CacheSettings()
        raise SettingsError(f"{self.source}: there is no [caches.{name}]: {nearest(name, ['default', *self.caches])}")


# -- where they come from ---------------------------------------------------------------------------------------


def discover(environ: Mapping[str, str], cwd: str | os.PathLike[str]) -> Settings | None:
    """What `$STAMPEDE_SETTINGS` names, else `stampede.toml` in `cwd`, else None."""
    if named := environ.get(VARIABLE):
        try:
            return load(Path(cwd, named), environ)
        except SettingsError as exc:
            raise SettingsError(f"${VARIABLE}: {exc}") from exc.__cause__
    try:
        return load(Path(cwd, FILE), environ)
    except SettingsError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            return None
        raise


def load(path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of one file; SettingsError names what is wrong and where."""
    return from_mapping(_toml(Path(path)), str(path), environ)


def from_mapping(
    mapping: Mapping[str, Any], source: str = "configure()", environ: Mapping[str, str] = os.environ
) -> Settings:
    """The same from a mapping of the same shape: `{"caches": {"default": {"url": ...}}}`."""
    for name in mapping:
        if name not in ("caches", "origins"):
            raise SettingsError(f"{source}: {name}: there is no such table: {_home_of(str(name))}")
    return Settings(
        caches={name: _cache(at, table) for name, at, table in _tables(mapping, "caches", source, environ)},
        origins={name: _origin(at, table) for name, at, table in _tables(mapping, "origins", source, environ)},
        source=source,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # editors of some systems write a BOM
    except FileNotFoundError as exc:
        raise SettingsError(f"{path}: there is no such file") from exc
    except IsADirectoryError as exc:
        raise SettingsError(f"{path}: it is a directory: name the file in it") from exc
    except OSError as exc:
        raise SettingsError(f"{path}: it can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{path}: it isn't UTF-8 (byte {exc.start} is {exc.object[exc.start]:#04x})") from exc
    except (ValueError, RecursionError) as exc:
        raise SettingsError(f"{path}: it isn't TOML: {exc}") from exc


def _tables(
    mapping: Mapping[str, Any], kind: str, source: str, environ: Mapping[str, str]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Each table of one kind: its name, its place for error texts, and its content with `${NAME}` filled in."""
    tables = mapping.get(kind, {})
    if not isinstance(tables, Mapping):
        raise SettingsError(f"{source}: {kind}: it is a table of tables: write [{kind}.default]")
    found = []
    for name, table in tables.items():
        at = f"{source}: [{kind}.{name}]"
        if not isinstance(table, Mapping):
            raise SettingsError(f"{source}: [{kind}] {name}: {_home_of(str(name))}")
        found.append((name, at, {key: _filled_in(value, f"{at} {key}", environ) for key, value in table.items()}))
    return found


def _home_of(name: str) -> str:
    if name in _CACHE:
        return "it is a setting of one cache: write it under [caches.default]"
    return nearest(name, ["caches", "origins"])


_PLACEHOLDER = re.compile(r"(\$?)\$\{([^}]*)\}")


def _filled_in(value: Any, at: str, environ: Mapping[str, str]) -> Any:
    """The value with each `${NAME}` in its strings replaced; `$${` is a plain `${`."""
    if isinstance(value, str):

        def variable(match: re.Match[str]) -> str:
            escaped, name = match.groups()
            if escaped:
                return match[0][1:]
            if name not in environ:
                raise SettingsError(f"{at}: the environment has no {name!r} for ${{{name}}}; a plain ${{ is $${{")
            return environ[name]

        return _PLACEHOLDER.sub(variable, value)
    if isinstance(value, Mapping):
        return {key: _filled_in(inner, at, environ) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled_in(inner, at, environ) for inner in value]
    return value


# -- checks: each takes a setting's name and its value, and gives the value to keep -------------------------------

Check: TypeAlias = Callable[[str, Any], Any]


def _checked(at: str, table: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    for name in table:
        if name not in checks:
            raise SettingsError(f"{at} {name}: {_IN_CODE.get(name) or _no_such(name, checks)}")
    try:
        return {name: checks[name](name, value) for name, value in table.items()}
    except OptionError as exc:
        raise SettingsError(f"{at} {exc}") from exc


def _no_such(name: str, checks: Mapping[str, Check]) -> str:
    return f"there is no such setting: {nearest(str(name), list(checks))}"


_IN_CODE = {
    "cache_if": "it is a function: give it to @cached or Cache",
    "raises": "it holds classes: give it to @cached or Cache",
}


def _cache(at: str, table: Mapping[str, Any]) -> CacheSettings:
    values = _checked(at, table, _CACHE)
    policy = DEFAULT.with_options(**{name: values.pop(name) for name in _POLICY if name in values})
    if values.get("codec") == "pickle" and not values.get("signing_key"):
        raise SettingsError(f"{at} codec is 'pickle', which runs what it reads: it needs a signing_key")
    return CacheSettings(**values, policy=policy)


def _origin(at: str, table: Mapping[str, Any]) -> OriginSettings:
    return OriginSettings(**_checked(at, table, _ORIGIN))


_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"\s*".join(f"(?:{_NUMBER}{unit}(?![a-z]))?" for unit in _UNITS))


def duration(name: str, value: Any) -> Any:
    """Seconds out of a text such as "500ms", "10m", "1h30m" or "90"; inf out of "forever"; all else as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text == "forever":
        return inf
    if re.fullmatch(_NUMBER, text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise OptionError(f"{name} is {value!r}: give seconds, or a text such as '500ms', '10m', '1h30m', 'forever'")
    return sum(float(number) * unit for number, unit in zip(match.groups(), _UNITS.values(), strict=True) if number)


def _wait(name: str, value: Any) -> Any:
    wait = duration(name, value)
    return None if wait == inf else wait  # a policy's word for "as long as a lease stands"


def _number(name: str, value: Any) -> Any:
    return float(value) if isinstance(value, str) and re.fullmatch(_NUMBER, value) else value


def _flag(name: str, value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _option(convert: Check) -> Check:
    def check(name: str, value: Any) -> Any:
        converted = convert(name, value)
        DEFAULT.with_options(**{name: converted})  # an error about this one is to name this one
        return converted

    return check


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is {_kind(value)}: give a string")
    return value


def _url(name: str, value: Any) -> str:
    url = _text(name, value)
    if any(ord(letter) < 32 for letter in url):
        raise OptionError(f"{name} holds a line break or another control character")
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        shown = without_secrets(url)
        raise OptionError(f"{name} is {shown!r}, without a scheme: give a URL such as 'disk:///var/cache/shop'")
    return url


def _optional_url(name: str, value: Any) -> str | None:
    return None if value is None else _url(name, value)


def _count(name: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise OptionError(f"{name} is {value!r}: give a whole number, at least 1")
    return number


_SIZES = {"": 1, "B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _size(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,18})\s*([A-Za-z]*)", value)) and match[2] in _SIZES:
        value = int(match[1]) * _SIZES[match[2]]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} is {value!r}: give a number of bytes, or a text such as '64KiB' or '10MB'")
    return value


def _compress(name: str, value: Any) -> int | None:
    flag = _flag(name, value)
    return (COMPRESS_ABOVE if flag else None) if isinstance(flag, bool) else _size(name, value)


def _one_of(*names: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in names:
            shown = repr(value) if isinstance(value, str) else _kind(value)
            close = get_close_matches(str(value), names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(map(repr, names))}"
            raise OptionError(f"{name} is {shown}: {hint}")
        return str(value)

    return check


def _names(name: str, value: Any) -> tuple[str | type, ...]:
    if not isinstance(value, (list, tuple)):
        raise OptionError(f"{name} is {_kind(value)}: give a list of dotted names such as 'shop.models.Price'")
    for each in value:
        dotted = isinstance(each, str) and all(part.isidentifier() for part in each.split(".")) and "." in each
        if not (dotted or isinstance(each, type)):
            raise OptionError(f"{name} holds {each!r}: give dotted names such as 'shop.models.Price'")
    return tuple(value)


def _keys(name: str, value: Any) -> tuple[bytes, ...]:
    """The signing keys; no error may quote one."""
    if value is None:
        return ()
    keys = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(key, (str, bytes)) for key in keys):
        raise OptionError(f"{name} holds what is no string: give one, or a list of them, the signing one first")
    if not all(keys):
        raise OptionError(f"{name} holds an empty string: everybody could sign with it")
    return tuple(key.encode() if isinstance(key, str) else key for key in keys)


def _local(name: str, value: Any) -> LocalSettings | Literal[False] | None:
    value = _flag(name, value)
    if value is None or value is False or isinstance(value, LocalSettings):
        return value
    if value is True:
        return LocalSettings()
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} is {value!r}: give true, false or {{ entries = 10_000, ttl = 1 }}")
    for inner in value:
        if inner not in _LOCAL:
            raise OptionError(f"{name}.{inner}: {_no_such(inner, _LOCAL)}")
    return LocalSettings(**{inner: _LOCAL[inner](f"{name}.{inner}", given) for inner, given in value.items()})


def _local_ttl(name: str, value: Any) -> float | None:
    return None if value is None else seconds(name, duration(name, value))


def _rate(name: str, value: Any) -> Rate:
    count, slash, per = value.partition("/") if isinstance(value, str) else ("", "", "")
    try:
        within = duration(name, f"1{per}" if per.strip() in _UNITS else per)
        rate = Rate(_count(name, count.strip()), seconds(name, within))
    except OptionError:
        rate = None
    if rate is None or not slash or not 0 < rate.per < inf:
        raise OptionError(f"{name} is {value!r}: give a number of computations per time, such as '100/1s'")
    return rate


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


_POLICY: dict[str, Check] = {
    "ttl": _option(duration),
    "stale": _option(duration),
    "early": _option(_number),
    "background": _option(_flag),
    "lease": _option(duration),
    "max_hold": _option(duration),
    "wait": _option(_wait),
    "retry_after": _option(duration),
    "jitter": _option(_number),
}
_CACHE: dict[str, Check] = {
    "url": _url,
    "locks": _optional_url,
    "local": _local,
    "namespace": _text,
    "codec": _one_of("sealed", "msgpack", "json", "pickle"),
    "trust": _names,
    "signing_key": _keys,
    "compress": _compress,
    "max_bytes": _size,
    "on_engine_error": _one_of("local", "raise"),
    **_POLICY,
}
_LOCAL: dict[str, Check] = {"entries": _count, "ttl": _local_ttl}
_ORIGIN: dict[str, Check] = {"concurrency": _count, "rate": _rate, "when_full": _one_of("wait", "stale", "raise")}


# -- secrets ----------------------------------------------------------------------------------------------------

_SECRET = re.compile(r"(?i)([?&;][^=&;]*(?:passw|secret|token|key|credential)[^=&;]*=)[^&;]*")


def without_secrets(url: str) -> str:
    """The URL for human eyes: user and password, and parameters that sound like secrets, are `***`."""
    head, scheme, rest = url.partition("://") if "://" in url else ("", "", url)
    rest = _SECRET.sub(r"\1***", rest)
    # A path has no user; elsewhere all up to the last "@" goes, since passwords are not always quoted as they should.
    if "@" in rest and not rest.startswith("/"):
        rest = "***@" + rest.rpartition("@")[2]
    return head + scheme + rest
