"""How connections are made: one function for each topology, which takes a URL or a client object. The client library
connects, encrypts and logs in; all of its options are passed on. Its own retries are off: the engine sends again by
itself, since it knows which commands may be sent twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from stampede.engines.kit.hang_detector import HangDetector
from stampede.engines.kit.url import flag, parts_of, safe_url
from stampede.engines.redis.scripts import is_damage
from stampede.errors import EngineClosed, EngineError, OptionError

__all__ = [
    "DEFAULTS",
    "SENTINEL",
    "RedisAddress",
    "RedisConnector",
    "is_silence",
    "made_with",
    "never",
    "of_client",
    "of_url",
    "several",
    "trouble",
]

DEFAULTS: dict[str, Any] = {
    "socket_timeout": 1.0,  # short, since calls go on without the engine if it hangs
    "socket_connect_timeout": 0.5,
}
SENTINEL = "sentinel_"
"""Prefix of the options for the connections to sentinels."""

MOST = 1000
"""Highest number of connections of the blocking side."""

_POOL = {"max_connections", "timeout"}

_FOREIGN = {
    "retry", "retry_on_error", "retry_on_timeout", "connection_pool", "event_dispatcher", "parser_class",
    "maint_notifications_config", "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler",
    "maintenance_state", "maintenance_notification_hash", "orig_host_address", "orig_socket_timeout",
    "orig_socket_connect_timeout", "himport_registry", "cache", "cache_config", "redis_connect_func",
    "encoding", "encoding_errors", "decode_responses", "encoder_class", "command_packer", "legacy_responses",
    "connection_class", "response_callbacks",
}  # fmt: skip
"""Options of a client's connections that are not taken over: they belong to its pool, its colour or its replies."""


class RedisAddress(NamedTuple):
    """The host and port of a server."""

    host: str
    port: int


class RedisConnector:
    """A maker of connections to one server."""

    moves = False
    """Whether another server may take its place."""

    on_move: Callable[[], None] | None = None
    """Called when another server has taken its place."""

    closed = False

    def check(self) -> None:
        """Raise EngineClosed if the engine is closed."""
        if self.closed:
            raise EngineClosed(self.name)

    def __init__(self, name: str, kind: str, options: Mapping[str, Any]) -> None:
        """Check the options. `kind` is the name of a connection class, which the library has in both colours."""
        self.name = name
        self.hang_detector = HangDetector()
        self._kind = kind
        # The library uses 2 ** 31 for "no limit".
        self.max_connections = min(int(options.get("max_connections") or 50), MOST)
        self.timeout = float(options.get("timeout", 20.0))
        # Do not send the library's name: that would be two more round trips.
        unnamed = ("driver_info",) if find_spec("redis.driver_info") else ("lib_name", "lib_version")
        ours = DEFAULTS | dict.fromkeys(unnamed)
        self._options = ours | {key: value for key, value in options.items() if key not in _POOL}
        self._options["protocol"] = 2  # RESP2 connects faster; news have a connection of their own
        if kind == "UnixDomainSocketConnection":
            for key in ("host", "port", "socket_keepalive", "socket_keepalive_options", "socket_type"):
                self._options.pop(key, None)
        self.patience: float | None = self._options["socket_timeout"]
        try:
            self._made("redis")
        except (TypeError, ValueError) as wrong:
            raise OptionError(f"{name}{_said(wrong)}") from wrong

    def _made(self, package: str, **options: Any) -> Any:
        """Return a connection of one colour, not yet connected."""
        kind = getattr(import_module(f"{package}.connection"), self._kind)
        return kind(**self._options | options, retry=never(f"{package}.retry"))

    def connection(self, **options: Any) -> Any:
        """Return a connection of the blocking colour, not yet connected."""
        return self._made("redis", **options)

    async def suspending_connection(self) -> Any:
        """Return a connection of the running event loop, not yet connected."""
        return self._made("redis.asyncio")

    def met(self, wire: Any) -> None:
        """Note that this connection is established now."""

    def look(self) -> None:
        """Check from time to time whether another server has taken its place."""

    def close(self) -> None:
        """Make no more connections, and release what is needed to find the server."""
        self.closed = True


def of_url(url: str, options: Mapping[str, Any]) -> RedisConnector:
    """Return the server of `redis://`, `rediss://` or `unix://`."""
    from redis.connection import parse_url

    path = parts_of(url).path
    try:
        found = parse_url(url)
    except ValueError as wrong:
        raise OptionError(f"{safe_url(url)}: {wrong}") from wrong
    database = path.strip("/")
    if not url.startswith("unix") and database and not database.isdecimal():
        raise OptionError(f"{safe_url(url)}: {database!r} is not a database number, as in redis://localhost:6379/0")
    found.pop("tracking", None)  # the engine's own
    kind = found.pop("connection_class", None)
    return RedisConnector(safe_url(url), "Connection" if kind is None else kind.__name__, found | dict(options))


