"""One directory's SQLite file: opened, read, written by one at a time, replaced when it is damaged.

The file has a random name, which the stamps hold: whoever removes one removes the other, and every process sees by
the inode of the stamps that what it has open is no longer what the directory means.
"""

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
FORMAT = 3  # in the file names: another layout is another file, so that two releases can share a directory

_UNWRITABLE = "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE"
"""Nothing can be written, but what is stored can be read."""

_WORLD = (
    "SQLITE_ABORT", "SQLITE_AUTH", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_CONSTRAINT", "SQLITE_FULL",
    "SQLITE_INTERRUPT", "SQLITE_IOERR", "SQLITE_LOCKED", "SQLITE_MISMATCH", "SQLITE_MISUSE", "SQLITE_NOLFS",
    "SQLITE_NOMEM", "SQLITE_PERM", "SQLITE_PROTOCOL", "SQLITE_RANGE", "SQLITE_READONLY", "SQLITE_TOOBIG",
)  # fmt: skip
"""What SQLite may say of a good file, too: a full disk, another program's lock, a question of ours that is wrong."""

# SQLite's message about a damaged file may hold a damaged byte, which Python can't decode. And the file may be removed
# between its opening and the question how large its disk is.
_TROUBLE = (sqlite3.Error, UnicodeDecodeError, FileNotFoundError)

_log = logging.getLogger("stampede")


class Locked(Exception):
    """Readers can't read at this very moment (a recovery, a last one closing). Ask again."""


