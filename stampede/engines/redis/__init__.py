"""The Redis engine: values and leases on a Redis (6.2 or later) or Valkey server. Scripts decide, pushes wake waiters.

lua/         one script for each verb: whatever must be one step
scripts.py   calls the scripts by their hashes, and knows which replies are possible
wire.py      names of keys, arguments and replies
verbs.py     Claims and Store, written once over a `RedisLine`;  locks.py, limits.py   Locks and Limits, likewise
line.py      asking one server, with retries and errors;  blocking.py, suspending.py   in each colour
news.py      subscriptions, and what keeps tickets valid;  readers.py   watches idle connections for their end
clients.py   turns a URL or a client into connections to a server
shard.py     one server's ports;  sentinel.py   the server that sentinels name
cluster.py   many shards, one for each master;  routed.py   the ports over them
inside.py    the private parts of redis-py that are used: sockets, streams, and hiredis' parser"""

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
    """A server's database, shared by all processes that connect to it.

    The query of `url` takes every option of the client library; options given as arguments win. Or pass a `client` of
    either colour (`Redis`, `RedisCluster`, or the result of `Sentinel.master_for`): new connections are made like the
    client's, and its own are not used.

    The blocking side has at most `max_connections` open (50); further callers wait for one (for at most `timeout`
    seconds, 20). An event loop has one. With `tracking` the server reports every change of what was read here. This
    keeps local tiers valid, and costs a little for each key that is read. By default it begins when a local tier asks
    for it; True begins at once, and False turns it off."""

    scheme = "redis"
    pushes = True
    fair = True
    rooms = True
    looks = changes = True

    def __init__(
        self, url: str | None = None, *, client: Any = None, tracking: bool | None = None, **options: Any
    ) -> None:
        if (url is None) == (client is None):
            raise OptionError("RedisEngine takes a URL or a client: give exactly one of them")
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
        """Whether the server reports changes. If it refuses to, the first question finds out."""
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
            if isinstance(error.__cause__, NoPermissionError):  # the server works, but this user may not ask
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
    """Return what a URL or a client leads to: one server, the one that sentinels name, or a cluster."""
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
    """Return the engine of a URL.

    `redis://user:password@host:6379/0?socket_timeout=0.5`, `rediss://` for TLS, `unix:///run/redis.sock?db=0`,
    `redis+sentinel://host:26379,host:26379/service/0` or `redis+cluster://host:6379,host:6379`."""
    query = dict(parse_qsl(urlsplit(url).query))
    tracking = options.pop("tracking", query.get("tracking"))
    if tracking is not None:
        tracking = flag("tracking", tracking)
    return RedisEngine(url, tracking=tracking, **options)


def check_url(url: str) -> None:
    """Raise OptionError if the URL or its options are wrong. A connection is made for this, but not connected."""
    tracking = dict(parse_qsl(parts_of(url).query)).get("tracking")
    if tracking is not None:
        flag("tracking", tracking)
    _servers(url, None, {}, tracking=False).close()


def of_client(client: Any) -> RedisEngine:
    """Return an engine for the server of a redis-py client, of either colour."""
    return RedisEngine(client=client)
