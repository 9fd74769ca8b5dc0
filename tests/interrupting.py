"""Every moment at which a call of ours can be interrupted: before each line, or each opcode, of our own code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Line", "lines_of"]

Line: TypeAlias = tuple[str, int]


def ours(frame: Any) -> bool:
    name = frame.f_code.co_filename
    return "/stampede/" in name or "<stampede" in name


def lines_of(act: Callable[[], object], at: Callable[[Line], object]) -> None:
    """Do `act`, and tell of each line of ours before it runs: any of them may be interrupted by a finalizer."""
    busy = False

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal busy
        if busy or not ours(frame):
            return None
        if event == "line":
            busy = True
            try:
                at((frame.f_code.co_filename, frame.f_lineno))
            finally:
                busy = False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
