"""The database that a directory uses at present: its stamps, and connections to it."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakSet

from stampede.engines.disk.stamps import DiskStamps
from stampede.engines.kit import boot_clock
from stampede.model.ports import Pulse

__all__ = ["LOOK", "DatabaseLink", "Opened", "Row"]

Row = tuple[Any, ...]

LOOK = 0.1
"""Seconds between two checks of readers, and of hits in a local tier, whether the directory still uses this database.
Writers check each time."""

_IDLE = 16


class DatabaseLink:
    """A connection to the database, for one thread at a time. If an exception interrupts that thread, and the last
    reference to the link is lost, SQLite rolls its transaction back."""

    sql: sqlite3.Connection

    def __init__(self) -> None:
        self.busy = True

    def connect(self, file: Path, patience: float) -> None:
        uri = f"{file.as_uri()}?mode=rw"  # opening never makes a new file
        self.sql = sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None, check_same_thread=False)
        self.sql.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the last writes, and damages nothing
        self.sql.execute("PRAGMA journal_size_limit = 16777216")
        disk = os.statvfs(file)
        pages = disk.f_blocks * disk.f_frsize >> 16  # empty the log at a sixteenth of a small file system
        self.sql.execute(f"PRAGMA wal_autocheckpoint = {min(pages, 1000) or 1000}")  # 1000: SQLite's default
        self.sql.execute("PRAGMA busy_timeout = 0")  # from here on, `DiskDatabase` itself waits and tries again

    def close(self) -> None:
        self.busy = False
        if hasattr(self, "sql"):
            self.sql.close()


class Opened:
    """The stamps of one database, and the links of this process to it."""

    def __init__(self, stamps: DiskStamps, file: Path, timeout: float) -> None:
        self.stamps = stamps
        self.file = file
        self.looked = boot_clock.clock()
        self.pulse = Pulse(self._still)  # of the tickets for local tiers
        self._file_name = str(file)
        self._timeout = timeout
        self.writer: tuple[int, DatabaseLink] | None = None  # the thread of this process that writes now, and its link
        self._left = False
        self._idle: list[DatabaseLink] = []
        self._links: WeakSet[DatabaseLink] = WeakSet()
        self._lock = threading.RLock()  # re-entrant: a finalizer may need a link while this is held

    @property
    def current(self) -> bool:
        """Whether the directory still uses this database."""
        return self.stamps.current and os.access(self._file_name, os.F_OK)

    def _still(self, now: float) -> float:
        """Return until when tickets are valid. The stamps alone do not tell: their mapping outlives the directory."""
        if not self._left and self.current:
            return now + LOOK
        self.looked = -inf  # so that the next reader checks, too
        return -inf

    # -- links ----------------------------------------------------------------------------------------------------

    @contextmanager
    def link(self, *, patiently: bool = False) -> Iterator[DatabaseLink]:
        """Lend a link to a block. If the block raises, the link is closed."""
        link = self.take(patiently=patiently)
        try:
            yield link
        except BaseException:
            link.close()
            raise
        self.give_back(link)

    def take(self, *, patiently: bool = False) -> DatabaseLink:
        """Return a link that no other thread uses. `patiently`: wait while another process recovers the log, or closes
        it as the last one. Readers may be in an event loop, so they do not wait here: see `DiskDatabase.patiently`."""
        with self._lock:
            if self._idle:
                link = self._idle.pop()
                link.busy = True
                return link
            link = DatabaseLink()
            self._links.add(link)
        try:
            link.connect(self.file, self._timeout if patiently else 0.0)
        except BaseException:
            link.close()
            raise
        return link

    def give_back(self, link: DatabaseLink) -> None:
        if self._left or len(self._idle) >= _IDLE:
            link.close()
        else:
            self._idle.append(link)
        link.busy = False

    def end_own_write(self) -> None:
        """End a write of this thread that an exception of a signal's handler has interrupted. A reference to that
        exception would otherwise keep the transaction open."""
        writer = self.writer
        if writer is not None and writer[0] == threading.get_ident():
            writer[1].close()
            self.writer = None

    def row(self, sql: str, args: Row) -> Row | None:
        """Return the first row that one statement finds, or None."""
        link = self.take()
        try:
            found: list[Row] = link.sql.execute(sql, args).fetchall()
        except BaseException:
            link.close()
            raise
        self.give_back(link)
        return found[0] if found else None

    def leave(self) -> None:
        """Make all tickets invalid, and close the idle links."""
        self._left = True
        self.pulse.until = -inf
        self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    # -- forks ----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close all links, and let no statement begin until the fork is done. A fork copies SQLite's table of locks,
        which is wrong in the child: the child would believe that it holds the parent's locks, and the parent might
        remove the log while the child uses it. This waits at most one second for the statements under way."""
        deadline = time.monotonic() + 1
        self._lock.acquire()
        while any(link.busy for link in list(self._links)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        self._close_idle()

    def after_fork(self) -> None:
        self._lock.release()

    def start_again(self) -> list[DatabaseLink]:
        """Begin anew in a forked child. Return the links that the parent's other threads were using: the caller must
        keep them, because closing them would write to the file."""
        self._lock = threading.RLock()
        self._idle, self.writer = [], None
        self.looked = self.pulse.until = -inf
        lost, self._links = list(self._links), WeakSet()
        return lost
