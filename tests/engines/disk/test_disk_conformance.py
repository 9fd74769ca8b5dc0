"""The disk engine passes the suites for every engine. Its peer is another engine on the same directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from stampede.engines.disk import DiskEngine
from stampede.model.ports import Engine
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class TestDisk(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1

    @pytest.fixture(autouse=True)
    def _directory(self, memory_path: Path) -> None:
        self.directory = memory_path

    def make_engine(self) -> DiskEngine:
        return DiskEngine(self.directory)

    def make_peer(self, engine: Engine) -> DiskEngine:
        return DiskEngine(self.directory)


class TestDiskAsync(TestDisk):
    suspending = True
