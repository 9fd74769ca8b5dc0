"""Files locked by the kernel, and the names of processes that hold something. A name identifies a process on this
machine, even after its number has been given to another one. It says nothing about leases, which are rows with an end.
It only tells that a holder is dead, so that waiters need not wait for that end."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["dead", "is_there", "pid_here", "process", "shut", "try_lock", "unlock"]

_NAME = re.compile(r"([0-9]{1,9})-([0-9]{1,20})-([0-9]{0,20})", re.ASCII)
"""Process number, namespace of numbers, start time. A name of another form comes from a damaged or hostile file."""


def try_lock(fd: int) -> bool:
    """Lock the whole file for this open file alone. Return False if it is locked already."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock. Never call this in a forked child: the open file, and so the lock, is also the parent's."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_there(fd: int, path: str | Path) -> bool:
    """Return whether this path still leads to this open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def shut(fd: int) -> None:
    """Close a file that may be closed already, or was never opened. (Below 0, gevent's `os.close` raises
    ValueError.)"""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


def process() -> str:
    """Return the name of this process."""
    return _name_of(os.getpid())


@cache
def _name_of(pid: int) -> str:
    return f"{pid}-{_pid_namespace()}-{_start_of(pid) or ''}"


def pid_here(name: str) -> int | None:
    """Return the number in a process's name. None if it is not valid in this namespace of processes."""
    parts = _NAME.fullmatch(name)
    return int(parts[1]) if parts is not None and parts[2] == str(_pid_namespace()) else None


def dead(name: str) -> bool:
    """Return whether the process of this name is known to have ended. False for a process in another container."""
    if name == process():
        return False
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        return True  # no process has such a name
    pid = pid_here(name)
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's process
    return parts[3] != "" and _start_of(pid) not in (None, parts[3])


def _start_of(pid: int) -> str | None:
    """Return when the process was started, in the kernel's ticks. "" if it has ended and is a zombie; None if that is
    unknown (always outside Linux)."""
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
