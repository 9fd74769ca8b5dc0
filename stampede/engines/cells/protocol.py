"""The interface for authors of engines: a cell of named bytes, which is read, and swapped if it has not changed.

    class MyCell(Cell):
        def read(self, names):
            return [Seen(...) for name in names]

        def swap(self, name, version, data, ttl):
            ...                                             # in one atomic step: compare the version, then write
            return new_version                              # or Faster(), if the version is another one

    def from_url(url, **options):                           # the entry point, in the group `stampede.engines`
        return MyCell(...)

`CellEngine` builds claims, a store, locks, limits and batches from these two verbs, for blocking and async callers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Cell", "Faster", "Seen", "Version", "WatchingCell"]

Version = Any
"""A value that identifies one write to a name. Versions are compared by `==`. None means that nothing is stored.

A version must never be used twice for the same name, not even after the name was removed and written again. A counter
in each row breaks this rule, because it starts again with a new row. Random bytes are good, and so is a counter of the
whole store. A hash of the bytes (an ETag) or the bytes themselves are good, too: `CellEngine` never writes the same
bytes twice.
"""


class Seen(NamedTuple):
    """The state of one name, as it was read."""

    data: bytes | None  # None: nothing is stored
    version: Version = None  # `CellEngine` passes it to `swap`
    age: float | None = None  # seconds since the write, by the store's own clock; None: the store can't tell


NOTHING = Seen(None)


class Faster(NamedTuple):
    """The answer of a swap that changed nothing, because another process was faster: the stored version differs."""

    seen: Seen | None = None
    """The present state, if the store returns it in the same round trip (see `tells`). None: the engine reads again."""


class Cell(ABC):
    """Named bytes, each with a version, in a store that many processes share. A name has 1 to 250 printable ASCII
    characters and no blanks. Names are case-sensitive: `a` and `A` are two names. The engine may call each method from
    many threads at once. A method may raise any exception if the store fails: the caller gets an EngineError. A swap
    that raises may or may not have written. A method must not retry a swap itself."""

    ends: bool = False
    """Whether the store removes data by itself after its ttl: some time later is allowed, earlier is not. Other stores
    keep the data until its name is written again, or until a cleanup removes it. The engine ignores such data."""

    grows: bool = False
    """Whether versions are ints, and each write to a name has a greater version than all writes before it, also after
    a removal. The engine then uses versions as the fences of locks."""

    ages: bool = False
    """Whether `read` returns ages. Without ages, each process counts the time of a lease by its own clock, from when it
    first sees the lease. Entries then age by the wall clock of their writer, unless the reader knows better."""

    tells: bool = False
    """Whether Faster contains the present state. The engine then claims without reading first: a claim of a key that
    is not stored takes one round trip."""

    longest: int | None = None
    """The largest size of `data` in bytes; the engine never passes more to `swap`. None: no limit. A cell that learns
    the limit from its store may set it at the first call."""

    at_once: int | None = None
    """The largest number of names in one `read`. None: no limit."""

    @abstractmethod
    def read(self, names: Sequence[str]) -> list[Seen]:
        """Return the state of each name, in this order; if possible in one round trip. No name occurs twice. The result
        must include every swap that has returned before, on any machine: a lagging replica must not answer."""

    @abstractmethod
    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        """Write `data` if the stored version equals `version` (None: if nothing is stored), and return the new version.
        Otherwise change nothing and return Faster. This is one atomic step: if many callers swap at once, from any
        machines, exactly one succeeds. If `data` is None, remove the name; the engine ignores the version that is
        returned. After `ttl` seconds (more than 0, or infinite) the data is not needed any more. Pass the ttl to the
        store if it can expire data, or store it beside the data for a cleanup. Data may stay longer than that."""

    def ping(self) -> float:
        """Return the seconds of one round trip."""
        start = time.perf_counter()
        self.read(["ping"])
        return time.perf_counter() - start

    def close(self) -> None:
        """Release all connections and files, for good. Calls that are under way in other threads may raise."""
        return

    def start_again(self) -> None:
        """Drop all connections in a forked child, and send nothing on them: they belong to the parent."""
        return


class WatchingCell(Cell):
    """A cell that reports changes, so that waiters are woken and need not poll."""

    @abstractmethod
    def watch(self, name: str, notify: Callable[[], object]) -> Callable[[], object]:
        """Call `notify()` after each change of this name, from any thread. Return a function that ends the watch.

        Every change after `watch` has returned must be reported, so that a caller that reads afterwards misses nothing.
        `notify` may be called without a change. Call it if a change may have been missed, such as after a lost
        connection."""
