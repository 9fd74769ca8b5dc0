"""How connections are made: one function for each topology, which says what is behind a URL or a client object.

The client library connects, encrypts and logs in; all of its options go through. Its own retries are off: we send
again by ourselves, since we know that each verb may be sent twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
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
    "socket_timeout": 1.0,  # short, since calls go on without an engine that hangs
    "socket_connect_timeout": 0.5,
}
SENTINEL = "sentinel_"
"""What options for the connections to sentinels begin with."""

MOST = 1000
"""Connections of the blocking side; beyond that callers wait for one."""

_POOL = {"max_connections", "timeout"}

_FOREIGN = {
    "retry", "retry_on_error", "retry_on_timeout", "connection_pool", "event_dispatcher", "parser_class",
    "maint_notifications_config", "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler",
    "maintenance_state", "maintenance_notification_hash", "orig_host_address", "orig_socket_timeout",
    "orig_socket_connect_timeout", "himport_registry", "cache", "cache_config", "redis_connect_func",
    "encoding", "encoding_errors", "decode_responses", "encoder_class", "command_packer", "legacy_responses",
    "connection_class", "response_callbacks",
}  # fmt: skip
"""What a client's connections were made with, and ours are not: they belong to its pool, its colour or its replies."""


class RedisAddress(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


class RedisConnector:
    """One server, as the ways to connect to it."""

    moves = False
    """Whether another server may take its place."""

    on_move: Callable[[], None] | None = None
    """To be called when that has happened."""

    closed = False

    def check(self) -> None:
        """EngineClosed, once it is."""
        if self.closed:
            raise EngineClosed(self.name)

    def __init__(self, name: str, kind: str, options: Mapping[str, Any]) -> None:
        """`kind` is the name of a class of connections, which the library has in both colours."""
        self.name = name
        self.hang_detector = HangDetector()
        self._kind = kind
        # The library says 2 ** 31 where it means that there is no bound.
        self.max_connections = min(int(options.get("max_connections") or 50), MOST)
        self.timeout = float(options.get("timeout", 20.0))
        self._options = DEFAULTS | {key: value for key, value in options.items() if key not in _POOL}
        self._options["protocol"] = 2  # a connection is ready sooner; news come by one of their own
        if kind == "UnixDomainSocketConnection":
            for key in ("host", "port", "socket_keepalive", "socket_keepalive_options", "socket_type"):
                self._options.pop(key, None)
        self.patience: float | None = self._options["socket_timeout"]
        try:
            self._made("redis")
        except (TypeError, ValueError) as wrong:
            raise OptionError(f"{name}{_said(wrong)}") from wrong

    def _made(self, package: str, **options: Any) -> Any:
        """A connection of one colour, not yet connected."""
        kind = getattr(import_module(f"{package}.connection"), self._kind)
        return kind(**self._options | options, retry=never(f"{package}.retry"))

    def connection(self, **options: Any) -> Any:
        """One connection of the blocking colour, not yet connected."""
        return self._made("redis", **options)

    async def suspending_connection(self) -> Any:
        """One connection of the running event loop, not yet connected."""
        return self._made("redis.asyncio")

    def met(self, wire: Any) -> None:
        """A connection stands."""

    def look(self) -> None:
        """Find out whether another server has taken its place, now and then."""

    def close(self) -> None:
        """No connection is made any more. Let go of what it takes to know where to connect."""
        self.closed = True


def of_url(url: str, options: Mapping[str, Any]) -> RedisConnector:
    """The server of `redis://`, `rediss://` and `unix://`."""
    from redis.connection import parse_url

    path = parts_of(url).path
    try:
        found = parse_url(url)
    except ValueError as wrong:
        raise OptionError(f"{safe_url(url)}: {wrong}") from wrong
    database = path.strip("/")
    if not url.startswith("unix") and database and not database.isdecimal():
        raise OptionError(f"{safe_url(url)}: {database!r} is no number of a database, as in redis://localhost:6379/0")
    found.pop("tracking", None)  # the engine's own
    kind = found.pop("connection_class", None)
    return RedisConnector(safe_url(url), "Connection" if kind is None else kind.__name__, found | dict(options))


def _said(wrong: Exception) -> str:
    """What redis-py says of an option, without the names of its classes."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(wrong))
    return f" has no option {unknown[1]!r}: it takes those of redis-py's connections" if unknown else f": {wrong}"


def several(url: str, port: int) -> tuple[list[RedisAddress], dict[str, Any]]:
    """The addresses in `scheme://user:password@host:port,host:port/path?options`, and the client's options.

    With `ssl=true` connections are encrypted: `kind` among the options says so.
    """
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
    for name in (*made_up, "tracking"):  # which is the engine's own
        options.pop(name, None)
    options["kind"] = "SSLConnection" if flag("ssl", options.pop("ssl", False)) else "Connection"
    return addresses, options


def _address(url: str, text: str, default: int) -> RedisAddress:
    host, _, port = text.rpartition(":") if text.rpartition("]")[2].find(":") >= 0 else (text, "", str(default))
    host = unquote(host).strip("[]")
    if not host:
        raise OptionError(f"{safe_url(url)}: give hosts as host:port,host:port")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(f"{safe_url(url)}: {port!r} is no port")
    return RedisAddress(host, int(port))


def of_client(client: Any, options: Mapping[str, Any]) -> RedisConnector:
    """The server of a `redis.Redis` or `redis.asyncio.Redis`: our connections are made as its own, and are ours."""
    pool: Any = getattr(client, "connection_pool", None)
    kind = getattr(getattr(pool, "connection_class", None), "__name__", "")
    if kind not in ("Connection", "SSLConnection", "UnixDomainSocketConnection"):
        raise OptionError(f"client is {type(client).__name__!r}: give one of the package redis, or a URL")
    return RedisConnector(
        _url_of(kind, pool.connection_kwargs), kind, made_with(pool.connection_kwargs) | dict(options)
    )


def _url_of(kind: str, its: Mapping[str, Any]) -> str:
    """What people would have written."""
    if kind == "UnixDomainSocketConnection":
        return f"unix://{its.get('path', '')}"
    scheme = "rediss" if kind == "SSLConnection" else "redis"
    return f"{scheme}://{its.get('host', 'localhost')}:{its.get('port', 6379)}/{its.get('db', 0)}"


def made_with(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a client's connections were made with, as far as it is good for ours."""
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
"""What the connections of an event loop don't know: where it says nothing, it is not said."""


def trouble(server: str, error: Exception) -> EngineError:
    """What the library raised, as ours."""
    failure = EngineError(f"{server}: {type(error).__name__}: {error}")
    failure.partial = is_damage(error)
    return failure


def is_silence(error: EngineError) -> bool:
    """Whether there was no answer, and not one that refuses."""
    from redis import exceptions

    return isinstance(error.__cause__, (exceptions.ConnectionError, exceptions.TimeoutError, OSError))


def is_about_rights(error: EngineError) -> bool:
    """Whether the command is refused to us (by ACLs), or to all, since the server writes nothing at present."""
    from redis.exceptions import NoPermissionError, ResponseError

    cause = error.__cause__
    return isinstance(cause, NoPermissionError) or (
        isinstance(cause, ResponseError) and str(cause).startswith(("MISCONF", "NOREPLICAS"))
    )


def never(module: str = "redis.retry") -> Any:
    """The library's retries, switched off; each colour has its own."""
    from redis.backoff import NoBackoff

    return import_module(module).Retry(NoBackoff(), 0)
