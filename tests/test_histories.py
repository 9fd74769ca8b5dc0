"""Random histories of a key go to a record and to every engine, in both colours; all answers are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")

from cachetools import LRUCache
from memcached_server import shared_memcached
from servers import shared_redis

from stampede.engines.disk import DiskEngine
from stampede.engines.disk.boot import clock
from stampede.engines.memcached import MemcachedEngine
from stampede.engines.memcached.holds import is_alias
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.engines.redis import RedisEngine
from stampede.ports import Engine
from stampede.testing import FakeClock
from stampede.testing.conformance import HistoriesSuite


class TestMemory(HistoriesSuite):
    histories = 100

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(clock=self.clock)


class TestMemoryAsync(TestMemory):
    suspending = True


class TestMemoryInCachetools(TestMemory):
    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(store=LRUCache(1_000), clock=self.clock)


class TestPaired(HistoriesSuite):
    ids_last = False  # who overrules a computation gives what is there another one

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        self.parts = MemoryEngine(clock=self.clock), MemoryEngine(clock=self.clock)
        return Paired(*self.parts, clock=self.clock)

    def make_peer(self, engine: Engine) -> Engine:
        assert self.clock is not None
        return Paired(*self.parts, clock=self.clock)


class TestDisk(HistoriesSuite):
    """Also as its own clock moves, which all its processes share."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.clock = tmp_path, FakeClock(clock())
        monkeypatch.setattr("stampede.engines.disk.rows.clock", self.clock)

    def make_engine(self) -> Engine:
        return DiskEngine(self.directory)

    def make_peer(self, engine: Engine) -> Engine:
        return DiskEngine(self.directory)


class TestDiskAsync(TestDisk):
    suspending = True


class TestRedis(HistoriesSuite):
    def make_engine(self) -> Engine:
        return RedisEngine(shared_redis().url)

    def make_peer(self, engine: Engine) -> Engine:
        return RedisEngine(shared_redis().url)


class TestRedisAsync(TestRedis):
    suspending = True


class TestMemcached(HistoriesSuite):
    def make_engine(self) -> Engine:
        return MemcachedEngine(shared_memcached().address, sign=0)

    def make_peer(self, engine: Engine) -> Engine:
        return MemcachedEngine(shared_memcached().address, sign=0)

    def is_token(self, told: bytes, token: bytes) -> bool:
        return told == token or is_alias(told)


class TestMemcachedAsync(TestMemcached):
    suspending = True
