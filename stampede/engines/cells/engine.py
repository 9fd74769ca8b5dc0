"""The engine that is built from a cell."""

from __future__ import annotations

import time
from collections.abc import Callable

from stampede.engines.cells.batch import CellBatch
from stampede.engines.cells.generations import CellGenerations
from stampede.engines.cells.limits import CellLimits
from stampede.engines.cells.locks import CellLocks
from stampede.engines.cells.protocol import Cell, Version
from stampede.engines.cells.records import CellRecords, OpenCell
from stampede.engines.cells.verbs import CellKeys
from stampede.engines.kit.worker_threads import WorkerThreads, here
from stampede.model.limit_window import Window
from stampede.model.ports import Engine, Side
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING

__all__ = ["CellEngine"]


class CellEngine(Engine):
    """Values, leases, locks and limits in the cells of a store. Each change of a key swaps its whole record, including
    the value. Waiters are woken by a cell that reports changes. With other cells they poll: often at first, and often
    around the time at which the last cost of the key lets them expect the value."""

    def __init__(
        self,
        cell: Cell,
        scheme: str = "cell",
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.scheme = scheme
        opened = self._open = OpenCell(cell, scheme, clock, wall)
        self.pushes, self.looks, self.timeless = opened.watches, cell.tells, not cell.ages
        generations = CellGenerations(clock)
        records, arecords = CellRecords(opened, BLOCKING, here), CellRecords(opened, SUSPENDING, WorkerThreads().run)
        self.recalls = keys = CellKeys(records, generations)
        akeys = CellKeys(arecords, generations)
        locks, alocks = CellLocks(records), CellLocks(arecords)
        seen: dict[str, tuple[Version, Window]] = {}
        limits, alimits = CellLimits(records, seen), CellLimits(arecords, seen)
        self.blocking = Side(keys, keys, locks, limits, softens=keys, shows=keys, holds=locks, handover=locks)
        self.suspending = Side(akeys, akeys, alocks, alimits, softens=akeys, shows=akeys, holds=alocks, handover=alocks)
        self.many = CellBatch(records, generations)
        forks.in_child(self._start_again)

    def ping(self) -> float:
        with self._open.asking() as cell:
            return cell.ping()

    def close(self) -> None:
        self._open.close()

    def _start_again(self) -> None:
        self._open.start_again()
