"""Engines that are made of cells: the conformance suite, over a cell in memory with and without each capability."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from stormy_cell import StormyCell, insisting

from stampede.engines.cells import CellEngine
from stampede.ports import Engine
from stampede.testing import ClaimsSuite, FakeClock, LocksSuite, StoreSuite
from stampede.testing.cells import MemoryCell, WatchedMemoryCell


class Hurried(FakeClock):
    """A clock that goes, and may be moved on besides: nobody has to sit out a second."""

    def __call__(self) -> float:
        return super().__call__() + time.monotonic()


class TestCells(ClaimsSuite, StoreSuite, LocksSuite):
    """One that can do everything but watch."""

    short: ClassVar[float] = 0.05
    kind: ClassVar[type[MemoryCell]] = MemoryCell
    can: ClassVar[dict[str, Any]] = {}

    def make_engine(self) -> Engine:
        self.clock = Hurried()
        self.cell = self.kind(**self.can, clock=self.clock)
        return self.make_peer()

    def make_peer(self, engine: Engine | None = None) -> Engine:
        assert self.clock is not None
        return CellEngine(self.cell, clock=self.clock, wall=self.clock)


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


class TestCellsInAStorm(ClaimsSuite, StoreSuite, LocksSuite):
    """A store that loses questions and answers, and changes things after it was given up."""

    short: ClassVar[float] = 0.1
    slack = 0.05
    can: ClassVar[dict[str, Any]] = {"seed": 1}

    def make_engine(self) -> Engine:
        self.cell = StormyCell(**self.can)
        return insisting(CellEngine(self.cell), self.cell)

    def make_peer(self, engine: Engine) -> Engine:
        return insisting(CellEngine(self.cell), self.cell)


class TestCellsThatCanNothingInAStormAsync(TestCellsInAStorm):
    suspending = True
    can: ClassVar[dict[str, Any]] = {"seed": 2, "ends": False, "grows": False, "ages": False}
