"""The one lock under which this process decides: who leads a flight, who holds a lease, what is kept.

One, for all caches, and reentrant: any allocation under it may run the collector, which may run a finalizer, which may
use this cache or another. With a lock for each, two threads that are in a finalizer, each in the middle of what the
other's wants, would wait for each other for ever. Nothing that waits is done under it, and no other lock is wanted.
"""

from __future__ import annotations

import threading

from stampede.runtime import forks

__all__ = ["lock"]

lock = threading.RLock()
"""To be had by `process_lock.lock`, each time anew: a forked child has another one."""


def _after_fork() -> None:
    global lock
    lock = threading.RLock()  # a thread that was deciding is not here to open it


forks.in_child(_after_fork)
