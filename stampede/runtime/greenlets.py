"""Greenlets: several callers in one thread, of which each runs until it lets another on."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from stampede.errors import UnsupportedPatch
from stampede.runtime import forks

__all__ = ["adapt", "cooperative", "here"]


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
    """Return whether a greenlet that waits for a lock lets the others of its thread run: after gevent's patch."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and monkey.is_module_patched("threading")


known: Any = None
"""`threading.Lock`, as `adapt` saw it last. A patch replaces it."""

_cooperative = cooperative()


def adapt() -> None:
    """Take notice of a monkey patch: at the first use, and when `threading.Lock` is not `known`.

    What was made before gevent's patch excludes no greenlet from another, and gunicorn's `--preload` patches in each
    child only. So what a forked child makes anew is made anew here, too.
    """
    global known, _cooperative
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise UnsupportedPatch(
            "the program is patched by eventlet.monkey_patch(), which removes what this library waits with: "
            "use gevent (gunicorn -k gevent, celery -P gevent) or threads"
        )
    known, before, _cooperative = threading.Lock, _cooperative, cooperative()
    if _cooperative and not before:
        forks.as_in_child()
