"""Postgres URLs: read as libpq and SQLAlchemy read them, and written so that they can be copied. Messages show a URL
only through `safe_url`. libpq's own errors quote passwords that it cannot parse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from psycopg import Error
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from stampede.engines.kit.url import Kind, flag, integer, number, safe_url, text
from stampede.errors import OptionError
from stampede.settings.options import nearest, seconds

__all__ = ["OURS", "checked", "libpqs", "read", "without_secrets", "written"]

OURS: dict[str, Kind] = {
    "timeout": number,
    "max_connections": integer,
    "listen": text,
    "bound": flag,
    "entries": integer,
    "max_bytes": integer,
    "history": seconds,
    "history_rows": integer,
}
"""Options of the engine; all others are libpq's."""

_SECRET = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}


def read(url: str) -> dict[str, Any]:
    """Return the options in `postgres://user:password@host:5432/database?sslmode=require`: libpq's, and the engine's.
    Raise OptionError if the URL cannot be read."""
    options = _read(url)
    if set("@= ") & set(f"{options.get('host', '')}{options.get('port', '')}"):
        raise _unreadable(safe_url(url) if _URL.match(url) else "that address")
    return options


def _read(url: str) -> dict[str, Any]:
    scheme, _, rest = url.partition("://")
    if not _URL.match(url):
        return _parsed(url, "that address")  # as `host=db port=5432`, in which no password can be found and hidden
    own, query = _halves(rest)
    options = _parsed("postgresql://" + own.replace(" ", "%20"), safe_url(url))
    if "@" in options.get("dbname", ""):
        raise _unreadable(safe_url(url))  # this is more likely half of a password
    asked: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, value = (pair.replace("+", " ") if "+" in scheme else pair).partition("=")
        asked[unquote(name)] = unquote(value)
    if asked.get("ssl") == "true":  # JDBC's spelling, which libpq accepts in a URL
        asked["sslmode"] = "require"
        del asked["ssl"]
    return options | asked


_URL = re.compile(r"[\w+.-]+://")


def _halves(rest: str) -> tuple[str, str]:
    """Return the part before the query, and the query. A password may contain `?`: libpq looks for the @ first."""
    at, slash = rest.find("@"), rest.find("/")
    behind = at if at >= 0 and (slash < 0 or at < slash) else 0
    own, _, query = rest[behind:].partition("?")
    return rest[:behind] + own, query


def _parsed(conninfo: str, shown: str) -> dict[str, Any]:
    try:
        return dict(conninfo_to_dict(conninfo))
    except (Error, ValueError):
        raise _unreadable(shown) from None  # libpq's error would quote the password


def _unreadable(shown: str) -> OptionError:
    return OptionError(
        f"{shown} can't be read: write postgres://user:password@host:5432/database, with special characters in a name "
        "or a password percent-encoded (@ as %40, / as %2F, % as %25)"
    )


def libpqs() -> set[str]:
    """Return the names of the options that the installed libpq has."""
    return {each.keyword.decode() for each in Conninfo.get_defaults()}


def checked(conninfo: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """Return a copy of these options. Raise OptionError if libpq lacks one of them. `shown` names the URL in errors."""
    known = libpqs()
    for name, value in conninfo.items():
        if name not in known:
            raise OptionError(f"{shown} has no option {name!r}: {nearest(name, known | set(OURS))}")
        if "\0" in str(value):
            raise OptionError(f"{shown}: {name} contains a NUL character")
    ports = [each for each in str(conninfo.get("port") or "").split(",") if each]
    if not all(each.isdecimal() and 0 < int(each) < 65536 for each in ports):
        raise _unreadable(shown)  # a wrong port may be half of a password
    return dict(conninfo)


def written(conninfo: Mapping[str, Any]) -> str:
    """Return these options as a URL that libpq can read, too."""
    given = {name: str(value) for name, value in conninfo.items() if value is not None}
    user, password, database = (quote(given.pop(name, ""), safe="") for name in ("user", "password", "dbname"))
    host, port = given.pop("host", ""), given.pop("port", "")
    if set(host) & set(",/@") or "," in port:  # several hosts, or the directory of a socket
        given = {"host": host, **({"port": port} if port else {}), **given}
        host = port = ""
    whose = f"{user}{':' if password else ''}{password}@" if user or password else ""
    place = (f"[{host}]" if ":" in host else quote(host, safe="")) + (f":{port}" if port else "")
    query = "&".join(f"{name}={quote(value, safe='/,:')}" for name, value in given.items())
    return f"postgres://{whose}{place}/{database}{'?' if query else ''}{query}"


def without_secrets(conninfo: Mapping[str, Any]) -> str:
    """Return these options as a URL without passwords. With it, libpq finds the password in PGPASSWORD or ~/.pgpass."""
    return written({name: value for name, value in conninfo.items() if name not in _SECRET})