def _said(wrong: Exception) -> str:
    """Return what redis-py says about an option, without the names of its classes."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(wrong))
    return f" has no option {unknown[1]!r}: it takes those of redis-py's connections" if unknown else f": {wrong}"


def several(url: str, port: int) -> tuple[list[RedisAddress], dict[str, Any]]:
    """Return the addresses in `scheme://user:password@host:port,host:port/path?options`, and the client's options.
    `kind` among the options is the connection class: an encrypted one with `ssl=true`."""
    from redis.connection import parse_url

    parts = parts_of(url)
    user, at, hosts = parts.netloc.rpartition("@")
    addresses = [_address(url, host, port) for host in hosts.split(",")]
    query = dict(parse_qsl(parts.query))
    others = {name.removeprefix(SENTINEL): value for name, value in query.items() if name.startswith(SENTINEL)}
    try:
        options: dict[str, Any] = parse_url(f"redis://{user}{at}h/?{parts.query}")
        for name, value in parse_url(f"redis://h/?{urlencode(others)}").items():
            options[SENTINEL + name] = value
    except ValueError as wrong:
        raise OptionError(f"{safe_url(url)}: {wrong}") from wrong
    made_up = "host", "port", SENTINEL + "host", SENTINEL + "port"
    for name in (*made_up, "tracking"):  # `tracking` is the engine's own
        options.pop(name, None)
    options["kind"] = "SSLConnection" if flag("ssl", options.pop("ssl", False)) else "Connection"
    return addresses, options


def _address(url: str, text: str, default: int) -> RedisAddress:
    host, _, port = text.rpartition(":") if text.rpartition("]")[2].find(":") >= 0 else (text, "", str(default))
    host = unquote(host).strip("[]")
    if not host:
        raise OptionError(f"{safe_url(url)}: give hosts as host:port,host:port")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(f"{safe_url(url)}: {port!r} is not a port")
    return RedisAddress(host, int(port))


def of_client(client: Any, options: Mapping[str, Any]) -> RedisConnector:
    """Return the server of a `redis.Redis` or `redis.asyncio.Redis`. New connections are made like the client's."""
    pool: Any = getattr(client, "connection_pool", None)
    kind = getattr(getattr(pool, "connection_class", None), "__name__", "")
    if kind not in ("Connection", "SSLConnection", "UnixDomainSocketConnection"):
        raise OptionError(f"client is {type(client).__name__!r}: give one of the package redis, or a URL")
    return RedisConnector(
        _url_of(kind, pool.connection_kwargs), kind, made_with(pool.connection_kwargs) | dict(options)
    )


def _url_of(kind: str, options: Mapping[str, Any]) -> str:
    """Return the URL that a person would have written for these options."""
    if kind == "UnixDomainSocketConnection":
        return f"unix://{options.get('path', '')}"
    scheme = "rediss" if kind == "SSLConnection" else "redis"
    return f"{scheme}://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db', 0)}"


def made_with(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a client's connections that are also valid for ours."""
    given = {key: value for key, value in options.items() if key not in _FOREIGN}
    for name in _ONE_COLOUR:
        if not given.get(name):
            given.pop(name, None)
    timeouts = {key for key in ("socket_timeout", "socket_connect_timeout") if given.get(key, 0) is None}
    return {key: value for key, value in given.items() if key not in timeouts}


_ONE_COLOUR = (
    "ssl_validate_ocsp", "ssl_validate_ocsp_stapled", "ssl_ocsp_context", "ssl_ocsp_expected_cert",
    "ssl_password", "ssl_ca_path",  # not in redis-py 5.3
)  # fmt: skip
"""Options that connections of an event loop do not accept. They are left out if they are empty."""


def trouble(server: str, error: Exception) -> EngineError:
    """Return an EngineError for an error of the library."""
    failure = EngineError(f"{server}: {type(error).__name__}: {error}")
    failure.partial = is_damage(error)
    return failure


def is_silence(error: EngineError) -> bool:
    """Return whether the server gave no answer, as opposed to a refusal."""
    from redis import exceptions

    return isinstance(error.__cause__, (exceptions.ConnectionError, exceptions.TimeoutError, OSError))


def is_about_rights(error: EngineError) -> bool:
    """Return whether ACLs refuse the command to this user, or the server currently refuses writes to all."""
    from redis.exceptions import NoPermissionError, ResponseError

    cause = error.__cause__
    return isinstance(cause, NoPermissionError) or (
        isinstance(cause, ResponseError) and str(cause).startswith(("MISCONF", "NOREPLICAS"))
    )


def never(module: str = "redis.retry") -> Any:
    """Return the library's retry object that never retries. Each colour has its own module."""
    from redis.backoff import NoBackoff

    return import_module(module).Retry(NoBackoff(), 0)
