"""A dictionary whose items expire."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["Ending"]

K = TypeVar("K")


class _Ends(Protocol):
    @property
    def end(self) -> float: ...


E = TypeVar("E", bound=_Ends)


class Ending(dict[K, E]):
    """Items that are worthless after their `end`. `put` removes expired ones now and then."""

    roof = 64

    def put(self, key: K, thing: E, now: float) -> None:
        if len(self) >= self.roof:
            for old, ended in [each for each in self.copy().items() if each[1].end <= now]:
                if self.get(old) is ended:  # a finalizer may have run since the copy
                    del self[old]
            self.roof = max(64, 2 * len(self))
        self[key] = thing

    def living(self, key: K, now: float) -> E | None:
        """Return the item of this key, or None if there is none or it has expired."""
        thing = self.get(key)
        return thing if thing is not None and thing.end > now else None
