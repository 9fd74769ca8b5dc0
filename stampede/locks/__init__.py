"""Locks for users: `Lock`, `try_lock` and `Bulkhead`, across all processes that use the same engine.

Here are the objects that users hold, and the waiting of callers in one process. Engines decide which callers hold a
lock, by the rules of `model/lock_queue.py`. Begin with `lock.py`."""
