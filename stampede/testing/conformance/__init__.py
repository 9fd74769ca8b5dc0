"""Conformance suites: one suite of tests per port, for the authors of engines, cells and codecs.

    class TestMine(ClaimsSuite, StoreSuite, LocksSuite):
        def make_engine(self):
            return MyEngine("mine://localhost")        # a new, empty engine for every test

    class TestMineAsync(TestMine):
        suspending = True

    class TestMyCell(CellSuite):                   # before the suites above, if the engine is made of a cell
        def make_cell(self):
            return MyCell("localhost")

    class TestMyCodec(CodecSuite):                 # for an object that is given as `codec=`
        def make_codec(self):
            return MyCodec()

pytest and unittest both collect such classes. The docstring of each test says what an engine must do, and what would go
wrong for users otherwise. Tests of an ability that the engine does not declare are skipped."""

from __future__ import annotations

from stampede.testing.conformance.cells import CellSuite
from stampede.testing.conformance.claims import ClaimsSuite
from stampede.testing.conformance.codecs import CodecSuite
from stampede.testing.conformance.histories import HistoriesSuite
from stampede.testing.conformance.locks import LocksSuite
from stampede.testing.conformance.store import StoreSuite

__all__ = ["CellSuite", "ClaimsSuite", "CodecSuite", "HistoriesSuite", "LocksSuite", "StoreSuite"]
