"""The verbs as SQL statements: what each verb reads and changes. Each change is decided in one transaction."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from zlib import crc32

from stampede.engines.disk.database import DiskDatabase, Locked, Write
from stampede.engines.disk.opened import Opened
from stampede.engines.disk.stamps import HAND, MARK, SLOTS
from stampede.engines.kit.boot_clock import clock
from stampede.engines.kit.failures import decode_past, encode_past
from stampede.engines.kit.flock import dead, pid_here, process
from stampede.engines.kit.wake import LOOK, WakeFiles
from stampede.engines.kit.whereabouts import here
from stampede.engines.kit.worker_threads import Run
from stampede.errors import EngineError, TooLarge
from stampede.model import record
from stampede.model.entry import Entry
from stampede.model.lock_queue import SAFETY
from stampede.model.ports import Ask, Busy, Found, Granted, Looked, Reply, Shown, Ticket
from stampede.model.record import NOTHING, Change, Keeps, Kept, Lease, Past, Record
from stampede.runtime import forks
from stampede.runtime.colour import Colour

__all__ = ["Awaited", "Port", "Rows", "bell_of", "key_number", "lock_number"]

T = TypeVar("T")

SWEEP = 60.0  # seconds between two removals of expired leases, locks and failures
LOG = 16 << 20  # bytes of the file system that are left free: SQLite's log is cut to this size
PAGE = 1000  # rows of one page of `page`

_MESSAGE = 4000
_LEAST = -(1 << 63)
_LONGEST = 900_000_000  # SQLite's own limit is a little above

# The casts make each column bytes or a number, even if the file is damaged.
_COLUMNS = (
    "key, CAST(ifnull(id, '') AS BLOB), "
    + ", ".join(f"CAST(ifnull({name}, 0) AS REAL)" for name in ("fresh", "keep", "cost", "margin", "ttl"))
    + ", raised, CAST(ifnull(value, '') AS BLOB)"
)
_LEASE_COLUMNS = "token, CAST(ifnull(leases.ends, 0) AS REAL), holder, CAST(ifnull(fence, 0) AS INTEGER)"
_PAGE = "SELECT number, key, CAST(ifnull(keep, 0) AS REAL) FROM entries WHERE number > ? ORDER BY number LIMIT ?"
_LOOK = "SELECT key, id, fresh, keep, value FROM entries WHERE number = ?"  # the value's header has the other columns
_LEASE = f"SELECT {_LEASE_COLUMNS} FROM leases WHERE number = ?"
_STATE = f"""
    SELECT {_COLUMNS}, leases.number IS NOT NULL, {_LEASE_COLUMNS},
        pasts.story, CAST(ifnull(pasts.ends, 0) AS REAL)
    FROM (SELECT ? AS asked)
        LEFT JOIN entries ON entries.number = asked
        LEFT JOIN leases ON leases.number = asked
        LEFT JOIN pasts ON pasts.number = asked
"""
_DECIDED = _STATE.replace("ifnull(value, '')", "''")  # for changes that do not need the value itself

_Name = tuple[int, bytes]

Awaited: TypeAlias = tuple[float, Iterable[str]] | None
"""How many seconds a waiter waits if it is not woken, and the processes that hold what it waits for. None: do not wait,
because something has changed already."""


@lru_cache(8192)
def key_number(key: str, person: bytes = b"") -> _Name:
    """Return the 64-bit hash of a key, by which its row is found, and its bytes, which are compared with the row's."""
    raw = key.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=8, person=person).digest(), "little", signed=True), raw


def lock_number(name: str) -> _Name:
    """Return the 64-bit hash of a lock's name, and its bytes."""
    return key_number(name, b"lock")


def bell_of(number: int) -> int:
    """Return the bell for a number. All numbers of a slot share it: `expected` clears the note for all of them."""
    return number & (SLOTS - 1)


