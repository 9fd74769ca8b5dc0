"""What SQLite complains of: a moment, the world around a file, or the file itself."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

__all__ = ["TROUBLE", "Damaged", "Locked", "is_busy", "is_damaged"]

_WORLD = (
    "SQLITE_ABORT", "SQLITE_AUTH", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_CONSTRAINT", "SQLITE_FULL",
    "SQLITE_INTERRUPT", "SQLITE_IOERR", "SQLITE_LOCKED", "SQLITE_MISMATCH", "SQLITE_MISUSE", "SQLITE_NOLFS",
    "SQLITE_NOMEM", "SQLITE_PERM", "SQLITE_PROTOCOL", "SQLITE_RANGE", "SQLITE_READONLY", "SQLITE_TOOBIG",
)  # fmt: skip
"""What SQLite may say of a good file, too: a full disk, another program's lock, a question of ours that is wrong."""


class Locked(Exception):
    """Readers can't read at this very moment (a recovery, a last one closing). Ask again."""


class Damaged(Exception):
    """A row says what nobody has written."""


# Python can't even tell some errors, whose message has a damaged byte: it raises UnicodeDecodeError instead.
TROUBLE = (sqlite3.Error, UnicodeDecodeError, Damaged)


def is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def is_damaged(error: Exception, file: Path) -> bool:
    """Would a file that was just made not have raised this?"""
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False  # a question of ours that is wrong
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_READONLY":  # what we may write all the same says of itself that we may not
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return name == "SQLITE_IOERR_SHORT_READ" or not name.startswith(_WORLD)
