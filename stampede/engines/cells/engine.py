"""The engine that is made of a cell."""

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
from stampede.model.ports import Engine, Side
from stampede.model.window import Window
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING

__all__ = ["CellEngine"]


class CellEngine(Engine):
    """Values, leases and locks in the cells of some store.

    Every change of a key is one swap of its whole record, value and all. Who waits looks again, soon at first and at
    the moment at which the key's last cost says, unless the cell tells of changes.
    """

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
