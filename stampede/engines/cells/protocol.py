"""What the author of an engine writes: a cell that can be read, and swapped for another if nobody was faster.

    class MyCell(Cell):
        def read(self, names):
            return [Seen(...) for name in names]

        def swap(self, name, version, data, ttl):
            ...                                             # in one step: is `version` what is there? Then write
            return new_version                              # or Faster()

    def from_url(url, **options):                           # the entry point, in the group `stampede.engines`
        return MyCell(...)

Claims, stores, locks, batches and both colours are made of that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Cell", "Faster", "Seen", "Version", "WatchingCell"]

Version = Any
"""What tells one writing of a name from every other, compared by `==`; None: nothing is there.

It must never come back, also not after the name was removed and written again (a row's own counter that begins anew
with each row would): random bytes will do, or a number that the whole store counts up. So will a hash of the bytes
(an ETag), or the bytes themselves: we write none twice.
"""


class Seen(NamedTuple):
    """What a name has."""

    data: bytes | None  # None: nothing is there
    version: Version = None  # given back to `swap`
    age: float | None = None  # seconds since it was written, by the store's own clock; None: it can't say


NOTHING = Seen(None)


class Faster(NamedTuple):
    """A swap's other answer: something else is there than was seen, and nothing was changed."""

    seen: Seen | None = None
    """What is there instead, of stores that say so in the same round trip (see `tells`). None: it is read again."""


class Cell(ABC):
    """Named bytes, each with a version, in a store that many processes see.

    Names are 1 to 250 printable ASCII characters without blanks, and are exact: `a` and `A` are two. Each verb may be
    called from many threads at once, and says by whatever exception it likes that the store is in trouble: callers get
    an EngineError. What became of a swap that has raised need not be known. Verbs don't retry a swap by themselves.
    """

    ends: bool = False
    """What was given a ttl is removed by the store, by itself, some time after (never before) it is over. Elsewhere it
    stays until its name is written again, or swept: nobody asks for it."""

    grows: bool = False
    """Versions are ints, and each writing of a name has a greater one than all before it, also after a removal: they
    are the fences of locks."""

    ages: bool = False
    """`read` tells ages. Elsewhere leases end by the clocks of those who watch them, and what is kept gets older by the
    wall clock of its writer, as far as a reader doesn't know better."""

    tells: bool = False
    """Faster says what is there instead: a claim where nothing was is one round trip."""

    longest: int | None = None
    """Bytes of `data` at most; what is larger is never given to `swap`. It may be found out by the first question."""

    at_once: int | None = None
    """Names of one `read` at most."""

    @abstractmethod
    def read(self, names: Sequence[str]) -> list[Seen]:
        """What each name has, in this order: in one round trip where that can be. No name comes twice.

        Whatever a swap that has returned, anywhere, has written is seen: no replica that lags may answer.
        """

    @abstractmethod
    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        """Write `data` if what is there has this version (None: if nothing is there), and return the new version;
        Faster, if it hasn't. One step: of many that swap at once, from whichever machines, one is granted it.

        With `data` None remove it, and return anything. After `ttl` seconds (more than 0, or infinite) nobody needs it
        any more: tell the store if it has ends, or keep it beside the data for who sweeps; it may stay longer.
        """

    def ping(self) -> float:
        """Seconds of one round trip."""
        start = time.perf_counter()
        self.read(["ping"])
        return time.perf_counter() - start

    def close(self) -> None:
        """Let go of everything, for good."""
        return

    def start_again(self) -> None:
        """In a forked child: forget connections, without a word to the server. They are the parent's."""
        return


class WatchingCell(Cell):
    """One that tells of changes, so that those who wait are woken and needn't look again and again."""

    @abstractmethod
    def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        """Have `told()` called, by whichever thread, after each change of this name; returns what ends that.

        Whatever is changed after this has returned is told: who reads behind it misses nothing. It may be called for
        no reason, and should be where something may have been missed, as after a lost connection.
        """
