"""Generations, where an engine's author keeps them: what they are called, and for how long one is believed in.

Each is told by the id of all scopes and by a scope's own. Behind a `~` in these stands what has only made them softer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

__all__ = ["KNOWN", "MOST", "NOTED", "Beliefs", "hard_part", "names_of", "new_generation"]

KNOWN = 1.0
"""Seconds for which a generation is believed where nobody is to tell of the next."""

NOTED = 3.0
"""Seconds for which an ended generation is noted: somebody may believe in it yet, and changes go there, too."""

MOST = 32
"""As many, at most."""


class Beliefs:
    """What this process takes for today's, for both colours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}

    def at_hand(self, scope: str) -> str | None:
        known = self._known.get(scope)
        return known[0] if known is not None and self._clock() < known[1] else None

    def learn(self, scope: str, generation: str, asked: float) -> None:
        """It was so at some moment after `asked`."""
        if asked + KNOWN >= self._known.get(scope, ("", 0.0))[1]:  # or it was asked before that one
            self._known[scope] = generation, asked + KNOWN

    def clear(self) -> None:
        self._known.clear()


def new_generation() -> str:
    return os.urandom(6).hex()


def hard_part(generation: str) -> str:
    return generation.partition("~")[0]


def names_of(wholes: Sequence[str], owns: Sequence[str]) -> list[str]:
    """What keys are told apart by, for each that all scopes and for each that a scope has, or had a moment ago."""
    return [_name_of(whole, own) for whole in wholes for own in owns]


def _name_of(whole: str, own: str) -> str:
    (whole, _, softer), (own, _, softest) = whole.partition("~"), own.partition("~")
    return f"{whole}.{own}~{softer}.{softest}" if softer or softest else f"{whole}.{own}"
