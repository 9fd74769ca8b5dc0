"""Greenlets: several callers in one thread, of which each runs until it lets another on."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

__all__ = ["cooperative", "here"]


def here() -> weakref.ref[Any] | None:
    """The greenlet that runs; None for what runs in no greenlet but its thread's own. Two such are compared by `==`."""
    module = sys.modules.get("greenlet")
    if module is None:
        return None
    getcurrent = getattr(module, "getcurrent", None)
    if getcurrent is None:
        return None  # it is just being imported
    current = getcurrent()
    return None if current.parent is None else weakref.ref(current)


def cooperative() -> bool:
    """Does a greenlet that waits for a lock let the others of its thread on? So it is after gevent's monkey patch."""
    return type(threading.Lock()).__module__ != "_thread"
