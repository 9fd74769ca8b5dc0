"""Greenlets: several callers in one thread, each of which runs until it lets another one run."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from stampede.errors import UnsupportedPatch
from stampede.runtime import forks

__all__ = ["adapt", "cooperative", "here"]


def here() -> weakref.ref[Any] | None:
    """Return a weak reference to the current greenlet, or None outside of greenlets. Compare two of them by `==`."""
    module = sys.modules.get("greenlet")
    if module is None:
        return None
    getcurrent = getattr(module, "getcurrent", None)
    if getcurrent is None:
        return None  # the module is being imported
    current = getcurrent()
    return None if current.parent is None else weakref.ref(current)


def cooperative() -> bool:
    """Return whether gevent has patched `threading`: then a greenlet that waits for a lock lets the others run."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and monkey.is_module_patched("threading")


known: Any = None
"""`threading.Lock` at the last call of `adapt`. A monkey patch replaces it."""

_cooperative = cooperative()


def adapt() -> None:
    """Adapt to a monkey patch. Call this at the first use, and whenever `threading.Lock` is not `known`. Locks that
    were made before gevent's patch do not exclude one greenlet from another, and with gunicorn's `--preload` only the
    children are patched. So everything that a forked child replaces is replaced here, too. Raise UnsupportedPatch if
    eventlet has patched the program."""
    global known, _cooperative
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise UnsupportedPatch(
            "the program is patched by eventlet.monkey_patch(), which removes the locks that this library needs: "
            "use gevent (gunicorn -k gevent, celery -P gevent) or threads"
        )
    known, before, _cooperative = threading.Lock, _cooperative, cooperative()
    if _cooperative and not before:
        forks.as_in_child()
