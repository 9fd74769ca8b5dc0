"""Where commands write: plain lines, or rich's tables where it is installed and somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = ["Board", "Screen", "screen"]

Row = Sequence[str]


class Board(Protocol):
    """A table that fills while one looks: `show` replaces the row that has the same first cell."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, *row: str) -> None: ...


class Screen(Protocol):
    def say(self, text: str = "") -> None: ...
    def table(self, columns: Row, rows: Sequence[Row]) -> None: ...
    def board(self, columns: Row) -> Board: ...


def screen() -> Screen:
    """Rich's, on a terminal; else plain lines, which pipes and logs can take."""
    if not sys.stdout.isatty():
        return PlainScreen()
    try:
        return RichScreen()
    except ModuleNotFoundError:
        return PlainScreen()


class PlainScreen:
    """Lines of text; what changes is rewritten on a terminal, and elsewhere written once it is final."""

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def table(self, columns: Row, rows: Sequence[Row]) -> None:
        lines = [columns, ["-" * len(column) for column in columns], *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for row in lines:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.say("  ".join(cells).rstrip())

    def board(self, columns: Row) -> Board:
        return _PlainBoard(columns)


class _PlainBoard:
    def __init__(self, columns: Row) -> None:
        self._columns = columns
        self._rewrites = sys.stdout.isatty()
        self._name = ""
        self._line = ""

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


class RichScreen:
    """The same in colour."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def say(self, text: str = "") -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, columns: Row, rows: Sequence[Row]) -> None:
        self._console.print(_rich_table(columns, rows))

    def board(self, columns: Row) -> Board:
        return _RichBoard(self._console, columns)


class _RichBoard:
    def __init__(self, console: Any, columns: Row) -> None:
        from rich.live import Live

        self._columns = columns
        self._rows: dict[str, Row] = {}
        self._live = Live(console=console, refresh_per_second=15)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, *row: str) -> None:
        self._rows[row[0]] = row
        self._live.update(_rich_table(self._columns, list(self._rows.values())))


def _rich_table(columns: Row, rows: Sequence[Row]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
