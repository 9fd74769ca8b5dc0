"""A value made of the one that is kept, and no change lost: read, make, and write if it is still what was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stampede.entry import Entry
from stampede.errors import EngineError, OptionError
from stampede.policy import Policy
from stampede.ports import Versioned
from stampede.scope import ScopeSide

__all__ = ["STAY", "exchange", "is_fresh"]

STAY = object()
"""What is made of a value that is to stay as it is."""

TRIES = 1000
"""How often a value is made anew because somebody else was faster."""


async def exchange(
    scope: ScopeSide, key: str, make: Callable[[Entry[Any] | None], Any], policy: Policy
) -> Entry[Any] | None:
    """The entry of what was made of what is kept; None: that stays."""
    if not isinstance(scope.core.engine.blocking.store, Versioned):
        raise OptionError(
            f"{scope.core.engine.scheme}:// can't tell whether a value is still the one that was read, as add, update "
            "and touch must: use set"
        )
    for _ in range(TRIES):
        seen = await scope.kept(key)
        value = make(seen)
        if value is STAY:
            return None
        entry = scope.entry_for(key, value, policy)
        if await scope.exchange(key, seen, entry):
            return entry
    raise EngineError(f"others change {key!r} faster than it can be read and written")


def is_fresh(entry: Entry[Any] | None) -> bool:
    """Whether it is a value that may be served."""
    return entry is not None and entry.fresh > 0 and not entry.raised
