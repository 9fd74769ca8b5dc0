"""What a URL of Postgres says: read as libpq and SQLAlchemy read it, and written so that it can be copied.

No message shows what stands in a URL but by `safe_url`: libpq's own errors quote passwords that it can't read.
"""

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
from stampede.model.policy import nearest, seconds

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
"""Options that are the engine's own; all others are libpq's."""

_SECRET = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}


def read(url: str) -> dict[str, Any]:
    """The options of `postgres://user:password@host:5432/database?sslmode=require`: libpq's, and ours."""
    options = _read(url)
    if set("@= ") & set(f"{options.get('host', '')}{options.get('port', '')}"):
        raise _unreadable(safe_url(url) if _URL.match(url) else "that address")
    return options


def _read(url: str) -> dict[str, Any]:
    scheme, _, rest = url.partition("://")
    if not _URL.match(url):
        return _parsed(url, "that address")  # as in `host=db port=5432`, in which passwords can't be found
    own, query = _halves(rest)
    options = _parsed("postgresql://" + own.replace(" ", "%20"), safe_url(url))
    if "@" in options.get("dbname", ""):
        raise _unreadable(safe_url(url))  # more likely it is half of a password
    asked: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, _, value = (pair.replace("+", " ") if "+" in scheme else pair).partition("=")
        asked[unquote(name)] = unquote(value)
    if asked.get("ssl") == "true":  # which libpq takes, too, as JDBC has it
        asked["sslmode"] = "require"
        del asked["ssl"]
    return options | asked


_URL = re.compile(r"[\w+.-]+://")


def _halves(rest: str) -> tuple[str, str]:
    """What stands before the query, and that. A password may have a `?` in it, as libpq looks for the @ first."""
    at, slash = rest.find("@"), rest.find("/")
    behind = at if at >= 0 and (slash < 0 or at < slash) else 0
    own, _, query = rest[behind:].partition("?")
    return rest[:behind] + own, query


def _parsed(conninfo: str, shown: str) -> dict[str, Any]:
    try:
        return dict(conninfo_to_dict(conninfo))
    except (Error, ValueError):
        raise _unreadable(shown) from None  # that error would quote it


def _unreadable(shown: str) -> OptionError:
    return OptionError(
        f"{shown} can't be read: write postgres://user:password@host:5432/database, with what is odd in a name or a "
        "password percent-encoded (@ as %40, / as %2F, % as %25)"
    )


def libpqs() -> set[str]:
    """The options that libpq has here."""
    return {each.keyword.decode() for each in Conninfo.get_defaults()}


def checked(conninfo: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """The same, if libpq has all of these options."""
    known = libpqs()
    for name, value in conninfo.items():
        if name not in known:
            raise OptionError(f"{shown} has no option {name!r}: {nearest(name, known | set(OURS))}")
        if "\0" in str(value):
            raise OptionError(f"{shown}: {name} has a NUL in it")
    ports = [each for each in str(conninfo.get("port") or "").split(",") if each]
    if not all(each.isdecimal() and 0 < int(each) < 65536 for each in ports):
        raise _unreadable(shown)  # it may be half of a password
    return dict(conninfo)


def written(conninfo: Mapping[str, Any]) -> str:
    """As a URL, which libpq reads, too."""
    given = {name: str(value) for name, value in conninfo.items() if value is not None}
    user, password, database = (quote(given.pop(name, ""), safe="") for name in ("user", "password", "dbname"))
    host, port = given.pop("host", ""), given.pop("port", "")
    if set(host) & set(",/@") or "," in port:  # of several, or a socket's directory
        given = {"host": host, **({"port": port} if port else {}), **given}
        host = port = ""
    whose = f"{user}{':' if password else ''}{password}@" if user or password else ""
    place = (f"[{host}]" if ":" in host else quote(host, safe="")) + (f":{port}" if port else "")
    query = "&".join(f"{name}={quote(value, safe='/,:')}" for name, value in given.items())
    return f"postgres://{whose}{place}/{database}{'?' if query else ''}{query}"


def without_secrets(conninfo: Mapping[str, Any]) -> str:
    """The same, to be shown and copied: libpq finds the password in PGPASSWORD, or ~/.pgpass."""
    return written({name: value for name, value in conninfo.items() if name not in _SECRET})
