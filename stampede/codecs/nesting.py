"""How much stack it takes to read a pickle that may be deeply nested.

Python hashes tuples by recursion in C, and does not check how much stack is left: deeply nested tuples would crash the
process. A pickle nests no deeper than the number of its opcodes that nest. They are counted. If this thread's stack
might be too small, the bytes are read in a thread whose stack is large enough."""

from __future__ import annotations

import ctypes
import sys
import threading

__all__ = ["deep_pickle"]

_USUAL = 1 << 20  # bytes of a stack, if the platform does not say: the smallest default (Alpine Linux)
_TAKEN = 32_000  # bytes that are in use already
_HASHED, _CHECKED = 128, 512  # bytes per level: to hash a tuple; to read, compare or hash where Python limits the depth

_TUPLES = b"t\x85\x86\x87\x91"  # the last opcode makes frozensets, which are compared like tuples
_NO_TUPLES = bytes({*range(256)}.difference(_TUPLES))
_LEVELS = 10_000  # at most so many levels of C code, if it lets Python limit the depth


class _Stack(threading.local):
    """The size of this thread's stack. `threading.stack_size()` does not tell it: a call sets the size to 0."""

    def __init__(self) -> None:
        size = ctypes.c_size_t(_USUAL)
        if sys.platform == "linux":
            library, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(128)  # glibc and musl use 56
            library.pthread_self.restype = ctypes.c_void_p  # if gevent has patched it, `get_ident` is a greenlet's
            if library.pthread_getattr_np(ctypes.c_void_p(library.pthread_self()), attributes) == 0:
                library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
                library.pthread_attr_destroy(attributes)
        self.levels = max(size.value - _TAKEN, 0) // _CHECKED


_stack = _Stack()


def deep_pickle(body: bytes) -> int:
    """Return how many bytes of stack this pickle may need; 0 if this thread has enough."""
    if len(body) <= _stack.levels or (tuples := len(body.translate(None, _NO_TUPLES))) <= _stack.levels:
        return 0
    return _TAKEN + tuples * _HASHED + min(tuples, max(sys.getrecursionlimit(), _LEVELS)) * 2 * _CHECKED
