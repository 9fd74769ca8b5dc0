"""An engine made of a cell: bytes by name, read and swapped."""

from __future__ import annotations

from stampede.engines.cells.engine import CellEngine
from stampede.engines.cells.protocol import Cell, Faster, Seen, Version, WatchingCell

__all__ = ["Cell", "CellEngine", "Faster", "Seen", "Version", "WatchingCell"]
