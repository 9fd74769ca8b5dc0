"""The check of each setting: from its name and raw value to the value to use. Errors name the setting and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import inf
from types import ModuleType
from typing import Any, Literal, TypeAlias

from stampede.errors import OptionError
from stampede.settings.model import LocalSettings, RateSetting, safe_url
from stampede.settings.options import DEFAULT, NUMBER, OPTIONS, UNITS, nearest, seconds

__all__ = ["CACHE", "ORIGIN", "POLICY", "Check", "checked", "observers"]

COMPRESS_ABOVE = 4096
"""With `compress = true`, larger bodies (in bytes) are compressed."""

Check: TypeAlias = Callable[[str, Any], Any]


def checked(table: Mapping[str, Any], checks: Mapping[str, Check], prefix: str = "") -> dict[str, Any]:
    """Return the table's values, each checked. `prefix` is put before the names in errors."""
    for name in table:
        if name not in checks:
            hint = nearest(str(name), list(checks))
            if checks is CACHE and not hint.startswith("did"):
                hint += " (options of the engine go into its URL: 'redis://localhost?socket_timeout=0.5')"
            raise OptionError(f"{prefix}{name}: there is no such setting: {hint}")
    return {name: checks[name](f"{prefix}{name}", value) for name, value in table.items()}


def _number(name: str, value: Any) -> Any:
    return float(value) if isinstance(value, str) and re.fullmatch(NUMBER, value) else value


def _flag(name: str, value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _truth(name: str, value: Any) -> bool:
    flag = _flag(name, value)
    if not isinstance(flag, bool):
        raise OptionError(f"{name} is {value!r}: give true or false")
    return flag


def _option(convert: Check) -> Check:
    def check(name: str, value: Any) -> Any:
        converted = convert(name, value)
        DEFAULT.with_options(**{name: converted})  # raises an error that names this setting
        return converted

    return check


def _in_code(what: str) -> Check:
    def check(name: str, value: Any) -> Any:
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, (str, int, float, Mapping)):  # it came from a file
            raise OptionError(f"{name} takes {what}, which a file can't hold: give it to @cached or Cache")
        return value

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
        shown = safe_url(url)
        raise OptionError(f"{name} is {shown!r}, without a scheme: give a URL such as 'disk:///var/cache/shop'")
    return url


def _optional_url(name: str, value: Any) -> str | None:
    return None if value is None else _url(name, value)


def _count(name: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**31:
        raise OptionError(f"{name} is {value!r}: give a whole number, at least 1, and {2**31 - 1} at most")
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


_codec_name = _one_of("sealed", "msgpack", "json", "pickle")


def _codec(name: str, value: Any) -> Any:
    """Return a codec's name, or the user's own codec object, which is checked in full when it is used."""
    own = not isinstance(value, type) and any(hasattr(value, verb) for verb in ("encode", "decode"))
    return value if own and not isinstance(value, (str, bytes)) else _codec_name(name, value)


def _names(name: str, value: Any) -> tuple[str | type | ModuleType, ...]:
    if not isinstance(value, (list, tuple)):
        raise OptionError(f"{name} is {_kind(value)}: give a list of dotted names such as 'shop.models.Price'")
    for each in value:
        dotted = isinstance(each, str) and all(part.isidentifier() for part in each.split(".")) and "." in each
        if not (dotted or isinstance(each, (type, ModuleType))):
            raise OptionError(f"{name} holds {each!r}: give dotted names such as 'shop.models.Price'")
    return tuple(value)


def _keys(name: str, value: Any) -> tuple[bytes, ...]:
    """Return the signing keys. No error may quote one."""
    if value is None:
        return ()
    keys = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(key, (str, bytes)) for key in keys):
        raise OptionError(f"{name} holds something other than a string: give a string, or a list whose first key signs")
    if not keys:
        raise OptionError(f"{name} is an empty list: nothing would be signed; give a key, or leave it out")
    if not all(keys):
        raise OptionError(f"{name} holds an empty string: anyone could sign with it; give a key, or leave it out")
    return tuple(key.encode() if isinstance(key, str) else key for key in keys)


def _local(name: str, value: Any) -> LocalSettings | Literal[False] | None:
    value = _flag(name, value)
    if value is None or value is False or isinstance(value, LocalSettings):
        return value
    if value is True:
        return LocalSettings()
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} is {value!r}: give true, false or {{ entries = 10_000, ttl = 1 }}")
    return LocalSettings(**checked(value, _LOCAL, f"{name}."))


def _local_ttl(name: str, value: Any) -> float | None:
    return None if value is None else seconds(name, value)


def _rate(name: str, value: Any) -> RateSetting:
    count, slash, per = value.partition("/") if isinstance(value, str) else ("", "", "")
    try:
        rate = RateSetting(_count(name, count.strip()), seconds(name, f"1{per}" if per.strip() in UNITS else per))
    except OptionError:
        rate = None
    if rate is None or not slash or not 0 < rate.per < inf:
        raise OptionError(f"{name} is {value!r}: give a number of computations per time, such as '100/1s'")
    return rate


def observers(name: str, value: Any) -> tuple[tuple[Any, Any], ...]:
    """Return the observers of a table (`prometheus = true`, `mine = "package.module:name"`), or of a list from code."""
    if not isinstance(value, (Mapping, list, tuple)):
        raise OptionError(f"{name} is {_kind(value)}: give a table, or a list of functions")
    found: list[tuple[Any, Any]] = []
    for key, each in (value if isinstance(value, Mapping) else dict(enumerate(value))).items():
        if key in ("prometheus", "opentelemetry"):
            found += [(key, key)] if _truth(f"{name}.{key}", each) else []
        elif callable(each) or (isinstance(each, str) and re.fullmatch(r"[\w.]+:\w+", each)):
            found.append((key, each))
        else:
            close = get_close_matches(str(key), ("prometheus", "opentelemetry"), 1)
            hint = f"did you mean {close[0]!r}? Otherwise give" if close else "give"
            raise OptionError(
                f"{name}.{key} is {each!r}: {hint} a function of an event, as "
                "'package.module:name'; prometheus = true and opentelemetry = true are built in"
            )
    return tuple(found)


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


# A policy's own checks accept texts such as "10m". Numbers and flags may be texts too, from the environment.
_OF_POLICY: dict[str, Check] = {
    "early": _number,
    "jitter": _number,
    "background": _flag,
    "strict": _flag,
    "cache_if": _in_code("a function"),
    "raises": _in_code("classes"),
}
POLICY: dict[str, Check] = {name: _option(_OF_POLICY.get(name, lambda name, value: value)) for name in OPTIONS}
CACHE: dict[str, Check] = {
    "url": _url,
    "locks": _optional_url,
    "local": _local,
    "namespace": _text,
    "codec": _codec,
    "trust": _names,
    "signing_key": _keys,
    "compress": _compress,
    "max_bytes": _size,
    "on_engine_error": _one_of("local", "raise"),
    "on_error": _one_of("raise", "later"),
    **POLICY,
}
_LOCAL: dict[str, Check] = {"entries": _count, "ttl": _local_ttl}
ORIGIN: dict[str, Check] = {
    "concurrency": _count,
    "rate": _rate,
    "when_full": _one_of("wait", "stale", "raise"),
    "adaptive": _truth,
    "at_least": _count,
}
