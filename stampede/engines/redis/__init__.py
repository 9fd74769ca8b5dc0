"""The Redis engine: values and leases on a Redis (6.2 or later) or Valkey server, decided by scripts, told by pushes.

lua/         a script for each verb: whatever must be one step
scripts.py   calls them by their hashes, and knows what a reply may look like
wire.py      keys' names, arguments and replies
verbs.py     Claims and Store, written once over a `Line`;  locks.py, limits.py   Locks and Limits, likewise
line.py      what is asked is answered, asked again or told as trouble;  blocking.py, suspending.py   in each colour
news.py      subscriptions, and what keeps tickets true;  readers.py   the ends of connections that nobody looks at
clients.py   what is behind a URL: how connections to a server are made
shard.py     one server's ports;  sentinel.py   the server that sentinels name
cluster.py   many shards, one for each master;  routed.py   the ports over them
inside.py    what is used of redis-py that is its own: the socket and the streams of a connection; and hiredis' parser
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from stampede.engines.kit.url import flag, parts_of, scheme_of
from stampede.engines.redis import clients
from stampede.engines.redis.clients import RedisConnector
from stampede.engines.redis.cluster import Cluster, of_cluster_client, of_cluster_url
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.sentinel import of_sentinel_client, of_sentinel_url
from stampede.engines.redis.shard import Shard
from stampede.errors import EngineError, OptionError
from stampede.model.ports import Engine, Side
from stampede.runtime import forks
from stampede.runtime.colour import run_blocking

__all__ = ["RedisEngine", "from_url", "of_client"]


class RedisEngine(Engine):
    """A server's database, shared by all who connect to it.

    `url` takes every option of the client library in its query; options given here win. Or hand over a `client` of
    either colour (`Redis`, `RedisCluster`, what `Sentinel.master_for` gives): connections are made as its own are, and
    none of its own is used.
    `max_connections` of them at most are open on the blocking side (50), where callers beyond wait for one (for at
    most `timeout` seconds, 20); an event loop has one. With `tracking` the server tells of every change in what
    was read here, which keeps local tiers true, and costs a little for each key that is read: it begins when a local
    tier asks for it, or at once if it is True, or never if it is False.
    """

    scheme = "redis"
    pushes = True
    fair = True
    rooms = True
    looks = changes = True

    def __init__(
        self, url: str | None = None, *, client: Any = None, tracking: bool | None = None, **options: Any
    ) -> None:
        if (url is None) == (client is None):
            raise OptionError("RedisEngine takes a URL or a client: one of them")
        self._follows = tracking is not False
        self.scheme = "redis" if url is None else scheme_of(url)
        self._servers = servers = _servers(url, client, options, tracking=bool(tracking))
        self.url = servers.name
        self.audience = servers.scripts.audience
        self.many = servers.blocking.keys
        self.recalls = servers.recalls
        self.blocking, self.suspending = _side(servers.blocking), _side(servers.suspending)
        self._closing = forks.closing(self, servers.close)
        forks.in_child(self._start_again)

    @property
    def coherent(self) -> bool:  # type: ignore[override]
        """Whether the server tells of changes. One that refuses to is found out by the first question."""
        return self._follows and not self._servers.scripts.refuses

    def refusal(self) -> str | None:
        return self._servers.refusal() if self._follows else None

    def follow(self) -> None:
        if self._follows:
            self._servers.follow()

    def close(self) -> None:
        self._closing()

    def ping(self) -> float:
        start = time.perf_counter()
        run_blocking(self._servers.ping())
        return time.perf_counter() - start

    def advice(self) -> Sequence[str]:
        from redis.exceptions import NoPermissionError

        try:
            return run_blocking(self._servers.advice())
        except EngineError as error:
            if isinstance(error.__cause__, NoPermissionError):  # the server is well, and this user can't ask it
                return ()
            raise

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return run_blocking(self._servers.facts())

    def _start_again(self) -> None:
        self._servers.start_again()


def _side(ports: Any) -> Side:
    keys, locks = ports.keys, ports.locks
    return Side(keys, keys, locks, ports.limits, lists=keys, softens=keys, shows=keys, holds=locks, handover=locks)


def _servers(url: str | None, client: Any, options: dict[str, Any], *, tracking: bool) -> Shard | Cluster:
    """What is behind a URL or a client: one server, the one that sentinels name, or a cluster's."""
    if url is None:
        cluster = of_cluster_client(client, options, tracking=tracking)
        if cluster is not None:
            return cluster
        server: RedisConnector = of_sentinel_client(client, options) or clients.of_client(client, options)
    elif scheme_of(url) == "redis+cluster":
        return of_cluster_url(url, options, tracking=tracking)
    elif scheme_of(url) == "redis+sentinel":
        server = of_sentinel_url(url, options)
    else:
        server = clients.of_url(url, options)
    return Shard(server, Scripts(), tracking=tracking)


def from_url(url: str, **options: Any) -> RedisEngine:
    """`redis://user:password@host:6379/0?socket_timeout=0.5`, `rediss://` for TLS, `unix:///run/redis.sock?db=0`,
    `redis+sentinel://host:26379,host:26379/service/0` or `redis+cluster://host:6379,host:6379`."""
    query = dict(parse_qsl(urlsplit(url).query))
    tracking = options.pop("tracking", query.get("tracking"))
    if tracking is not None:
        tracking = flag("tracking", tracking)
    return RedisEngine(url, tracking=tracking, **options)


def check_url(url: str) -> None:
    """Options are those of a connection that is made, and not connected."""
    tracking = dict(parse_qsl(parts_of(url).query)).get("tracking")
    if tracking is not None:
        flag("tracking", tracking)
    _servers(url, None, {}, tracking=False).close()


def of_client(client: Any) -> RedisEngine:
    """Where a client of redis-py leads, of either colour."""
    return RedisEngine(client=client)
