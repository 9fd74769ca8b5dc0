"""The Redis engine: values and leases on a Redis or Valkey server, decided by scripts, told by pushes."""

from __future__ import annotations

import time
from typing import Any

from stampede.colour import BLOCKING, SUSPENDING, run_blocking
from stampede.engines.redis.blocking import Blocking
from stampede.engines.redis.clients import Server, of_client, of_url
from stampede.engines.redis.news import News
from stampede.engines.redis.scripts import Scripts
from stampede.engines.redis.verbs import Generations, Keys

__all__ = ["RedisEngine", "from_url"]


class RedisEngine:
    scheme = "redis"
    shared = True
    fenced = True
    pushes = True
    coherent = True

    def __init__(self, url: str = "", *, client: Any = None, **options: Any) -> None:
        self._server: Server = of_url(url, options) if client is None else of_client(client, options)
        server = self._server
        scripts, self._news, generations = Scripts(), News(lambda: server.connection(protocol=3)), Generations()
        self._line = Blocking(self._server, scripts)
        self.claims = self.store = Keys(self._line, scripts, self._news, generations, BLOCKING)
        self.aclaims = self.astore = None
        self.locks = self.alocks = None

    def ping(self) -> float:
        start = time.perf_counter()
        run_blocking(self._line.ask((b"PING",)))
        return time.perf_counter() - start

    def close(self) -> None:
        self._news.close()
        self._line.close()


def from_url(url: str, **options: Any) -> RedisEngine:
    return RedisEngine(url, **options)
