"""The difficult parts of Python: blocking and suspending code, event loops, threads, forks, greenlets, annotations.

Here is all code that uses the interpreter or asyncio in an unusual way. Nothing in this room knows about caches.
Begin with `colour.py`."""
