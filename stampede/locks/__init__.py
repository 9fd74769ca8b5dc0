"""Locks that are no cache: `Lock`, `try_lock` and `Bulkhead`, over every process that reaches the engine.

Here is what a user holds and how callers of one process wait. Who is inside a lock is decided by `model/room.py`, in
the engine. Begin with `lock.py`.
"""
