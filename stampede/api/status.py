"""What is known of one key at this moment: what is kept, and who computes it. Nothing is touched by asking."""

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
    """Who computes a key: what isn't known is None.

    An engine keeps `host:pid` beside a lease if it can without a price (memory, disk, Redis; memcached from the moment
    at which the lease is given its holder's name). Since when, and in which thread or task, is known of this process.
    """

    host: str | None = None
    pid: int | None = None
    thread: str | None = None  # the thread's name, or the task's
    seconds: float | None = None  # for which it has been computing
    lease: float | None = None  # seconds for which its lease stands, unless it is renewed

    def __str__(self) -> str:
        where = f"{self.host}:{self.pid}" if self.host is not None and self.pid is not None else self.host or "somebody"
        facts = [f"in {self.thread}"] if self.thread is not None else []
        facts += [f"for {self.seconds:.1f} s"] if self.seconds is not None else []
        facts += [f"its lease ends in {self.lease:.1f} s"] if self.lease is not None else []
        return ", ".join([where, *facts])


@dataclass(frozen=True, slots=True)
class Status(Generic[T]):
    """One key's.

    >>> price.status("tea")
    Status(key='price:("tea")', entry=Entry(...), age=12.5, fresh=587.5, kept=4187.5, holder=None)
    """

    key: str
    entry: Entry[T] | None  # what is kept, fresh or stale
    age: float | None  # seconds since it was stored; None: it has no end from which to tell
    fresh: float  # seconds for which it is fresh yet; 0: it is stale, or nothing is kept
    kept: float  # seconds for which it is kept yet
    holder: Holder | None  # who computes it now


async def status(scope: ScopeSide, key: str) -> Status[Any]:
    """What is kept of the key, and who computes it, as far as this process and the engine know."""
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
    # An engine that doesn't know whose a lease is may not know its token, either.
    if flight is not None and since is not None and (flight.token == shown.token or not shown.holder):
        return Holder(*parts_of(here()), _place(flight), flight.owner.clock() - since, lease)
    return Holder(*parts_of(shown.holder), lease=lease) if shown.token else None


def _place(flight: Flight) -> str | None:
    """The name of the thread or the task that computes."""
    if flight.loop is None:
        return next((thread.name for thread in threading.enumerate() if thread.ident == flight.thread), None)
    work = flight.work
    try:
        tasks = asyncio.all_tasks(flight.loop)
    except RuntimeError:
        return None  # tasks come and go faster than they can be looked at
    return next((task.get_name() for task in tasks if task.get_coro() is work), None)
