"""Limits among the processes of this machine: a file per name, locked (flock) for as long as one start is decided."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from errno import ENOSPC
from hashlib import blake2b
from pathlib import Path
from random import random

from stampede.engines.kit.boot_clock import clock
from stampede.engines.kit.flock import is_there, try_lock
from stampede.engines.kit.limits import T, WindowLimits, usage
from stampede.engines.kit.naming import shown
from stampede.errors import EngineClosed, EngineError
from stampede.model.ports import Usage
from stampede.model.window import NOTHING, SECOND, Window, bytes_of, ends, window_of
from stampede.runtime.colour import Bell, Colour

__all__ = ["LimitFiles"]

PATIENCE = 2.0
"""Seconds for which one waits for a file that somebody has locked: he is frozen, or this machine stands still."""

SWEPT = 0.01  # of the new names so many look for those that are over: with a name for each user there may be many

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LENGTH = 65_536


class LimitFiles(WindowLimits):
    """Limits of one colour in one directory. The clock is the machine's, from its start, and nobody can set it.

    A file holds the window in its first line, and behind it the name, for people. Files of limits that are over are
    removed now and then, and by those who list them.
    """

    def __init__(self, directory: Path, colour: Colour) -> None:
        self._directory, self._colour = directory, colour
        self.closed = False

    async def used(self, name: str) -> Usage:
        path = self._path(name)
        return usage(self._read(path)[0] if path.exists() else NOTHING, _now())

    async def listed(self) -> list[tuple[str, Usage]]:
        return sorted((name, usage(window, _now())) for window, name in self._living() if name)

    def _path(self, name: str) -> Path:
        if self.closed:
            raise EngineClosed("file")
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return self._directory / f"limit-{digest}"

    async def _changed(self, name: str, change: Callable[[Window, int], tuple[Window, T]]) -> T:
        try:
            async with _locked(self._path(name), self._colour) as fd:
                before = os.pread(fd, _LENGTH, 0)
                window, _ = _parsed(before)
                after, answer = change(window, _now())
                if after is not window:
                    _put(fd, bytes_of(after) + b"\n" + name.encode("utf-8", "surrogatepass"), before)
        except OSError as error:
            raise EngineError(f"can't keep limits in {self._directory}: {error}") from error
        if not before and random() < SWEPT:
            self._living()
        return answer

    def _living(self) -> list[tuple[Window, str]]:
        """The limits that are not over. The files of the others are removed."""
        found = []
        for path in self._directory.glob("limit-*"):
            window, name = self._read(path)
            if _is_over(window):
                _remove(path)
            else:
                found.append((window, name))
        return found

    def _read(self, path: Path) -> tuple[Window, str]:
        try:
            return _parsed(path.read_bytes())
        except OSError:
            return NOTHING, ""


def _parsed(data: bytes) -> tuple[Window, str]:
    window, _, name = data.partition(b"\n")
    return window_of(window), shown(name)


def _now() -> int:
    return int(clock() * SECOND)


def _is_over(window: Window) -> bool:
    return window.seen + ends(window) <= _now()


def _remove(path: Path) -> None:
    """Unless another process decides by this file now, or has just written to it."""
    with suppress(OSError):  # what can't be removed stays
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # Who waits for the file sees afterwards that another one has its name, or none.
            if try_lock(fd) and is_there(fd, path) and _is_over(_parsed(os.pread(fd, _LENGTH, 0))[0]):
                path.unlink()
        finally:
            os.close(fd)


def _put(fd: int, data: bytes, before: bytes) -> None:
    """The data, or what was there before and an OSError: a disk that is nearly full takes a part."""
    full = os.pwrite(fd, data, 0) < len(data)
    if full:
        os.pwrite(fd, before, 0)
    os.ftruncate(fd, len(before if full else data))
    if full:
        raise OSError(ENOSPC, os.strerror(ENOSPC))


@asynccontextmanager
async def _locked(path: Path, colour: Colour) -> AsyncIterator[int]:
    """The file of this name, while nobody else decides by it."""
    end = time.monotonic() + PATIENCE
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            while not try_lock(fd):
                if time.monotonic() > end:
                    raise EngineError(f"{path} has been locked for {PATIENCE:g} s: by a process that is frozen?")
                await colour.park(Bell(), 0.001)
            if is_there(fd, path):  # else it was removed meanwhile, and others decide by another
                yield fd
                return
        finally:
            os.close(fd)
