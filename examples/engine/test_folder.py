"""The conformance suites for our engine, in both colours. Run them with `pytest`."""

import shutil
import tempfile

from folder import FolderCell

from stampede.engines.cells import CellEngine
from stampede.testing import CellSuite, ClaimsSuite, LocksSuite, StoreSuite


class TestFolderCell(CellSuite):
    """Tests of the two verbs alone. A failure here makes the other suites fail, too."""

    def make_cell(self):
        self.folder = tempfile.TemporaryDirectory()
        return FolderCell(self.folder.name)

    def make_peer(self, cell):
        return FolderCell(self.folder.name)


class TestFolder(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1  # the shortest lease in the tests, in seconds

    def make_engine(self):
        self.folder = tempfile.mkdtemp()
        return CellEngine(FolderCell(self.folder))

    def make_peer(self, engine):
        """Return a second client of the same store, as another process would have."""
        return CellEngine(FolderCell(self.folder))

    def drop_engine(self, engine):
        engine.close()
        if engine is self.engine:
            shutil.rmtree(self.folder)


class TestFolderAsync(TestFolder):
    suspending = True
