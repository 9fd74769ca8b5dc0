"""The Redis engine passes the suites for every engine. Its peer is another engine on the same server."""

from __future__ import annotations

import pytest

pytest.importorskip("redis")

from servers import shared_redis

from stampede.engines.redis import RedisEngine
from stampede.model.ports import Engine
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class TestRedis(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1

    def make_engine(self) -> Engine:
        server = shared_redis()
        server.cli("FLUSHALL")
        return RedisEngine(server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return RedisEngine(shared_redis().url)


class TestRedisAsync(TestRedis):
    suspending = True
