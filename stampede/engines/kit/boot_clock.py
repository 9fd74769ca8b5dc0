"""The clock of a directory: all processes of the machine share it, and setting the time of day does not change it. It
starts anew with each boot; the time of day is used once, to carry stored entries over a reboot. Where the kernel does
not identify its boots (outside Linux), the clock is the time of day, and setting it makes entries older or younger."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

__all__ = ["boot", "carry_over", "clock", "note"]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


boot = _boot()

clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if boot and hasattr(time, "CLOCK_BOOTTIME") else time.time
)


def note(connection: sqlite3.Connection, boot: str, now: float, wall: float) -> None:
    """Record what both clocks show during this boot."""
    connection.execute("INSERT OR REPLACE INTO clock VALUES (0, ?, ?, ?)", (boot, now, wall))


def carry_over(connection: sqlite3.Connection, boot: str, now: float, wall: float) -> None:
    """After a reboot, move every end to this boot's clock and drop the leases. Call this inside a transaction."""
    then = connection.execute(
        "SELECT boot, CAST(ifnull(now, 0) AS REAL), CAST(ifnull(wall, 0) AS REAL) FROM clock"
    ).fetchone()
    if then is not None and then[0] == boot:
        return  # another process was first
    passed = wall - then[2] if then is not None else -1.0
    for table in ("leases", "rooms", "pasts"):
        connection.execute(f"DELETE FROM {table}")
    if passed < 0:  # the time of day was set back, so the age of every entry is unknown
        connection.execute("DELETE FROM entries")
    else:
        shift = now - (then[1] + passed)
        shifts = (shift, shift, shift)
        connection.execute("UPDATE entries SET fresh = fresh + ?, keep = keep + ?, gone = gone + ?", shifts)
    note(connection, boot, now, wall)
