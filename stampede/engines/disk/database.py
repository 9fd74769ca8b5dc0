"""The SQLite file of one directory: open it, read it, write it one process at a time, replace it if it is damaged. The
file has a random name, which is stored in the file of stamps. Both are removed together. If the inode of the stamps has
changed, each process sees that its open database is no longer the one that the directory uses."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from stampede.engines.disk.opened import LOOK, DatabaseLink, Opened, Row
from stampede.engines.disk.stamps import GENERATIONS, MARK, WRITER, DiskStamps, UnreadableStamps
from stampede.engines.kit import boot_clock
from stampede.errors import EngineClosed, EngineError
from stampede.runtime.colour import running_loop

__all__ = ["DiskDatabase", "Locked", "Write"]

T = TypeVar("T")

SCHEMA = Path(__file__).with_name("schema.sql")
FORMAT = 3  # part of the file names: releases with different layouts use different files in the same directory

_UNWRITABLE = "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE"
"""Errors after which nothing can be written, but stored data can be read."""

_WORLD = (
    "SQLITE_ABORT", "SQLITE_AUTH", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_CONSTRAINT", "SQLITE_FULL",
    "SQLITE_INTERRUPT", "SQLITE_IOERR", "SQLITE_LOCKED", "SQLITE_MISMATCH", "SQLITE_MISUSE", "SQLITE_NOLFS",
    "SQLITE_NOMEM", "SQLITE_PERM", "SQLITE_PROTOCOL", "SQLITE_RANGE", "SQLITE_READONLY", "SQLITE_TOOBIG",
)  # fmt: skip
"""Errors that SQLite also raises for an undamaged file: a full disk, another program's lock, a wrong statement."""

# UnicodeDecodeError: SQLite's message about a damaged file may contain a damaged byte, which Python can't decode.
# FileNotFoundError: the file may be removed between its opening and the call of `statvfs`.
_TROUBLE = (sqlite3.Error, UnicodeDecodeError, FileNotFoundError)

_log = logging.getLogger("stampede")


class Locked(Exception):
    """Raised if the database can't be read at this moment: it is not open, or another process recovers its log or is
    the last one to close it. Try again."""


class Write:
    """A transaction under way: its connection, and the slots that it has marked."""

    def __init__(self, connection: sqlite3.Connection, opened: Opened) -> None:
        self.execute = connection.execute
        self.opened = opened
        self._slots: set[int] = set()
        self._everything = False

    def change(self, number: int) -> None:
        """Mark the slot of a key: values that are read from now on may be out of date after the commit."""
        slot = self.opened.stamps.slot(number)
        self._slots.add(slot)
        self.opened.stamps.mark(slot)

    def change_generation(self, number: int) -> None:
        """Mark the slot of a scope. If this writer dies, the next one replaces all marks."""
        self.change(number)
        self._slots.add(GENERATIONS)
        self.opened.stamps.mark(GENERATIONS)

    def change_everything(self) -> None:
        """Mark all slots."""
        self._everything = True
        self.opened.stamps.mark_all()

    def settle(self) -> None:
        """Replace the marks by new stamps, after the commit or the rollback."""
        if self._everything:
            self.opened.stamps.stamp_all()
        for slot in self._slots:
            self.opened.stamps.stamp(slot)


