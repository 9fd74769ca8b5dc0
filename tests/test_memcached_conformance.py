"""The memcached engine does what every engine has to do; its peer is another engine on the same servers."""

from __future__ import annotations

import pytest

pytest.importorskip("pymemcache")

from memcached_server import shared_memcached

from stampede.engines.memcached import MemcachedEngine
from stampede.ports import Engine
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class TestMemcached(ClaimsSuite, StoreSuite, LocksSuite):
    short = 1.0  # its clock ticks in seconds
    slack = 0.7

    def make_engine(self) -> Engine:
        server = shared_memcached()
        server.empty()
        return MemcachedEngine(server.address, sign=0)

    def make_peer(self, engine: Engine) -> Engine:
        return MemcachedEngine(shared_memcached().address, sign=0)


class TestMemcachedAsync(TestMemcached):
    suspending = True
