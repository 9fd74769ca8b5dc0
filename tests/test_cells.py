"""Engines that are made of cells: the conformance suite, over a cell in memory with and without each capability."""

from __future__ import annotations

from typing import Any, ClassVar

from stampede.engines.cells import CellEngine
from stampede.ports import Engine
from stampede.testing import ClaimsSuite, LocksSuite, StoreSuite
from stampede.testing.cells import MemoryCell, WatchedMemoryCell


class TestCells(ClaimsSuite, StoreSuite, LocksSuite):
    """One that can do everything but watch."""

    short: ClassVar[float] = 0.05
    kind: ClassVar[type[MemoryCell]] = MemoryCell
    can: ClassVar[dict[str, Any]] = {}

    def make_engine(self) -> Engine:
        self.cell = self.kind(**self.can)
        return CellEngine(self.cell)

    def make_peer(self, engine: Engine) -> Engine:
        return CellEngine(self.cell)


class TestCellsAsync(TestCells):
    suspending = True


class TestCellsThatWatch(TestCells):
    kind = WatchedMemoryCell


class TestCellsThatWatchAsync(TestCellsThatWatch):
    suspending = True


class TestCellsThatCanNothing(TestCells):
    """No ends, no ages, no numbers: all is told by our own clocks."""

    can: ClassVar[dict[str, Any]] = {"ends": False, "grows": False, "ages": False}


class TestCellsThatCanNothingAsync(TestCellsThatCanNothing):
    suspending = True


class TestCellsThatTell(TestCells):
    """A swap that comes too late says what is there."""

    can: ClassVar[dict[str, Any]] = {"tells": True, "ages": False}


class TestCellsThatTellAsync(TestCellsThatTell):
    suspending = True
