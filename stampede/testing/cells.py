"""A cell in memory: the base of the tests of cells, and the shortest example of a cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from stampede.engines.cells import Cell, Faster, Seen, Version

__all__ = ["MemoryCell"]


class MemoryCell(Cell):
    """A cell that stores names in a dictionary, as a server would for all its clients. Its abilities are arguments.

    >>> cell = MemoryCell()
    >>> version = cell.swap("a", None, b"1", 60.0)
    >>> cell.read(["a", "b"])
    [Seen(data=b'1', version=1, age=0.0), Seen(data=None, version=None, age=None)]
    >>> cell.swap("a", None, b"2", 60.0)
    Faster(seen=None)
    """

    def __init__(
        self,
        *,
        ends: bool = True,
        grows: bool = True,
        ages: bool = True,
        tells: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ends, self.grows, self.ages, self.tells = ends, grows, ages, tells
        self._clock = clock
        self._lock = threading.RLock()
        self._names: dict[str, tuple[bytes, Version, float, float]] = {}
        self._versions = count(1)

    def read(self, names: Sequence[str]) -> list[Seen]:
        with self._lock:
            return [self._seen(name) for name in names]

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self._lock:
            seen = self._seen(name)
            if seen.version != version:
                return Faster(seen if self.tells else None)
            if data is None:
                del self._names[name]
                return None
            number = next(self._versions)
            now, new = self._clock(), number if self.grows else f"v{number}"
            self._names[name] = data, new, now, now + ttl
            return new

    def _seen(self, name: str) -> Seen:
        data, version, written, end = self._names.get(name, (b"", None, 0.0, 0.0))
        now = self._clock()
        if version is None or (self.ends and end <= now):
            self._names.pop(name, None)
            return Seen(None)
        return Seen(data, version, now - written if self.ages else None)