class DiskDatabase:
    """Reads and transactions of one directory, for the threads of one process."""

    def __init__(self, directory: Path, timeout: float) -> None:
        self.directory = directory
        self._timeout = timeout
        self._opened: Opened | None = None
        self._opening = threading.RLock()  # re-entrant: a finalizer or a signal's handler may interrupt its holder
        self._forking: Opened | None = None
        self._lost: list[DatabaseLink] = []
        self._closed = False
        if running_loop() is None:
            with suppress(EngineError):  # the first call raises it; cached functions go on without the engine
                self.open()

    # -- opening --------------------------------------------------------------------------------------------------

    def opened(self, now: float | None = None) -> Opened:
        """Return the open database. Raise `Locked` if it must be opened first. Without `now`, check that the directory
        still uses it. With `now`, a check less than `LOOK` seconds ago is enough."""
        opened = self._opened
        if opened is not None:
            if now is not None and abs(now - opened.looked) < LOOK:
                return opened
            if opened.current:
                opened.looked = boot_clock.clock()
                return opened
        if self._closed:
            raise EngineClosed(f"disk://{self.directory}")
        raise Locked

    def open(self) -> Opened:
        """Return the database, and open it if needed. This blocks while other processes lock its files."""
        with self._opening:
            old = self._opened
            if old is not None and old.current:
                return old
            if self._closed:
                raise EngineClosed(f"disk://{self.directory}")
            if old is not None:
                self._opened = None
                old.stamps.mark_all()  # this voids the tickets of all processes for the old database
                old.leave()
            try:
                self._opened = self._attach()
            except (OSError, *_TROUBLE) as error:
                raise EngineError(
                    f"can't use {self.directory}: {error}: give a directory that can be made and written, "
                    "on a local disk with room"
                ) from error
            return self._opened

    def _attach(self) -> Opened:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(100):
            try:
                stamps = DiskStamps(stamps_of(self.directory))
            except FileNotFoundError:
                make_database(self.directory)
                continue
            except UnreadableStamps:
                stamps_of(self.directory).unlink(missing_ok=True)
                continue
            opened = Opened(stamps, file_of(self.directory, stamps.incarnation), self._timeout)
            if opened.file.exists():
                try:
                    self._arrive(opened)
                    return opened
                except _TROUBLE as error:
                    if not _is_damaged(error, opened.file):
                        raise
                    _log.warning("%s is damaged (%s): %s", opened.file, error, self._discard(opened))
            else:
                self._discard(opened)
        raise OSError("its files are replaced faster than they can be opened")

    def _discard(self, opened: Opened) -> str:
        """Remove a missing or damaged database from the directory, and return what was done. The next `open` makes a
        new one. This is not locked: if two processes find the damage at once, the second one may discard a new
        database."""
        if not opened.stamps.current:
            return "another process has removed it"
        opened.stamps.mark_all()  # before new stamps exist: a reader must not trust these while a writer marks those
        stamps_of(self.directory).unlink(missing_ok=True)
        return f"it was moved to {move_aside(opened.file).name}"

    def _arrive(self, opened: Opened) -> None:
        """Convert all times to the clock of this boot, if the machine was restarted, before anything is read."""
        with opened.link(patiently=True) as link:
            then = link.sql.execute("SELECT boot FROM clock").fetchone()
            if then is None or then[0] != boot_clock.boot:
                self._begin_write(link.sql, opened, time.monotonic() + self._timeout)
                boot_clock.carry_over(link.sql, boot_clock.boot, boot_clock.clock(), time.time())
                link.sql.execute("COMMIT")

    # -- reading ------------------------------------------------------------------------------------------------

    def row(self, opened: Opened, sql: str, args: Row) -> Row | None:
        """Return the row that one statement finds, or None. Raise `Locked` if the database can't be read just now."""
        try:
            return opened.row(sql, args)
        except _TROUBLE as error:
            raise self.trouble(error, opened) from error

    @contextmanager
    def reading(self) -> Iterator[tuple[Opened, sqlite3.Connection]]:
        """Lend a connection for several statements that see one state. Raise `Locked` if it can't be read just now."""
        opened = self.opened(boot_clock.clock())
        try:
            with opened.link() as link:
                link.sql.execute("BEGIN")
                yield opened, link.sql
                link.sql.execute("COMMIT")
        except _TROUBLE as error:
            raise self.trouble(error, opened) from error

    def patiently(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, and repeat it while it raises `Locked`."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self.open()
                return read()
            except Locked:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{self.directory} could not be read for {self._timeout:g} s: other processes are opening or "
                        "repairing it. Try again"
                    ) from None
            time.sleep(0.001)

    # -- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[Write]:
        """Run a block as a transaction, as the only writer of all processes. If the block raises, it is rolled back."""
        deadline = time.monotonic() + self._timeout
        while True:
            opened = self.open()
            try:
                with opened.link(patiently=True) as link:
                    write = Write(link.sql, opened)
                    try:
                        if self._begin_write(link.sql, opened, deadline):
                            opened.writer = threading.get_ident(), link
                            if opened.stamps.words[GENERATIONS] == MARK:
                                write.change_everything()  # a writer died and left its marks: replace them
                            yield write
                            link.sql.execute("COMMIT")
                            return
                    finally:
                        if link.busy:  # else `end_own_write` has ended it
                            link.sql.rollback()  # no effect after the commit
                        opened.writer = None
                        write.settle()
            except _TROUBLE as error:
                raise self._failure(error, opened) from error

    def _begin_write(self, connection: sqlite3.Connection, opened: Opened, deadline: float) -> bool:
        """Wait for the turn to write. Return False if the directory uses another database by now."""
        pause = 0.0001
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                opened.stamps.words[WRITER] = os.getpid()
                return opened.current  # checked after the wait, since it may have been replaced during the wait
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
            if not opened.current:
                return False
            opened.end_own_write()
            if time.monotonic() > deadline:
                last = opened.stamps.words[WRITER]
                raise EngineError(
                    f"{opened.file} has been locked for {self._timeout:g} s by process {last}, or by another program: "
                    "wait for it, end it, or give a longer timeout"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)

    # -- trouble ------------------------------------------------------------------------------------------------

    def trouble(self, error: Exception, opened: Opened) -> Exception:
        """Return what to raise for an error of a read: `Locked` or an EngineError."""
        return Locked() if _is_busy(error) else self._failure(error, opened)

    def _failure(self, error: Exception, opened: Opened) -> EngineError:
        """Return an EngineError that says what to do. A damaged file is moved aside by then."""
        opened.looked = -1.0  # the next call checks again which database the directory uses
        if not opened.current:
            return EngineError(f"{opened.file} was removed ({error}): the next call makes a new one")
        if _is_damaged(error, opened.file):
            try:
                return EngineError(f"{opened.file} is damaged ({error}): {self._discard(opened)}")
            except OSError as failure:
                return EngineError(f"{opened.file} is damaged ({error}): remove {self.directory} ({failure})")
        name = getattr(error, "sqlite_errorname", "")
        failed = EngineError(
            f"{opened.file}: {error} ({name}): see that the file and its directory can be written, and that there is "
            "room; or lower max_bytes"
        )
        failed.partial = failed.refused = name.startswith(_UNWRITABLE)
        return failed

    # -- ends and forks -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._opening:
            self._closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.leave()

    def before_fork(self) -> None:
        self._forking = self._opened
        if self._forking is not None:
            self._forking.before_fork()

    def after_fork(self) -> None:
        if self._forking is not None:
            self._forking.after_fork()

    def start_again(self) -> None:
        """Begin anew in a forked child. Links that the parent's threads were using are kept open and unused, because
        closing them would write to the file."""
        self._opening = threading.RLock()  # another thread of the parent may have held the old one
        if self._opened is not None:
            self._lost += self._opened.start_again()


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _is_damaged(error: Exception, file: Path) -> bool:
    """Return whether an error proves damage: an undamaged file would not have raised it."""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError, FileNotFoundError)):
        return False  # a wrong statement of ours, or a file that was removed
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_READONLY":  # the file's header forbids writing, but its permissions do not: a damaged header
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return name == "SQLITE_IOERR_SHORT_READ" or not name.startswith(_WORLD)


