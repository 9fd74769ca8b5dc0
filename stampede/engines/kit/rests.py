"""The rests of one whom a store has refused since it is asked too much, before he asks again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import uniform

__all__ = ["rests"]

FIRST, MOST = 0.02, 1.0
"""Seconds, the first time and in all."""


def rests() -> Iterator[bool]:
    """True, behind each rest, which is longer than the one before; until they would be too long in all."""
    end, rest = time.monotonic() + MOST, FIRST
    while time.monotonic() + rest < end:
        time.sleep(uniform(rest / 2, rest))
        rest *= 2
        yield True
