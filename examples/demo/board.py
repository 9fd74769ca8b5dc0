"""What the demo prints while it plays: one line per scene, updated on a terminal, or printed once it is final."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Self

__all__ = ["Board"]


class Board:
    """Lines of named cells on the standard output. `show` replaces the last line if its first cell is the same."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._rewrites = sys.stdout.isatty()
        self._name = self._line = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._finish()

    def show(self, *row: str) -> None:
        if row[0] != self._name:
            self._finish()
        before, self._name = len(self._line), row[0]
        cells = [f"{column} {cell}" for cell, column in zip(row[1:], self._columns[1:], strict=True) if cell]
        self._line = f"{row[0]}: {', '.join(cells)}"
        if self._rewrites:
            print(f"\r{self._line.ljust(before)}", end="", flush=True)

    def _finish(self) -> None:
        if self._line:
            print("" if self._rewrites else self._line, flush=True)
        self._name = self._line = ""
