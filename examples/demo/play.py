"""The demo's programme: its scenes in their order, and the texts about them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from board import Board
from caller import Task, clock
from conductor import Fleet
from page import page
from picture import Panel, draw
from timeline import Timeline

from stampede.api.cache import Cache
from stampede.cli.show import say, table
from stampede.errors import StampedeError

__all__ = ["demo"]

COLUMNS = ["scene", "computations", "all served after", "last late by", "blocked"]

LASTS = 1.75
"""How long the hot value is read, as a multiple of its ttl."""


def demo(processes: int, callers: int, seconds: float, out: Path) -> None:
    """Play all scenes, print their figures, and write the page to `out` (or the picture, if that ends in .svg)."""
    _check(out)
    herd = processes * callers
    room = max(herd // 8, 1)
    with (
        _ended_in_order(),
        tempfile.TemporaryDirectory(prefix="stampede-demo-") as directory,
        Fleet(directory, processes, callers, room) as fleet,
    ):
        say(
            f"{processes} processes × {callers} callers want one value at once; the origin computes it "
            f"in {seconds:g} s, for {room} at a time."
        )
        timelines = _play(fleet, directory, seconds)
    rows = [_row(timeline) for timeline in timelines]
    table(COLUMNS, rows)
    _write(out, timelines, rows, f"{processes} processes × {callers} callers", seconds, room)
    say(f"every caller's timeline: {out}")


def _play(fleet: Fleet, directory: str, cost: float) -> list[Timeline]:
    ttl = 12 * cost
    plain = Timeline("cold, without", "A cold key, get / compute / set", fleet.callers)
    cold = Timeline("cold, with stampede", "A cold key, with stampede", fleet.callers)
    hot = Timeline("hot key expires", "A hot key expires under load", fleet.callers, lasting=True, ttl=ttl)
    murder = Timeline("process is killed", "The process that computes is killed", fleet.callers)
    with Board(["scene", "computations", "computing", "waiting", "served", "seconds"]) as board:
        begin = clock()
        for _ in fleet.start():
            board.show("starting processes", "", "", "", "", f"{clock() - begin:.1f}")
        show = _shower(board)
        fleet.play(plain, Task("plain", cost, 60, guarded=False, lasting=False), show)
        fleet.play(cold, Task("cold", cost, 60, guarded=True, lasting=False), show)
        _warm(directory, "hot", cost, ttl)
        fleet.play(hot, Task("hot", cost, ttl, guarded=True, lasting=True), show, lasts=LASTS * ttl)
        fleet.play_murder(murder, Task("murder", cost, 60, guarded=True, lasting=False, doomed=True), show)
    return [plain, cold, hot, murder]


def _warm(directory: str, key: str, cost: float, ttl: float) -> None:
    """Compute the hot key's first value, so that its cost is known."""
    with Cache(f"disk://{directory}") as cache:
        cache.get_or_compute(key, lambda: time.sleep(cost), ttl=ttl)


def _shower(board: Board) -> Callable[[Timeline], None]:
    def show(timeline: Timeline) -> None:
        counts = timeline.counts()
        served = f"{timeline.callers} readers" if timeline.lasting else str(counts.served)
        passed = f"{timeline.end - timeline.begin:.1f}"
        board.show(timeline.name, *map(str, counts[:3]), served, passed)

    return show


# -- figures --------------------------------------------------------------------------------------------------------


def _row(timeline: Timeline) -> list[str]:
    lateness = timeline.lateness
    return [
        timeline.name,
        f"{len(timeline.computations)}{' (1 killed)' if timeline.killed else ''}",
        "" if timeline.lasting else f"{timeline.last_served - timeline.begin:.2f} s",
        _ms(lateness) if lateness is not None else "",
        f"{timeline.blocked} of {timeline.callers}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _figure(timeline: Timeline) -> tuple[str, str]:
    """Return the main figure of a scene, and a note about it."""
    count, lateness = len(timeline.computations), timeline.lateness
    served_callers = f"the other {timeline.callers - len(timeline.killed)}" if timeline.killed else "all"
    served = f"{served_callers} served after {timeline.last_served - timeline.begin:.2f} s"
    late = f", the last {_ms(lateness)} after the computation" if lateness is not None else ""
    if timeline.lasting:
        reads = sum(each.reads for each in timeline.reads)
        slowest = max((each.slowest for each in timeline.reads), default=0.0)
        return (
            f"{timeline.blocked} of {timeline.callers} readers blocked",
            f"{count} refreshes before expiry; {reads:,} reads, the slowest took {_ms(slowest)}",
        )
    if timeline.killed:
        takeover = timeline.takeover
        figure = "no takeover was needed" if takeover is None else f"another computes {_ms(takeover)} after the kill"
        return figure, served + late
    return f"{count} computation{'s' if count != 1 else ''}", served + late


def _panels(timelines: list[Timeline]) -> list[Panel]:
    plain, cold, hot, murder = timelines
    longest = max(plain.end - plain.begin, cold.end - cold.begin) * 1.02  # the same scale for both
    spans = [longest, longest, LASTS * hot.ttl, (murder.end - murder.begin) * 1.3]
    for each, span in zip(timelines, spans, strict=True):
        each.end = each.begin + span  # callers stay served until the end of the panel
    return [Panel(each, *_figure(each), span, each is plain) for each, span in zip(timelines, spans, strict=True)]


# -- the page -------------------------------------------------------------------------------------------------------


def _write(out: Path, timelines: list[Timeline], rows: list[list[str]], herd: str, cost: float, room: int) -> None:
    origin = f"The origin computes it in {cost:g} s, for {room} at a time."
    picture = draw(
        _panels(timelines),
        f"{herd}, one key: who computes?",
        f"Each row is a caller; time runs from left to right. {origin}",
    )
    text = picture if out.suffix == ".svg" else page(picture, COLUMNS, rows)
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise StampedeError(f"{out} can't be written: {error.strerror}") from error


def _check(out: Path) -> None:
    """Raise StampedeError before the demo runs, rather than after it, if `out` can't be written."""
    where = out if out.exists() else out.parent
    if out.is_dir() or not os.access(where, os.W_OK):
        raise StampedeError(f"{out} can't be written: give another --out")


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Turn SIGTERM into an ordinary exit, so that processes are reaped, and the directory is removed."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
