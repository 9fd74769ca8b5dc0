"""The stamps: a table in shared memory by which all processes see at once that the entry of a key has changed.

Keys share slots by their hashes. A writer marks the slot inside its transaction, and writes a unique stamp there after
the commit. A reader samples the slot before it reads the entry, and keeps nothing that it read under a mark. The order
matters: if the stamp is written before the commit, or sampled after the read, it can stand for an old value for ever.
(If one writer's stamp overwrites the next writer's mark, values that are read meanwhile are kept only until that writer
puts its own stamp.)

memoryview reads and writes aligned words of 8 bytes in one step on each 64-bit machine that runs Python 3.11. On
machines that reorder memory accesses, the system calls of a transaction separate the mark, the commit and the stamp.

The file also identifies the directory's present database file. It is written completely under another name before other
processes can see it: a hole in it would raise SIGBUS on a full disk."""

from __future__ import annotations

import mmap
import os
from errno import ENOSPC
from pathlib import Path

__all__ = ["GENERATIONS", "HAND", "MARK", "SLOTS", "WRITER", "DiskStamps", "UnreadableStamps"]

SLOTS = 1 << 16
MARK = 1  # in place of a stamp: a change is under way, or its writer has died

_MAGIC = int.from_bytes(b"stampede", "little")
_WORDS = 8 + SLOTS
_SIZE = 8 * _WORDS + 2 * SLOTS

# The words before the slots. WRITER: the process that began to write last. HAND: where the next eviction begins.
_WHAT, _INCARNATION, GENERATIONS, WRITER, HAND = range(5)


class UnreadableStamps(Exception):
    """Raised if a file is no table of stamps."""


class DiskStamps:
    """A mapped file of stamps. The mapping outlives the file's removal, because tickets refer to it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_size != _SIZE:
                raise UnreadableStamps(f"{path} has {status.st_size} bytes")
            view = memoryview(mmap.mmap(fd, _SIZE))
        finally:
            os.close(fd)
        self.words = view[: 8 * _WORDS].cast("Q")
        self.used = view[8 * _WORDS : 8 * _WORDS + SLOTS]  # a byte per slot: read since eviction last came by
        self._awaited = view[8 * _WORDS + SLOTS :]  # a byte per slot: there may be waiters
        if self.words[_WHAT] != _MAGIC:
            raise UnreadableStamps(f"{path} does not begin with the mark of this format")
        self._identity = status.st_dev, status.st_ino
        self.incarnation = f"{self.words[_INCARNATION]:016x}"

    @staticmethod
    def make(path: Path, incarnation: str) -> None:
        """Make a new file, with all its blocks allocated."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            head = _MAGIC.to_bytes(8, "little") + int(incarnation, 16).to_bytes(8, "little")
            if os.write(fd, head.ljust(_SIZE, b"\0")) < _SIZE:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        finally:
            os.close(fd)

    @property
    def current(self) -> bool:
        """Whether the directory still has this file. Its inode number is not used again while it is mapped."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    # -- slots --------------------------------------------------------------------------------------------------

    def slot(self, number: int) -> int:
        return 8 + (number & (SLOTS - 1))

    def mark(self, slot: int) -> None:
        self.words[slot] = MARK

    def stamp(self, slot: int) -> None:
        self.words[slot] = _unique()

    def mark_all(self) -> None:
        self._all(MARK)

    def stamp_all(self) -> None:
        self._all(_unique())

    def _all(self, word: int) -> None:
        self.words[8:] = memoryview(word.to_bytes(8, "little") * SLOTS).cast("Q")
        self.words[GENERATIONS] = word

    def touch(self, number: int) -> None:
        """Note that this key was read, so that eviction spares it once."""
        at = number & (SLOTS - 1)
        if not self.used[at]:
            self.used[at] = 1

    # -- waiters ------------------------------------------------------------------------------------------------

    def expect(self, number: int) -> None:
        """Note that a caller waits for this number. Call it before reading whether there is still a reason to wait."""
        self._awaited[number & (SLOTS - 1)] = 1

    def expected(self, number: int) -> bool:
        """Return whether callers wait for this number, and clear the note: waiters that go on call `expect` again."""
        at = number & (SLOTS - 1)
        awaited = bool(self._awaited[at])
        if awaited:
            self._awaited[at] = 0  # before they are woken: a waiter that comes meanwhile sets it again
        return awaited


def _unique() -> int:
    """Return a stamp that no slot has ever had."""
    return int.from_bytes(os.urandom(8), "little") | 2
