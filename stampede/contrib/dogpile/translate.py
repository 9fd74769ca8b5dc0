"""Translation of dogpile's own backends into our engines on the same stores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from stampede.errors import OptionError

__all__ = ["translated"]

Arguments = dict[str, Any]

# They say how a mutex is polled, or whether it holds in all processes: ours is not polled, and always does.
_MOOT = ("distributed_lock", "lock_sleep", "lock_blocking", "thread_local_lock", "lock_prefix", "dead_retry")


def translated(backend: str, given: Mapping[str, Any]) -> tuple[str, Arguments]:
    """Return our name and arguments for a backend; unchanged if it is not one of dogpile's."""
    if backend.endswith(("_sentinel", "_cluster")) and backend.startswith("dogpile.cache."):
        raise OptionError(f"{backend!r} can't be translated: configure the backend 'stampede' with a url, or a client")
    arguments = dict(given)
    translate = _KNOWN.get(backend)
    if translate is None or "cache_dict" in arguments:
        return backend, arguments
    for name in _MOOT:
        arguments.pop(name, None)
    limit = arguments.pop("lock_timeout", None)
    arguments = translate(arguments)
    if limit:
        arguments.setdefault("max_hold", limit)
    return "stampede", arguments


def _memory(arguments: Arguments) -> Arguments:
    return {"url": "memory://", "codec": "objects", **arguments}


def _memory_pickle(arguments: Arguments) -> Arguments:
    return {"url": "memory://", "codec": "pickle", **arguments}


def _dbm(arguments: Arguments) -> Arguments:
    for name in ("rw_lockfile", "dogpile_lockfile", "lock_factory"):
        arguments.pop(name, None)
    place = quote(os.path.abspath(arguments.pop("filename")))
    return {"url": f"disk://{place}.stampede", **arguments}


def _redis(arguments: Arguments) -> Arguments:
    url, connection = arguments.pop("url", None), _connection(arguments)
    pool = arguments.pop("connection_pool", None)
    if pool is None and url is not None and not connection:
        return {"url": url.replace("valkey", "redis", 1) if url.startswith("valkey") else url, **arguments}
    import redis

    if pool is not None:
        client = redis.Redis(connection_pool=pool)
    elif url is not None:
        client = redis.Redis.from_url(url, **connection)
    else:
        client = redis.Redis(**connection)
    return {"url": client, **arguments}


_CONNECTION = (
    "host", "port", "db", "username", "password", "ssl",
    "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options",
)  # fmt: skip


def _connection(arguments: Arguments) -> Arguments:
    """Take the options of connections to Redis out of the arguments, and return them. Set `ttl` along with it."""
    _expiry(arguments, "redis_expiration_time", "valkey_expiration_time")
    said = {name: arguments.pop(name) for name in _CONNECTION if name in arguments}
    return {**(arguments.pop("connection_kwargs", None) or {}), **{k: v for k, v in said.items() if v is not None}}


def _memcached(arguments: Arguments) -> Arguments:
    for name in ("username", "password", "tls_context"):
        if arguments.pop(name, None) is not None:
            raise OptionError(f"{name} can't be translated: configure the backend 'stampede' with a memcached:// url")
    for name in ("min_compress_len", "serde", "default_noreply", "binary", "behaviors"):
        arguments.pop(name, None)  # options of their clients, and of the protocol
    servers = arguments.pop("url")
    servers = [servers] if isinstance(servers, (str, tuple)) else servers
    hosts = [each if isinstance(each, str) else f"{each[0]}:{each[1]}" for each in servers]
    _expiry(arguments, "memcached_expire_time")
    return {"url": f"memcached://{','.join(hosts)}", **arguments}


def _expiry(arguments: Arguments, *names: str) -> None:
    """Set `ttl` from the arguments that say how long the store keeps values, where 0 means for ever."""
    for name in names:
        ttl = arguments.pop(name, None)
        if ttl:
            arguments.setdefault("ttl", ttl)


_KNOWN: dict[str, Callable[[Arguments], Arguments]] = {
    "dogpile.cache.memory": _memory,
    "dogpile.cache.memory_pickle": _memory_pickle,
    "dogpile.cache.dbm": _dbm,
    **{f"dogpile.cache.{name}": _redis for name in ("redis", "valkey")},
    **{f"dogpile.cache.{name}": _memcached for name in ("memcached", "pylibmc", "bmemcached", "pymemcache")},
}
