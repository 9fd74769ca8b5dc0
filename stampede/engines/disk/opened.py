"""What a directory means at present: its stamps, and links to its database."""

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
"""Seconds between two looks whether the directory is still the same, of readers and of hits in a local tier. Writers
look each time."""

_IDLE = 16


class DatabaseLink:
    """A connection to the database, for one thread at a time. If that is interrupted, and the last reference to it is
    lost, its transaction is rolled back."""

    sql: sqlite3.Connection

    def __init__(self) -> None:
        self.busy = True

    def connect(self, file: Path, patience: float) -> None:
        there = f"{file.as_uri()}?mode=rw"  # never made by opening it
        self.sql = sqlite3.connect(there, uri=True, timeout=patience, isolation_level=None, check_same_thread=False)
        self.sql.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the last writes, and damages nothing
        self.sql.execute("PRAGMA journal_size_limit = 16777216")
        disk = os.statvfs(file)
        pages = disk.f_blocks * disk.f_frsize >> 16  # the log is emptied at a sixteenth of a small file system
        self.sql.execute(f"PRAGMA wal_autocheckpoint = {min(pages, 1000) or 1000}")  # 1000: SQLite's default
        self.sql.execute("PRAGMA busy_timeout = 0")  # from here on we wait by ourselves, in `Database`

    def close(self) -> None:
        self.busy = False
        if hasattr(self, "sql"):
            self.sql.close()


class Opened:
    """The stamps and the links of one process to one database."""

    def __init__(self, stamps: DiskStamps, file: Path, timeout: float) -> None:
        self.stamps = stamps
        self.file = file
        self.looked = boot_clock.clock()
        self.pulse = Pulse(self._still)  # of the tickets for local tiers
        self._file_name = str(file)
        self._timeout = timeout
        self.writer: tuple[int, DatabaseLink] | None = None  # the thread that has begun to write, and by which link
        self._left = False
        self._idle: list[DatabaseLink] = []
        self._links: WeakSet[DatabaseLink] = WeakSet()
        self._lock = threading.RLock()  # a finalizer may want a link in the middle of this

    @property
    def current(self) -> bool:
        return self.stamps.current and os.access(self._file_name, os.F_OK)

    def _still(self, now: float) -> float:
        """Return until when tickets hold: the stamps, which hits look at, outlive the removal of the directory."""
        if not self._left and self.current:
            return now + LOOK
        self.looked = -inf  # the next reader is to see it, too
        return -inf

    # -- links ----------------------------------------------------------------------------------------------------

    @contextmanager
    def link(self, *, patiently: bool = False) -> Iterator[DatabaseLink]:
        """Lend a link. One that met trouble isn't used again."""
        link = self.take(patiently=patiently)
        try:
            yield link
        except BaseException:
            link.close()
            raise
        self.give_back(link)

    def take(self, *, patiently: bool = False) -> DatabaseLink:
        """Return a link that no other thread has. `patiently`: others may be recovering the log, or be the last to
        close it. Readers, perhaps in an event loop, leave that to `Database.patiently`."""
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
        """End a write of this thread that a signal's exception has interrupted. While that exception is kept, so is the
        transaction."""
        writer = self.writer
        if writer is not None and writer[0] == threading.get_ident():
            writer[1].close()
            self.writer = None

    def row(self, sql: str, args: Row) -> Row | None:
        """Return one row, of one statement."""
        link = self.take()
        try:
            found: list[Row] = link.sql.execute(sql, args).fetchall()
        except BaseException:
            link.close()
            raise
        self.give_back(link)
        return found[0] if found else None

    def leave(self) -> None:
        """Void what is kept under tickets, and close the links that are idle."""
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
        """Close every link, and let no statement begin before the fork is done.

        SQLite's record of who locks what is copied by a fork, and wrong in the child: it believes that it holds the
        parent's locks, and the parent may then remove the log under its hands. Statements under way are given a second.
        """
        deadline = time.monotonic() + 1
        self._lock.acquire()
        while any(link.busy for link in list(self._links)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        self._close_idle()

    def after_fork(self) -> None:
        self._lock.release()

    def start_again(self) -> list[DatabaseLink]:
        """In a forked child. Return the links of the parent's other threads: closing them would write."""
        self._lock = threading.RLock()
        self._idle, self.writer = [], None
        self.looked = self.pulse.until = -inf
        lost, self._links = list(self._links), WeakSet()
        return lost
