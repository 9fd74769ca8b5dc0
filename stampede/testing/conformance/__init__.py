"""What every engine has to do: one suite for each port, for the tests of engines everywhere.

    class TestMine(ClaimsSuite, StoreSuite, LocksSuite):
        def make_engine(self):
            return MyEngine("mine://localhost")        # new and empty, for every test

    class TestMineAsync(TestMine):
        suspending = True

    class TestMyCell(CellSuite):                   # of which an engine is made: before the suites above
        def make_cell(self):
            return MyCell("localhost")

    class TestMyCodec(CodecSuite):                 # what is given as `codec=`
        def make_codec(self):
            return MyCodec()

pytest and unittest both collect such classes. A case that an engine declares not to keep is skipped.
"""

from __future__ import annotations

from stampede.testing.conformance.cells import CellSuite
from stampede.testing.conformance.claims import ClaimsSuite
from stampede.testing.conformance.codecs import CodecSuite
from stampede.testing.conformance.histories import HistoriesSuite
from stampede.testing.conformance.locks import LocksSuite
from stampede.testing.conformance.store import StoreSuite

__all__ = ["CellSuite", "ClaimsSuite", "CodecSuite", "HistoriesSuite", "LocksSuite", "StoreSuite"]
