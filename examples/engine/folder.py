"""An engine that stores values, leases and locks as files of one directory: `folder:///var/cache/shared`."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from stampede.engines.cells import Cell, Faster, Seen
from stampede.errors import OptionError

VERSION = 16  # bytes before the data
YEAR = 365 * 86_400.0


class FolderCell(Cell):
    """A cell with one file per name: its version, then its data. The file's `mtime` is the time when it expires."""

    tells = True  # a swap that comes too late returns the current data

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def read(self, names):
        return [self._seen(self._path(name)) for name in names]

    def swap(self, name, version, data, ttl):
        path = self._path(name)
        with self._alone():
            seen = self._seen(path)
            if seen.version != version:
                return Faster(seen)
            if data is None:
                path.unlink(missing_ok=True)
                return None
            return self._write(path, data, time.time() + min(ttl, YEAR))

    def sweep(self) -> None:
        """Remove the files that have expired. Call this from time to time."""
        with self._alone():
            for path in self.folder.glob("*.cell"):
                if path.stat().st_mtime < time.time():
                    path.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{sha256(name.encode()).hexdigest()}.cell"  # any name, on any file system

    def _seen(self, path: Path) -> Seen:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return Seen(None)
        return Seen(content[VERSION:], content[:VERSION])

    def _write(self, path: Path, data: bytes, end: float) -> bytes:
        version = os.urandom(VERSION)  # unique: no version is ever used twice
        new = path.with_suffix(".new")
        new.write_bytes(version + data)
        os.utime(new, (end, end))
        new.replace(path)  # atomic: readers see the old file, or this one
        return version

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude all other processes. If this one is killed, the kernel releases the lock."""
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # not only closed: a child forked meanwhile has it open, too


def from_url(url: str) -> FolderCell:
    parts = urlsplit(url)
    if parts.query:
        raise OptionError(f"folder:// has no options, so remove {parts.query!r}")
    return FolderCell(parts.path)
