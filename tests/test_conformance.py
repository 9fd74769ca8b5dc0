"""Every engine keeps the ports' promises, in both colours."""

from __future__ import annotations

from cachetools import LRUCache

from stampede.engines.memory import MemoryEngine
from stampede.ports import Engine
from stampede.testing.clock import FakeClock
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class _All(ClaimsSuite, StoreSuite, LocksSuite):
    pass


class TestMemory(_All):
    def make_engine(self) -> Engine:
        return MemoryEngine()


class TestMemoryAsync(TestMemory):
    suspending = True


class TestMemoryByFakeClock(_All):
    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(clock=self.clock)


class TestMemoryByFakeClockAsync(TestMemoryByFakeClock):
    suspending = True


class TestMemorySealed(TestMemoryByFakeClock):
    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(sealed=True, clock=self.clock)


class TestMemoryInCachetools(TestMemoryByFakeClock):
    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        return MemoryEngine(store=LRUCache(1_000), clock=self.clock)


class TestMemoryInCachetoolsAsync(TestMemoryInCachetools):
    suspending = True
