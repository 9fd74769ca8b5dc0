"""The disk engine: values, leases and locks in a directory of a local disk, shared by the processes of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stampede.engines.disk.database import DiskDatabase, Locked
from stampede.engines.disk.limits import DiskLimits
from stampede.engines.disk.locks import DiskLocks
from stampede.engines.disk.rows import Port, Rows, bell_of, key_number
from stampede.engines.kit.boot_clock import clock
from stampede.engines.kit.flock import dead
from stampede.engines.kit.url import integer, number, options_of, path_of, safe_url
from stampede.engines.kit.worker_threads import WorkerThreads, here
from stampede.errors import OptionError
from stampede.model import record
from stampede.model.entry import Verdict
from stampede.model.ports import Ask, Busy, Engine, Found, Reply, Side
from stampede.model.record import Change
from stampede.runtime import forks
from stampede.runtime.colour import BLOCKING, SUSPENDING, run_blocking

__all__ = ["DiskEngine", "from_url"]

_LEAST = 1 << 20


class DiskEngine(Engine):
    """About `max_bytes` of data in one directory, shared by all processes of this machine (and user) that open it.
    Entries that are not read are evicted first. `timeout` is how many seconds a writer waits for its turn before
    EngineError. The directory is made if needed, also after it was removed, and a damaged file is moved aside. It must
    be on a local disk: SQLite's log needs memory that all processes share."""

    scheme = "disk"
    pushes = True
    rooms = True
    coherent = True

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = 1 << 30, timeout: float = 2.0) -> None:
        if max_bytes < _LEAST:
            raise OptionError(f"max_bytes is {max_bytes!r}: it must be at least {_LEAST} (1 MiB)")
        if not 0 < timeout < 3600:
            raise OptionError(f"timeout is {timeout!r}: give seconds, more than 0")
        self.directory = Path(directory).expanduser().absolute()
        rows = self._rows = Rows(DiskDatabase(self.directory, timeout), max_bytes)
        self.near = self.recalls = rows
        run = WorkerThreads().run
        self._locks, alocks = DiskLocks(rows, BLOCKING, here), DiskLocks(rows, SUSPENDING, run)
        self.blocking = _side(_Keys(rows, BLOCKING, here), self._locks)
        self.suspending = _side(_Keys(rows, SUSPENDING, run), alocks)
        self._closing = forks.closing(self, rows.close)
        forks.on_fork(rows.database.before_fork)
        forks.in_parent(rows.database.after_fork)
        forks.in_child(rows.start_again)

    def close(self) -> None:
        self._closing()

    def ping(self) -> float:
        start = time.perf_counter()
        self._rows.ping()
        return time.perf_counter() - start

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        locks = len(run_blocking(self._locks.held()))
        return {str(self.directory): self._rows.database.patiently(lambda: self._facts(locks))}

    def _facts(self, locks: int) -> Mapping[str, Any]:
        with self._rows.database.reading() as (_, connection):
            now = clock()
            sums = "count(*), total(fresh > ?1), total(length(key) + length(value))"
            kept, fresh, size = connection.execute(f"SELECT {sums} FROM entries WHERE keep > ?1", (now,)).fetchone()
            holders = [row[0] for row in connection.execute("SELECT holder FROM leases WHERE ends > ?", (now,))]
        return {
            "entries, fresh": int(fresh),
            "entries, stale": kept - int(fresh),
            "bytes of keys and values": int(size),
            "bytes on disk": sum(each.stat().st_size for each in self.directory.iterdir() if each.is_file()),
            "leases and locks standing": len([holder for holder in holders if not dead(holder)]) + locks,
        }


def _side(keys: _Keys, locks: DiskLocks) -> Side:
    limits = DiskLimits(keys.rows.database, keys.run)
    return Side(keys, keys, locks, limits, lists=keys, softens=keys, shows=keys, holds=locks, handover=locks)


def from_url(url: str, **options: Any) -> DiskEngine:
    """Open `disk:///var/cache/app?max_bytes=1000000000&timeout=2`, `disk://~/app` in the home, or `disk://./app` in the
    working directory."""
    return DiskEngine(directory_of(url), **options_of(url, options, _KINDS))


def check_url(url: str) -> None:
    """Raise OptionError for a wrong URL; open nothing."""
    options_of(url, {}, _KINDS)
    directory_of(url)


_KINDS = {"max_bytes": integer, "timeout": number}


def directory_of(url: str) -> Path:
    """Return the directory that a URL names: absolute after three slashes, else in the home or working directory."""
    path = path_of(url, "disk:///var/cache/app, for example")
    if path in ("", "/"):
        raise OptionError(f"{safe_url(url)!r} names no directory: write disk:///var/cache/app, for example")
    return Path(path).expanduser()


# -- the ports ----------------------------------------------------------------------------------------------------
#
# A read takes microseconds, so it runs in the caller's own thread, even in an event loop. A write may wait for another
# writer, so it runs in a worker thread.


def _changing(question: Callable[..., Change[Any]]) -> Any:
    """Return a method that changes one key by a function of `model/record.py`."""

    async def method(self: _Keys, key: str, *terms: Any) -> Any:
        return await self.run(self.rows.change, key, question, *terms)

    return method


def _read(verb: str) -> Any:
    """Return a method that calls the method of `Rows` with this name."""

    async def method(self: _Keys, *terms: Any) -> Any:
        return await self.read(getattr(self.rows, verb), *terms)

    return method


class _Keys(Port):
    """`Claims`, `Store`, `Lists`, `Softens` and `Shows` of one colour."""

    fill, renew = _changing(record.fill), _changing(record.renew)
    set, replace = _changing(record.set), _changing(record.replace)
    expire, invalidate = _changing(record.expire), _changing(record.invalidate)
    get, show, page, look_too = map(_read, ("get", "show", "page", "look_too"))

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        try:
            reply = self.rows.answer(key, token, ask)
        except Locked:
            reply = None
        if reply is not None:
            return reply
        return await self.run(self.rows.claim, key, token, ask)

    async def abandon(self, key: str, token: bytes, verdict: Verdict | None = None, rest: float = 0.0) -> bool:
        return await self.run(self.rows.change, key, record.abandon, token, verdict, rest)

    async def bump(self, scope: str) -> None:
        await self.run(self.rows.bump, scope)

    async def soften(self, scope: str) -> None:
        await self.run(self.rows.soften, scope)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        number = key_number(key)[0]
        await self.park(number, bell_of(number), timeout, self.rows.awaited, key, busy)
        return None

    async def generations(self, scope: str) -> Sequence[str]:
        """Return the present generation. It is read now (`surely`): with one that has just ended, the caller would
        change the key under a name that no reader uses."""
        return [await self.read(lambda: self.rows.generation(scope, surely=True))]
