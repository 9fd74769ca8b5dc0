"""The state of one key at this moment: its entry, and its computing holder. Asking changes nothing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

from stampede.algorithm.flight import Flight
from stampede.algorithm.scope import ScopeSide
from stampede.engines.kit.whereabouts import here, parts_of
from stampede.model.entry import Entry
from stampede.model.ports import Shown

__all__ = ["Holder", "Status", "status"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Holder:
    """The caller that computes a key. What is not known is None. An engine stores `host:pid` with a lease if that costs
    nothing (memory, disk, Redis; memcached only once the lease was given its holder's name). The thread or task, and
    the time, are known for computations of this process only."""

    host: str | None = None
    pid: int | None = None
    thread: str | None = None  # the thread's name, or the task's
    seconds: float | None = None  # how long it has been computing
    lease: float | None = None  # seconds until its lease ends, unless it is renewed

    def __str__(self) -> str:
        where = f"{self.host}:{self.pid}" if self.host is not None and self.pid is not None else self.host or "unknown"
        facts = [f"in {self.thread}"] if self.thread is not None else []
        facts += [f"for {self.seconds:.1f} s"] if self.seconds is not None else []
        facts += [f"its lease ends in {self.lease:.1f} s"] if self.lease is not None else []
        return ", ".join([where, *facts])


@dataclass(frozen=True, slots=True)
class Status(Generic[T]):
    """The state of one key.

    >>> price.status("tea")
    Status(key='price:("tea")', entry=Entry(...), age=12.5, fresh=587.5, kept=4187.5, holder=None)
    """

    key: str
    entry: Entry[T] | None  # the stored entry, fresh or stale
    age: float | None  # seconds since it was stored; None: unknown, as it never expires
    fresh: float  # seconds until it is stale; 0: it is stale, or nothing is stored
    kept: float  # seconds until it is gone
    holder: Holder | None  # the caller that computes it now, if any


async def status(scope: ScopeSide, key: str) -> Status[Any]:
    """Return the key's entry and its computing holder, as far as this process and the engine know."""
    shown, flight = await scope.show(key)
    entry = shown.entry
    return Status(
        key,
        entry,
        None if entry is None or entry.fresh == inf else entry.ttl - entry.fresh,
        0.0 if entry is None else max(entry.fresh, 0.0),
        0.0 if entry is None else max(entry.keep, 0.0),
        _holder(shown, flight),
    )


def _holder(shown: Shown, flight: Flight | None) -> Holder | None:
    lease = shown.lease if shown.token else None
    since = flight.since if flight is not None and not flight.ended else None
    # An engine that doesn't know the holder of a lease may not know its token, either.
    if flight is not None and since is not None and (flight.token == shown.token or not shown.holder):
        return Holder(*parts_of(here()), _worker_name(flight), flight.owner.clock() - since, lease)
    return Holder(*parts_of(shown.holder), lease=lease) if shown.token else None


def _worker_name(flight: Flight) -> str | None:
    """Return the name of the thread or the task that computes."""
    if flight.loop is None:
        return next((thread.name for thread in threading.enumerate() if thread.ident == flight.thread), None)
    work = flight.work
    try:
        tasks = asyncio.all_tasks(flight.loop)
    except RuntimeError:
        return None  # the set of tasks changes too fast to be copied
    return next((task.get_name() for task in tasks if task.get_coro() is work), None)
