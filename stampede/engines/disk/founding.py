"""A directory's files: begun, moved aside, swept up."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from stampede.engines.disk import boot
from stampede.engines.disk.stamps import Stamps

__all__ = ["file_of", "found", "move_aside", "stamps_of"]

SCHEMA = Path(__file__).with_name("schema.sql")
FORMAT = 3
"""In the file names: another layout is another file, so that two releases can share a directory."""


def stamps_of(directory: Path) -> Path:
    return directory / f"stamps-{FORMAT}"


def file_of(directory: Path, incarnation: str) -> Path:
    """The database that stamps name."""
    return directory / f"cache-{FORMAT}-{incarnation}.sqlite"


def found(directory: Path) -> None:
    """Begin a new database and its stamps, unless another process is faster."""
    incarnation = os.urandom(8).hex()
    file, unborn = file_of(directory, incarnation), directory / f"stamps-{FORMAT}-{incarnation}"
    unneeded = [unborn, *_files(file)]
    try:
        _create(file)
        Stamps.make(unborn, incarnation)
        os.link(unborn, stamps_of(directory))
        unneeded = [unborn]
        _remove_orphans(directory, file)
    except FileExistsError:
        pass  # another process was first
    finally:
        for path in unneeded:
            path.unlink(missing_ok=True)


def move_aside(file: Path) -> Path:
    """Where a damaged database is to be found from now on: in the place of the one that was moved before it."""
    aside = file.with_name(f"cache-{FORMAT}.damaged")
    with suppress(FileNotFoundError):
        os.replace(file, aside)
    for path in _files(file):
        path.unlink(missing_ok=True)
    return aside


def _remove_orphans(directory: Path, ours: Path) -> None:
    """What an earlier beginning left that was cut short, or whose stamps were removed."""
    for path in directory.glob(f"*-{FORMAT}-*"):
        with suppress(OSError):  # another process was first
            if ours.stem not in path.name and time.time() - path.stat().st_mtime > 3600:  # or it is being begun
                path.unlink()


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