class Rows:
    """The entries, leases and generations of one directory, as one process uses them."""

    def __init__(self, database: DiskDatabase, max_bytes: int) -> None:
        self.database = database
        self._max_bytes = max_bytes
        self.wake_files = WakeFiles(database.directory, dead)
        self._swept = 0.0
        # By scope: where its generation was read, the proof that it is still the same, and its name.
        self._known: dict[str, tuple[Opened, Ticket, str]] = {}

    # -- hits ---------------------------------------------------------------------------------------------------

    def look(self, key: str) -> Found | None:
        """Return the entry if it is fresh. None: it is not, or the database can't be read just now; claim."""
        number, raw = key_number(key)
        now = clock()
        try:
            opened = self.database.opened(now)
            stamp = opened.stamps.words[8 + (number & 0xFFFF)]  # sampled before the read: see `stamps.py`
            row = self.database.row(opened, _LOOK, (number,))
        except (EngineError, Locked):
            return None
        if row is None or type(row[2]) is not float or row[2] <= now or type(row[3]) is not float or row[0] != raw:
            return None
        _, id, fresh, keep, value = row
        return self._found(opened, number, Entry(value, id, fresh=fresh - now, keep=keep - now), stamp)

    def generation_at_hand(self, scope: str) -> str | None:
        """Return the generation that was read last, unless there was a bump since. None: read it."""
        known = self._known.get(scope)
        if known is None:
            return None
        opened, ticket, generation = known
        try:
            if self.database.opened(clock()) is not opened:
                return None
        except (EngineError, Locked):
            return None
        return generation if _unchanged(ticket) else None

    def ticket_of_generation(self, scope: str) -> Ticket | None:
        known = self._known.get(scope)
        return None if known is None else known[1]

    # -- claims -------------------------------------------------------------------------------------------------

    def answer(self, key: str, token: bytes, ask: Ask) -> Reply | None:
        """Return the answer to a claim if a plain read decides it. None: it needs a transaction."""
        number, raw = key_number(key)
        now = clock()
        database = self.database
        opened = database.opened(now)
        stamp = opened.stamps.words[8 + (number & 0xFFFF)]  # before the read: a later change also changes the stamp
        row = database.row(opened, _STATE, (number,))
        was = NOTHING if row is None else _record_of(row, raw)
        reply = self._decide(was, token, ask, now)[1]
        if isinstance(reply, Found):
            return self._found(opened, number, reply.entry, stamp)
        return None if isinstance(reply, Granted) else reply

    def claim(self, key: str, token: bytes, ask: Ask) -> Reply:
        """Answer a claim in a transaction. A lease that is granted is stored by then."""
        return self.change(key, self._decide, token, ask, state=_STATE)

    def change(self, key: str, question: Callable[..., Change[T]], *terms: Any, state: str = _DECIDED) -> T:
        """Return the answer of a function of `model/record.py`. By then the key has changed, and waiters are woken."""
        number, raw = key_number(key)
        with self.database.writing() as write:
            now = clock()
            was = _record(write, state, number, raw)
            after, answer, _ = question(was, *terms, now)
            if after is not was:
                self._become(write, number, raw, was, after, now)
        if was.lease is not None and (after.lease is None or after.lease.token != was.lease.token):
            self.wake(write.opened, number, bell_of(number))
        return answer

    def _found(self, opened: Opened, number: int, entry: Entry[Any], stamp: int) -> Found:
        stamps = opened.stamps
        stamps.touch(number)
        if stamp == MARK:
            return Found(entry)
        return Found(entry, Ticket(stamps.words, stamps.slot(number), stamp, opened.pulse))

    def _decide(self, was: Record, token: bytes, ask: Ask, now: float) -> Change[Reply]:
        """Decide a claim. A lease whose holder is dead does not count."""
        lease = was.lease
        if lease is not None and lease.token != token and not self._is_valid(lease, now):
            was = Record(was.kept, None, was.past)
        return record.claim(was, token, ask, now, holder=process())

    def _is_valid(self, lease: Lease, now: float) -> bool:
        """Return whether a lease is valid: it has not ended, and its holder lives."""
        return lease.end > now and not dead(lease.holder)

    def wake(self, opened: Opened, number: int, bell: int) -> None:
        """Wake the waiters for this number in all processes; call it after the commit. Mostly there are none."""
        if opened.stamps.expected(number):
            self.wake_files.ring(bell)

    def expect(self, number: int) -> None:
        """Note that a caller waits for this number. Call it before reading whether there is still a reason to wait."""
        self.database.opened().stamps.expect(number)

    def awaited(self, key: str, busy: Busy) -> Awaited:
        """Return how long to wait for the lease that `busy` names. None: it has ended already."""
        now = clock()
        row = self.database.row(self.database.opened(now), _LEASE, (key_number(key)[0],))
        lease = _lease_of(row) if row is not None else None
        if lease is None or lease.token != busy.token or not self._is_valid(lease, now):
            return None
        return min(lease.end - now, SAFETY), {lease.holder}

    # -- the store ----------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[str]) -> list[Entry[Any] | None]:
        now = clock()
        names = [key_number(key) for key in keys]
        rows: dict[int, tuple[Any, ...]] = {}
        with self.database.reading() as (opened, connection):
            for start in range(0, len(names), 500):
                some = [number for number, _ in names[start : start + 500]]
                marks = ",".join("?" * len(some))
                sql = f"SELECT number, {_COLUMNS} FROM entries WHERE number IN ({marks})"
                rows.update((number, row) for number, *row in connection.execute(sql, some))
        found: list[Entry[Any] | None] = []
        for number, raw in names:
            row = rows.get(number)
            entry = record.served(_kept(row), now) if row is not None and row[0] == raw else None
            found.append(entry)
            if entry is not None:
                opened.stamps.touch(number)
        return found

    def show(self, key: str) -> Shown:
        number, raw = key_number(key)
        with self.database.reading() as (_, connection):
            now, was = clock(), _record(connection, _STATE, number, raw)
        entry, lease = record.served(was.kept, now), was.lease
        if lease is None or not self._is_valid(lease, now):
            return Shown(entry, b"")
        pid = pid_here(lease.holder) if isinstance(lease.holder, str) else None
        host = here().rpartition(":")[0]  # the directory is on this machine, but the holder may be in another container
        return Shown(entry, lease.token, lease.end - now, f"{host}:{'' if pid is None else pid}")

    def page(self, prefix: str, cursor: int | None = None) -> tuple[list[str], int | None]:
        """Return one page of keys. Pages go by number, over all keys: each takes the same time, however few match."""
        raw = prefix.encode("utf-8", "surrogatepass")
        with self.database.reading() as (_, connection):
            rows = connection.execute(_PAGE, (_LEAST if cursor is None else cursor, PAGE)).fetchall()
        now = clock()
        found = [key for _, key, keep in rows if keep > now and type(key) is bytes and key.startswith(raw)]
        after = rows[-1][0] if len(rows) == PAGE else None
        return [key.decode("utf-8", "surrogatepass") for key in found], after

    def look_too(self, keys: Sequence[str], scopes: Sequence[str]) -> tuple[Looked, list[str]]:
        return {key: self.look(key) for key in keys}, [self.generation(scope) for scope in scopes]

    def generation(self, scope: str, *, surely: bool = False) -> str:
        """Return the generation of a scope. It is remembered until the next bump. `surely`: check first that the
        directory still uses this database."""
        opened = self.database.opened(None if surely else clock())
        stamps, known = opened.stamps, self._known.get(scope)
        slot = stamps.slot(_number_of_scope(scope))
        stamp = stamps.words[slot]  # before the read: see `stamps.py`
        if stamp == MARK and not surely:  # the mark may stay for ever, if the database was replaced: check that
            return self.generation(scope, surely=True)
        if known is not None and known[0] is opened and known[1].stamp == stamp != MARK:
            return known[2]
        with self.database.reading() as (_, connection):
            sql = "SELECT CAST(generation AS TEXT) FROM generations WHERE scope IN ('', ?) ORDER BY scope"
            generation = _generation_of([row[0] for row in connection.execute(sql, (scope,))])
        if len(self._known) > 10_000:
            self._known.clear()
        self._known[scope] = opened, Ticket(stamps.words, slot, stamp, opened.pulse), generation
        return generation

    def bump(self, scope: str) -> None:
        with self.database.writing() as write:
            self._change_scope(write, scope)
            write.execute("INSERT OR REPLACE INTO generations VALUES (?, ?)", (scope, os.urandom(4).hex()))

    def soften(self, scope: str) -> None:
        with self.database.writing() as write:
            self._change_scope(write, scope)
            sql = "SELECT CAST(generation AS TEXT) FROM generations WHERE scope = ?"
            hard = "".join(row[0].partition("~")[0] for row in write.execute(sql, (scope,)))
            softer = f"{hard}~{os.urandom(4).hex()}"
            write.execute("INSERT OR REPLACE INTO generations VALUES (?, ?)", (scope, softer))

    def _change_scope(self, write: Write, scope: str) -> None:
        """Mark the slot of a scope's generation, or with "" all slots."""
        if scope:
            write.change_generation(_number_of_scope(scope))
        else:
            write.change_everything()

    # -- storing and evicting -----------------------------------------------------------------------------------------

    def _limit(self, file: Path) -> int:
        """Return how many bytes the database may have: `max_bytes`, or less on a small or nearly full file system. Some
        room is left free for SQLite's log, without which nothing could be evicted."""
        try:
            disk, size = os.statvfs(file), os.stat(file).st_size
        except FileNotFoundError:
            return self._max_bytes  # it was removed: the next call finds out
        if not disk.f_blocks:
            return self._max_bytes  # the file system has no size, or does not tell it
        most = size + disk.f_bavail * disk.f_frsize
        return min(self._max_bytes, most - min(most // 2, LOG))

    def _become(self, write: Write, number: int, raw: bytes, was: Record, after: Record, now: float) -> None:
        """Write the differences between two records of a key to its rows."""
        kept, lease, past = after.kept, after.lease, after.past
        if after is NOTHING:
            write.change(number)  # even if there is no row: a local tier may still have an entry that was evicted here
            write.execute("DELETE FROM entries WHERE number = ? AND key = ?", (number, raw))
        elif kept is not None and kept is not was.kept:
            write.change(number)
            if was.kept is not None and kept.entry is was.kept.entry:
                sql = "UPDATE entries SET fresh = ?, gone = ? WHERE number = ?"
                write.execute(sql, (kept.fresh, kept.gone, number))
            elif was.kept is not None and was.kept.entry.id == kept.entry.same_as:  # the value stays where it is
                sql = "UPDATE entries SET id = ?, fresh = ?, keep = ?, gone = ?, ttl = ? WHERE number = ?"
                write.execute(sql, (kept.entry.id, kept.fresh, kept.keep, kept.gone, kept.entry.ttl, number))
            else:
                self._put(write, number, raw, kept, now)
        if lease is not was.lease:
            _put_lease(write, number, lease)
        if past is not was.past:
            _put_past(write, number, past, now)

    def _put(self, write: Write, number: int, raw: bytes, kept: Keeps, now: float) -> None:
        entry = kept.entry
        size, limit = len(entry.value), self._limit(write.opened.file)
        if size > min(limit, _LONGEST):
            key = raw.decode("utf-8", "surrogatepass")
            raise TooLarge(
                f"the value of {key!r} has {size} bytes: {self.database.directory} can store {limit} at most "
                "(max_bytes, or less on a small file system)"
            )
        self._make_room(write, limit - size, now)
        write.execute(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number, raw, entry.id, kept.fresh, kept.keep, kept.gone,
                entry.cost, entry.margin, entry.ttl, entry.raised, entry.value,
            ),
        )  # fmt: skip

    def _make_room(self, write: Write, limit: int, now: float) -> None:
        """Remove some expired entries; then evict entries that were not read since the hand last came by. Each store
        does a little of this work."""
        write.execute("DELETE FROM entries WHERE number IN (SELECT number FROM entries WHERE gone < ? LIMIT 8)", (now,))
        if now - self._swept > SWEEP:
            self._swept = now
            write.execute("DELETE FROM leases WHERE ends < ?", (now,))
            write.execute("DELETE FROM rooms WHERE ends < ?", (now,))
            write.execute("DELETE FROM pasts WHERE ends < ?", (now,))
        for _ in range(16):
            if not _takes_more(write, limit):
                return
            self._evict(write)

    def _evict(self, write: Write) -> None:
        """Move the hand by one step: evict the next entries in the order of their numbers, but spare those in use once
        (the clock algorithm)."""
        stamps = write.opened.stamps
        sql = "SELECT number FROM entries WHERE number > ? ORDER BY number LIMIT 64"
        numbers = [row[0] for row in write.execute(sql, (stamps.words[HAND] + _LEAST,))]
        stamps.words[HAND] = numbers[-1] - _LEAST if len(numbers) == 64 else 0
        unused = []
        for number in numbers:
            at = number & 0xFFFF
            if stamps.used[at]:
                stamps.used[at] = 0
            else:
                unused.append((number,))
        for each in unused:
            write.execute("DELETE FROM entries WHERE number = ?", each)

    # -- ends and forks -----------------------------------------------------------------------------------------------

    def ping(self) -> None:
        with self.database.writing() as write:
            write.execute("SELECT boot FROM clock").fetchall()

    def close(self) -> None:
        self.database.close()
        self.wake_files.close()

    def start_again(self) -> None:
        forks.each(part.start_again for part in (self.database, self.wake_files))


class Port:
    """The base of the ports of one colour. `run` executes what may wait for another writer."""

    def __init__(self, rows: Rows, colour: Colour, run: Run) -> None:
        self.rows = rows
        self._colour = colour
        self.run = run

    async def read(self, read: Callable[..., T], *args: Any) -> T:
        """Return the result of a read, which runs in the caller's own thread unless the database is locked."""
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
        """Wait for a bell, or until it is time to look again. The bell is listened to before `awaited` reads whether
        there is still a reason to wait: a change in between rings it."""
        wake_files = self.rows.wake_files
        bell, is_woken = wake_files.listen(bell_number)  # False: no process can wake us
        try:
            await self.read(self.rows.expect, number)
            found = await self.read(awaited, name, busy)
            if found is not None:
                longest, holders = found
                for holder in holders:
                    if holder != process():
                        wake_files.watch(holder, bell)
                await self._colour.park(bell, min(timeout, longest if is_woken else LOOK))
        finally:
            wake_files.forget(bell_number, bell)


def _number_of_scope(scope: str) -> int:
    """Return the number whose slot has the stamps of a scope's generation. Keys may share it."""
    return crc32(scope.encode("utf-8", "surrogatepass"))


def _unchanged(ticket: Ticket) -> bool:
    return ticket.stamps[ticket.slot] == ticket.stamp != MARK


def _kept(row: Sequence[Any]) -> Kept:
    _, id, fresh, keep, cost, margin, ttl, raised, value = row[:9]
    return Kept(Entry(value, id, cost, margin, ttl, fresh, keep, bool(raised)), fresh, keep)


def _generation_of(found: list[str]) -> str:
    """Join the generation of all scopes and that of one scope, each with its soft part after a `~`. A scope that was
    never bumped has none."""
    parts = [each.partition("~") for each in found]
    hard = ".".join(hard for hard, _, _ in parts if hard)
    softer = ".".join(softer for _, _, softer in parts)
    return f"{hard}~{softer}" if softer.strip(".") else hard


def _lease_of(row: Sequence[Any]) -> Lease:
    token, end, holder, fence = row
    return Lease(token, end, fence, holder)


def _record(connection: Any, state: str, number: int, raw: bytes) -> Record:
    """Return the record of one key."""
    row, *_ = connection.execute(state, (number,)).fetchall()  # several rows, if the file is damaged
    return _record_of(row, raw)


def _record_of(row: Sequence[Any], raw: bytes) -> Record:
    kept = _kept(row) if row[0] == raw else None
    return Record(kept, _lease_of(row[10:14]) if row[9] else None, None if row[14] is None else _past_of(*row[14:]))


def _past_of(failures: Any, end: float) -> Past | None:
    try:
        return decode_past(failures, end)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None  # the row is damaged


def _put_lease(write: Write, number: int, lease: Lease | None) -> None:
    if lease is None:
        write.execute("DELETE FROM leases WHERE number = ?", (number,))
        return
    values = number, lease.token, lease.end, lease.holder, lease.fence
    write.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", values)


def _put_past(write: Write, number: int, past: Past | None, now: float) -> None:
    if past is None:
        write.execute("DELETE FROM pasts WHERE number = ?", (number,))
    else:
        values = number, encode_past(past, now, past.end, _MESSAGE, record.MOST), past.end
        write.execute("INSERT OR REPLACE INTO pasts VALUES (?, ?, ?)", values)


def _takes_more(write: Write, limit: int) -> bool:
    """Return whether the used pages of the database take more than `limit` bytes. Free pages do not count: SQLite uses
    them again before the file grows."""
    pages: int = write.execute("PRAGMA page_count").fetchall()[0][0]
    if pages * 4096 <= limit:
        return False
    free: int = write.execute("PRAGMA freelist_count").fetchall()[0][0]
    return (pages - free) * 4096 > limit
