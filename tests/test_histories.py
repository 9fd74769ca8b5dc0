"""Random histories of a key go to a record and to every engine, in both colours; all answers are the same."""

from __future__ import annotations

from cachetools import LRUCache

from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
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
