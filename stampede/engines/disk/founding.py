"""A directory's files: begun, put in the place of others, moved aside, swept up."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from stampede.engines.disk import boot
from stampede.engines.disk.stamps import Stamps
from stampede.engines.flock import try_lock

__all__ = ["file_of", "found", "move_aside", "replace_unreadable", "stamps_of"]

SCHEMA = Path(__file__).with_name("schema.sql")
FORMAT = 2
"""In the file names: another layout is another file, so that two releases can share a directory."""


def stamps_of(directory: Path) -> Path:
    return directory / f"stamps-{FORMAT}"


def file_of(directory: Path, incarnation: str) -> Path:
    """The database that stamps name."""
    return directory / f"cache-{FORMAT}-{incarnation}.sqlite"


def found(directory: Path, put: Callable[[Path, Path], object]) -> None:
    """A new database and its stamps, in the place of those that are there if `put` replaces, else if none are."""
    incarnation = os.urandom(8).hex()
    file, unborn = file_of(directory, incarnation), directory / f"stamps-{FORMAT}-{incarnation}"
    try:
        _create(file)
        Stamps.make(unborn, incarnation)
        put(unborn, stamps_of(directory))
        _remove_orphans(directory, file)
    except FileExistsError:
        file.unlink(missing_ok=True)  # another process was first
    except BaseException:
        for path in _files(file):
            path.unlink(missing_ok=True)
        raise
    finally:
        unborn.unlink(missing_ok=True)


def replace_unreadable(directory: Path) -> None:
    """Stamps that are none have no mapping, and still an inode to lock."""
    root = stamps_of(directory)
    fd = os.open(root, os.O_RDWR | os.O_CLOEXEC)
    try:
        if try_lock(fd) and os.path.samestat(os.fstat(fd), os.stat(root)):
            found(directory, os.replace)
    finally:
        os.close(fd)


def move_aside(file: Path) -> Path:
    """Where a damaged database is to be found from now on, beside the one that was moved before it."""
    aside = file.with_suffix(f".damaged-{int(time.time())}")
    for path in _files(file):
        _move(path, aside if path == file else None)
    for path in sorted(file.parent.glob("*.damaged-*"), key=lambda path: path.stat().st_mtime)[:-2]:
        path.unlink(missing_ok=True)
    return aside


def _remove_orphans(directory: Path, ours: Path) -> None:
    """What an earlier beginning left that was cut short, or whose stamps were removed."""
    for path in directory.glob(f"*-{FORMAT}-*"):
        if ours.stem not in path.name and ".damaged-" not in path.name:
            try:
                if time.time() - path.stat().st_mtime > 3600:  # younger ones may be somebody's beginning
                    path.unlink()
            except OSError:
                pass  # else another process was first


def _create(file: Path) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        os.chmod(file, 0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN")
        for statement in SCHEMA.read_text().split(";\n"):
            connection.execute(statement)
        connection.execute("INSERT INTO generations VALUES ('', ?)", (os.urandom(4).hex(),))
        connection.execute("INSERT INTO fences VALUES (0, ?)", (int(time.time() * 1000),))
        boot.note(connection, boot.boot, boot.clock(), time.time())
        connection.execute("COMMIT")
    finally:
        connection.close()


def _files(file: Path) -> list[Path]:
    return [file, file.with_name(file.name + "-wal"), file.with_name(file.name + "-shm")]


def _move(path: Path, aside: Path | None) -> None:
    try:
        path.unlink() if aside is None else path.rename(aside)
    except FileNotFoundError:
        pass
