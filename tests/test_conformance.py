"""Every engine keeps the ports' promises, in both colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cachetools import LRUCache

from stampede.engines.disk import DiskEngine
from stampede.engines.file import FileEngine
from stampede.engines.memory import MemoryEngine
from stampede.engines.paired import Paired
from stampede.ports import Engine
from stampede.testing.clock import FakeClock
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class _Plain:
    """A Store that is not Versioned."""

    def __init__(self, store: Any) -> None:
        self.get, self.set, self.expire, self.invalidate = store.get, store.set, store.expire, store.invalidate
        self.generation, self.bump = store.generation, store.bump


class Unversioned(MemoryEngine):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.store: Any = _Plain(self.store)
        self.astore: Any = _Plain(self.astore)


class Blocking(MemoryEngine):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.astore: Any = None
        self.alocks: Any = None


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


class TestPaired(TestMemoryByFakeClock):
    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        store, locks = MemoryEngine(clock=self.clock), MemoryEngine(clock=self.clock)
        self.parts = store, locks
        return Paired(store, locks, clock=self.clock)

    def make_peer(self, engine: Engine) -> Engine:
        """Another process's pair over the same store and locks."""
        assert self.clock is not None
        return Paired(*self.parts, clock=self.clock)


class TestPairedAsync(TestPaired):
    suspending = True


class TestPairedOfUnversioned(TestPaired):
    """A store that can't replace in one step: the pair declares that it is not fenced."""

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        store, locks = Unversioned(self.clock), MemoryEngine(clock=self.clock)
        self.parts = store, locks
        return Paired(store, locks, clock=self.clock)


class TestPairedOfUnversionedAsync(TestPairedOfUnversioned):
    suspending = True


class TestPairedOfBlocking(TestPaired):
    """Engines without a suspending side run in threads."""

    suspending = True

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        store, locks = Blocking(clock=self.clock), Blocking(clock=self.clock)
        self.parts = store, locks
        return Paired(store, locks, clock=self.clock)


class TestPairedDiskAndFile(_All):
    """Values of one engine under the locks of another, as two processes of one machine have them."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_engine(self) -> Engine:
        return Paired(DiskEngine(self.directory / "store"), FileEngine(self.directory / "locks"))

    def make_peer(self, engine: Engine) -> Engine:
        return self.make_engine()


class TestPairedDiskAndFileAsync(TestPairedDiskAndFile):
    suspending = True
