"""All decorated functions, and the switch that makes their calls go straight through."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["disabled", "enrolled", "switch", "unbind_all"]


class Bound(Protocol):
    """What has found its cache."""

    def unbind(self) -> None: ...


enrolled: weakref.WeakSet[Bound] = weakref.WeakSet()


class Switch:
    off = False


switch = Switch()
switch.off = os.environ.get("STAMPEDE_DISABLED", "") not in ("", "0")


def unbind_all() -> None:
    """Every function finds its cache again at its next call."""
    for cached in list(enrolled):
        cached.unbind()


@contextmanager
def disabled() -> Iterator[None]:
    """Calls go straight to the functions."""
    before = switch.off
    _set_switch(True)
    try:
        yield
    finally:
        _set_switch(before)


def _set_switch(off: bool) -> None:
    switch.off = off
    unbind_all()  # or hits would go on
