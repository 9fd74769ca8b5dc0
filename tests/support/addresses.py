"""The address of each engine, with nothing stored there. Files are below a given path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker_server import BrokerThread
from dynamodb_server import shared_moto
from etcd_server import shared_etcd
from file_cell import FileCell
from memcached_server import shared_memcached
from postgres_server import shared_postgres
from servers import shared_redis
from zookeeper_server import shared_zookeeper

from stampede import Cache

__all__ = ["EMPTY", "cache_at"]


def _emptied(server: Any, url: str) -> str:
    server.empty()
    return url


def _redis(path: Path) -> str:
    shared_redis().cli("FLUSHALL")
    return shared_redis().url


def _postgres(path: Path) -> str:
    shared_postgres().prepare()
    return shared_postgres().postgres_url


def _zookeeper(path: Path) -> str:  # with sessions that are long enough for the leases of all tests
    return _emptied(shared_zookeeper(), f"{shared_zookeeper().url}?session=64")


def _zmq(path: Path) -> str:
    while _brokers:
        _brokers.pop().stop()
    _brokers.append(BrokerThread())
    return _brokers[0].url


_brokers: list[BrokerThread] = []

EMPTY: dict[str, Callable[[Path], str]] = {
    "memory": lambda path: "memory://",
    "disk": lambda path: f"disk://{path}/disk",
    "file": lambda path: f"file://{path}/file",
    "redis": _redis,
    "memcached": lambda path: _emptied(shared_memcached(), shared_memcached().url),
    "postgres": _postgres,
    "sql": lambda path: f"sql+sqlite:///{path}/cache.db",
    "dynamodb": lambda path: _emptied(shared_moto(), shared_moto().url),
    "etcd": lambda path: _emptied(shared_etcd(), shared_etcd().url),
    "zookeeper": _zookeeper,
    "zmq": _zmq,
    "cell": lambda path: f"cell://{path}/cell",
}


def cache_at(url: str, **options: Any) -> Cache:
    """Return a cache at one of these addresses. `cell` is an engine for tests only, which has no URL."""
    kind, _, place = url.partition("://")
    if kind != "cell":
        return Cache(url, **options)
    Path(place).mkdir(exist_ok=True)
    return Cache(FileCell(Path(place)), **options)
