"""A cell in memory that tells of changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stampede.engines.cells import Faster, Version, WatchingCell
from stampede.testing.cells import MemoryCell

__all__ = ["WatchedMemoryCell"]


class WatchedMemoryCell(MemoryCell, WatchingCell):
    """One that tells of changes, too."""

    def __init__(self, **can: Any) -> None:
        super().__init__(**can)
        self._told: dict[str, list[Callable[[], object]]] = {}

    def watch(self, name: str, told: Callable[[], object]) -> Callable[[], object]:
        with self._lock:
            self._told.setdefault(name, []).append(told)
        return lambda: self._forget(name, told)

    def _forget(self, name: str, told: Callable[[], object]) -> None:
        with self._lock:
            self._told[name].remove(told)

    def swap(self, name: str, version: Version, data: bytes | None, ttl: float) -> Version | Faster:
        with self._lock:
            swapped = super().swap(name, version, data, ttl)
            those = list(self._told.get(name, ()))
        for told in those:
            told()
        return swapped
