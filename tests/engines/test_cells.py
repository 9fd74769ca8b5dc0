"""Engines made of cells pass the conformance suites, with a cell in memory that has and lacks each capability."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from file_cell import FileCell
from stormy_cell import StormyCell, insisting
from watched_cell import WatchedMemoryCell

from stampede.engines.cells import Cell, CellEngine, Faster, Seen, Version
from stampede.model.ports import Engine
from stampede.testing import CellSuite, ClaimsSuite, FakeClock, HistoriesSuite, LocksSuite, StoreSuite
from stampede.testing.cells import MemoryCell
from stampede.testing.conformance.suite import HERD


class TestMemoryCell(CellSuite):
    """The cell that serves as an example."""

    can: ClassVar[dict[str, Any]] = {"tells": True}

    def make_cell(self) -> Cell:
        return MemoryCell(**self.can)


class TestMuteMemoryCell(TestMemoryCell):
    can: ClassVar[dict[str, Any]] = {"ends": False, "grows": False, "ages": False}


class TestWatchedMemoryCell(CellSuite):
    def make_cell(self) -> Cell:
        return WatchedMemoryCell()


class TestFileCell(CellSuite):
    """The cell of files, whose processes other tests kill."""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_cell(self) -> Cell:
        return FileCell(self.directory)

    def make_peer(self, cell: Cell) -> Cell:
        return FileCell(self.directory)


class Backwards(MemoryCell):
    """A cell with a mistake of its author. Each case of the suite finds one of the mistakes."""

    wrong = ""
    met = threading.Barrier(HERD)

    def read(self, names: Sequence[str]) -> list[Seen]:
        if self.wrong == "order":
            return super().read(names)[::-1]
        if self.wrong == "case":
            return super().read([name.lower() for name in names])
        if self.wrong == "length":
            return super().read([name[:200] for name in names])
        seen = super().read(names)
        return [each._replace(age=7.0) for each in seen] if self.wrong == "ages" else seen

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        if self.wrong == "case":
            name = name.lower()
        if self.wrong == "length":
            name = name[:200]
        if self.wrong == "cut" and data is not None:
            data = data[:1000]
        if self.wrong == "late" and version is not None:
            version = self.read([name])[0].version
        if self.wrong == "removal" and data is None:
            return None
        if self.wrong == "row counter" and version is None and data is not None:
            self._versions = count(1)
        if self.wrong == "race" and data is not None and data.startswith(b"by"):  # one of the herd
            seen = self.read([name])[0]
            self.met.wait(10)
            with self._lock:
                version = self.read([name])[0].version if seen.version == version else version
                return super().swap(name, version, data, ttl)
        return super().swap(name, version, data, 0.0 if self.wrong == "ends" else ttl)


@pytest.mark.parametrize(
    "wrong, case",
    [
        ("order", "test_a_read_is_in_order"),
        ("case", "test_names_are_exact"),
        ("length", "test_names_are_exact"),
        ("cut", "test_what_is_written_is_read"),
        ("late", "test_who_has_seen_something_else_is_too_late"),
        ("removal", "test_what_is_removed_is_gone"),
        ("row counter", "test_versions_never_come_back"),
        ("race", "test_one_of_many_is_the_first"),
        ("ends", "test_what_ends_is_there_until_then"),
        ("ages", "test_ages_are_told"),
    ],
)
def test_what_an_author_forgets_is_found(wrong: str, case: str) -> None:
    """The suite finds each mistake that an author of a cell could make. Otherwise, wrong cells would break promises."""

    class Suite(CellSuite):
        def make_cell(self) -> Cell:
            cell = Backwards()
            cell.wrong = wrong
            return cell

    with pytest.raises(AssertionError):
        getattr(Suite(), case)()


class Hurried(FakeClock):
    """A clock that runs, and can also be moved on, so that no test has to wait for seconds."""

    def __call__(self) -> float:
        return super().__call__() + time.monotonic()


class TestCells(ClaimsSuite, StoreSuite, LocksSuite):
    """A cell that knows no ends, ages or numbers. The engine measures all times with its own clock."""

    short: ClassVar[float] = 0.05
    kind: ClassVar[type[MemoryCell]] = MemoryCell
    can: ClassVar[dict[str, Any]] = {"ends": False, "grows": False, "ages": False}

    def make_engine(self) -> Engine:
        self.clock = Hurried()
        self.cell = self.kind(**self.can, clock=self.clock)
        return self.make_peer()

    def make_peer(self, engine: Engine | None = None) -> Engine:
        assert self.clock is not None
        return CellEngine(self.cell, clock=self.clock, wall=self.clock)


class TestCellsAsync(TestCells):
    """A cell that has all capabilities."""

    suspending = True
    kind = WatchedMemoryCell
    can: ClassVar[dict[str, Any]] = {"tells": True}


class TestCellsInAStorm(ClaimsSuite):
    """A store that loses requests and replies, and makes changes after the caller has given up."""

    short: ClassVar[float] = 0.1
    slack = 0.05

    def make_engine(self) -> Engine:
        self.cell = StormyCell(seed=1)
        return insisting(CellEngine(self.cell), self.cell)

    def make_peer(self, engine: Engine) -> Engine:
        return insisting(CellEngine(self.cell), self.cell)


class TestHistoriesOfCells(HistoriesSuite):
    """Histories over cells that know nothing of time."""

    histories = 60
    can: ClassVar[dict[str, Any]] = {"ends": False, "grows": False, "ages": False}

    def make_engine(self) -> Engine:
        self.clock = FakeClock()
        self.cell = MemoryCell(**self.can, clock=self.clock)
        return CellEngine(self.cell, clock=self.clock, wall=self.clock)

    def make_peer(self, engine: Engine) -> Engine:
        assert self.clock is not None
        return CellEngine(self.cell, clock=self.clock, wall=self.clock)


class TestHistoriesOfCellsAsync(TestHistoriesOfCells):
    suspending = True
    can: ClassVar[dict[str, Any]] = {"tells": True}


class TestHistoriesOfCellsThatEnd(TestHistoriesOfCells):
    can: ClassVar[dict[str, Any]] = {}
