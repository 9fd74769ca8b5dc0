"""`stampede stats`: what an engine holds, or its servers say of themselves, at this moment, whoever stored it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from stampede.cli.address import cache_of
from stampede.cli.show import say, table
from stampede.engines import open_engine
from stampede.engines.disk import DiskEngine
from stampede.engines.disk.boot import clock
from stampede.engines.disk.database import Database
from stampede.engines.flock import dead, pid_here
from stampede.errors import EngineError, OptionError
from stampede.ports import Engine
from stampede.settings import CacheSettings

__all__ = ["stats"]


class Lease(NamedTuple):
    name: str  # a key with its generation before it, or a lock's name
    holder: int | None  # the process, if it is one of this machine
    seconds: float  # until its end, unless it is renewed


class Holdings(NamedTuple):
    fresh: int
    stale: int
    bytes: int  # of values and keys
    on_disk: int
    leases: list[Lease]


def stats(settings: CacheSettings, *, as_json: bool) -> int:
    """Print the entries, bytes and leases of a disk cache; of Redis, what its servers say of themselves."""
    cache_of(settings).close()
    engine = open_engine(settings.url)
    try:
        if not isinstance(engine, DiskEngine):
            return _facts(engine, as_json=as_json)
        held = holdings(engine.directory)
        directory = str(engine.directory)
    finally:
        engine.close()
    if as_json:
        leases = [each._asdict() for each in held.leases]
        say(json.dumps({"directory": directory, **held._asdict(), "leases": leases}, indent=2))
        return 0
    say(directory)
    rows = [
        ("entries, fresh", f"{held.fresh:,}"),
        ("entries, stale", f"{held.stale:,}"),
        ("bytes of keys and values", f"{held.bytes:,}"),
        ("bytes on disk", f"{held.on_disk:,}"),
        ("leases and locks standing", f"{len(held.leases):,}"),
    ]
    table(["", "now"], rows)
    if held.leases:
        table(
            ["held", "by process", "s left"],
            [(each.name, str(each.holder or "?"), f"{each.seconds:.1f}") for each in held.leases[:20]],
        )
    return 0


def _facts(engine: Engine, *, as_json: bool) -> int:
    servers = engine.facts()
    if not servers:
        raise OptionError(
            f"{engine.called} isn't asked for what it holds: its own tools tell; and what one process has of it, that "
            "process does, by get_cache().stats()"
        )
    if as_json:
        named = {
            name: {re.sub(r"\W+", "_", what): value for what, value in facts.items()} for name, facts in servers.items()
        }
        say(json.dumps(named, indent=2))
        return 0
    for name, facts in servers.items():
        say(name)
        table(["", "now"], [(what, _text(value)) for what, value in facts.items()])
    return 0


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value or "no limit"


def holdings(directory: Path) -> Holdings:
    """What a directory's entries and leases come to. One look; nothing is kept from writing meanwhile."""
    database = Database(directory, 2.0)
    try:
        return database.patiently(lambda: _look(database))
    finally:
        database.close()


def _look(database: Database) -> Holdings:
    with database.reading() as (_, connection):
        now = clock()
        sums = "count(*), total(fresh > ?1), total(length(key) + length(value))"
        kept, fresh, size = connection.execute(f"SELECT {sums} FROM entries WHERE keep > ?1", (now,)).fetchone()
        leases = connection.execute("SELECT name, holder, ends FROM leases WHERE ends > ? ORDER BY ends", (now,))
        alive = database.directory / "alive"
        standing = [
            Lease(_readable(name), pid_here(holder), ends - now)
            for name, holder, ends in leases.fetchall()
            if not dead(alive, holder)
        ]
    return Holdings(int(fresh), kept - int(fresh), int(size), _on_disk(database.directory), standing)


def _readable(name: bytes) -> str:
    return _GENERATION.sub("", name.decode("utf-8", "backslashreplace"), count=1)


_GENERATION = re.compile(r"^[0-9a-f.]*(,[0-9a-f.]*)?/?\|")  # before a key; the name of a lock has none


def _on_disk(directory: Path) -> int:
    try:
        return sum(each.stat().st_size for each in directory.iterdir() if each.is_file())
    except OSError as error:
        raise EngineError(f"can't look into {directory}: {error}") from error
