"""One directory's SQLite file: opened, shared out to threads, written by one at a time, replaced when it is damaged.

The file has a random name, which the stamps hold: whoever replaces it replaces the stamps, and every process sees
by their inode that what it has open is no longer what the directory means.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

from stampede.engines.disk import boot
from stampede.engines.disk.opened import LOOK, Opened
from stampede.engines.disk.stamps import MARK, Stamps, Unreadable
from stampede.engines.disk.turn import Interrupted, Turn, Turns
from stampede.engines.flock import try_lock
from stampede.errors import EngineClosed, EngineError
from stampede.interruptions import pass_on
from stampede.ports import Ticket
from stampede.stalls import Patience

__all__ = ["Damaged", "Database", "Locked", "Write"]

T = TypeVar("T")
Row = tuple[Any, ...]

SCHEMA = Path(__file__).with_name("schema.sql")
FORMAT = 1
"""In the file names: another layout is another file, so that two releases can share a directory."""

NOTE = 60.0
"""Seconds between two notes of what both clocks show."""

_IDLE = 16
_WORLD = (
    "SQLITE_ABORT", "SQLITE_AUTH", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_CONSTRAINT", "SQLITE_FULL",
    "SQLITE_INTERRUPT", "SQLITE_IOERR", "SQLITE_LOCKED", "SQLITE_MISMATCH", "SQLITE_MISUSE", "SQLITE_NOLFS",
    "SQLITE_NOMEM", "SQLITE_PERM", "SQLITE_PROTOCOL", "SQLITE_RANGE", "SQLITE_READONLY", "SQLITE_TOOBIG",
)  # fmt: skip
"""What SQLite may say of a good file, too: a full disk, another program's lock, a question of ours that is wrong."""

_log = logging.getLogger("stampede")


class Locked(Exception):
    """Readers can't read at this very moment (a recovery, a last one closing). Ask again."""


class Damaged(Exception):
    """A row says what nobody has written."""


# Python can't even tell some errors, whose message has a damaged byte: it raises UnicodeDecodeError instead.
_TROUBLE = (sqlite3.Error, UnicodeDecodeError, Damaged)


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


