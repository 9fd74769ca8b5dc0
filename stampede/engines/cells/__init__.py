"""Engines made of a cell: named bytes in a store, which are read and swapped. Begin with `protocol.py`."""

from __future__ import annotations

from stampede.engines.cells.engine import CellEngine
from stampede.engines.cells.protocol import Cell, Faster, Seen, Version, WatchingCell

__all__ = ["Cell", "CellEngine", "Faster", "Seen", "Version", "WatchingCell"]
