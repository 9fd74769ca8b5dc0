"""The leases of this process, as an engine knows them: what ends one needs no look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Owned"]

N = TypeVar("N")
T = TypeVar("T")

_ROOM = 64


class Owned(Generic[N, T]):
    """By their names and tokens, for both colours. Those that nobody ended leave when they are over and many."""

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._owned: dict[tuple[N, bytes], T] = {}
        self._room = _ROOM

    def put(self, name: N, token: bytes, own: T) -> None:
        if len(self._owned) >= self._room:
            for each, old in self._owned.copy().items():
                if self._is_over(old):
                    self._owned.pop(each, None)
            self._room = max(_ROOM, 2 * len(self._owned))
        self._owned[name, token] = own

    def get(self, name: N, token: bytes) -> T | None:
        return self._owned.get((name, token))

    def pop(self, name: N, token: bytes) -> T | None:
        return self._owned.pop((name, token), None)

    def clear(self) -> None:
        """In a forked child: what is being computed is the parent's."""
        self._owned.clear()
