"""Move the entries of a diskcache directory into a cache, without running its pickles.

The directory is not trusted: SQLite opens the file read-only, files outside the directory are not read,
and pickles are read by the sealed codec's own reader, which makes builtins and can't call anything."""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from stampede.api.cache import Cache
from stampede.codecs.sealed import Sealed
from stampede.contrib.diskcache.keys import text_of
from stampede.errors import EngineError, OptionError, StampedeError
from stampede.settings.options import LONGEST

__all__ = ["Moved", "move"]

DATABASE = "cache.db"
SHARDS = "[0-9][0-9][0-9]"
"""The folders of a FanoutCache."""

MOST_BYTES = 1_000_000_000
"""No database of SQLite stores a larger value."""

_RAW, _BINARY, _TEXT, _PICKLE = 1, 2, 3, 4
_COLUMNS = "key, raw, expire_time, tag, mode, filename, value"


@dataclass(slots=True)
class Moved:
    """How many entries of a directory were moved, and why the others were not."""

    moved: int = 0
    expired: int = 0
    there: int = 0  # the cache had an entry of this key, which is newer
    skipped: dict[str, list[str]] = field(default_factory=dict)  # by reason: the keys, as far as they can be read


class _Row(NamedTuple):
    key: Any
    raw: Any
    expire_time: Any
    tag: Any
    mode: Any
    filename: Any
    value: Any


class _Skipped(Exception):
    """An entry that is not moved, and why."""


def move(old: Path, cache: Cache, *, json_disk: bool = False) -> Moved:
    """Copy the entries of diskcache's Cache or FanoutCache in the directory `old`. Change nothing there.

    `json_disk`: it was written by JSONDisk."""
    report = Moved()
    for directory in _directories(old):
        for row in _rows(directory):
            key: Any = row.key
            try:
                key = _key(row, json_disk)
                _move(row, directory, key, cache, json_disk, report)
            except _Skipped as reason:
                report.skipped.setdefault(str(reason), []).append(f"{key!r:.60}")
    return report


def _directories(old: Path) -> list[Path]:
    found = [file for file in (old / DATABASE, *sorted(old.glob(f"{SHARDS}/{DATABASE}"))) if file.is_file()]
    if not found:
        raise OptionError(f"{old} is no directory of diskcache: neither it nor {old}/000 has a {DATABASE}")
    inside = old.resolve()
    for file in (each for database in found for each in database.parent.glob(f"{DATABASE}*")):
        # A link may lead to a file of another user, and SQLite waits for ever for a pipe.
        if not file.is_file() or not file.resolve().is_relative_to(inside):
            raise OptionError(
                f"{file} is a link or a pipe, which may lead out of {old}: if you trust it, copy the directory with "
                "`cp -RL`, and import the copy"
            )
    return [file.parent for file in found]


def _rows(directory: Path) -> Iterator[_Row]:
    file = directory / DATABASE
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            for row in connection.execute(f"SELECT {_COLUMNS} FROM Cache"):
                yield _Row(*row)
    except sqlite3.Error as error:
        raise EngineError(f"{file} can't be read: {error}: stop its programs, or copy the directory first") from error


def _move(row: _Row, directory: Path, key: Any, cache: Cache, json_disk: bool, report: Moved) -> None:
    ttl = None if row.expire_time is None else _number(row.expire_time) - time.time()
    if ttl is not None and ttl <= 0:
        report.expired += 1
        return
    value = _value(row, directory, json_disk)
    try:
        tags = () if row.tag is None else (text_of(row.tag),)
        ttl = None if ttl is None or ttl > LONGEST else ttl
        added = cache.add(text_of(key), [value, row.tag], ttl=ttl, tags=tags)
    except EngineError:
        raise
    except StampedeError as error:
        raise _Skipped(str(error)) from error
    report.moved += added
    report.there += not added


def _key(row: _Row, json_disk: bool) -> Any:
    if row.raw == 1 and type(row.key) in (int, float, str, bytes):
        return _from_json(row.key) if json_disk else row.key
    if row.raw == 0 and type(row.key) is bytes:
        return _unpickled(row.key, "the key")
    raise _Skipped("the row is damaged")


def _value(row: _Row, directory: Path, json_disk: bool) -> Any:
    value = row.value if row.filename is None else _content(directory, row.filename)
    if row.mode == _PICKLE and type(value) is bytes:
        return _unpickled(value, "the value")
    if row.mode == _TEXT and type(value) is bytes:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise _Skipped("its file is not UTF-8") from error
    if row.mode in (_RAW, _BINARY) and value is not None:
        return _from_json(value) if json_disk else value
    raise _Skipped("the row is damaged")


def _content(directory: Path, name: Any) -> bytes:
    try:
        file = Path(directory, str(name)).resolve()
        if not file.is_relative_to(directory.resolve()):
            raise _Skipped("its file is outside of the directory")
        if not file.is_file():
            raise _Skipped("its file is missing")
        if file.stat().st_size > MOST_BYTES:
            raise _Skipped("its file is too large")
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise _Skipped("its file can't be read") from error


def _unpickled(body: bytes, what: str) -> Any:
    try:
        return Sealed().load(body, False)
    except Exception as error:  # damaged bytes make the reader raise anything
        raise _Skipped(f"{what} is a pickle of other types than builtins: {error}") from error


def _from_json(data: Any) -> Any:
    try:
        return json.loads(zlib.decompress(data))
    except (TypeError, ValueError, RecursionError, zlib.error) as error:
        raise _Skipped("it is not of a JSONDisk") from error


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise _Skipped("the row is damaged")
    return float(value)
