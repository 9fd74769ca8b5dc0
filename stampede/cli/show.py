"""How commands write: lines and tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

__all__ = ["long", "say", "shown", "table"]


def say(text: str = "") -> None:
    """Print a line now, also into a pipe."""
    print(text, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns' names."""
    lines = [columns, ["-" * len(column) for column in columns], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def long(seconds: float) -> str:
    """Return a duration for people, such as `5.0 min`."""
    if seconds == inf:
        return "ever"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def shown(text: str) -> str:
    """Return a text that can't move a terminal's cursor or change its colours: a name may come from anywhere."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
