"""A memory cell that notifies of changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stampede.engines.cells import Faster, Version, WatchingCell
from stampede.testing.cells import MemoryCell

__all__ = ["WatchedMemoryCell"]


class WatchedMemoryCell(MemoryCell, WatchingCell):
    """A memory cell that also notifies of changes."""

    def __init__(self, **can: Any) -> None:
        super().__init__(**can)
        self._told: dict[str, list[Callable[[], object]]] = {}

    def watch(self, name: str, notify: Callable[[], object]) -> Callable[[], object]:
        with self._lock:
            self._told.setdefault(name, []).append(notify)
        return lambda: self._forget(name, notify)

    def _forget(self, name: str, notify: Callable[[], object]) -> None:
        with self._lock:
            self._told[name].remove(notify)

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self._lock:
            swapped = super().swap(name, version, data, ttl)
            those = list(self._told.get(name, ()))
        for notify in those:
            notify()
        return swapped
