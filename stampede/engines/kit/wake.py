"""Waking waiters in other processes that share a directory.

A waiting process has a named pipe in the folder `wake`; a process that changes something writes the number of what
changed into each pipe. A pipe holds thousands of such numbers; a full one tells its reader that some were lost. If a
process dies, the next writer removes its pipe. The same thread checks every 10 ms whether the processes that are waited
for still live."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stampede.engines.kit.flock import shut
from stampede.runtime.colour import Bell
from stampede.runtime.threads import begun

__all__ = ["LOOK", "SINGLE", "WakeFiles"]

LOOK = 0.025  # seconds between two looks of waiters that cannot be woken
WATCH = 0.01  # seconds between two checks whether a holder lives
LINGER = 5.0  # seconds that the pipe stays after the last waiter, for the next herd
SINGLE = 1 << 16  # numbers from here on belong to locks

_WORD = 8
_FULL = 1 << 16


class WakeFiles:
    """Bells by number. They ring here and in every other process that uses the directory. For a number from `SINGLE`
    on, one bell rings in each process, that of the longest waiter: only one waiter can get the lock."""

    def __init__(self, directory: Path, dead: Callable[[str], bool]) -> None:
        self._wake = directory / "wake"
        self._dead = dead
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()  # a finalizer, or a signal, may ring in the middle of this
        self._bells: defaultdict[int, dict[Bell, None]] = defaultdict(dict)  # in order of arrival
        self._watched: defaultdict[str, dict[Bell, None]] = defaultdict(dict)
        self._pipe: tuple[Path, int, int] | None = None

    # -- waiting ------------------------------------------------------------------------------------------------

    def listen(self, number: int) -> tuple[Bell, bool]:
        """Return a bell for changes from now on. False means that there is no pipe, so the caller must look now and
        then."""
        bell = Bell()
        with self._lock:
            self._bells[number][bell] = None
            return bell, self._open()

    def watch(self, holder: str, bell: Bell) -> None:
        """Have the bell rung also at the death of this process."""
        with self._lock:
            self._watched[holder][bell] = None

    def listens(self, number: int) -> bool:
        """Return whether any waiter in this process waits for this number."""
        return number in self._bells

    def forget(self, number: int, bell: Bell) -> None:
        with self._lock:
            tables: list[tuple[Any, Any]] = [(self._bells, number)]
            tables += [(self._watched, holder) for holder in list(self._watched)]
            for table, name in tables:
                bells = table.get(name)
                if bells is not None:
                    bells.pop(bell, None)
                    if not bells:
                        del table[name]

    # -- waking -------------------------------------------------------------------------------------------------

    def ring(self, number: int) -> None:
        """Wake the waiters for this number, in all processes."""
        self._ring_here(number)
        mine = self._pipe
        try:
            names = os.listdir(self._wake)
        except OSError:
            return  # no folder, no waiters
        for name in names:
            if mine is None or name != mine[0].name:
                _send(self._wake / name, number)

    def _ring_here(self, number: int) -> None:
        with self._lock:
            bells = list(self._bells.pop(number, ()))
            if number >= SINGLE and bells[1:]:
                self._bells[number] = dict.fromkeys(bells[1:])
                bells = bells[:1]
        for bell in bells:
            bell.ring()

    def _ring_all(self) -> None:
        with self._lock:
            bells = [bell for each in self._bells.values() for bell in each]
            self._bells.clear()
        for bell in bells:
            bell.ring()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Make sure that there is a pipe, and a thread that reads it. Return False if that is impossible."""
        if self._pipe is not None and self._pipe[0].exists():
            return True
        self._close_pipe()  # the directory was removed: the thread ends with its pipe
        path = self._wake / f"{os.getpid()}-{os.urandom(6).hex()}"
        try:
            self._wake.mkdir(parents=True, exist_ok=True)
            os.mkfifo(path, 0o600)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # our own: prevents end-of-file
        except OSError:
            return False
        self._pipe = path, reader, writer
        thread = begun("stampede-wake", self._serve, self._pipe)
        if thread is None:
            self._close_pipe()
        return thread is not None

    def _serve(self, pipe: tuple[Path, int, int]) -> None:
        poll = select.poll()
        poll.register(pipe[1], select.POLLIN)
        idle = looked = time.monotonic()
        while True:
            readable = bool(poll.poll((WATCH if self._watched else LOOK) * 1000))
            now = time.monotonic()
            with self._lock:
                if self._pipe is not pipe:
                    return
                if self._bells:
                    idle = now
                elif now - idle > LINGER:
                    self._close_pipe()
                    return
                news = _read(pipe[1]) if readable else b""
                watched = list(self._watched) if now - looked >= WATCH else []
            for at in range(0, len(news), _WORD):
                self._ring_here(int.from_bytes(news[at : at + _WORD], "little", signed=True))
            if len(news) >= _FULL:
                self._ring_all()
            if watched:
                looked = now
            for holder in filter(self._dead, watched):
                with self._lock:
                    bells = self._watched.pop(holder, ())
                for bell in bells:
                    bell.ring()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            path, reader, writer = self._pipe
            self._pipe = None
            path.unlink(missing_ok=True)
            shut(reader)
            shut(writer)

    def close(self) -> None:
        with self._lock:
            self._close_pipe()
        self._ring_all()

    def start_again(self) -> None:
        """Begin anew in a forked child: pipe, thread and waiters belong to the parent."""
        if self._pipe is not None:
            shut(self._pipe[1])
            shut(self._pipe[2])
        self._begin()


def _send(path: Path, number: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no reader. A new pipe, which has none yet, is too young to be removed
            _remove_old(path)
        return
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.write(fd, number.to_bytes(_WORD, "little", signed=True))
    except OSError:
        pass  # full, so its reader will ring everything; or gone
    finally:
        os.close(fd)


def _remove_old(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > 1:
            path.unlink()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _FULL)
    except OSError:
        return b""
