"""Files that are locked by the kernel, and the names of the processes that hold something.

A process's name says which process it is on this machine, also after its number is given to another one. It says
nothing of leases, which are rows with an end: it only tells that a holder is dead, so that nobody waits for that end.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["dead", "is_there", "pid_here", "process", "shut", "try_lock", "unlock"]

_NAME = re.compile(r"([0-9]{1,9})-([0-9]{1,20})-([0-9]{0,20})", re.ASCII)
"""Number, namespace of numbers, start. What looks otherwise came out of a damaged or hostile file."""


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


def process() -> str:
    """This process's name."""
    return _name_of(os.getpid())


@cache
def _name_of(pid: int) -> str:
    return f"{pid}-{_pid_namespace()}-{_start_of(pid) or ''}"


def pid_here(name: str) -> int | None:
    """The process's number, if it has one that means the same process here."""
    parts = _NAME.fullmatch(name)
    return int(parts[1]) if parts is not None and parts[2] == str(_pid_namespace()) else None


def dead(name: str) -> bool:
    """Whether the process of this name has ended. Of a process in another container nobody knows."""
    if name == process():
        return False
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        return True  # nobody's name
    pid = pid_here(name)
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is another user's
    return parts[3] != "" and _start_of(pid) not in (None, parts[3])


def _start_of(pid: int) -> str | None:
    """When the process was started, as the kernel counts; "" of one that has ended and was not waited for. None: it
    is not told (outside of Linux)."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state in (b"Z", b"X") else fields[18].decode()


@cache
def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
