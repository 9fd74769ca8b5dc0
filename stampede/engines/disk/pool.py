"""Connections to a database, each for one thread at a time; none of them over a fork."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stampede.engines.disk.opened import Opened

__all__ = ["Pool", "Row"]

Row = tuple[Any, ...]

_IDLE = 16


class Pool:
    """Those of one process to one directory."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.start_again()

    def start_again(self) -> None:
        """Also in a forked child: whoever had a connection is not here."""
        self._lock = threading.RLock()  # it may be wanted by a finalizer, or a signal, that interrupts us
        self._out = 0  # connections in use
        self._lost = 0  # of them, by threads that were interrupted at an unlucky moment
        self._halted = False

    def connect(self, opened: Opened, *, patiently: bool = False) -> sqlite3.Connection:
        """`patiently`: others recover the log, or are the last to close it. For who reads, perhaps in a loop,
        even these pass in `Database.patiently`."""
        there = f"{opened.file.as_uri()}?mode=rw"  # never made by opening it
        patience = self._timeout if patiently else 0.0
        connection = sqlite3.connect(there, uri=True, timeout=patience, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the last writes, and damages nothing
            connection.execute("PRAGMA journal_size_limit = 16777216")
            disk = os.statvfs(opened.file)
            pages = disk.f_blocks * disk.f_frsize >> 16  # the log is emptied at a sixteenth of a small file system
            connection.execute(f"PRAGMA wal_autocheckpoint = {min(pages, 1000) or 1000}")  # 1000: SQLite's default
            connection.execute("PRAGMA busy_timeout = 0")  # from here on we wait by ourselves: see `patiently`, `_gate`
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def connection(self, opened: Opened, *, patiently: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread has. One that met trouble isn't used again."""
        with self._lock:
            self._out += 1
            connection = opened.rested()
        try:
            if connection is None:
                connection = self.connect(opened, patiently=patiently)
            yield connection
        except BaseException:
            if connection is not None:
                connection.close()
            with self._lock:
                self._out -= 1
            raise
        self._give_back(opened, connection)

    def row(self, opened: Opened, sql: str, args: Row) -> Row | None:
        """One row, of one statement: the same in one step, as most of what is asked is asked so."""
        with self._lock:
            self._out += 1
            connection = opened.rested()
        try:
            if connection is None:
                connection = self.connect(opened)
            found: list[Row] = connection.execute(sql, args).fetchall()
        except BaseException:
            with self._lock:
                self._out -= 1
            if connection is not None:
                connection.close()
            raise
        self._give_back(opened, connection)
        return found[0] if found else None

    def _give_back(self, opened: Opened, connection: sqlite3.Connection) -> None:
        with self._lock:
            self._out -= 1
            if not opened.left and len(opened.idle) < _IDLE:
                opened.idle.append(connection)
                return
        connection.close()

    def close(self, opened: Opened) -> None:
        """Those that rest, of what was left."""
        with self._lock:
            idle, opened.idle = opened.idle, []
        for connection in idle:
            connection.close()

    # -- forks ------------------------------------------------------------------------------------------------------

    def before_fork(self, current: Callable[[], Opened | None]) -> None:
        """Close every connection. SQLite's record of who locks what is copied by a fork, and wrong in the child.

        A child that inherits it believes that it holds the parent's locks, and the parent may then remove the log
        under its hands. Whoever is in the middle of a statement is given a second to end it.
        """
        deadline = time.monotonic() + 1
        while True:
            self._halted = self._lock.acquire(timeout=1)  # and no statement begins before the fork is done
            self._lost = min(self._lost, self._out)
            if not self._halted or self._out == self._lost or current() is None:
                break
            if time.monotonic() > deadline:
                self._lost = self._out  # the next fork doesn't wait for these
                break
            self._lock.release()
            time.sleep(0.0005)
        opened = current()
        if opened is not None:
            while opened.idle:
                opened.idle.pop().close()

    def after_fork(self) -> None:
        if self._halted:
            self._halted = False
            self._lock.release()
