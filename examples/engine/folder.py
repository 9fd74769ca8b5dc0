"""Values, leases and locks as the files of one directory: `folder:///var/cache/shared`."""

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
    """A file for each name: its version, then its data. When nobody needs it any more, its `mtime` says."""

    tells = True  # a swap that comes too late knows what is there

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
        """Have it called now and then: what nobody needs any more is removed."""
        with self._alone():
            for path in self.folder.glob("*.cell"):
                if path.stat().st_mtime < time.time():
                    path.unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{sha256(name.encode()).hexdigest()}.cell"  # `a` and `A`, and `a/b`, on any file system

    def _seen(self, path: Path) -> Seen:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return Seen(None)
        return Seen(content[VERSION:], content[:VERSION])

    def _write(self, path: Path, data: bytes, end: float) -> bytes:
        version = os.urandom(VERSION)  # it never comes back
        new = path.with_suffix(".new")
        new.write_bytes(version + data)
        os.utime(new, (end, end))
        new.replace(path)  # in one step: who reads sees the old one, or this
        return version

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One at a time, of all processes; the kernel ends it for who is killed."""
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has it open


def from_url(url: str) -> FolderCell:
    parts = urlsplit(url)
    if parts.query:
        raise OptionError(f"folder:// has no options, and {parts.query!r} is one")
    return FolderCell(parts.path)
