"""Limits among the processes of one machine: each name has a file, which is locked (flock) while it is changed."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from errno import ENOSPC
from hashlib import blake2b
from pathlib import Path

from stampede.engines.kit.boot_clock import clock
from stampede.engines.kit.flock import is_there, try_lock
from stampede.engines.kit.limits import T, WindowLimits, usage
from stampede.engines.kit.naming import shown
from stampede.errors import EngineClosed, EngineError
from stampede.model.limit_window import NOTHING, SECOND, Window, bytes_of, ends, window_of
from stampede.model.ports import Usage
from stampede.runtime.chance import random
from stampede.runtime.colour import Bell, Colour

__all__ = ["LimitFiles"]

PATIENCE = 2.0
"""Seconds to wait for a locked file before EngineError. A lock takes microseconds: its holder is frozen, or the machine
is stuck."""

SWEPT = 0.01  # the share of new names that remove expired limits: with a name for each user there may be many

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LENGTH = 65_536


class LimitFiles(WindowLimits):
    """Limits of one colour in one directory. Their clock counts from the machine's start, so it is never set. A file
    contains the window in its first line, followed by the name, for people. Files of expired limits are removed now and
    then, and when limits are listed."""

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
        """Return the limits that have not expired, and remove the files of the others."""
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
    """Remove a file, unless another process has locked it or has just written to it."""
    with suppress(OSError):  # a file that can't be removed stays
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # A process that waits for this lock sees afterwards, by `is_there`, that the file was removed.
            if try_lock(fd) and is_there(fd, path) and _is_over(_parsed(os.pread(fd, _LENGTH, 0))[0]):
                path.unlink()
        finally:
            os.close(fd)


def _put(fd: int, data: bytes, before: bytes) -> None:
    """Write the data. If a nearly full disk takes only a part of it, restore the former content and raise OSError."""
    full = os.pwrite(fd, data, 0) < len(data)
    if full:
        os.pwrite(fd, before, 0)
    os.ftruncate(fd, len(before if full else data))
    if full:
        raise OSError(ENOSPC, os.strerror(ENOSPC))


@asynccontextmanager
async def _locked(path: Path, colour: Colour) -> AsyncIterator[int]:
    """Open and lock a file while the block runs."""
    end = time.monotonic() + PATIENCE
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            while not try_lock(fd):
                if time.monotonic() > end:
                    raise EngineError(
                        f"{path} has been locked for {PATIENCE:g} s, perhaps by a frozen process: end that process"
                    )
                await colour.park(Bell(), 0.001)
            if is_there(fd, path):  # else the file was removed meanwhile, and other processes use a new one
                yield fd
                return
        finally:
            os.close(fd)
