"""How much stack it takes to read a pickle that may nest deeply.

Python hashes tuples by recursion in C, whatever is left of the stack: deeply nested ones would end the process. A
pickle nests no deeper than it has opcodes that nest. They are counted; bytes with more of them than this thread's stack
could hold are read in a thread whose stack is large enough.
"""

from __future__ import annotations

import ctypes
import sys
import threading

__all__ = ["deep_pickle"]

_USUAL = 1 << 20  # bytes of a stack, where the platform does not tell: the smallest default (Alpine Linux)
_TAKEN = 32_000  # bytes that are taken already
_HASHED, _CHECKED = 128, 512  # bytes per level: to hash a tuple; to read, compare or hash what Python counts, too

_TUPLES = b"t\x85\x86\x87\x91"  # the last: frozensets, which are compared like tuples
_NO_TUPLES = bytes({*range(256)}.difference(_TUPLES))
_LEVELS = 10_000  # after so many, at the most, Python stops C code that asks it


class _Stack(threading.local):
    """The size of this thread's stack. `threading.stack_size()` does not tell it: to ask is to set it to 0."""

    def __init__(self) -> None:
        size = ctypes.c_size_t(_USUAL)
        if sys.platform == "linux":
            library, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(128)  # glibc and musl take 56
            library.pthread_self.restype = ctypes.c_void_p  # `get_ident` is a greenlet's, under gevent's patch
            if library.pthread_getattr_np(ctypes.c_void_p(library.pthread_self()), attributes) == 0:
                library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
                library.pthread_attr_destroy(attributes)
        self.levels = max(size.value - _TAKEN, 0) // _CHECKED


_stack = _Stack()


def deep_pickle(body: bytes) -> int:
    """Return the bytes of stack that this pickle may need; 0 if this thread has them."""
    if len(body) <= _stack.levels or (tuples := len(body.translate(None, _NO_TUPLES))) <= _stack.levels:
        return 0
    return _TAKEN + tuples * _HASHED + min(tuples, max(sys.getrecursionlimit(), _LEVELS)) * 2 * _CHECKED
