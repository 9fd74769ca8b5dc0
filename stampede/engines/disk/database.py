"""One directory's SQLite file: opened, shared out to threads, written by one at a time, replaced when it is damaged.

The file has a random name, which the stamps hold: whoever replaces it replaces the stamps, and every process sees
by their inode that what it has open is no longer what the directory means.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

from stampede.colour import running_loop
from stampede.engines.disk import boot
from stampede.engines.disk.founding import file_of, found, move_aside, replace_unreadable, stamps_of
from stampede.engines.disk.opened import LOOK, Opened
from stampede.engines.disk.pool import Pool, Row
from stampede.engines.disk.stamps import MARK, Stamps, Unreadable
from stampede.engines.disk.trouble import TROUBLE, Locked, is_busy, is_damaged
from stampede.engines.disk.turn import Deadline, Interrupted, Turn, Turns
from stampede.errors import EngineClosed, EngineError
from stampede.ports import Ticket

__all__ = ["Database", "Write"]

T = TypeVar("T")

NOTE = 60.0
"""Seconds between two notes of what both clocks show."""

_UNWRITABLE = "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE"
"""Nothing can be written, but what is stored can be read."""

_log = logging.getLogger("stampede")


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
        self._pool = Pool(timeout)
        self._begin()
        if running_loop() is None:
            with suppress(EngineError):  # the first call raises it; cached functions go on without the engine
                self.open()

    def _begin(self) -> None:
        self._opening = threading.RLock()  # it may be wanted by a finalizer, or a signal, that interrupts us
        self._turns = Turns()

    # -- what is open ---------------------------------------------------------------------------------------------

    def opened(self, now: float | None = None) -> Opened:
        """What the directory means; with `now`, as of at most a moment ago. `Locked`: it is to be opened first."""
        opened = self._opened
        if opened is not None:
            if now is not None and abs(now - opened.looked) < LOOK:
                return opened
            if opened.current:
                opened.looked = boot.clock()
                return opened
        if self._closed:
            raise EngineClosed(f"disk://{self.directory}")
        raise Locked

    def stood(self, ticket: Ticket) -> bool:
        """Would a ticket hold that was taken back?"""
        opened = self._opened
        if opened is None or not isinstance(ticket.stamps, memoryview) or not opened.current:
            return False
        return opened.stamps.words[ticket.slot] == ticket.stamp

    def open(self) -> Opened:
        """Have it open, which may take as long as others have its files."""
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
            except (OSError, *TROUBLE) as error:
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
        self._pool.close(old)

    def _attach(self) -> Opened:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(100):
            try:
                stamps = Stamps(stamps_of(self.directory))
            except FileNotFoundError:
                found(self.directory, os.link)
                continue
            except Unreadable:
                replace_unreadable(self.directory)
                continue
            opened = Opened(stamps, file_of(self.directory, stamps.incarnation))
            if opened.file.exists():
                try:
                    self._arrive(opened)
                    return opened
                except TROUBLE as error:
                    if not is_damaged(error, opened.file):
                        raise
                    _log.warning("%s is damaged (%s): %s", opened.file, error, self._replace(opened))
            elif stamps.current:
                self._replace(opened)
        raise OSError("its files change faster than they can be opened")

    def _replace(self, opened: Opened) -> str:
        """Through the gate: a new database in the place of one that is gone or damaged, if nobody else was faster."""
        stamps = opened.stamps
        if not self._enter(stamps, Deadline(self._timeout)):
            raise EngineError(f"process {stamps.writer} is writing to {self.directory}, so it can't be replaced yet")
        try:
            if not stamps.current:
                return "a new one has been begun"
            stamps.mark_all()  # before there is another: nobody is to go by these while somebody changes those
            found(self.directory, os.replace)
            aside = move_aside(opened.file)
            return f"it was moved to {aside.name}, and a new one begun"
        finally:
            stamps.leave()

    def _arrive(self, opened: Opened) -> None:
        """After a reboot, before anything is read: move the ends to this boot's clock."""
        connection = self._pool.connect(opened, patiently=True)
        try:
            connection.execute(f"PRAGMA busy_timeout = {int(self._timeout * 1000)}")
            then = connection.execute("SELECT boot FROM clock").fetchone()
            if then is None or then[0] != boot.boot:
                connection.execute("BEGIN IMMEDIATE")
                boot.carry_over(connection, boot.boot, boot.clock(), time.time())
                connection.execute("COMMIT")
        finally:
            connection.close()

    # -- reading ------------------------------------------------------------------------------------------------

    def row(self, opened: Opened, sql: str, args: Row) -> Row | None:
        """One row, of one statement. `Locked`: not at this moment."""
        try:
            return self._pool.row(opened, sql, args)
        except TROUBLE as error:
            raise self._trouble(error, opened) from error

    @contextmanager
    def reading(self) -> Iterator[tuple[Opened, sqlite3.Connection]]:
        """Several statements that see one state. `Locked`: not at this moment."""
        opened = self.opened(boot.clock())
        try:
            with self._pool.connection(opened) as connection:
                connection.execute("BEGIN")
                yield opened, connection
                connection.execute("COMMIT")
        except TROUBLE as error:
            raise self._trouble(error, opened) from error

    def patiently(self, read: Callable[[], T]) -> T:
        """What `read` gives, asked again while others keep readers out."""
        deadline = Deadline(self._timeout)
        while True:
            try:
                self.open()
                return read()
            except Locked:
                if deadline.left <= 0:
                    raise EngineError(f"{self.directory} could not be read for {self._timeout:g} s") from None
            time.sleep(0.001)

    # -- writing ------------------------------------------------------------------------------------------------

    def writing(self) -> AbstractContextManager[Write]:
        """One transaction, with no other writer in any process. It holds if the block ends well, else nothing does."""
        turn = Turn()
        block = self._transaction(turn)
        turn.steps = ref(block.gen)
        return block

    @contextmanager
    def _transaction(self, turn: Turn) -> Iterator[Write]:
        deadline = Deadline(self._timeout)
        opened: Opened | None = None
        trouble: Exception | None = None
        try:
            self._take_turn(turn, deadline)
            opened = self._gate(turn, deadline)
            with self._pool.connection(opened, patiently=True) as connection:
                self._begin_write(connection, deadline)
                write = Write(connection, opened)
                try:
                    yield write
                    self._note(connection)
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        _roll_back(connection)
                    write.settle()
        except TROUBLE as error:
            trouble = error
        finally:
            self._turns.end(turn)
        if trouble is not None and opened is not None:
            raise self._told(trouble, opened) from trouble

    def _take_turn(self, turn: Turn, deadline: Deadline) -> None:
        """Be the only thread of this process that writes."""
        waits = deadline.left
        try:
            if self._turns.take(turn, deadline):
                return
        except Interrupted:
            raise EngineError(
                f"a finalizer or signal interrupted a write to {self.directory}, and can't write itself"
            ) from None
        raise EngineError(f"another thread has been writing to {self.directory} for {waits:g} s")

    def tidy_up(self) -> None:
        """After an error: let the next writer in, if the error left a write of this thread unfinished."""
        self._turns.tidy_up()

    def _gate(self, turn: Turn, deadline: Deadline) -> Opened:
        """The gate of what the directory means at this moment, locked."""
        while True:
            opened = self._opened or self.open()  # looked at behind the gate: before it, that would say nothing yet
            stamps = opened.stamps
            turn.leave.append(stamps.leave)  # before it is entered, or nobody knew of it
            entered = stamps.enter()
            if not entered and opened.current:
                entered = self._enter(stamps, deadline)
                if not entered:
                    raise EngineError(
                        f"process {stamps.writer} has been writing to {self.directory} for {self._timeout:g} s"
                    )
            if entered and opened.current:
                return opened
            stamps.leave()
            self.open()

    def _enter(self, stamps: Stamps, deadline: Deadline) -> bool:
        pause = 0.0001
        while not stamps.enter():
            if deadline.left <= 0:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.002)
        return True

    def _begin_write(self, connection: sqlite3.Connection, deadline: Deadline) -> None:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or deadline.left <= 0:
                    raise
            time.sleep(0.001)

    def _note(self, connection: sqlite3.Connection) -> None:
        now = boot.clock()
        if abs(now - self._noted) > NOTE:
            self._noted = now
            boot.note(connection, boot.boot, now, time.time())

    def mend(self, opened: Opened, slot: int) -> None:
        """Put a stamp where a writer that was killed left its mark. Nothing, if a writer is at work."""
        turn = Turn()
        try:
            self._take_turn(turn, Deadline(0.0))
        except EngineError:
            return
        try:
            turn.leave.append(opened.stamps.leave)
            if opened.stamps.enter():
                try:
                    if opened.stamps.words[slot] == MARK and opened.current:
                        with self._pool.connection(opened) as connection:
                            connection.execute("BEGIN IMMEDIATE")  # settles what the dead one left in the log
                            connection.execute("COMMIT")
                        opened.stamps.stamp(slot)
                finally:
                    opened.stamps.leave()
        except TROUBLE:
            pass  # the mark stays: nothing is kept locally
        finally:
            self._turns.end(turn)

    # -- trouble ------------------------------------------------------------------------------------------------

    def _trouble(self, error: Exception, opened: Opened) -> Exception:
        return Locked() if is_busy(error) else self._told(error, opened)

    def _told(self, error: Exception, opened: Opened) -> EngineError:
        """What a caller can do about it. A damaged file is out of the way by then."""
        opened.looked = -1.0  # the next call looks again what the directory means
        if not opened.current:
            return EngineError(f"{opened.file} was removed ({error}): the next call makes a new one")
        if is_damaged(error, opened.file):
            return EngineError(f"{opened.file} is damaged ({error}): {self._heal(opened)}")
        if is_busy(error):
            return EngineError(f"another program has locked {opened.file} for {self._timeout:g} s")
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            told = EngineError(f"there is no room for {opened.file} ({error}): make some, or lower max_bytes")
        else:
            told = EngineError(f"{opened.file}: {error} ({name}): see that the file and its directory can be written")
        told.partial = told.refused = name.startswith(_UNWRITABLE)
        return told

    def _heal(self, opened: Opened) -> str:
        """Move the damaged file aside and begin a new one: by one process, if several find the damage at once."""
        turn = Turn()
        turn.leave.append(opened.stamps.leave)
        try:
            self._take_turn(turn, Deadline(self._timeout))
        except EngineError:
            return "it is still in use"
        try:
            return self._replace(opened)
        except EngineError as failure:
            return str(failure)
        except (OSError, *TROUBLE) as failure:
            return f"it can't be replaced ({failure}): remove {self.directory}"
        finally:
            self._turns.end(turn)

    # -- ends and forks -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._opening:
            self._closed = True
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.leave()
            self._pool.close(opened)

    def before_fork(self) -> None:
        self._pool.before_fork(lambda: self._opened)

    def after_fork(self) -> None:
        self._pool.after_fork()

    def start_again(self) -> None:
        """In a forked child. What a thread of the parent was using is left as it is: closing it would write."""
        opened = self._opened
        self._pool.start_again()
        self._begin()
        if opened is not None:
            self._left.append(opened.idle)
            opened.start_again()


def _roll_back(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        pass  # the error that brought us here tells more
