"""Who of this process waits for what in cells; where nobody tells them, one looks for all who would look soon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf

from stampede import decisions
from stampede.colour import Bell
from stampede.engines.cells.sightings import Known

__all__ = ["Lookout", "Waiter"]

SOON = 0.01
"""Seconds before its moment at which a look is taken along by another's."""


class Waiter:
    """One who waits for what this name will have."""

    __slots__ = ("_bell", "due", "name", "seen")

    def __init__(self, name: str) -> None:
        self.name = name
        self.due = inf  # when it looks for itself
        self.seen: Known | None = None  # what another has seen for it
        self._bell = Bell()

    def ring(self) -> None:
        self._bell.ring()

    def fresh(self) -> Bell:
        """Rings as often as it is told to: each time for who listens since the last."""
        if self._bell.rung:
            self._bell = Bell()
        return self._bell


class Lookout:
    """Those of one engine, in both colours."""

    def __init__(self) -> None:
        self._waiting: dict[Waiter, None] = {}

    @contextmanager
    def has(self, mine: Waiter) -> Iterator[None]:
        with decisions.lock:
            self._waiting[mine] = None
        try:
            yield
        finally:
            with decisions.lock:
                self._waiting.pop(mine, None)

    def taken_along(self, mine: Waiter, now: float, rest: float) -> list[Waiter]:
        """For whom this one looks now.

        Should it never tell them, they look for themselves a `rest` later: it may be a task of a loop that they block,
        be cancelled, or find no answer.
        """
        with decisions.lock:
            those = [each for each in self._waiting if each is mine or each.due <= now + SOON]
            for each in those:
                each.due = now + rest
        return those

    def tell(self, those: Iterable[Waiter], seen: Mapping[str, Known]) -> None:
        for each in those:
            each.seen = seen[each.name]
            each.ring()
