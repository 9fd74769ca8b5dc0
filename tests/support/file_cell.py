"""A cell of files: a directory that the processes of one machine share. It has no clock and no expiry."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from stampede.engines.cells import Cell, Faster, Seen, Version

__all__ = ["FileCell"]


class FileCell(Cell):
    """Each name is a file. The bytes of a file are also its version, because no bytes are written twice."""

    silence = 5.0

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, names: Sequence[str]) -> list[Seen]:
        found = [self._read(name) for name in names]
        return [Seen(data, data) for data in found]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with open(self._directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._read(name) != version:
                return Faster()
            if data is None:
                self._path(name).unlink()
            else:
                new = self._directory / "new"
                new.write_bytes(data)
                os.replace(new, self._path(name))
            return data

    def _read(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> Path:
        return self._directory / sha256(name.encode()).hexdigest()  # a name may be too long for a file name
