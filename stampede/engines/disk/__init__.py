"""The disk engine: values and leases in one directory of a local disk, shared by all processes of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from stampede import forks
from stampede.colour import BLOCKING, SUSPENDING, Colour
from stampede.engines.disk.boot import clock
from stampede.engines.disk.database import Database, Locked
from stampede.engines.disk.limits import DiskLimits
from stampede.engines.disk.locks import LockRows, lock_bell, number_of
from stampede.engines.disk.rows import Rows, bell_of, key_number, lock_number
from stampede.engines.kit.errands import Errands, Run, here
from stampede.engines.url import integer, number, options_of, path_of, safe_url
from stampede.engines.wake import LOOK
from stampede.errors import OptionError
from stampede.ports import Ask, Busy, Engine, Found, Granted, Held, Reply, Side, Versioned
from stampede.room import Queued

__all__ = ["DiskEngine", "from_url"]

T = TypeVar("T")

Awaited: TypeAlias = tuple[float, Iterable[str]] | None

_LEAST = 1 << 20


class DiskEngine(Engine):
    """Keeps at most about `max_bytes` in a directory, whatever processes of this machine (and this user) open it.

    What isn't asked for goes first. `timeout` is how long a writer waits for its turn, before EngineError. The
    directory is made if need be, and again when somebody removes it; a damaged file is moved aside. It must be on
    a local disk: SQLite's log needs memory that all its processes share.
    """

    scheme = "disk"
    fenced = True
    pushes = True
    rooms = True
    coherent = True

    def __init__(self, directory: str | os.PathLike[str], *, max_bytes: int = 1 << 30, timeout: float = 2.0) -> None:
        if max_bytes < _LEAST:
            raise OptionError(f"max_bytes is {max_bytes!r}: it must be at least {_LEAST} (1 MiB)")
        if not 0 < timeout < 3600:
            raise OptionError(f"timeout is {timeout!r}: give seconds, more than 0")
        self.directory = Path(directory).expanduser().absolute()
        rows = self._rows = Rows(Database(self.directory, timeout), max_bytes)
        self.near = self.recalls = rows
        self.blocking = _side(rows, BLOCKING, here)
        self.suspending = _side(rows, SUSPENDING, Errands().run)
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
        return {str(self.directory): self._rows.database.patiently(self._facts)}

    def _facts(self) -> Mapping[str, Any]:
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
            "leases and locks standing": sum(map(self._rows.lives, holders)) + len(LockRows(self._rows).held()),
        }


def _side(rows: Rows, colour: Colour, way: Any) -> Side:
    keys, locks = _Keys(rows, colour, way), _Locks(rows, colour, way)
    limits = DiskLimits(rows.database, way)
    return Side(keys, keys, locks, limits, lists=keys, softens=keys, shows=keys, holds=locks, hands=locks)


def from_url(url: str, **options: Any) -> DiskEngine:
    """`disk:///var/cache/app?max_bytes=1000000000&timeout=2`; `disk://~/app` is in the home, `disk://./app` here."""
    return DiskEngine(directory_of(url), **options_of(url, options, _KINDS))


def check_url(url: str) -> None:
    options_of(url, {}, _KINDS)
    directory_of(url)


_KINDS = {"max_bytes": integer, "timeout": number}


def directory_of(url: str) -> Path:
    """The directory that a URL names: absolute after three slashes, else in the home or the working directory."""
    path = path_of(url, "disk:///var/cache/app, for example")
    if path in ("", "/"):
        raise OptionError(f"{safe_url(url)!r} names no directory: write disk:///var/cache/app, for example")
    return Path(path).expanduser()


# -- the ports ----------------------------------------------------------------------------------------------------
#
# A read takes microseconds, so it is done where it is asked for, also on an event loop. Whatever may wait for
# another writer runs in a thread beside the loop.


class _Port:
    def __init__(self, rows: Rows, colour: Colour, run: Run) -> None:
        self.rows = rows
        self._colour = colour
        self.run = run

    async def read(self, read: Callable[..., T], *args: Any) -> T:
        try:
            return read(*args)
        except Locked:
            return await self.run(self.rows.database.patiently, lambda: read(*args))

    async def park(
        self,
        number: int,
        bell_number: int,
        timeout: float,
        awaited: Callable[[str, Busy], Awaited],
        name: str,
        busy: Busy,
    ) -> None:
        """Wait for the bell of this number, or until it is time to look again. It is listened to before `awaited` looks
        whether there is still a reason to wait: nothing falls between."""
        post = self.rows.post
        bell, told = post.listen(bell_number)
        try:
            await self.read(self.rows.expect, number)
            found = await self.read(awaited, name, busy)
            if found is not None:
                longest, holders = found
                for holder in holders:
                    if not self.rows.life.is_mine(holder):
                        post.watch(holder, bell)
                await self._colour.park(bell, min(timeout, longest if told else LOOK))
        finally:
            post.forget(bell_number, bell)


def _written(verb: str) -> Any:
    async def asked(self: _Keys, *terms: Any, **more: Any) -> Any:
        return await self.run(partial(getattr(self.rows, verb), *terms, **more))

    return asked


def _read(verb: str) -> Any:
    async def asked(self: _Keys, *terms: Any) -> Any:
        return await self.read(getattr(self.rows, verb), *terms)

    return asked


class _Keys(_Port, Versioned):
    """Claims and Store."""

    fill, abandon, renew = map(_written, ("fill", "abandon", "renew"))
    set, replace, expire, invalidate = map(_written, ("set", "replace", "expire", "invalidate"))
    bump, soften = map(_written, ("bump", "soften"))
    get, show, page, generation = map(_read, ("get", "show", "page", "generation"))

    async def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        try:
            reply = self.rows.answer(key, token, ask)
        except Locked:
            reply = None
        if reply is not None:
            return reply
        return await self.run(self.rows.claim, key, token, ask)

    async def wait(self, key: str, busy: Busy, timeout: float) -> Found | None:
        number = key_number(key)[0]
        await self.park(number, bell_of(number), timeout, self.rows.awaited, key, busy)
        return None

    async def generations(self, scope: str) -> Sequence[str]:
        """For who changes a key. A moment ago won't do: he would change it under a name that nobody asks for."""
        return [await self.read(lambda: self.rows.generation(scope, surely=True))]