class Database:
    """Reads and transactions of one directory, for the threads of one process."""

    def __init__(self, directory: Path, timeout: float) -> None:
        self.directory = directory
        self._timeout = timeout
        self._opened: Opened | None = None
        self._left: list[Any] = []
        self._noted = 0.0
        self._closed = False
        self._begin()
        self.opened()

    def _begin(self) -> None:
        self._opening = threading.RLock()  # these two may be wanted by a finalizer, or a signal, that interrupts us
        self._pool = threading.RLock()
        self._turns = Turns()
        self._out = 0  # connections in use
        self._lost = 0  # of them, by threads that were interrupted at an unlucky moment
        self._halted = False

    # -- what is open ---------------------------------------------------------------------------------------------

    def opened(self, now: float | None = None) -> Opened:
        """What the directory means; with `now`, as of at most a moment ago."""
        opened = self._opened
        if opened is not None:
            if now is not None and abs(now - opened.looked) < LOOK:
                return opened
            if opened.current:
                opened.looked = boot.clock()
                return opened
        return self._open_anew()

    def stood(self, ticket: Ticket) -> bool:
        """Would a ticket hold that was taken back?"""
        opened = self._opened
        if opened is None or not isinstance(ticket.stamps, memoryview) or not opened.current:
            return False
        return opened.stamps.words[ticket.slot] == ticket.stamp

    def _open_anew(self) -> Opened:
        with self._opening:
            old = self._opened
            if old is not None and old.current:
                return old
            if self._closed:
                raise EngineClosed(f"disk://{self.directory}")
            if old is not None:
                self._forget(old)
            try:
                self._opened = self._attach()
            except (OSError, *_TROUBLE) as error:
                pass_on(error)
                raise EngineError(
                    f"can't use {self.directory}: {error}: give a directory that can be made and written, "
                    "on a local disk with room"
                ) from error
            return self._opened

    def _forget(self, old: Opened) -> None:
        """Void every ticket that any process has for what the directory meant, and close it."""
        self._opened = None
        old.stamps.mark_all()
        old.leave()
        with self._pool:
            idle, old.idle = old.idle, []
        for connection in idle:
            connection.close()

    def _attach(self) -> Opened:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = self.directory / f"stamps-{FORMAT}"
        for _ in range(100):
            try:
                stamps = Stamps(root)
            except FileNotFoundError:
                self._found(os.link)
                continue
            except Unreadable:
                self._replace_unreadable(root)
                continue
            opened = Opened(stamps, self._file(stamps.incarnation))
            if opened.file.exists():
                try:
                    self._arrive(opened)
                    return opened
                except _TROUBLE as error:
                    if not _damaged(error, opened.file):
                        raise
                    _log.warning("%s is damaged (%s): %s", opened.file, error, self._replace(opened))
            elif stamps.current:
                self._replace(opened)
        raise OSError("its files change faster than they can be opened")

    def _file(self, incarnation: str) -> Path:
        return self.directory / f"cache-{FORMAT}-{incarnation}.sqlite"

    def _found(self, put: Callable[[Path, Path], object]) -> None:
        """A new database and its stamps, in the place of those that are there if `put` replaces, else if none are."""
        incarnation = os.urandom(8).hex()
        file, unborn = self._file(incarnation), self.directory / f"stamps-{FORMAT}-{incarnation}"
        try:
            _create(file)
            Stamps.make(unborn, incarnation)
            put(unborn, self.directory / f"stamps-{FORMAT}")
            self._remove_orphans(file)
        except FileExistsError:
            file.unlink(missing_ok=True)  # another process was first
        except BaseException:
            for path in _files(file):
                path.unlink(missing_ok=True)
            raise
        finally:
            unborn.unlink(missing_ok=True)

    def _remove_orphans(self, ours: Path) -> None:
        """What an earlier beginning left that was cut short, or whose stamps were removed."""
        for path in self.directory.glob(f"*-{FORMAT}-*"):
            if ours.stem not in path.name and ".damaged-" not in path.name:
                try:
                    if time.time() - path.stat().st_mtime > 3600:  # younger ones may be somebody's beginning
                        path.unlink()
                except OSError as error:
                    pass_on(error)  # else another process was first

    def _replace(self, opened: Opened) -> str:
        """Through the gate: a new database in the place of one that is gone or damaged, if nobody else was faster."""
        stamps = opened.stamps
        if not self._enter(stamps, Patience(self._timeout)):
            raise EngineError(f"process {stamps.writer} is writing to {self.directory}, so it can't be replaced yet")
        try:
            if not stamps.current:
                return "a new one has been begun"
            stamps.mark_all()  # before there is another: nobody is to go by these while somebody changes those
            self._found(os.replace)
            aside = opened.file.with_suffix(f".damaged-{int(time.time())}")
            for path in _files(opened.file):
                _move(path, aside if path == opened.file else None)
            self._keep_two_damaged()
            return f"it was moved to {aside.name}, and a new one begun"
        finally:
            stamps.leave()

    def _replace_unreadable(self, root: Path) -> None:
        """Stamps that are none have no mapping, and still an inode to lock."""
        fd = os.open(root, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(fd) and os.path.samestat(os.fstat(fd), os.stat(root)):
                self._found(os.replace)
        finally:
            os.close(fd)

    def _arrive(self, opened: Opened) -> None:
        """After a reboot, before anything is read: move the ends to this boot's clock."""
        connection = self._connect(opened)
        try:
            connection.execute(f"PRAGMA busy_timeout = {int(self._timeout * 1000)}")
            then = connection.execute("SELECT boot FROM clock").fetchone()
            if then is None or then[0] != boot.boot:
                connection.execute("BEGIN IMMEDIATE")
                boot.carry_over(connection, boot.boot, boot.clock(), time.time())
                connection.execute("COMMIT")
        finally:
            connection.close()

    # -- connections ------------------------------------------------------------------------------------------------

    @contextmanager
    def _connection(self, opened: Opened) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread has. One that met trouble isn't used again."""
        with self._pool:
            self._out += 1
            connection = opened.rested()
        try:
            if connection is None:
                connection = self._connect(opened)
            yield connection
        except BaseException:
            if connection is not None:
                connection.close()
            with self._pool:
                self._out -= 1
            raise
        self._give_back(opened, connection)

    def _give_back(self, opened: Opened, connection: sqlite3.Connection) -> None:
        with self._pool:
            self._out -= 1
            if opened is self._opened and len(opened.idle) < _IDLE:
                opened.idle.append(connection)
                return
        connection.close()

    def _connect(self, opened: Opened) -> sqlite3.Connection:
        there = f"{opened.file.as_uri()}?mode=rw"  # never made by opening it
        patience = self._timeout  # others recover the log, or are the last to close it: a matter of milliseconds
        connection = sqlite3.connect(there, uri=True, timeout=patience, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the last writes, and damages nothing
            connection.execute("PRAGMA journal_size_limit = 16777216")
            connection.execute("PRAGMA busy_timeout = 0")  # from here on we wait by ourselves: see `patiently`, `_gate`
        except BaseException:
            connection.close()
            raise
        return connection

    # -- reading ------------------------------------------------------------------------------------------------

    def row(self, opened: Opened, sql: str, args: Row) -> Row | None:
        """One row, of one statement. `Locked`: not at this moment."""
        with self._pool:
            self._out += 1
            connection = opened.rested()
        try:
            if connection is None:
                connection = self._connect(opened)
            found: list[Row] = connection.execute(sql, args).fetchall()
        except BaseException as error:
            with self._pool:
                self._out -= 1
            if connection is not None:
                connection.close()
            if isinstance(error, _TROUBLE):
                raise self._trouble(error, opened) from error
            raise
        with self._pool:
            self._out -= 1
            if opened is self._opened and len(opened.idle) < _IDLE:
                opened.idle.append(connection)
                connection = None
        if connection is not None:
            connection.close()
        return found[0] if found else None

    @contextmanager
    def reading(self) -> Iterator[tuple[Opened, sqlite3.Connection]]:
        """Several statements that see one state. `Locked`: not at this moment."""
        opened = self.opened(boot.clock())
        try:
            with self._connection(opened) as connection:
                connection.execute("BEGIN")
                yield opened, connection
                connection.execute("COMMIT")
        except _TROUBLE as error:
            raise self._trouble(error, opened) from error

    def patiently(self, read: Callable[[], T]) -> T:
        """What `read` gives, asked again while others keep readers out."""
        patience = Patience(self._timeout)
        while True:
            try:
                return read()
            except Locked:
                if patience.left <= 0:
                    raise EngineError(f"{self.directory} could not be read for {self._timeout:g} s") from None
            patience.rest(0.001)

    # -- writing ------------------------------------------------------------------------------------------------

    def writing(self) -> AbstractContextManager[Write]:
        """One transaction, with no other writer in any process. It holds if the block ends well, else nothing does."""
        turn = Turn(sys._getframe(1))
        block = self._transaction(turn)
        turn.steps = ref(block.gen)
        return block

    @contextmanager
    def _transaction(self, turn: Turn) -> Iterator[Write]:
        patience = Patience(self._timeout)
        opened: Opened | None = None
        trouble: Exception | None = None
        try:
            self._take_turn(turn, patience)
            opened = self._gate(turn, patience)
            with self._connection(opened) as connection:
                self._begin_write(connection, patience)
                write = Write(connection, opened)
                try:
                    yield write
                    self._note(connection)
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        _roll_back(connection)
                    write.settle()
        except _TROUBLE as error:
            trouble = error
        finally:
            self._turns.end(turn)
        if trouble is not None and opened is not None:
            raise self._told(trouble, opened) from trouble

    def _take_turn(self, turn: Turn, patience: Patience) -> None:
        """Be the only thread of this process that writes."""
        waits = patience.left
        try:
            if self._turns.take(turn, patience):
                return
        except Interrupted:
            raise EngineError(
                f"a finalizer or signal interrupted a write to {self.directory}, and can't write itself"
            ) from None
        raise EngineError(f"another thread has been writing to {self.directory} for {waits:g} s")

    def tidy_up(self) -> None:
        """After an error: if a write was left at a moment that no `finally` covers, other processes wait for it."""
        if self._turns.left:
            turn = Turn(sys._getframe())
            try:
                self._turns.take(turn, Patience(0.0))
            finally:
                self._turns.end(turn)

    def _gate(self, turn: Turn, patience: Patience) -> Opened:
        """The gate of what the directory means at this moment, locked."""
        while True:
            opened = self._opened or self.opened()  # looked at behind the gate: before it, that would say nothing yet
            stamps = opened.stamps
            turn.leave.append(stamps.leave)  # before it is entered, or nobody knew of it
            entered = stamps.enter()
            if not entered and opened.current:
                entered = self._enter(stamps, patience)
                if not entered:
                    raise EngineError(
                        f"process {stamps.writer} has been writing to {self.directory} for {self._timeout:g} s"
                    )
            if entered and opened.current:
                return opened
            stamps.leave()
            self.opened()

    def _enter(self, stamps: Stamps, patience: Patience) -> bool:
        pause = 0.0001
        while not stamps.enter():
            if patience.left <= 0:
                return False
            patience.rest(pause)
            pause = min(pause * 1.5, 0.002)
        return True

    def _begin_write(self, connection: sqlite3.Connection, patience: Patience) -> None:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _busy(error) or patience.left <= 0:
                    raise
            patience.rest(0.001)

    def _note(self, connection: sqlite3.Connection) -> None:
        now = boot.clock()
        if abs(now - self._noted) > NOTE:
            self._noted = now
            boot.note(connection, boot.boot, now, time.time())

    def mend(self, opened: Opened, slot: int) -> None:
        """Put a stamp where a writer that was killed left its mark. Nothing, if a writer is at work."""
        turn = Turn(sys._getframe())
        try:
            self._take_turn(turn, Patience(0.0))
        except EngineError:
            return
        try:
            turn.leave.append(opened.stamps.leave)
            if opened.stamps.enter():
                try:
                    if opened.stamps.words[slot] == MARK and opened.current:
                        with self._connection(opened) as connection:
                            connection.execute("BEGIN IMMEDIATE")  # settles what the dead one left in the log
                            connection.execute("COMMIT")
                        opened.stamps.stamp(slot)
                finally:
                    opened.stamps.leave()
        except _TROUBLE:
            pass  # the mark stays: nothing is kept locally
        finally:
            self._turns.end(turn)

    # -- trouble ------------------------------------------------------------------------------------------------

    def _trouble(self, error: Exception, opened: Opened) -> Exception:
        return Locked() if _busy(error) else self._told(error, opened)

    def _told(self, error: Exception, opened: Opened) -> EngineError:
        """What a caller can do about it. A damaged file is out of the way by then."""
        opened.looked = -1.0  # the next call looks again what the directory means
        if not opened.current:
            return EngineError(f"{opened.file} was removed ({error}): the next call makes a new one")
        if _damaged(error, opened.file):
            return EngineError(f"{opened.file} is damaged ({error}): {self._heal(opened)}")
        if _busy(error):
            return EngineError(f"another program has locked {opened.file} for {self._timeout:g} s")
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            return EngineError(f"there is no room for {opened.file} ({error}): make some, or lower max_bytes")
        return EngineError(f"{opened.file}: {error} ({name}): see that the file and its directory can be written")

    def _heal(self, opened: Opened) -> str:
        """Move the damaged file aside and begin a new one: by one process, if several find the damage at once."""
        turn = Turn(sys._getframe())
        turn.leave.append(opened.stamps.leave)
        try:
            self._take_turn(turn, Patience(self._timeout))
        except EngineError:
            return "it is still in use"
        try:
            return self._replace(opened)
        except EngineError as failure:
            return str(failure)
        except (OSError, *_TROUBLE) as failure:
            pass_on(failure)
            return f"it can't be replaced ({failure}): remove {self.directory}"
        finally:
            self._turns.end(turn)

    def _keep_two_damaged(self) -> None:
        for path in sorted(self.directory.glob("*.damaged-*"), key=lambda path: path.stat().st_mtime)[:-2]:
            path.unlink(missing_ok=True)

    # -- ends and forks -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._opening:
            self._closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.leave()
            with self._pool:
                idle, opened.idle = opened.idle, []
            for connection in idle:
                connection.close()

    def before_fork(self) -> None:
        """Close every connection. SQLite's record of who locks what is copied by a fork, and wrong in the child.

        A child that inherits it believes that it holds the parent's locks, and the parent may then remove the log
        under its hands. Whoever is in the middle of a statement is given a second to end it.
        """
        deadline = time.monotonic() + 1
        while True:
            self._halted = self._pool.acquire(timeout=1)  # and no statement begins before the fork is done
            self._lost = min(self._lost, self._out)
            if not self._halted or self._out == self._lost or self._opened is None:
                break
            if time.monotonic() > deadline:
                self._lost = self._out  # the next fork doesn't wait for these
                break
            self._pool.release()
            time.sleep(0.0005)
        opened = self._opened
        if opened is not None:
            while opened.idle:
                opened.idle.pop().close()

    def after_fork(self) -> None:
        if self._halted:
            self._halted = False
            self._pool.release()

    def start_again(self) -> None:
        """In a forked child. What a thread of the parent was using is left as it is: closing it would write."""
        opened = self._opened
        self._begin()
        if opened is not None:
            self._left.append(opened.idle)
            opened.start_again()


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
        boot.note(connection, boot.boot, boot.clock(), time.time())
        connection.execute("COMMIT")
    finally:
        connection.close()


def _files(file: Path) -> list[Path]:
    return [file, file.with_name(file.name + "-wal"), file.with_name(file.name + "-shm")]


def _move(path: Path, aside: Path | None) -> None:
    try:
        path.unlink() if aside is None else path.rename(aside)
    except FileNotFoundError:
        pass


def _roll_back(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass  # the error that brought us here tells more


def _busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _damaged(error: Exception, file: Path) -> bool:
    """Would a file that was just made not have raised this?"""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False  # a question of ours that is wrong
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_READONLY":  # what we may write all the same says of itself that we may not
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return name == "SQLITE_IOERR_SHORT_READ" or not name.startswith(_WORLD)
