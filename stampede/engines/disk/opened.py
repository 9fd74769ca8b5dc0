"""What a directory means at present, and who sees for those who ask nobody that it means something else by now.

Who reads or writes looks himself. Who only hits what his process keeps looks at nothing but the stamps, which outlive
their file's removal. So while tickets are out a thread of the process looks for all of them, and takes them back when
the directory is gone. It doesn't wake a process for ever that does nothing: it takes the tickets back then, too, and
who hits after that reads, and is given another.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from math import inf
from pathlib import Path

from stampede.engines.disk import boot
from stampede.engines.disk.stamps import Stamps
from stampede.watch import Watch

__all__ = ["LOOK", "Opened"]

LOOK = 0.1
"""Seconds between two looks whether the directory is still the same, for those who read or hit. Writers look each
time."""

REST = 5.0
"""Seconds in which a process does nothing, before its tickets are taken back."""

NOTHING = 0.02
"""Seconds of the processor's time that are nothing in so long."""

_watch = Watch("stampede-watch-disk")


class Opened:
    """The stamps, and connections to the database."""

    def __init__(self, stamps: Stamps, file: Path) -> None:
        self.stamps = stamps
        self.file = file
        self._file_name = str(file)
        self.idle: list[sqlite3.Connection] = []
        self.looked = boot.clock()
        self._lent: memoryview | None = None
        self._lending = threading.RLock()  # a finalizer may hit in the middle of this
        self.left = False  # for another, or closed: nobody begins anything with it
        self._moved = 0.0, 0.0  # when the process was last seen to do something, and the processor's time by then

    @property
    def current(self) -> bool:
        if not self.stamps.current:
            return False
        try:
            os.stat(self._file_name)
        except OSError:
            return False
        return True

    def rested(self) -> sqlite3.Connection | None:
        """A connection that nobody is using."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    # -- tickets --------------------------------------------------------------------------------------------------

    def lend(self) -> memoryview | None:
        """The stamps, for tickets that are looked after. None: there is no thread to be had for that."""
        lent = self._lent
        return lent if lent is not None else self._lend()

    def _lend(self) -> memoryview | None:
        with self._lending:
            if self._lent is None and not self.left:
                now = time.monotonic()
                self._moved = now, -inf
                if _watch.add(self, now + LOOK):  # before they are lent: it may be interrupted in between
                    self._lent = memoryview(self.stamps.words)
            return self._lent

    def look(self, now: float) -> float | None:
        """Take the tickets back if they are good for nothing any more, or for nobody."""
        gone = not self.current
        spent = time.process_time() - time.thread_time()  # which looks, and is not to keep itself at it
        with self._lending:
            if self._lent is None:
                return None
            since, before = self._moved
            if spent - before > NOTHING:
                since = now
                self._moved = now, spent
            if not gone and now - since < REST:
                return now + LOOK
            if gone:
                self.looked = -inf  # who reads next is to see it too
            self._take_back()
            return None

    def _take_back(self) -> None:
        lent = self._lent
        if lent is not None:
            lent.release()  # what is looked up in it from now on is a ValueError
            self._lent = None

    def leave(self) -> None:
        """Void what was lent, and lend no more."""
        with self._lending:
            self.left = True
            self._take_back()

    def start_again(self) -> None:
        """In a forked child, where nobody looks."""
        self._lending = threading.RLock()
        self._take_back()
        self.idle = []
        self.looked = -inf
        self.stamps.start_again()
