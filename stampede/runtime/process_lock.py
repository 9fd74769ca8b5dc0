"""The one lock under which this process decides which caller leads a flight, which holds a lease, and what is stored.

There is one for all caches, and it is re-entrant. Any allocation under it may run the garbage collector, which may run
a finalizer, which may use this cache or another. If each cache had a lock, two threads could deadlock: each holds one
lock, and runs a finalizer that needs the other. No code waits or takes another lock while it holds this one."""

from __future__ import annotations

import threading

from stampede.runtime import forks

__all__ = ["lock"]

lock = threading.RLock()
"""Always read it as `process_lock.lock`, and never store it: a forked child has another one."""


def _after_fork() -> None:
    global lock
    lock = threading.RLock()  # a thread that held it does not exist in the child, and can't release it


forks.in_child(_after_fork)
