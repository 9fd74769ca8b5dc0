"""The Redis engine: values and leases on a Redis (6.2 or later) or Valkey server, decided by scripts, told by pushes.

lua/         a script for each verb: whatever must be one step
scripts.py   calls them by their hashes
wire.py      keys' names, arguments and replies
verbs.py     Claims and Store, written once over a `Line`;  locks.py   Locks, likewise
blocking.py, suspending.py   the line of each colour
news.py      subscriptions, and what keeps tickets true
clients.py   what is behind a URL: a function for each topology
resp.py      replies from bytes
"""

from __future__ import annotations

import os
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from weakref import WeakSet, finalize

from stampede.colour import BLOCKING, SUSPENDING, run_blocking
from stampede.engines.redis.blocking import Blocking
from stampede.engines.redis.clients import of_client, of_url
from stampede.engines.redis.locks import LockPort
from stampede.engines.redis.news import News
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.suspending import Suspending
from stampede.engines.redis.verbs import Generations, Keys
from stampede.engines.url import flag
from stampede.errors import OptionError

__all__ = ["RedisEngine", "from_url"]


class RedisEngine:
    """A server's database, shared by all who connect to it.

    `url` takes every option of the client library in its query; options given here win. Or hand over a `client`
    (`redis.Redis` or `redis.asyncio.Redis`): connections are made as its own are, and none of its own is used.
    `max_connections` of them at most are open on the blocking side (50), where callers beyond wait for one (for at
    most `timeout` seconds, 20); an event loop has one. `tracking` has the server tell of every change in what was
    read here, which keeps local tiers true, and costs the server a little for each key that is read.
    """

    scheme = "redis"
    shared = True
    fenced = True
    pushes = True
    looks = None
    tier = None

    def __init__(self, url: str | None = None, *, client: Any = None, tracking: bool = True, **options: Any) -> None:
        if (url is None) == (client is None):
            raise OptionError("RedisEngine takes a URL or a client: one of them")
        self.coherent = tracking
        server = of_url(url, options) if url is not None else of_client(client, options)
        scripts, news = Scripts(), News(lambda: server.connection(protocol=3), tracks=tracking)
        generations = Generations(news)
        line, aline = Blocking(server, scripts, news), Suspending(server, scripts, news)
        self._line, self._aline, self._news, self._generations = line, aline, news, generations
        self._parts = (line, aline, news, generations)
        self.claims = self.store = Keys(line, scripts, news, generations, BLOCKING)
        self.aclaims = self.astore = Keys(aline, scripts, news, generations, SUSPENDING)
        self.locks = LockPort(line, scripts, news, BLOCKING)
        self.alocks = LockPort(aline, scripts, news, SUSPENDING)
        self.close = finalize(self, _close, os.getpid(), news, line, aline)
        _engines.add(self)

    def ping(self) -> float:
        start = time.perf_counter()
        run_blocking(self._line.ask((b"PING",)))
        return time.perf_counter() - start

    def _start_again(self) -> None:
        for part in self._parts:
            part.start_again()


def from_url(url: str, **options: Any) -> RedisEngine:
    """`redis://user:password@host:6379/0?socket_timeout=0.5`, `rediss://` for TLS, `unix:///run/redis.sock?db=0`."""
    query = dict(parse_qsl(urlsplit(url).query))
    tracking = flag("tracking", options.pop("tracking", query.get("tracking", True)))
    return RedisEngine(url, tracking=tracking, **options)


# -- ends and forks -------------------------------------------------------------------------------------------------


def _close(pid: int, *parts: News | Blocking | Suspending) -> None:
    if os.getpid() == pid:
        for part in parts:
            part.close()


_engines: WeakSet[RedisEngine] = WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._start_again()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
