"""Engine URLs: their options, checked, and their passwords, hidden."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from stampede.errors import OptionError
from stampede.model.policy import nearest, seconds
from stampede.settings.model import safe_url

__all__ = [
    "Address",
    "Kind",
    "addresses_of",
    "anything",
    "duration",
    "flag",
    "integer",
    "number",
    "options_of",
    "parts_of",
    "path_of",
    "safe_url",
    "scheme_of",
    "text",
]

Kind: TypeAlias = Callable[[str, Any], Any]
"""What an option is to be: makes it of what the URL or the caller gave, or raises OptionError."""

_ODD = re.compile(r"[^:/]*://[^/?#@:]*:(?!\d{1,5}[/?#])[^/?#@]*[/?#][^=]*@")


def scheme_of(url: str) -> str:
    """What stands before `://`; OptionError says what a URL looks like."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise OptionError(f"{safe_url(url)!r} is no engine: give a URL such as 'memory://' or 'disk:///var/cache/app'")
    return scheme.lower()


def parts_of(url: str) -> SplitResult:
    """The parts of a URL; OptionError if it is none."""
    if _ODD.match(url):  # or a piece of the password would be taken for a port, and shown
        raise OptionError(f"{safe_url(url)!r} is no URL: percent-encode what is odd in a password (/ as %2F)")
    try:
        return urlsplit(url)
    except ValueError as exc:
        if "netloc" in str(exc):  # it is quoted, with its password
            raise OptionError(f"{safe_url(url)!r} is no URL: a name or a password is to be percent-encoded") from None
        raise OptionError(f"{safe_url(url)!r} is no URL: {exc}") from exc


def path_of(url: str, example: str) -> str:
    """What stands behind `scheme://`, as a path of this machine: absolute, or it begins with `~`, `.` or `..`."""
    parts = parts_of(url)
    path = unquote(parts.netloc + parts.path)
    if "\0" in path:
        raise OptionError(f"{safe_url(url)!r} names no directory: write {example}")
    if path and path[0] != "/" and path.split("/")[0] not in (".", "..") and path[0] != "~":
        absolute, relative = (safe_url(url).replace("://", behind, 1) for behind in (":///", "://./"))
        raise OptionError(
            f"{safe_url(url)!r} has two slashes: write {absolute} if the path begins at the root, or {relative} if it "
            "begins at the working directory"
        )
    return path.removeprefix("/") if path.startswith("/~") else path


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def addresses_of(url: str, port: int) -> list[Address]:
    """The servers of a URL, `HOST:PORT,HOST:PORT`. `port`: that of a server with none."""
    parts, found = parts_of(url), []
    for each in unquote(parts.netloc.rpartition("@")[2]).split(","):
        try:
            its = urlsplit(f"//{each.strip()}")
            host, its_port = its.hostname, port if its.port is None else its.port
        except ValueError as error:
            raise OptionError(f"{safe_url(url)!r}: {each!r} is no HOST:PORT: {error}") from error
        if not host or not its_port:
            example = f"{parts.scheme}://localhost:{port}"
            raise OptionError(f"{safe_url(url)!r} names no server: give a URL such as {example!r}")
        found.append(Address(host, its_port))
    return found


def options_of(url: str, given: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The options of the URL's query, and of the caller (which win), each made what it is to be."""
    options: dict[str, Any] = dict(parse_qsl(parts_of(url).query, keep_blank_values=True))
    options.update(given)
    for name in options:
        if name not in kinds:
            hint = nearest(name, list(kinds)) if kinds else "it takes none"
            raise OptionError(f"{safe_url(url)} has no option {name!r}: {hint}")
    return {name: kinds[name](name, value) for name, value in options.items()}


def integer(name: str, value: Any) -> int:
    """A whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise OptionError(f"{name} is {value!r}: give a whole number")


def number(name: str, value: Any) -> float:
    """A number of seconds, zero or more."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise OptionError(f"{name} is {value!r}: give a number of seconds") from None
    return seconds(name, value)


def duration(name: str, value: Any) -> float:
    """A number of seconds, more than zero."""
    found = number(name, value)
    if found <= 0:
        raise OptionError(f"{name} is {value!r}: give a number of seconds, more than 0")
    return found


def flag(name: str, value: Any) -> bool:
    """True or false, in the words of settings files and of shells."""
    known = _FLAGS.get(str(value).lower())
    if known is None:
        raise OptionError(f"{name} is {value!r}: give true or false")
    return known


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}: give a string")
    return value


def anything(name: str, value: Any) -> Any:
    """An object that the engine itself looks at."""
    return value


_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
