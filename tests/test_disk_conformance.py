"""The disk engine does what every engine has to do; its peer is another engine on the same directory."""

from __future__ import annotations

import shutil
import tempfile

from stampede.engines.disk import DiskEngine
from stampede.ports import Engine
from stampede.testing.conformance import ClaimsSuite, LocksSuite, StoreSuite


class TestDisk(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1

    def make_engine(self) -> DiskEngine:
        return DiskEngine(tempfile.mkdtemp(prefix="stampede-test-"))

    def make_peer(self, engine: Engine) -> DiskEngine:
        assert isinstance(engine, DiskEngine)
        return DiskEngine(engine.directory)

    def drop_engine(self, engine: Engine) -> None:
        assert isinstance(engine, DiskEngine)
        engine.close()
        shutil.rmtree(engine.directory, ignore_errors=True)


class TestDiskAsync(TestDisk):
    suspending = True
