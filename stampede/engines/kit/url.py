"""Engine URLs: checking their options, and hiding their passwords."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from stampede.errors import OptionError
from stampede.settings.model import safe_url
from stampede.settings.options import nearest, seconds

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
"""A check of one option: it takes the name and the value, and returns the converted value or raises OptionError."""

_ODD = re.compile(r"[^:/]*://[^/?#@:]*:(?!\d{1,5}[/?#])[^/?#@]*[/?#][^=]*@")


def scheme_of(url: str) -> str:
    """Return what is in front of `://`. Raise OptionError if there is none."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise OptionError(
            f"{safe_url(url)!r} is not a URL of an engine: give one such as 'memory://' or 'disk:///var/cache/app'"
        )
    return scheme.lower()


def parts_of(url: str) -> SplitResult:
    """Return the parts of a URL. Raise OptionError if it is not valid."""
    if _ODD.match(url):  # a piece of the password would be taken for a port, and shown
        raise OptionError(
            f"{safe_url(url)!r} is not a valid URL: percent-encode special characters in the password (/ as %2F)"
        )
    try:
        return urlsplit(url)
    except ValueError as exc:
        if "netloc" in str(exc):  # the message quotes the URL, with its password
            raise OptionError(
                f"{safe_url(url)!r} is not a valid URL: percent-encode the user name and the password"
            ) from None
        raise OptionError(f"{safe_url(url)!r} is not a valid URL: {exc}") from exc


def path_of(url: str, example: str) -> str:
    """Return what follows `scheme://` as a local path. It is absolute, or begins with `~`, `.` or `..`."""
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
    """The host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def addresses_of(url: str, port: int) -> list[Address]:
    """Return the servers of a URL, `HOST:PORT,HOST:PORT`. `port` is used for a server without one."""
    parts, found = parts_of(url), []
    for each in unquote(parts.netloc.rpartition("@")[2]).split(","):
        try:
            server = urlsplit(f"//{each.strip()}")
            host, found_port = server.hostname, port if server.port is None else server.port
        except ValueError as error:
            raise OptionError(f"{safe_url(url)!r}: {each!r} is not HOST:PORT: {error}") from error
        if not host or not found_port:
            example = f"{parts.scheme}://localhost:{port}"
            raise OptionError(f"{safe_url(url)!r} names no server: give a URL such as {example!r}")
        found.append(Address(host, found_port))
    return found


def options_of(url: str, given: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the options of the URL's query and of the caller, checked and converted. The caller's win."""
    options: dict[str, Any] = dict(parse_qsl(parts_of(url).query, keep_blank_values=True))
    options.update(given)
    for name in options:
        if name not in kinds:
            hint = nearest(name, list(kinds)) if kinds else "it takes none"
            raise OptionError(f"{safe_url(url)} has no option {name!r}: {hint}")
    return {name: kinds[name](name, value) for name, value in options.items()}


def integer(name: str, value: Any) -> int:
    """Return the value as a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise OptionError(f"{name} is {value!r}: give a whole number")


def number(name: str, value: Any) -> float:
    """Return the value as a number of seconds, zero or more."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise OptionError(f"{name} is {value!r}: give a number of seconds") from None
    return seconds(name, value)


def duration(name: str, value: Any) -> float:
    """Return the value as a number of seconds, more than zero."""
    found = number(name, value)
    if found <= 0:
        raise OptionError(f"{name} is {value!r}: give a number of seconds, more than 0")
    return found


def flag(name: str, value: Any) -> bool:
    """Return the value as a bool. Accepts the words of settings files and shells."""
    known = _FLAGS.get(str(value).lower())
    if known is None:
        raise OptionError(f"{name} is {value!r}: give true or false")
    return known


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}: give a string")
    return value


def anything(name: str, value: Any) -> Any:
    """Return any object: the engine checks it."""
    return value


_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
