"""Helpers of the benchmarks: one core, interleaved rounds, medians, tables in Markdown."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median


def pin(core: int | None = None) -> None:
    """Stay on one core from now on, as under `taskset`: a move between cores would be measured, too."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[-1] if core is None else core})


def interleaved(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each way, measured in turns, so that a slow minute of the machine affects all of them.

    The garbage collector runs as in production, and has nothing to do at the start of each sample: each way pays only
    for its own garbage.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, way in ways.items():
            gc.collect()
            samples[name].append(way())
    gc.unfreeze()
    return {name: median(times) for name, times in samples.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table: names to the left, numbers to the right."""
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        print(f"| {' | '.join(cells)} |")
    print()


def machine() -> str:
    """Return the facts about this machine that a reader needs to compare results."""
    return f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
