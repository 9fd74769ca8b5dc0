"""What users call: the `cached` decorator, caches, and caches by name.

Here is what turns a call into a question: signatures, keys, options and methods in both colours. How a question is
answered is decided in `algorithm`. Begin with `cached.py`, then `cache.py`.
"""