# -- the files of a directory -------------------------------------------------------------------------------------


def stamps_of(directory: Path) -> Path:
    return directory / f"stamps-{FORMAT}"


def file_of(directory: Path, incarnation: str) -> Path:
    """Return the path of the database whose name is in the stamps."""
    return directory / f"cache-{FORMAT}-{incarnation}.sqlite"


def make_database(directory: Path) -> None:
    """Make a new database and its stamps, unless another process is faster."""
    incarnation = os.urandom(8).hex()
    file, unborn = file_of(directory, incarnation), directory / f"stamps-{FORMAT}-{incarnation}"
    unneeded = [unborn, *_files(file)]
    try:
        _create(file)
        DiskStamps.make(unborn, incarnation)
        os.link(unborn, stamps_of(directory))
        unneeded = [unborn]
        _remove_orphans(directory, file)
    except FileExistsError:
        pass  # another process was first
    finally:
        for path in unneeded:
            path.unlink(missing_ok=True)


def move_aside(file: Path) -> Path:
    """Rename a damaged database and return its new path. One that was moved aside before is replaced."""
    aside = file.with_name(f"cache-{FORMAT}.damaged")
    with suppress(FileNotFoundError):
        os.replace(file, aside)
    for path in _files(file):
        path.unlink(missing_ok=True)
    return aside


def _remove_orphans(directory: Path, ours: Path) -> None:
    """Remove the files of databases that were not completed, or that have lost their stamps."""
    for path in directory.glob(f"*-{FORMAT}-*"):
        with suppress(OSError):  # another process was first
            if ours.stem not in path.name and time.time() - path.stat().st_mtime > 3600:  # newer: perhaps being made
                path.unlink()


def _create(file: Path) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        os.chmod(file, 0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN")
        for statement in SCHEMA.read_text().split(";\n"):
            connection.execute(statement)
        connection.execute("INSERT INTO generations VALUES ('', ?)", (os.urandom(4).hex(),))
        connection.execute("INSERT INTO fences VALUES (0, ?)", (int(time.time() * 1000),))
        boot_clock.note(connection, boot_clock.boot, boot_clock.clock(), time.time())
        connection.execute("COMMIT")
    finally:
        connection.close()


def _files(file: Path) -> list[Path]:
    return [file, file.with_name(file.name + "-wal"), file.with_name(file.name + "-shm")]
