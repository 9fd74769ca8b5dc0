"""Each engine gives the same answers as a plain record for random histories of a key, for threads and for tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("redis")
pytest.importorskip("pymemcache")
pytest.importorskip("psycopg")

from cachetools import LRUCache
from memcached_server import shared_memcached
from postgres_server import MovedClock, shared_postgres
from servers import SteppedServer, shared_redis

from stampede.engines.disk import DiskEngine
from stampede.engines.kit.boot_clock import clock
from stampede.engines.memcached import MemcachedEngine
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.engines.postgres import PostgresEngine
from stampede.engines.redis import RedisEngine
from stampede.model.ports import Engine
from stampede.testing import FakeClock
from stampede.testing.conformance import HistoriesSuite


class TestMemory(HistoriesSuite):
    histories = 40

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
    ids_last = False  # a change that overrides a computation gives the stored value a new id

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        self.parts = MemoryEngine(clock=self.clock), MemoryEngine(clock=self.clock)
        return Paired(*self.parts, clock=self.clock)

    def make_peer(self, engine: Engine) -> Engine:
        assert self.clock is not None
        return Paired(*self.parts, clock=self.clock)


class TestDisk(HistoriesSuite):
    """The clock of the engine, which all its processes share, is moved on, too."""

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


class SteppedClock(FakeClock):
    """A clock that runs. If it is moved on, the clock of a server is moved on, too."""

    def __init__(self, server: SteppedServer | MovedClock) -> None:
        super().__init__(0.0)
        self.server = server

    def __call__(self) -> float:
        return time.monotonic() + super().__call__()

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.server.step(super().__call__())


@pytest.mark.usefixtures("_clock")
class TestRedisAsTimePasses(HistoriesSuite):
    """Times are the server's. Ends are so far apart that the time between two requests does not matter."""

    blur = 2.0
    durations: ClassVar[dict[str, float]] = {"no": 0.0, "short": 100.0, "long": 7200.0, "ever": inf}
    passes: ClassVar[list[float]] = [37.0, 1000.0]

    @pytest.fixture
    def _clock(self) -> Iterator[None]:
        server = SteppedServer()
        self.server, self.clock = server, SteppedClock(server)
        yield
        server.close()

    def make_engine(self) -> Engine:
        return RedisEngine(self.server.url)

    def make_peer(self, engine: Engine) -> Engine:
        return RedisEngine(self.server.url)


class TestMemcached(HistoriesSuite):
    def make_engine(self) -> Engine:
        return MemcachedEngine(shared_memcached().address)

    def make_peer(self, engine: Engine) -> Engine:
        return MemcachedEngine(shared_memcached().address)


class TestMemcachedAsync(TestMemcached):
    suspending = True


class TestPostgres(HistoriesSuite):
    def make_engine(self) -> Engine:
        shared_postgres().prepare()
        return PostgresEngine(shared_postgres().postgres_url)

    def make_peer(self, engine: Engine) -> Engine:
        return PostgresEngine(shared_postgres().postgres_url)


class TestPostgresAsync(TestPostgres):
    suspending = True


@pytest.mark.usefixtures("_clock")
class TestPostgresAsTimePasses(HistoriesSuite):
    """Times are those of the server's clock, which all decisions in the database take from one function."""

    blur = 2.0
    durations: ClassVar[dict[str, float]] = {"no": 0.0, "short": 100.0, "long": 7200.0, "ever": inf}
    passes: ClassVar[list[float]] = [37.0, 1000.0]

    @pytest.fixture
    def _clock(self) -> Iterator[None]:
        with shared_postgres().database() as database:
            self.moved = MovedClock(shared_postgres(), database)
            self.clock = SteppedClock(self.moved)
            yield

    def make_engine(self) -> Engine:
        return PostgresEngine(self.moved.url)

    def make_peer(self, engine: Engine) -> Engine:
        return PostgresEngine(self.moved.url)
