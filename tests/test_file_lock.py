"""The file engine: the kernel's locks, as every lock engine has to behave, and where they differ."""

from __future__ import annotations

import shutil
import tempfile

from stampede.engines.file import FileEngine
from stampede.ports import Engine
from stampede.testing.conformance import LocksSuite


class TestFile(LocksSuite):
    def make_engine(self) -> FileEngine:
        return FileEngine(tempfile.mkdtemp(prefix="stampede-test-"))

    def make_peer(self, engine: Engine) -> FileEngine:
        assert isinstance(engine, FileEngine)
        return FileEngine(engine.directory)

    def drop_engine(self, engine: Engine) -> None:
        assert isinstance(engine, FileEngine)
        engine.close()
        shutil.rmtree(engine.directory, ignore_errors=True)


class TestFileAsync(TestFile):
    suspending = True