class Write:
    """One transaction under way: its connection, and the slots that it has marked."""

    def __init__(self, connection: sqlite3.Connection, opened: Opened) -> None:
        self.execute = connection.execute
        self.opened = opened
        self._slots: set[int] = set()
        self._everything = False

    def change(self, number: int) -> None:
        """Tell the readers of this key that what they read from now on may not last."""
        slot = self.opened.stamps.slot(number)
        self._slots.add(slot)
        self.opened.stamps.mark(slot)

    def change_everything(self) -> None:
        self._everything = True
        self.opened.stamps.mark_all()

    def settle(self) -> None:
        """After the commit, or the rollback: stamps that no reader has seen."""
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
        self._opening = threading.RLock()  # it may be wanted by a finalizer, or a signal, that interrupts us
        self._forking: Opened | None = None
        self._lost: list[DatabaseLink] = []
        self._closed = False
        if running_loop() is None:
            with suppress(EngineError):  # the first call raises it; cached functions go on without the engine
                self.open()

    # -- what is open ---------------------------------------------------------------------------------------------

    def opened(self, now: float | None = None) -> Opened:
        """What the directory means; with `now`, as of at most a moment ago. `Locked`: it is to be opened first."""
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
        """Have it open, which may take as long as others have its files."""
        with self._opening:
            old = self._opened
            if old is not None and old.current:
                return old
            if self._closed:
                raise EngineClosed(f"disk://{self.directory}")
            if old is not None:
                self._opened = None
                old.stamps.mark_all()  # every ticket that any process has for what the directory meant is void
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
                found(self.directory)
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
        raise OSError("its files change faster than they can be opened")

    def _discard(self, opened: Opened) -> str:
        """Take a database that is gone or damaged out of the directory. Whoever opens that next begins a new one.

        Nobody waits for a turn: if two processes find the damage at once, a new database may be discarded as well.
        """
        if not opened.stamps.current:
            return "another process has removed it"
        opened.stamps.mark_all()  # before there is another: nobody is to go by these while somebody changes those
        stamps_of(self.directory).unlink(missing_ok=True)
        return f"it was moved to {move_aside(opened.file).name}"

    def _arrive(self, opened: Opened) -> None:
        """After a reboot, before anything is read: move the ends to this boot's clock."""
        with opened.link(patiently=True) as link:
            then = link.sql.execute("SELECT boot FROM clock").fetchone()
            if then is None or then[0] != boot_clock.boot:
                self._begin_write(link.sql, opened, time.monotonic() + self._timeout)
                boot_clock.carry_over(link.sql, boot_clock.boot, boot_clock.clock(), time.time())
                link.sql.execute("COMMIT")

    # -- reading ------------------------------------------------------------------------------------------------

    def row(self, opened: Opened, sql: str, args: Row) -> Row | None:
        """One row, of one statement. `Locked`: not at this moment."""
        try:
            return opened.row(sql, args)
        except _TROUBLE as error:
            raise self.trouble(error, opened) from error

    @contextmanager
    def reading(self) -> Iterator[tuple[Opened, sqlite3.Connection]]:
        """Several statements that see one state. `Locked`: not at this moment."""
        opened = self.opened(boot_clock.clock())
        try:
            with opened.link() as link:
                link.sql.execute("BEGIN")
                yield opened, link.sql
                link.sql.execute("COMMIT")
        except _TROUBLE as error:
            raise self.trouble(error, opened) from error

    def patiently(self, read: Callable[[], T]) -> T:
        """What `read` gives, asked again while others keep readers out."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self.open()
                return read()
            except Locked:
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.directory} could not be read for {self._timeout:g} s") from None
            time.sleep(0.001)

    # -- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[Write]:
        """One transaction, with no other writer in any process. It is committed if the block ends well."""
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
                                write.change_everything()  # a writer died there: its marks would stay
                            yield write
                            link.sql.execute("COMMIT")
                            return
                    finally:
                        if link.busy:  # not ended by `end_own_write`
                            link.sql.rollback()  # if it was not committed
                        opened.writer = None
                        write.settle()
            except _TROUBLE as error:
                raise self._told(error, opened) from error

    def _begin_write(self, connection: sqlite3.Connection, opened: Opened, deadline: float) -> bool:
        """Wait for the turn to write. False: the directory means something else by now."""
        pause = 0.0001
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                opened.stamps.words[WRITER] = os.getpid()
                return opened.current  # looked at now: before the turn, that says nothing
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
            if not opened.current:
                return False
            opened.end_own_write()
            if time.monotonic() > deadline:
                last = opened.stamps.words[WRITER]
                raise EngineError(
                    f"{opened.file} has been locked for {self._timeout:g} s: by process {last}, or another program"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)

    # -- trouble ------------------------------------------------------------------------------------------------

    def trouble(self, error: Exception, opened: Opened) -> Exception:
        return Locked() if _is_busy(error) else self._told(error, opened)

    def _told(self, error: Exception, opened: Opened) -> EngineError:
        """What a caller can do about it. A damaged file is out of the way by then."""
        opened.looked = -1.0  # the next call looks again what the directory means
        if not opened.current:
            return EngineError(f"{opened.file} was removed ({error}): the next call makes a new one")
        if _is_damaged(error, opened.file):
            try:
                return EngineError(f"{opened.file} is damaged ({error}): {self._discard(opened)}")
            except OSError as failure:
                return EngineError(f"{opened.file} is damaged ({error}): remove {self.directory} ({failure})")
        name = getattr(error, "sqlite_errorname", "")
        told = EngineError(
            f"{opened.file}: {error} ({name}): see that the file and its directory can be written, and that there is "
            "room; or lower max_bytes"
        )
        told.partial = told.refused = name.startswith(_UNWRITABLE)
        return told

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
        """In a forked child. What a thread of the parent was using is left as it is: closing it would write."""
        self._opening = threading.RLock()  # another thread of the parent may have had it
        if self._opened is not None:
            self._lost += self._opened.start_again()


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _is_damaged(error: Exception, file: Path) -> bool:
    """Would a file that was just made not have raised this?"""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError, FileNotFoundError)):
        return False  # a question of ours that is wrong, or a file that is gone
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_READONLY":  # what we may write all the same says of itself that we may not
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return name == "SQLITE_IOERR_SHORT_READ" or not name.startswith(_WORLD)


# -- the files of a directory -------------------------------------------------------------------------------------


def stamps_of(directory: Path) -> Path:
    return directory / f"stamps-{FORMAT}"


def file_of(directory: Path, incarnation: str) -> Path:
    """The database that stamps name."""
    return directory / f"cache-{FORMAT}-{incarnation}.sqlite"


def found(directory: Path) -> None:
    """Begin a new database and its stamps, unless another process is faster."""
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
    """Where a damaged database is to be found from now on: in the place of the one that was moved before it."""
    aside = file.with_name(f"cache-{FORMAT}.damaged")
    with suppress(FileNotFoundError):
        os.replace(file, aside)
    for path in _files(file):
        path.unlink(missing_ok=True)
    return aside


def _remove_orphans(directory: Path, ours: Path) -> None:
    """What an earlier beginning left that was cut short, or whose stamps were removed."""
    for path in directory.glob(f"*-{FORMAT}-*"):
        with suppress(OSError):  # another process was first
            if ours.stem not in path.name and time.time() - path.stat().st_mtime > 3600:  # or it is being begun
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
