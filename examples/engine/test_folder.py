"""What every engine has to do, tried on ours, in both colours: `pytest`."""

import shutil
import tempfile

from folder import FolderCell

from stampede.engines.cells import CellEngine
from stampede.testing import CellSuite, ClaimsSuite, LocksSuite, StoreSuite


class TestFolderCell(CellSuite):
    """The two verbs by themselves: what fails here fails everywhere."""

    def make_cell(self):
        self.folder = tempfile.TemporaryDirectory()
        return FolderCell(self.folder.name)

    def make_peer(self, cell):
        return FolderCell(self.folder.name)


class TestFolder(ClaimsSuite, StoreSuite, LocksSuite):
    short = 0.1  # seconds: the shortest lease it is tried with

    def make_engine(self):
        self.folder = tempfile.mkdtemp()
        return CellEngine(FolderCell(self.folder))

    def make_peer(self, engine):
        """Another process's, on the same store."""
        return CellEngine(FolderCell(self.folder))

    def drop_engine(self, engine):
        engine.close()
        if engine is self.engine:
            shutil.rmtree(self.folder)


class TestFolderAsync(TestFolder):
    suspending = True