class _Locks(_Port):
    """Locks, Holds and Hands."""

    def __init__(self, rows: Rows, colour: Colour, run: Run) -> None:
        super().__init__(rows, colour, run)
        self.its = LockRows(rows)

    async def acquire(
        self, name: str, token: bytes, lease: float, *, waits: bool = False, room: float = 1
    ) -> Granted | Busy:
        try:
            busy = self.its.refusal(name, token, room)
        except Locked:
            busy = None
        if busy is not None:
            return busy
        reply = await self.run(self.its.acquire, name, token, lease, waits, room)
        number = lock_number(name)[0]
        if isinstance(reply, Granted) and self.rows.post.listens(lock_bell(number)):
            await self.read(self.rows.expect, number)  # for those that were not woken when it came free
        return reply

    async def renew(self, name: str, token: bytes, lease: float) -> bool:
        return await self.run(self.its.renew, name, token, lease)

    async def release(self, name: str, token: bytes) -> bool:
        return await self.run(self.its.release, name, token)

    async def hand_over(self, name: str, token: bytes, lease: float) -> bool:
        return await self.run(self.its.hand_over, name, token, lease)

    async def wait(self, name: str, busy: Busy, timeout: float) -> None:
        number = number_of(busy.own) if isinstance(busy, Queued) else lock_number(name)[0]
        await self.park(number, lock_bell(number), timeout, self.its.awaited, name, busy)

    async def holder(self, name: str) -> list[tuple[bytes, float]]:
        return await self.read(self.its.holder, name)

    async def held(self, prefix: str = "") -> list[Held]:
        return await self.read(self.its.held, prefix)
