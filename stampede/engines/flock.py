"""Signs of life: a file per process that the kernel unlocks when the process ends, however it ends.

The lock says nothing of leases: a frozen process keeps it, and those are rows with an end. It only tells that a
holder is dead, so that nobody waits for the end of a dead holder's lease.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from stampede.errors import EngineError

__all__ = ["Life", "dead", "is_there", "no_such_process", "pid_here", "process", "shut", "sweep", "try_lock", "unlock"]

_NAME = re.compile(r"([0-9]{1,9})-([0-9]{1,20})(-[0-9a-f]{12})?", re.ASCII)
"""What names look like. One that doesn't came out of a damaged or hostile file, and may lead anywhere."""


def try_lock(fd: int) -> bool:
    """Take the whole file for this open file alone, if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give it back. Never in a forked child: the open file is the parent's too, and so is the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_there(fd: int, path: str | Path) -> bool:
    """Whether this open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def shut(fd: int) -> None:
    """Close what may be closed already, or was never opened: below 0, gevent's `os.close` raises a ValueError."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


class Life:
    """This process's name among those that share a folder, and the file that is locked while it lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._name = ""
        self._fd = -1

    @property
    def name(self) -> str:
        """The name, under a lock that stands. A new one after a fork, or when somebody has removed the file."""
        with self._lock:
            try:
                # Who sweeps may remove a new file before it is locked.
                while self._fd < 0 or not os.fstat(self._fd).st_nlink:
                    self._begin()
            except OSError as error:
                raise EngineError(
                    f"can't use {self._folder}: {error}: give a directory that can be made and written"
                ) from error
            return self._name

    def _begin(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._name, self._fd = f"{process()}-{os.urandom(6).hex()}", -1
        self._folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._folder / self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def is_mine(self, name: str) -> bool:
        return bool(name) and name == self._name

    def close(self) -> None:
        """End here: what this name holds is anybody's."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)  # this ends it; the file is removed as well, or by the next one that sees it
                with suppress(OSError):
                    (self._folder / self._name).unlink()

    def start_again(self) -> None:
        """In a forked child: close without unlocking, since the life is the parent's."""
        self._lock = threading.RLock()
        fd, self._fd, self._name = self._fd, -1, ""
        if fd >= 0:
            os.close(fd)


def dead(folder: Path, name: str) -> bool:
    """Whether the process of this name has ended. Its file goes with the first who notices."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return True  # nobody's name: it must neither be opened nor removed
    path = folder / name
    if no_such_process(name):
        path.unlink(missing_ok=True)  # some child has it open, and the lock with it
        return True
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # out of files, no right to look: nobody knows, so the lease's end decides
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def sweep(folder: Path) -> None:
    """Remove the files of the dead."""
    with suppress(OSError):  # what can't be swept now will be another time
        for name in os.listdir(folder):
            dead(folder, name)


def process() -> str:
    """This process's number, and where that number is valid."""
    return f"{os.getpid()}-{_pid_namespace()}"


def pid_here(name: str) -> int | None:
    """The process's number, if it has one that means the same process here."""
    parts = _NAME.fullmatch(name)
    return int(parts[1]) if parts is not None and parts[2] == str(_pid_namespace()) else None


def no_such_process(name: str) -> bool:
    """Whether the process of this name has ended, as far as can be told by its number."""
    pid = pid_here(name)
    try:
        if pid is not None:
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # else it is another user's
    return False


@cache
def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
