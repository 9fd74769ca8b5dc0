"""What Python makes hard: blocking and suspending code, event loops, threads, forks, greenlets and annotations.

Here is everything that touches the interpreter or asyncio in an unusual way. Nothing in this room knows what a cache
is. Begin with `colour.py`.
"""
