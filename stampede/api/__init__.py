"""What users call: the `cached` decorator, caches, and caches by name.

This room turns a call into a question: it handles signatures, keys, options and methods, blocking and async. The room
`algorithm` answers the question. Begin with `cached.py`, then `cache.py`."""
