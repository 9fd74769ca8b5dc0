"""The stamps: a table in shared memory that tells every process at once that a key's entry has changed.

There is a slot for each hash of a key. A writer marks the slot inside its transaction, and puts a unique stamp there
after the commit. A reader samples the slot before it reads, and keeps nothing that it read under a mark. The order
matters: a stamp put before the commit, or sampled after the read, can name an old value for ever. (If one writer's
stamp removes the next one's mark, what is read meanwhile is kept only until that one puts its own.)

Aligned words of 8 bytes are read and written whole by memoryview on every machine that Python 3.11 runs on with 64
bits; the system calls of a transaction stand between the mark, the commit and the stamp, for machines that reorder.

The file is also the directory's identity (which database file is in use). It is made whole, under another name, before
it can be seen: a hole in it would be a SIGBUS on a full disk.
"""

from __future__ import annotations

import mmap
import os
from errno import ENOSPC
from pathlib import Path

__all__ = ["GENERATIONS", "HAND", "MARK", "SLOTS", "WRITER", "DiskStamps", "UnreadableStamps"]

SLOTS = 1 << 16
MARK = 1  # instead of a stamp: a change is under way, or its writer died

_MAGIC = int.from_bytes(b"stampede", "little")
_WORDS = 8 + SLOTS
_SIZE = 8 * _WORDS + 2 * SLOTS

# The words in front of the slots: the process that has last begun to write; where eviction goes on, and so forth.
_WHAT, _INCARNATION, GENERATIONS, WRITER, HAND = range(5)


class UnreadableStamps(Exception):
    """The file is no table of stamps."""


class DiskStamps:
    """One mapping of one file of stamps. It outlives the file's removal, as tickets point into it."""

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
        self.used = view[8 * _WORDS : 8 * _WORDS + SLOTS]  # a byte per slot: asked for since eviction came by
        self._awaited = view[8 * _WORDS + SLOTS :]  # a byte per slot: somebody waits, or did when it last changed
        if self.words[_WHAT] != _MAGIC:
            raise UnreadableStamps(f"{path} doesn't begin as it should")
        self._identity = status.st_dev, status.st_ino
        self.incarnation = f"{self.words[_INCARNATION]:016x}"

    @staticmethod
    def make(path: Path, incarnation: str) -> None:
        """Make a whole new file, every block of it allocated."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            head = _MAGIC.to_bytes(8, "little") + int(incarnation, 16).to_bytes(8, "little")
            if os.write(fd, head.ljust(_SIZE, b"\0")) < _SIZE:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        finally:
            os.close(fd)

    @property
    def current(self) -> bool:
        """Whether the directory still has this very file, whose number is not used again while it is mapped."""
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
        """Remember that this key is in use."""
        at = number & (SLOTS - 1)
        if not self.used[at]:
            self.used[at] = 1

    # -- waiters ------------------------------------------------------------------------------------------------

    def expect(self, number: int) -> None:
        """Note that somebody waits for this number. To be called before it is read whether there is still a reason."""
        self._awaited[number & (SLOTS - 1)] = 1

    def expected(self, number: int) -> bool:
        """Return whether somebody waits, once: those that go on waiting call `expect` again."""
        at = number & (SLOTS - 1)
        awaited = bool(self._awaited[at])
        if awaited:
            self._awaited[at] = 0  # before they are told, or one that comes meanwhile would be forgotten
        return awaited


def _unique() -> int:
    """Return a stamp that no slot ever had."""
    return int.from_bytes(os.urandom(8), "little") | 2
